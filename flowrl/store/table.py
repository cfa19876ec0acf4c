"""The experience table: rows of a run, appended in any process, read in any process, grown by rows and by columns.

    table = ExperienceTable(max_rows=10_000, compression="lz4", chunk_rows=256)
    numbers = table.append(rows)                           # a RowBatch, an Arrow table or a list of dicts
    table.add_column("advantage", values, SAMPLE.f32)      # a segment beside the others; nothing is rewritten
    for batch in table.loader(batch_rows=32, prefetch=4, device="cuda"): ...

                 prompt_id   response_ids   reward  | advantage (added later)
    chunk 0      [256]       [256]          [256]   | [256]          a segment of each: bytes that never change
    chunk 1      [256]       [256]          [256]   | [256]
    open         [8] [32]    [8] [32]       [8] [32]| [40]           pieces, made one when the chunk is full

Rows lie in shared memory as plain ragged buffers; older ones are compressed or in files when the table is told so. Readers
get what was there when they asked: appending, evicting and moving never disturb them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa

from flowrl.errors import ConfigError, DataError, SchemaError, StoreError
from flowrl.schema.columns import Column, TableSchema
from flowrl.schema.types import TOKEN, ColumnType
from flowrl.shown import shown
from flowrl.store import changes, claims, opening, stats
from flowrl.store.backing import Backing
from flowrl.store.catalog import HOT, PACKED, Catalog, Record, Segment
from flowrl.store.incoming import Known, check_groups, incoming
from flowrl.store.intervals import RowSet
from flowrl.store.laying import carrier_for, check_carried, check_layout
from flowrl.store.loader import Loader
from flowrl.store.mover import Mover, Tiers
from flowrl.store.presence import Presence
from flowrl.store.reading import View, check_columns
from flowrl.store.rows import RowBatch
from flowrl.store.settings import check_count, check_settings

if TYPE_CHECKING:
    from flowrl.store.claims import Claim, Stream
    from flowrl.store.stats import TableStats

CHUNK_ROWS = 256
"""Rows of a chunk unless the table says otherwise."""

HOT_BYTES = 1 << 30
"""What stays plain in memory of a table with compression, unless it says otherwise."""


class ExperienceTable:
    """Rows that are appended, read in any order, handed to consumers, and evicted oldest first.

    Every row has every column, except columns that are declared to be filled later. Rows are numbered from 0 among those
    the table holds now (`take`, `filter`); `append`, `fill` and claims use row numbers that count from the first row ever
    appended.

    Example:
        table = ExperienceTable(max_rows=1000, keep_together="prompt_id")
        table.append([{"prompt_id": "a", "reward": 1.0}])
        len(table), table.columns, table["reward"], table.take([0, -1])

    Another process opens the same rows with `ExperienceTable.open(table.name)`, or is handed the table itself (it pickles as
    its name). Threads may share one; appends of several threads are in no order.
    """

    def __init__(
        self,
        schema: TableSchema | None = None,
        *,
        max_rows: int | None = None,
        max_bytes: int | None = None,
        chunk_rows: int = CHUNK_ROWS,
        keep_together: str | None = None,
        compression: str | None = None,
        hot_bytes: int | None = None,
        memory_bytes: int | None = None,
        path: str | Path | None = None,
        memory: str = "shared",
        eviction: str = "fifo",
        on_full: str = "evict",
        timeout_s: float = 60.0,
    ) -> None:
        """Args:
            schema: None takes the columns of the first rows.
            max_rows: rows beyond this leave; None keeps all. Claimed rows stay.
            max_bytes: the same in stored bytes, wherever they lie.
            chunk_rows: rows of a full chunk.
            keep_together: rows of one append with equal value of this column are evicted, and can be claimed, together.
            compression: "lz4", "zstd" or "auto" (LZ4 in memory, zstd in files): a codec per column, where a sample says
                that it saves more than 15 %. None stores plain bytes.
            hot_bytes: with compression, how much of the newest rows stays plain (1 GiB): random reads of compressed
                chunks take many times longer.
            memory_bytes: with a path, how much stays in memory; older chunks are written to files.
            path: a new folder for the table. Its rows outlive the processes; without one they go with the last of them.
            memory: "shared", or "private" to one process (no /dev/shm needed).
            eviction: "fifo", or "lru": the least recently read chunk leaves first (a cache).
            on_full: with a bound: "evict"; "wait" for consumers to be done with rows; or "raise".
            timeout_s: longest wait for another process, and for room.

        Errors: ConfigError for options that make no sense; StoreError when memory or the folder cannot be had.
        """
        settings = {
            "max_rows": max_rows, "max_bytes": max_bytes, "chunk_rows": chunk_rows, "keep_together": keep_together,
            "compression": compression, "hot_bytes": hot_bytes, "memory_bytes": memory_bytes, "memory": memory,
            "eviction": eviction, "on_full": on_full, "timeout_s": timeout_s,
        }  # fmt: skip
        check_settings(settings, path)
        if compression is not None and hot_bytes is None:
            settings["hot_bytes"] = HOT_BYTES
        if schema is not None and not isinstance(schema, TableSchema):
            raise ConfigError(f"an ExperienceTable takes a TableSchema first; found {schema!r}. A folder: path='...'")
        folder = None if path is None else Path(path).expanduser()
        self._start(opening.create(settings, folder, memory), readonly=False)
        if schema is not None and len(schema):
            columns = [[c.name, str(c.type), True, c.doc] for c in schema]
            with self._backing.transaction():
                self._backing.commit({"kind": "columns", "columns": columns})

    @classmethod
    def open(cls, target: str | Path, *, readonly: bool = False) -> ExperienceTable:
        """A table that exists: by its folder, or by its name in shared memory.

        Errors: StoreError when there is none there, it is damaged, or another version wrote it.
        """
        table = cls.__new__(cls)
        table._start(opening.attach(target, readonly=readonly), readonly=readonly)
        return table

    def _start(self, opened: opening.Opened, *, readonly: bool) -> None:
        self._backing, self._name, self._path = opened.backing, opened.name, opened.path
        self.readonly = readonly
        settings = self._backing.catalog.settings
        self.max_rows: int | None = settings["max_rows"]
        self.chunk_rows: int = settings["chunk_rows"]
        self.keep_together: str | None = settings["keep_together"]
        self.timeout_s: float = settings["timeout_s"]
        self._backing.folder, self._backing.timeout_s = self._path, self.timeout_s
        self._bounds = changes.Bounds(
            settings["max_rows"],
            settings["max_bytes"],
            settings["chunk_rows"],
            settings["on_full"],
            settings["timeout_s"],
        )
        self._by_use = settings["eviction"] == "lru"
        tiers = Tiers(settings["compression"], settings["hot_bytes"], settings["memory_bytes"], self._path)
        self._mover = Mover(self._backing, tiers)
        self._checked: Mapping[str, ColumnType] | None = None
        """Types that came with the last append: looked at once."""
        self._known: Known | None = None
        """The columns, when rows came last."""
        if self._path is not None and not readonly:
            self._backing.removes_files = True
        self._end = weakref.finalize(self, _leave, self._backing, self._mover, opened, readonly, os.getpid())

    # ------------------------------------------------------------------------------------------------- looking at it

    @property
    def name(self) -> str:
        """What `open` finds the table by: its folder, or its name in shared memory."""
        return self._name

    def _now(self) -> Catalog:
        self._backing.check_open()
        self._backing.replay()
        return self._backing.catalog

    def __len__(self) -> int:
        return len(self._now().alive)

    def __bool__(self) -> bool:
        return True  # a table without rows is still a table; ask len()

    @property
    def schema(self) -> TableSchema:
        with self._backing.mutex:
            return TableSchema(tuple(Column(n, c.type, c.doc) for n, c in self._now().columns.items()))

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self._now().columns)

    @property
    def num_chunks(self) -> int:
        with self._backing.mutex:
            return sum(1 for _ in self._now().chunk_ranges())

    @property
    def version(self) -> int:
        """Grows with every change."""
        return self._now().version

    @property
    def appended(self) -> int:
        """Rows ever appended."""
        return self._now().appended

    @property
    def evicted(self) -> int:
        """Rows gone because of a bound, or by `evict`."""
        return self._now().evicted

    @property
    def nbytes(self) -> int:
        """Bytes of the values of all rows held, uncompressed; repeated prompts count once."""
        return self._now().raw_bytes

    @property
    def numbers(self) -> np.ndarray:
        """Row numbers of the rows held, int64 [N]."""
        with self._backing.mutex:
            return self._now().alive.numbers()

    def stats(self) -> TableStats:
        """Rows, bytes, codecs and tiers, as a whole and by column."""
        self._backing.check_open()
        return stats.stats(self._backing, self._name)

    def __contains__(self, name: object) -> bool:
        return name in self._now().columns

    def __getitem__(self, name: str) -> Any:
        """All values of a column: an array [N, *inner] or a `Ragged`."""
        if not isinstance(name, str):
            raise SchemaError(
                f"table[...] takes a column's name; found {name!r}. For rows: take([0]), scan(), or batch()"
            )
        return self.batch([name])[name]

    def __iter__(self) -> NoReturn:
        raise SchemaError("a table is read by scan() (chunk after chunk), loader() (batches) or batch() (all rows)")

    def _repr_html_(self) -> str:
        return shown("table", self)

    def __repr__(self) -> str:
        if self._backing.closed:
            return f"ExperienceTable({self._name}, closed)"
        bound = f" of at most {self.max_rows}" if self.max_rows is not None else ""
        gone = f", {self.evicted} evicted" if self.evicted else ""
        return f"ExperienceTable({len(self)} rows{bound}{gone}: {', '.join(self.columns) or 'no columns yet'})"

    # ------------------------------------------------------------------------------------------------------- growing

    def append(
        self, rows: RowBatch | pa.Table | Sequence[Mapping[str, Any]], types: Mapping[str, ColumnType] | None = None
    ) -> range:
        """Add rows at the end; what is beyond the table's bounds leaves.

        Args:
            rows: with exactly the table's columns, in any order, without those that are filled later.
            types: of columns that neither the table nor the standard columns know (Arrow tables, lists of dicts).

        Returns: numbers of the rows, counted from the first row ever appended.

        Errors: SchemaError for missing, unknown or wrongly typed columns; DataError for missing values and for a group
        larger than `max_rows`; StoreError when there is no memory; WaitTimeout with on_full="wait". On an error nothing is
        changed.
        """
        self._check_writable()
        self._mover.raise_error()
        catalog = self._now()
        with self._backing.mutex:
            known = self._known
            if known is None or known.version != catalog.columns_version:
                later = frozenset(n for n, c in catalog.columns.items() if not c.required)
                known = self._known = Known.of(self.schema, later, catalog.columns_version)
        found = incoming(rows, types, known, self.keep_together, self._checked)
        self._checked = types
        check_groups(found.groups, self.keep_together, self.max_rows)
        if not found.num_rows and known.schema is not None:
            return range(catalog.appended, catalog.appended)
        numbers, closed = changes.append(self._backing, found, self._bounds)
        if closed:
            changes.merge_full_chunks(self._backing, self.chunk_rows, self.timeout_s)
        self._mover.poke()
        return numbers

    def add_column(self, name: str, values: Any, kind: ColumnType) -> None:
        """Add a column to all rows held; the others are not touched.

        Args:
            values: one value (or list) per row held, in order. None declares a column that is filled later, row by row
                (`fill`): rows are appended without it, and consumers that ask for it get the rows that have it.

        Errors: SchemaError when the column exists, or for a wrong length or dtype; DataError for missing values.
        """
        self._check_writable()
        self._mover.raise_error()
        changes.add_column(self._backing, name, values, kind, self.timeout_s)
        self._mover.poke()

    def fill(self, name: str, numbers: Any, values: Any, *, keep_existing: bool = False) -> int:
        """Give some rows their value of a column that was declared with `add_column(name, None, kind)`.

        Args:
            numbers: row numbers, as `append` returned them or a claim has them; in any order.
            values: one value (or list) for each.
            keep_existing: rows that have a value keep it, instead of an error. (`Claim.fill` ends the claim with it.)

        Returns: rows that were given a value; those of evicted rows are dropped.

        Errors: SchemaError for an unknown column, a value that is there already or of a wrong type; DataError for a row
        number that was never given out.
        """
        self._check_writable()
        self._mover.raise_error()
        filled = changes.fill(self._backing, {name: values}, numbers, self.timeout_s, keep_existing=keep_existing)
        changes.merge_full_chunks(self._backing, self.chunk_rows, self.timeout_s)
        self._mover.poke()
        return filled

    def evict(self, numbers: Any) -> int:
        """Drop the given rows (row numbers), except claimed ones and groups with one. Returns how many went."""
        self._check_writable()
        return changes.evict(self._backing, RowSet.of(changes.row_numbers("evict", numbers)).pairs(), self.timeout_s)

    def finish(self) -> None:
        """Say that no more rows will come: streams end when everything is used."""
        self._check_writable()
        with self._backing.transaction(self.timeout_s) as catalog:
            if not catalog.finished:
                self._backing.commit({"kind": "finish"})

    def _check_writable(self) -> None:
        self._backing.check_open()
        if self.readonly:
            raise StoreError("the table was opened with readonly=True; open it without to change it")

    # ------------------------------------------------------------------------------------------------------- reading

    def batch(self, columns: Sequence[str] | None = None) -> RowBatch:
        """All rows as one batch."""
        view, _ = self._view(columns)
        return view.batch()

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[RowBatch]:
        """Chunk after chunk, oldest first; numbers are not copied. The rows are those held now."""
        view, bounds = self._view(columns)
        return view.scan(bounds)

    def _view(
        self, columns: Sequence[str] | str | None, pairs: list[tuple[int, int]] | None = None
    ) -> tuple[View, list[tuple[int, int]]]:
        """Rows as they are now, and the chunks they are in."""
        with self._backing.transaction(self.timeout_s) as catalog:
            names = check_columns(catalog, columns)
            pairs = catalog.alive.pairs() if pairs is None else pairs
            bounds = list(dict.fromkeys(c for a, b in pairs for c in catalog.chunk_ranges(a, b)))
            view = View.of(self._backing, pairs, names)
            # who reads everything says nothing about what is used
            if self._by_use and 0 < len(bounds) < len(catalog.recent) and not self.readonly:
                self._backing.commit({"kind": "touch", "chunks": [first for first, _ in bounds]})
        return view, bounds

    def take(self, indices: Any, columns: Sequence[str] | None = None) -> RowBatch:
        """The given rows in the given order; only the chunks that hold them are read."""
        rows = np.asarray(indices)
        rows = rows.astype(np.int64).reshape(-1) if rows.size == 0 else rows
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            raise SchemaError(
                f"take needs a list of row numbers; found {rows.dtype} of shape {rows.shape}. For a mask use filter"
            )
        with self._backing.transaction(self.timeout_s) as catalog:
            held = len(catalog.alive)
            if rows.size and (int(rows.min()) < -held or int(rows.max()) >= held):
                raise DataError(f"take asked for row {rows.max() if rows.max() >= held else rows.min()} of {held} rows")
            numbers = catalog.alive.nth(rows.astype(np.int64) % max(held, 1)) if rows.size else rows
            chunks = dict.fromkeys(c for a, b in RowSet.of(numbers) for c in catalog.chunk_ranges(a, b))
            pairs = [pair for first, end in chunks for pair in catalog.alive.clip(first, end)]
            ready = catalog.ready(check_columns(catalog, columns))
            if not all(rows_.covers(a, b) for rows_ in ready for a, b in pairs):
                pairs = RowSet.of(numbers).pairs()  # others of the chunk may lack a column that is filled later
            view, _ = self._view(columns, pairs)
        starts = np.asarray([a for a, _ in pairs], np.int64)
        before = np.cumsum([0, *(b - a for a, b in pairs)], dtype=np.int64)
        home = np.searchsorted(starts, numbers, side="right") - 1
        return view.rows(before[home] + numbers - starts[home] if len(pairs) else numbers)

    def filter(
        self, keep: np.ndarray | Callable[[RowBatch], np.ndarray], columns: Sequence[str] | None = None
    ) -> RowBatch:
        """The rows where `keep` holds: a mask [N], or a function from a chunk to its mask."""
        view, bounds = self._view(None if callable(keep) else columns)
        if callable(keep):
            masks = [np.asarray(keep(chunk)) for chunk in view.scan(bounds)]
            keep = np.concatenate(masks) if masks else np.zeros(0, bool)
        mask = np.asarray(keep)
        if mask.dtype != np.bool_ or mask.shape != (view.num_rows,):
            raise SchemaError(
                f"filter needs one boolean per row ({view.num_rows}); found {mask.dtype} of shape {mask.shape}"
            )
        if columns is not None:
            check_columns(self._backing.catalog, columns)
        return view.rows(np.flatnonzero(mask), columns)

    def find(self, column: str, values: Sequence[Any]) -> np.ndarray:
        """Index (as `take` counts) of the newest row with each value of a text or integer column, -1 where none has it."""
        if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray):
            raise SchemaError(
                f"find needs a list of values; found {values!r}. For one value: find({column!r}, [{values!r}])"
            )
        found = self.batch([column])[column]
        if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.kind == "f":
            raise SchemaError(
                f"find looks in a column of one text or integer per row; '{column}' is {self.schema[column].type}"
            )
        places = {value: index for index, value in enumerate(found.tolist())}
        return np.asarray([places.get(value, -1) for value in values], np.int64)

    def to_arrow(self) -> pa.Table:
        """An Arrow table with one chunk per chunk; numbers are not copied."""
        view, bounds = self._view(None)
        chunks = [chunk.to_arrow() for chunk in view.scan(bounds)]
        return pa.concat_tables(chunks) if chunks else view.batch().to_arrow()

    def loader(
        self,
        batch_rows: int | None = None,
        *,
        max_tokens: int | None = None,
        columns: Sequence[str] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        group_by: str | None = None,
        layout: str | None = None,
        pad_multiple: int = 1,
        device: str | None = None,
        pin: bool | None = None,
        prefetch: int = 0,
        num_workers: int = 0,
        reuse: bool = False,
    ) -> Loader:
        """Batches of the rows held now; see `flowrl.store.loader.Loader` for the options and layouts.

        The layout is "rows" unless it is named or a device is: then it is "padded".
        """
        layout = layout or ("rows" if device is None else "padded")
        with self._backing.mutex:
            needed = None if columns is None else self._needed(self._now(), columns, max_tokens, group_by)
        view, _ = self._view(needed)
        return Loader(
            view, batch_rows=batch_rows, max_tokens=max_tokens, columns=columns, shuffle=shuffle, seed=seed,
            group_by=group_by, layout=layout, pad_multiple=pad_multiple, device=device, pin=pin, prefetch=prefetch,
            num_workers=num_workers, reuse=reuse,
        )  # fmt: skip

    def _needed(
        self, catalog: Catalog, columns: Sequence[str], max_tokens: int | None, group_by: str | None
    ) -> list[str]:
        """The columns a loader reads: those to give, and those that say how long rows are and which belong together."""
        names = check_columns(catalog, columns)
        if group_by:
            names += check_columns(catalog, group_by)
        if max_tokens is not None:
            names += ["prompt_ids"] if "prompt_ids" in catalog.columns else []
            names += [n for n, c in catalog.columns.items() if c.type.granularity is TOKEN][:1]
        return list(dict.fromkeys(names))

    # ------------------------------------------------------------------------------------------------------ streaming

    def claim(
        self,
        node: str,
        rows: int,
        columns: Sequence[str] | None = None,
        *,
        at_least: int = 1,
        whole_groups: bool = False,
        wait_s: float = 0.0,
    ) -> Claim | None:
        """The oldest rows that no consumer of `node` has had, for this consumer alone.

        Args:
            node: name of what consumes; each node is given every row once, whoever asks for it.
            rows: the most to be given.
            columns: a row is given when it has these (None: all); they are what the claim reads.
            at_least: fewer rows than this are waited for, unless the table is finished.
            whole_groups: only whole groups, of a table with `keep_together`.
            wait_s: longest wait; 0 looks once.

        Returns: the claim; None when there are no rows now (wait_s=0), or none will ever come.

        Errors: WaitTimeout naming what is missing; DataError for a group that does not fit.
        """
        self._check_writable()
        return claims.claim(
            self._backing,
            node,
            rows,
            columns,
            whole_groups=whole_groups,
            at_least=at_least,
            wait_s=wait_s,
        )

    def stream(
        self,
        node: str,
        batch_rows: int = 32,
        *,
        columns: Sequence[str] | None = None,
        layout: str = "padded",
        pad_multiple: int = 1,
        at_least: int = 1,
        whole_groups: bool = False,
        timeout_s: float | None = None,
        ahead: int = 4,
        device: Any = None,
        pin: bool | None = None,
    ) -> Stream:
        """Batches of rows as they come, each row to one consumer of `node`, until `finish` was called and all is used.

        A batch counts as used when the next one is asked for; leaving the loop in between gives the last one back. Layouts,
        `device` and `pin` are those of `loader`.

        Args:
            at_least: smaller batches than this are waited for, unless the table is finished.
            whole_groups: only whole groups, of a table with `keep_together`.
            ahead: batches for which rows are claimed at once when they are there; 1 leaves most to other consumers.
            timeout_s: longest wait for a row (the table's when None).

        Errors: WaitTimeout naming what is missing; DataError for a group that does not fit.
        """
        self._check_writable()
        check_layout(layout)
        check_count("stream", "ahead", ahead)
        wait_s = self.timeout_s if timeout_s is None else timeout_s

        def take(rows: int, also: Record | None) -> Claim | None:
            found = claims.claim(
                self._backing, node, rows, columns, whole_groups=whole_groups, at_least=at_least, wait_s=wait_s, unit=batch_rows,
                also=also,
            )  # fmt: skip
            if found is not None:
                check_carried(found.view.types, list(found.view.types), layout, device, pin)
            return found

        carrier = carrier_for(device, pin, 0)
        return claims.Stream(take, layout, pad_multiple, batch_rows, 1 if whole_groups else ahead, carrier)

    # -------------------------------------------------------------------------------------------------------- tiers

    def compress(self) -> None:
        """Compress every full chunk now, whatever `hot_bytes` says."""
        self._check_writable()
        for segment in self._full_segments((HOT,)):
            self._mover.compress(segment)

    def spill(self) -> None:
        """Write every full chunk to a file now, whatever `memory_bytes` says."""
        self._check_writable()
        if self._path is None:
            raise ConfigError("spill needs a table with a folder: ExperienceTable(path='...')")
        for segment in self._full_segments((HOT, PACKED)):
            self._mover.spill(segment)

    def _full_segments(self, tiers: Sequence[str]) -> list[Segment]:
        with self._backing.mutex:
            catalog = self._now()
            last = catalog.chunks[-1] if catalog.chunks else 0
            grows = last if catalog.appended - last < self.chunk_rows else catalog.appended
            return [s for tier in tiers for s in catalog.tiers[tier].values() if s.stop <= grows]

    def flush(self) -> None:
        """Wait until everything lies where the bounds want it. Errors: StoreError (a full disk), WaitTimeout."""
        self._check_writable()
        self._mover.flush(self.timeout_s)

    # ------------------------------------------------------------------------------------------------- saving it

    def state(self) -> dict[str, Any]:
        """Rows and counters, enough for `restore`; plain values and bytes."""
        with self._backing.transaction(self.timeout_s):
            return changes.state(self._backing)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Become the table that `state` was taken from; what was here is gone."""
        self._check_writable()
        with self._backing.transaction(self.timeout_s):
            changes.restore(self._backing, state, self._bounds)

    def close(self) -> None:
        """Leave the table. The last process to leave removes its memory; with a path its rows are in files then."""
        self._end()

    def __enter__(self) -> ExperienceTable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._backing.catalog.settings.get("memory") == "private":
            raise StoreError(
                "a table with memory='private' stays in its process; make it with memory='shared' to hand it to another"
            )
        return (ExperienceTable.open, (self._name,))


def _leave(backing: Backing, mover: Mover, opened: opening.Opened, readonly: bool, pid: int) -> None:
    """What closing means; runs when the table is collected or Python ends, too."""
    if backing.closed:
        return
    if os.getpid() != pid and not (isinstance(backing.presence, Presence) and backing.presence.has_joined):
        backing.closed = True  # a forked child's copy that was never used: the memory is the parent's to remove
        return
    mover.stop()
    opening.leave(backing, mover, opened, readonly=readonly)
