"""Rows for other tools: Parquet files, Arrow datasets, SQL, Polars.

    to_parquet(table, "rows.parquet")
    sql(table, "select prompt_id, avg(reward) from rows group by prompt_id")
    for batch in from_parquet("rows.parquet"): ...

Each function takes whatever has a `schema` and a `scan`: a table here, on another host, or a file. Rows pass through chunk by
chunk; fields keep the column types (`flowrl.type`), so what was written is read back as it was. No field is nullable: an id
stays text or an int64 and never becomes a float.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from flowrl.errors import ConfigError, DataError, FlowError, MissingExtra, SchemaError, StoreError
from flowrl.schema.columns import TableSchema, nearest
from flowrl.schema.standard import STANDARD
from flowrl.schema.types import ColumnType
from flowrl.store.folders import sync_folder
from flowrl.store.rows import RowBatch

if TYPE_CHECKING:
    from pyarrow.dataset import Dataset

GROUP_BYTES = 64 << 20
"""Values in a row group of a Parquet file, in bytes, where the caller says no number of rows."""

SQL_NAME = "rows"
"""What a query calls the table."""


class Scanned(Protocol):
    """What these functions need of a table."""

    @property
    def schema(self) -> TableSchema: ...

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[RowBatch]: ...


# --------------------------------------------------------------------------------------------------------------- Arrow


def reader(table: Scanned, columns: Sequence[str] | None = None) -> pa.RecordBatchReader:
    """One pass over the rows as Arrow record batches, a chunk at a time; the chunk is made when it is asked for.

    Errors: SchemaError for unknown columns; DataError for text that is no Unicode.
    """
    wanted = table.schema if columns is None else table.schema.select(columns)
    schema = arrow_schema(wanted)
    return pa.RecordBatchReader.from_batches(schema, _record_batches(table, wanted, schema))


def arrow_schema(schema: TableSchema) -> pa.Schema:
    """The Arrow schema of a table's columns; no field may be null."""
    found = schema.to_arrow()
    return pa.schema([field.with_nullable(False) for field in found], metadata=found.metadata)


def _record_batches(table: Scanned, wanted: TableSchema, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    types = {column.name: column.type for column in wanted}
    for chunk in table.scan(list(wanted.names)):
        # a named inner length known by now is known in every chunk
        arrays = to_arrow(chunk.as_types(types)).columns
        yield from pa.Table.from_arrays(arrays, schema=schema).to_batches()


def to_arrow(rows: RowBatch) -> pa.Table:
    """`rows.to_arrow()`. Errors: DataError that names column and row of text that is no Unicode."""
    try:
        return rows.to_arrow()
    except (UnicodeEncodeError, DataError):
        for name, kind in rows.types.items():
            if kind.dtype == "str":
                _refuse_surrogates(name, rows)
        raise


def _refuse_surrogates(name: str, rows: RowBatch) -> None:
    for number, row in enumerate(rows.select([name]).rows()):
        for text in [row[name]] if isinstance(row[name], str) else row[name]:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"column '{name}' holds half a surrogate pair in row {number} ({error.reason}), which no file of text can "
                    "hold; replace it (text.encode(errors='replace').decode()) or keep the column as bytes"
                ) from None


def dataset(table: Scanned, columns: Sequence[str] | None = None) -> Dataset:
    """The rows as a `pyarrow.dataset.Dataset`, to be scanned and filtered as often as wanted.

    It holds the rows the table has now; numbers are not copied, booleans and text are. For one pass over rows that do
    not fit in memory take `reader`.
    """
    from pyarrow import dataset as datasets

    passed = reader(table, columns)
    return datasets.InMemoryDataset(list(passed), schema=passed.schema)


# ------------------------------------------------------------------------------------------------------------- Parquet


def to_parquet(
    table: Scanned,
    path: str | Path,
    *,
    columns: Sequence[str] | None = None,
    compression: str = "zstd",
    row_group_rows: int | None = None,
) -> Path:
    """Write the rows to a Parquet file. It appears under its name when it is complete, or not at all.

    Args:
        compression: "zstd", "lz4", "snappy", "gzip" or "none".
        row_group_rows: rows of a row group; None takes about 64 MiB of values.

    Errors: SchemaError for a table without columns; StoreError when the file cannot be written.
    """
    return write_parquet(reader(table, columns), path, compression=compression, row_group_rows=row_group_rows)


def write_parquet(
    rows: pa.RecordBatchReader, path: str | Path, *, compression: str = "zstd", row_group_rows: int | None = None
) -> Path:
    """`to_parquet` of Arrow record batches."""
    import pyarrow.parquet as pq

    known = ("zstd", "lz4", "snappy", "gzip", "none")
    if compression not in known:
        raise ConfigError(f"compression is one of {', '.join(known)}; found {compression!r}")
    if row_group_rows is not None and (isinstance(row_group_rows, bool) or row_group_rows < 1):
        raise ConfigError(f"row_group_rows is at least 1; found {row_group_rows!r}")
    if not rows.schema.names:
        raise SchemaError("a Parquet file needs columns, and the rows have none; append some first")
    with written_aside(path) as aside, pq.ParquetWriter(aside, rows.schema, compression=compression) as writer:
        for group in _grouped(rows, row_group_rows):
            writer.write_table(group, row_group_size=max(group.num_rows, 1))
    return Path(path)


def _grouped(batches: pa.RecordBatchReader, rows: int | None) -> Iterator[pa.Table]:
    """The same rows in pieces of `rows` rows, or of about GROUP_BYTES."""
    held: list[pa.RecordBatch] = []
    num_rows = num_bytes = 0
    for batch in batches:
        held.append(batch)
        num_rows, num_bytes = num_rows + len(batch), num_bytes + batch.nbytes
        while rows is not None and num_rows >= rows:
            together = pa.Table.from_batches(held)
            yield together.slice(0, rows)
            held, num_rows = together.slice(rows).to_batches(), num_rows - rows
        if rows is None and num_bytes >= GROUP_BYTES:
            yield pa.Table.from_batches(held)
            held, num_rows, num_bytes = [], 0, 0
    if num_rows:
        yield pa.Table.from_batches(held)


def from_parquet(
    path: str | Path, columns: Sequence[str] | None = None, types: Mapping[str, ColumnType] | None = None
) -> Iterator[RowBatch]:
    """The rows of a Parquet file, a row group at a time.

    Args:
        types: of columns whose type the file does not say and that are no standard columns. (`to_parquet` writes types.)

    Errors: StoreError for a file that is missing or no Parquet file; SchemaError for a column of unknown type; DataError
    for nulls.
    """
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise StoreError(f"'{path}' cannot be read as a Parquet file: {error}") from error
    with file:
        names = list(file.schema_arrow.names)
        if columns is not None:
            wanted = [columns] if isinstance(columns, str) else list(columns)
            for name in wanted:
                if name not in names:
                    raise SchemaError(f"'{path}' has no column '{name}'; {nearest(name, names)}")
            names = wanted
        given = _types_of(path, [file.schema_arrow.field(name) for name in names], types or {})
        for number in range(file.num_row_groups):
            yield RowBatch.from_arrow(file.read_row_group(number, names).select(names), given)


def _types_of(path: str | Path, fields: Sequence[pa.Field], given: Mapping[str, ColumnType]) -> dict[str, ColumnType]:
    """Types that the file does not say: those given, and those of standard columns. Errors: SchemaError for others."""
    standard = {column.name: column.type for column in STANDARD}
    found: dict[str, ColumnType] = {}
    for item in fields:
        if item.name in given:
            found[item.name] = given[item.name]
        elif b"flowrl.type" in (item.metadata or {}):
            continue
        elif item.name in standard:
            found[item.name] = standard[item.name]
        else:
            raise SchemaError(
                f"column '{item.name}' of '{path}' ({item.type}) is no standard column, and the file does not say its type; say "
                f"it: from_parquet(path, types={{'{item.name}': fr.SAMPLE.f32}}), or leave it out with columns="
            )
    return found


@contextmanager
def written_aside(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write to; what was written there takes its place when the block ends well.

    Errors: StoreError when the disk is full or the folder is missing or read-only; nothing is left behind.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        yield aside
        with open(aside, "rb") as written:
            os.fsync(written.fileno())
        os.replace(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        missing = "" if path.parent.is_dir() else f"; make the folder '{path.parent}' first"
        raise StoreError(f"'{path}' cannot be written: {error}{missing}") from error
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------------------- SQL


def sql(table: Scanned, query: str) -> pa.Table:
    """The answer to a query in DuckDB's SQL, in which the table is called `rows`.

    Only the columns a query names are read, and streamed once for each time it names the table. Lists are lists:
    `len(response_ids)`, `list_avg(rollout_logprobs)`, `unnest(...)`. Values of f16 columns are seen as f32.

    Example:
        sql(table, "select prompt_id, avg(reward) as mean from rows group by prompt_id order by mean").to_pylist()

    Errors: MissingExtra without duckdb; ConfigError for a query that it refuses.
    """
    return query_rows(lambda names: reader(table, names), table.schema.names, query)


def query_rows(read: Callable[[list[str] | None], pa.RecordBatchReader], names: Sequence[str], query: str) -> pa.Table:
    """`sql` over any source of record batches.

    Args:
        read: a new pass over the named columns; None is all of them.
        names: the columns there are.
    """
    try:
        import duckdb
    except ImportError as error:
        raise MissingExtra("SQL over rows needs duckdb; install it with: pip install 'flowrl[sql]'") from error
    if not names:
        raise SchemaError("a query needs columns, and the table has no columns yet; append some rows first")
    connection = duckdb.connect(":memory:")
    stream = _Stream(read, _columns_named(connection, query, names))
    try:
        try:
            found = _answer(connection, stream, query)
        except duckdb.InvalidInputException as error:
            if "already released" not in str(error):
                raise
            # a DuckDB before 1.3 reads a stream once only, and this query reads it again
            found = _answer(connection, pa.table(stream), query)
    except duckdb.Error as error:
        if stream.error is not None:
            raise stream.error from None
        raise ConfigError(f"the query was refused: {error}\nthe table `rows` has {', '.join(names)}") from error
    finally:
        connection.close()
    return found


def _answer(connection: Any, rows: object, query: str) -> pa.Table:
    connection.register(SQL_NAME, rows)
    answer = connection.sql(query)
    if answer is None:
        raise ConfigError("the query gives no rows; write a SELECT from the table `rows`")
    return answer.to_arrow_table()


class _Stream:
    """Something DuckDB can scan as often as a query needs; each scan is a pass of its own."""

    def __init__(self, read: Callable[[list[str] | None], pa.RecordBatchReader], names: list[str] | None) -> None:
        self._read, self._names = read, names
        self.error: FlowError | None = None
        """What went wrong with the rows themselves; DuckDB passes on the text only."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        passed = self._read(self._names)
        schema = pa.schema([field.with_type(_for_sql(field.type)) for field in passed.schema])
        return pa.RecordBatchReader.from_batches(schema, self._batches(passed, schema)).__arrow_c_stream__()

    def _batches(self, passed: pa.RecordBatchReader, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        try:
            for batch in passed:
                arrays = [
                    column if column.type == field.type else column.cast(field.type)
                    for column, field in zip(batch.columns, schema, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        except FlowError as error:
            self.error = error
            raise


def _for_sql(kind: pa.DataType) -> pa.DataType:
    """The type with f16, which DuckDB lacks, as f32."""
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_large_list(kind):
        return pa.large_list(_for_sql(kind.value_type))
    if pa.types.is_list(kind):
        return pa.list_(_for_sql(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_for_sql(kind.value_type), kind.list_size)
    return kind


def _columns_named(connection: Any, query: str, names: Sequence[str]) -> list[str] | None:
    """Columns a query may touch: those it names anywhere. None for all, whenever it may mean more than it names."""
    import duckdb

    try:
        tree = json.loads(connection.execute("select json_serialize_sql(?::varchar)", [query]).fetchall()[0][0])
    except (duckdb.Error, ValueError, TypeError):
        return None
    words: set[str] = set()
    tables: set[str] = set()
    values: set[str] = set()
    if tree.get("error") or not _collect(tree, words, tables, values) or tables & values:
        return None
    if len({name.casefold() for name in names}) < len(names):
        return None
    found = [name for name in names if name.casefold() in words]
    return found or list(names[:1])  # `count(*)` names none, and rows without columns cannot be counted


def _collect(tree: Any, words: set[str], tables: set[str], values: set[str]) -> bool:
    """Gather what a parsed query names; False when something in it stands for columns that it does not name.

    Args:
        words: every word of it, in lower case.
        tables: names of its tables and their aliases.
        values: columns named without a table; a table's name among them means whole rows.
    """
    if isinstance(tree, list):
        return min(
            [_collect(item, words, tables, values) for item in tree], default=True
        )  # all of them, whatever the first says
    if isinstance(tree, str):
        words.add(tree.casefold())
    if not isinstance(tree, dict):
        return True
    named = tree.get("column_names", [])
    if tree.get("class") == "COLUMN_REF" and len(named) == 1:
        values.add(named[0].casefold())
    if tree.get("type") == "BASE_TABLE":
        tables |= {str(tree.get(key)).casefold() for key in ("alias", "table_name")}
    means_more = (
        tree.get("class") in ("STAR", "POSITIONAL_REFERENCE")
        or tree.get("type") in ("PIVOT", "SHOW_REF", "TABLE_FUNCTION")
        or tree.get("ref_type") in ("NATURAL", "POSITIONAL")
        or bool(tree.get("column_name_alias"))
    )
    return _collect(list(tree.values()), words, tables, values) and not means_more


# -------------------------------------------------------------------------------------------------------------- Polars


def to_polars(table: Scanned, columns: Sequence[str] | None = None) -> Any:
    """All rows as a `polars.DataFrame`. Errors: MissingExtra without polars."""
    try:
        import polars
    except ImportError as error:
        raise MissingExtra("a Polars data frame needs polars; install it with: pip install polars") from error
    return polars.from_arrow(reader(table, columns).read_all())
