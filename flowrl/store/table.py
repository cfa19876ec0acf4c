"""The experience table: rows of a run, kept in memory in chunks, grown by rows and by columns.

    table = ExperienceTable(max_rows=10_000)
    table.append(rows)                                     # a RowBatch, an Arrow table or a list of dicts
    table.add_column("advantage", values, SAMPLE.f32)      # a segment beside the others; nothing is rewritten
    for batch in table.loader(batch_rows=32, shuffle=True): ...

                 prompt_id   response_ids   reward  | advantage (added later)
    chunk 0      [256]       [256]          [256]   | [256]          sealed: never written again
    chunk 1      [256]       [256]          [256]   | [256]
    open         [40]        [40]           [40]    | [40]           grows until it is full

Readers get what was there when they asked: chunks are immutable, so appending and evicting never disturb them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from flowrl.errors import ConfigError, DataError, SchemaError
from flowrl.schema.columns import Column, TableSchema, nearest
from flowrl.schema.standard import STANDARD
from flowrl.schema.types import ColumnType
from flowrl.store.columns import inner_lengths, to_stored
from flowrl.store.loader import Loader
from flowrl.store.rows import RowBatch

ARROW_PIECE_ROWS = 256
"""Rows of a chunk unless the table says otherwise."""


class ExperienceTable:
    """Rows that are appended, read in any order, and evicted oldest first.

    Every row has every column. Rows are numbered from 0 among those the table holds now; `evicted` says how many came
    before them.

    Example:
        table = ExperienceTable(max_rows=1000, keep_together="prompt_id")
        table.append([{"prompt_id": "a", "reward": 1.0}])
        len(table), table.columns, table["reward"], table.take([0, -1])
    """

    def __init__(
        self,
        schema: TableSchema | None = None,
        *,
        max_rows: int | None = None,
        chunk_rows: int = ARROW_PIECE_ROWS,
        keep_together: str | None = None,
    ) -> None:
        """Args:
        schema: columns every append must bring; None takes those of the first append.
        max_rows: the oldest rows are evicted beyond this; None keeps all.
        chunk_rows: rows of a sealed chunk.
        keep_together: rows of one append with equal value of this column are evicted together, so that no group is
            ever seen with some of its rows gone.
        """
        for name, value in (("max_rows", max_rows), ("chunk_rows", chunk_rows)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"ExperienceTable needs {name} of at least 1; found {value!r}")
        self.max_rows, self.chunk_rows, self.keep_together = max_rows, chunk_rows, keep_together
        self._schema = schema
        self._sealed: list[RowBatch] = []
        self._open: list[RowBatch] = []
        self._groups: list[int] = []
        """With `keep_together`: rows of each group, oldest first."""
        self.version = 0
        """Grows with every change."""
        self.appended = 0
        """Rows ever appended."""
        self.evicted = 0
        """Rows gone because of `max_rows`."""

    # ------------------------------------------------------------------------------------------------- looking at it

    def __len__(self) -> int:
        return self.appended - self.evicted

    @property
    def schema(self) -> TableSchema:
        return self._schema if self._schema is not None else TableSchema()

    @property
    def columns(self) -> tuple[str, ...]:
        return self.schema.names

    @property
    def num_chunks(self) -> int:
        return len(self._chunks())

    @property
    def nbytes(self) -> int:
        """Bytes of the values of all rows held."""
        return sum(chunk.nbytes for chunk in self._chunks())

    def __contains__(self, name: object) -> bool:
        return name in self.schema

    def __getitem__(self, name: str) -> Any:
        """All values of a column: an array [N, *inner] or a `Ragged`."""
        return self.batch([name])[name]

    def __repr__(self) -> str:
        bound = f" of at most {self.max_rows}" if self.max_rows is not None else ""
        gone = f", {self.evicted} evicted" if self.evicted else ""
        return f"ExperienceTable({len(self)} rows{bound}{gone}: {', '.join(self.columns) or 'no columns yet'})"

    def _chunks(self) -> list[RowBatch]:
        if len(self._open) > 1:
            self._open = [RowBatch.concat(self._open)]
        return [*self._sealed, *self._open]

    def _empty(self) -> RowBatch:
        return RowBatch({c.name: [] for c in self.schema}, {c.name: c.type for c in self.schema}, 0)

    # ------------------------------------------------------------------------------------------------------- growing

    def append(
        self, rows: RowBatch | pa.Table | Sequence[Mapping[str, Any]], types: Mapping[str, ColumnType] | None = None
    ) -> range:
        """Add rows at the end; evict the oldest beyond `max_rows`.

        Args:
            rows: with exactly the table's columns, in any order.
            types: of columns that neither the table nor the standard columns know (Arrow tables, lists of dicts).

        Returns: numbers of the rows, counted from the first row ever appended.

        Errors: SchemaError for missing, unknown or wrongly typed columns; DataError for missing values and for a group
        larger than `max_rows`. On an error nothing is changed.
        """
        batch = self._typed(rows, types)
        groups = []
        if self.keep_together is not None:
            found = batch.group_indices(self.keep_together)
            groups = [len(group) for group in found]
            if found and not np.array_equal(order := np.concatenate(found), np.arange(len(batch))):
                batch = batch.take(order)  # rows of a group become neighbours
            if self.max_rows is not None and max(groups, default=0) > self.max_rows:
                raise DataError(
                    f"a group of equal '{self.keep_together}' has {max(groups)} rows and the table keeps {self.max_rows}; "
                    "raise max_rows"
                )
        first = self.appended
        self._schema = batch.schema if self._schema is None else _filled(self._schema, batch)
        self._push(batch)
        self._groups += groups
        self.appended += len(batch)
        self.version += 1
        self._evict()
        return range(first, first + len(batch))

    def _typed(self, rows: Any, types: Mapping[str, ColumnType] | None) -> RowBatch:
        if not isinstance(rows, RowBatch):
            rows = self._converted(rows, dict(types or {}))
        if self._schema is None:
            return rows
        for name in self.columns:
            if name not in rows:
                raise SchemaError(
                    f"the table has a column '{name}' that the rows to append lack; {nearest(name, rows.names)}"
                )
        for name in rows.names:
            if name not in self:
                raise SchemaError(
                    f"the rows to append have a column '{name}' that the table lacks; drop it, or call "
                    f"add_column('{name}', ...) first; {nearest(name, self.columns)}"
                )
        for column in self._schema:
            if not column.type.accepts(rows.types[column.name]):
                raise SchemaError(
                    f"column '{column.name}' of the table is {column.type}; found {rows.types[column.name]}"
                )
        return rows.select(self.columns).as_types({c.name: c.type for c in self._schema})

    def _converted(self, rows: Any, types: dict[str, ColumnType]) -> RowBatch:
        known = {**{c.name: c.type for c in STANDARD}, **{c.name: c.type for c in self.schema}, **types}
        if isinstance(rows, pa.Table | pa.RecordBatch):
            untold = [f.name for f in rows.schema if b"flowrl.type" not in (f.metadata or {})]
            return RowBatch.from_arrow(
                rows, {name: known[name] for name in rows.schema.names if name in known and name in untold}
            )
        if isinstance(rows, Mapping) or not isinstance(rows, Sequence):
            raise SchemaError(
                f"append takes a RowBatch, an Arrow table or a list of dicts; found {type(rows).__name__}"
            )
        names = list(self.columns) if self._schema is not None else list(rows[0]) if rows else []
        names += [name for row in rows[:1] for name in row if name not in names]
        for name in names:
            if name not in known:
                raise SchemaError(
                    f"column '{name}' is no standard column; say its type: append(rows, types={{'{name}': fr.SAMPLE.f32}})"
                )
        return RowBatch.from_rows(rows, {name: known[name] for name in names})

    def _push(self, batch: RowBatch) -> None:
        start = 0
        while start < len(batch):
            room = self.chunk_rows - sum(len(part) for part in self._open)
            stop = min(start + room, len(batch))
            self._open.append(batch if stop - start == len(batch) else batch.slice(start, stop))
            start = stop
            if sum(len(part) for part in self._open) == self.chunk_rows:
                # copied out of what it was cut from, so that evicting the chunk frees its memory
                self._sealed.append(RowBatch.concat(self._open) if len(self._open) > 1 else self._open[0].copy())
                self._open = []

    def _evict(self) -> None:
        if self.max_rows is None or len(self) <= self.max_rows:
            return
        gone = len(self) - self.max_rows
        if self.keep_together is not None:
            whole = 0
            while whole < gone:
                whole += self._groups.pop(0)
            gone = whole
        self.evicted += gone
        chunks = self._chunks()
        while gone and len(chunks[0]) <= gone:
            gone -= len(chunks.pop(0))
        if gone:
            chunks[0] = chunks[0].slice(gone)
        self._sealed, self._open = (chunks[:-1], chunks[-1:]) if self._open else (chunks, [])

    def add_column(self, name: str, values: Any, kind: ColumnType) -> None:
        """Add a column to all rows held; the others are not touched.

        Args:
            values: one value (or list) per row held, in order.

        Errors: SchemaError when the column exists, or for a wrong length or dtype; DataError for missing values.
        """
        if name in self:
            raise SchemaError(
                f"the table has a column '{name}' already; columns are never overwritten, choose another name"
            )
        column = Column(name, kind)
        stored, kind = to_stored(name, values, kind, len(self))
        whole = RowBatch({name: stored}, {name: kind}, len(self))
        start = 0
        chunks = []
        for chunk in self._chunks():
            segment = whole.slice(start, start + len(chunk))
            chunks.append(chunk.with_column(name, segment[name], kind))
            start += len(chunk)
        self._sealed, self._open = (chunks[:-1], chunks[-1:]) if self._open else (chunks, [])
        self._schema = self.schema.with_column(Column(name, kind, column.doc))
        self.version += 1

    # ------------------------------------------------------------------------------------------------------- reading

    def batch(self, columns: Sequence[str] | None = None) -> RowBatch:
        """All rows as one batch."""
        chunks = list(self.scan(columns))
        if chunks:
            return RowBatch.concat(chunks)
        return self._empty() if columns is None else self._empty().select(columns)

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[RowBatch]:
        """Chunk after chunk, oldest first, without copying."""
        chunks = self._chunks()
        if columns is not None:
            self._empty().select(columns)  # refuses unknown names even when there are no rows
            chunks = [chunk.select(columns) for chunk in chunks]
        return iter(chunks)

    def take(self, indices: Any, columns: Sequence[str] | None = None) -> RowBatch:
        """The given rows in the given order; only the chunks that hold them are read."""
        rows = np.asarray(indices)
        rows = rows.astype(np.int64).reshape(-1) if rows.size == 0 else rows
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            raise SchemaError(
                f"take needs a list of row numbers; found {rows.dtype} of shape {rows.shape}. For a mask use filter"
            )
        if rows.size and (int(rows.min()) < -len(self) or int(rows.max()) >= len(self)):
            raise DataError(
                f"take asked for row {rows.max() if rows.max() >= len(self) else rows.min()} of {len(self)} rows"
            )
        if not rows.size:
            return self._empty() if columns is None else self._empty().select(columns)
        rows = rows.astype(np.int64) % len(self)
        chunks = list(self.scan(columns))
        starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])
        home = np.searchsorted(starts, rows, side="right") - 1
        order = np.argsort(home, kind="stable")
        parts = [chunks[c].take(rows[order][home[order] == c] - starts[c]) for c in np.unique(home)]
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows))
        together = RowBatch.concat(parts)
        return together if np.array_equal(back, np.arange(len(rows))) else together.take(back)

    def filter(
        self, keep: np.ndarray | Callable[[RowBatch], np.ndarray], columns: Sequence[str] | None = None
    ) -> RowBatch:
        """The rows where `keep` holds: a mask [N], or a function from a chunk to its mask."""
        if callable(keep):
            masks = [np.asarray(keep(chunk)) for chunk in self._chunks()]
            keep = np.concatenate(masks) if masks else np.zeros(0, bool)
        mask = np.asarray(keep)
        if mask.dtype != np.bool_ or mask.shape != (len(self),):
            raise SchemaError(
                f"filter needs one boolean per row ({len(self)}); found {mask.dtype} of shape {mask.shape}"
            )
        return self.take(np.flatnonzero(mask), columns)

    def to_arrow(self) -> pa.Table:
        """An Arrow table with one chunk per chunk; numbers are not copied."""
        # a named inner length known by now is known in every chunk
        types = {c.name: c.type for c in self.schema}
        chunks = [chunk.as_types(types).to_arrow() for chunk in self._chunks()]
        return pa.concat_tables(chunks) if chunks else self._empty().to_arrow()

    def loader(
        self,
        batch_rows: int | None = None,
        *,
        max_tokens: int | None = None,
        columns: Sequence[str] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        group_by: str | None = None,
        layout: str = "rows",
        pad_multiple: int = 1,
    ) -> Loader:
        """Batches of the rows held now; see `flowrl.store.loader.Loader` for the options and layouts."""
        return Loader(
            self.batch(), batch_rows=batch_rows, max_tokens=max_tokens, columns=columns, shuffle=shuffle, seed=seed,
            group_by=group_by, layout=layout, pad_multiple=pad_multiple,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------- saving it

    def state(self) -> dict[str, Any]:
        """Rows and counters, enough for `restore`; plain values and bytes."""
        return {
            "rows": self.batch().to_ipc() if self._schema is not None else None,
            "groups": list(self._groups),
            "appended": self.appended,
            "evicted": self.evicted,
            "version": self.version,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Become the table that `state` was taken from; what was here is gone."""
        self._sealed, self._open, self._schema = [], [], None
        if state["rows"] is not None:
            batch = RowBatch.from_ipc(state["rows"])
            self._schema = batch.schema
            self._push(batch)
        self._groups = list(state["groups"])
        self.appended, self.evicted, self.version = state["appended"], state["evicted"], state["version"]


def _filled(schema: TableSchema, batch: RowBatch) -> TableSchema:
    """The schema with inner lengths that only a name stood for, once rows with values have come."""
    for column in schema:
        if any(not isinstance(n, int) for n in inner_lengths(column.type)):
            schema = schema.with_column(Column(column.name, batch.types[column.name], column.doc, column.from_data))
    return schema
