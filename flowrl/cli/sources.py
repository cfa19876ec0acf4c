"""Where rows lie on disk or in memory, found by what the command line is given.

    runs/grpo-1                                    a run: its recorded edges
    runs/grpo-1/edges/step_000012/rollout.arrow    an Arrow IPC stream (or file)
    rows.parquet                                   a Parquet file
    tables/replay, 5f0c...                         an experience table: its folder, or its name in shared memory

Rows are Arrow record batches here, so that a file somebody else wrote can be looked at too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from flowrl.errors import ConfigError, StoreError
from flowrl.schema.columns import nearest
from flowrl.store import interop

if TYPE_CHECKING:
    from flowrl.store.table import ExperienceTable

SUFFIXES = (".arrow", ".parquet")


@dataclass(slots=True)
class ColumnFacts:
    """What is known of a column; None where the file does not say."""

    type: str
    raw_bytes: int
    stored_bytes: int | None = None
    codecs: list[str] = field(default_factory=list)
    tiers: list[str] = field(default_factory=list)
    rows: int | None = None
    """That have a value, where some lack one."""


@dataclass(slots=True)
class Facts:
    """What `ls` and `stats` print."""

    table: str
    rows: int
    raw_bytes: int
    stored_bytes: int
    tiers: dict[str, int]
    columns: dict[str, ColumnFacts]
    counts: dict[str, Any] = field(default_factory=dict)
    """What only an experience table has: appended, evicted, version, ..."""


class Source(Protocol):
    """One table, wherever it lies."""

    name: str
    """As the command line takes it."""

    @property
    def columns(self) -> list[str]:
        """Those that every row has a value of."""

    def reader(self, columns: Sequence[str] | None = None) -> pa.RecordBatchReader: ...

    def facts(self) -> Facts: ...

    def close(self) -> None: ...


# --------------------------------------------------------------------------------------------------------------- files


class ArrowFile:
    """An Arrow IPC stream, such as a recorded edge; of one cut off by a kill, the whole record batches."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        with self._opened() as (schema, _):
            self.schema = schema

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)

    @contextmanager
    def _opened(self, columns: Sequence[str] | None = None) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
        included = None if columns is None else [self.schema.names.index(name) for name in columns]
        options = pa.ipc.IpcReadOptions(included_fields=included or [])
        try:
            with pa.memory_map(str(self.path)) as source:
                is_file = source.read(6) == b"ARROW1"
                source.seek(0)
                if is_file:
                    file = pa.ipc.open_file(source, options=options)
                    yield file.schema, (file.get_batch(number) for number in range(file.num_record_batches))
                else:
                    stream = pa.ipc.open_stream(source, options=options)
                    yield stream.schema, _whole_batches(stream)
        except (OSError, pa.ArrowInvalid) as error:
            raise StoreError(f"'{self.path}' cannot be read as Arrow IPC: {error}") from error

    def reader(self, columns: Sequence[str] | None = None) -> pa.RecordBatchReader:
        names = self.columns if columns is None else list(columns)

        def batches() -> Iterator[pa.RecordBatch]:
            with self._opened(names) as (_, found):
                for batch in found:
                    yield batch.select(names)

        return pa.RecordBatchReader.from_batches(_selected(self.schema, names), batches())

    def facts(self) -> Facts:
        raw = dict.fromkeys(self.columns, 0)
        rows = 0
        for batch in self.reader():
            rows += batch.num_rows
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                raw[name] += column.nbytes
        stored = self.path.stat().st_size
        is_plain = stored >= sum(raw.values())  # otherwise the buffers are compressed, and nobody says by how much each
        columns = {
            name: ColumnFacts(type_of(self.schema.field(name)), raw[name], raw[name] if is_plain else None,
                              ["none"] if is_plain else [], ["disk"])
            for name in self.columns
        }  # fmt: skip
        return Facts(self.name, rows, sum(raw.values()), stored, {"disk": stored}, columns)

    def close(self) -> None: ...


def _whole_batches(stream: pa.RecordBatchStreamReader) -> Iterator[pa.RecordBatch]:
    while True:
        try:
            yield stream.read_next_batch()
        except StopIteration:
            return
        except (pa.ArrowInvalid, OSError):  # the rest was cut off
            return


class ParquetFile:
    """A Parquet file. Its raw bytes are those of its pages before compression."""

    def __init__(self, path: Path, name: str) -> None:
        import pyarrow.parquet as pq

        self.path, self.name = path, name
        try:
            self._file = pq.ParquetFile(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise StoreError(f"'{path}' cannot be read as a Parquet file: {error}") from error
        self.schema = self._file.schema_arrow

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)

    def reader(self, columns: Sequence[str] | None = None) -> pa.RecordBatchReader:
        names = self.columns if columns is None else list(columns)
        schema = _selected(self.schema, names)

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in self._file.iter_batches(batch_size=1024, columns=names):
                yield pa.RecordBatch.from_arrays(batch.select(names).columns, schema=schema)

        return pa.RecordBatchReader.from_batches(schema, batches())

    def facts(self) -> Facts:
        metadata = self._file.metadata
        columns = {name: ColumnFacts(type_of(self.schema.field(name)), 0, 0, [], ["disk"]) for name in self.columns}
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(number)
                found = columns[_top_name(chunk.path_in_schema, self.columns)]
                found.raw_bytes += chunk.total_uncompressed_size
                found.stored_bytes = (found.stored_bytes or 0) + chunk.total_compressed_size
                codec = "none" if chunk.compression == "UNCOMPRESSED" else chunk.compression.lower()
                found.codecs = sorted({*found.codecs, codec})
        stored = self.path.stat().st_size
        raw = sum(column.raw_bytes for column in columns.values())
        return Facts(self.name, metadata.num_rows, raw, stored, {"disk": stored}, columns)

    def close(self) -> None:
        self._file.close()


def _top_name(path: str, names: Sequence[str]) -> str:
    """The column a leaf belongs to: `response_ids.list.element` is one of `response_ids`."""
    return path if path in names else max((name for name in names if path.startswith(f"{name}.")), key=len)


def _selected(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    return pa.schema([schema.field(name) for name in names], metadata=schema.metadata)


def type_of(of: pa.Field) -> str:
    """The column type a field carries, or its Arrow type."""
    told = (of.metadata or {}).get(b"flowrl.type")
    return told.decode() if told is not None else str(of.type)


# -------------------------------------------------------------------------------------------------------------- tables


class OpenTable:
    """An experience table, opened for reading."""

    def __init__(self, table: ExperienceTable, name: str) -> None:
        self._table, self.name = table, name

    @property
    def columns(self) -> list[str]:
        found = self._table.stats()
        return [name for name, column in found.columns.items() if column.rows == found.rows]

    def reader(self, columns: Sequence[str] | None = None) -> pa.RecordBatchReader:
        return interop.reader(self._table, self.columns if columns is None else columns)

    def facts(self) -> Facts:
        found = self._table.stats()
        tiers = {tier: size for tier, size in found.tiers.items() if size}
        columns = {
            name: ColumnFacts(
                column.type, column.raw_bytes, column.stored_bytes, sorted(column.codecs), list(column.tiers),
                column.rows if column.rows < found.rows else None,
            )
            for name, column in found.columns.items()
        }  # fmt: skip
        counts = {
            name: getattr(found, name)
            for name in ("appended", "evicted", "lost", "version", "chunks", "segments", "claimed", "finished")
        }
        return Facts(self.name, found.rows, found.raw_bytes, found.stored_bytes, tiers, columns, counts)

    def close(self) -> None:
        self._table.close()


def _open_table(target: str) -> OpenTable:
    from flowrl.store.table import ExperienceTable

    return OpenTable(ExperienceTable.open(target, readonly=True), target)


# ------------------------------------------------------------------------------------------------------------- finding


def open_one(target: str) -> Source:
    """The one table at a path. Errors: ConfigError when there is none, or several; StoreError when it cannot be read."""
    path = Path(target)
    if path.is_dir() and not _is_table(path):
        found = [str(member) for member in members(path)]
        what = "the folder of a run" if (path / "run.json").is_file() else "a folder"
        if not found:
            raise ConfigError(f"'{target}' is {what}, and {_nothing_in(path)}")
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ConfigError(
            f"'{target}' is {what} with several tables: {', '.join(found[:3])}{more}; name one (flowrl table ls {target})"
        )
    return _open(target)


def names_at(target: str | None) -> list[str]:
    """The tables at a path, as `open_one` takes them; without one, those in shared memory.

    Errors: ConfigError for a folder without any.
    """
    if target is None:
        return _in_memory()
    path = Path(target)
    if not path.is_dir() or _is_table(path):
        return [target]
    found = members(path)
    if not found:
        raise ConfigError(f"'{target}' holds no tables: {_nothing_in(path)}")
    return list(map(str, found))


def _open(target: str) -> Source:
    path = Path(target)
    if path.is_file():
        if path.suffix == ".parquet":
            return ParquetFile(path, target)
        if path.suffix == ".arrow":
            return ArrowFile(path, target)
        raise ConfigError(f"'{target}' is no table: a file of rows ends in {' or '.join(SUFFIXES)}")
    if path.is_dir() or path.name == target:  # a bare name may be that of a table in shared memory
        try:
            return _open_table(target)
        except StoreError as error:
            if path.exists():
                raise
            raise ConfigError(f"there is no file, folder or table '{target}': {error}") from error
    beside = [member.name for member in path.parent.iterdir()] if path.parent.is_dir() else []
    raise ConfigError(f"there is nothing at '{target}'; beside it: {nearest(path.name, beside)}")


def members(folder: Path) -> list[Path]:
    """Tables in a folder; of a run, its recorded edges in order of steps."""
    if (folder / "run.json").is_file():
        return sorted(folder.glob("edges/step_*/*.arrow"))
    found = [path for path in folder.iterdir() if path.suffix in SUFFIXES or _is_table(path)]
    return sorted(path for path in found if not path.name.startswith("."))


def _nothing_in(folder: Path) -> str:
    if (folder / "run.json").is_file():
        return "nothing was recorded: run with --set record=*"
    runs = sorted(path.parent.name for path in folder.glob("*/run.json"))
    if runs:
        return f"it holds the runs {', '.join(runs[:8])}"
    return f"there are no experience tables and no {' or '.join(SUFFIXES)} files in it"


def _is_table(path: Path) -> bool:
    return (path / "head").is_file()


def _in_memory() -> list[str]:
    from flowrl.store.folders import shm_folder

    folder = shm_folder()
    return sorted(path.name for path in folder.glob("*") if _is_table(path)) if folder.is_dir() else []
