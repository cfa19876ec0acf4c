"""Rows of a table as they were at one moment, whatever happens to the table later.

    view = View.of(backing, pairs, columns)        in a transaction: every segment it needs is pinned
    view.rows(indices, columns)                    a RowBatch, from memory, compressed memory or files
    view.places(columns)                           a plan for the loader's kernels, when everything lies plain in memory

A view is made of parts: rows of one chunk, with the segments that hold their columns.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flowrl.errors import DataError, SchemaError
from flowrl.schema.columns import nearest
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import TOKEN, ColumnType
from flowrl.store import layout as layouts
from flowrl.store.backing import Backing
from flowrl.store.catalog import DISK, HOT, Catalog, Segment
from flowrl.store.columns import Values
from flowrl.store.intervals import Pairs, RowSet, length
from flowrl.store.kernels import locate
from flowrl.store.kernels.plan import Plan
from flowrl.store.placing import Recipe, recipe, split
from flowrl.store.rows import RowBatch
from flowrl.store.spill import read_segment

DECODED_PARTS = 4
"""Parts that a view keeps decoded when they were compressed or on disk: neighbouring batches read the same one."""


class Source(NamedTuple):
    """A segment, the bytes it lies in, and the columns to take from it."""

    segment: Segment
    root: np.ndarray
    names: tuple[str, ...]


class Part(NamedTuple):
    """Neighbouring rows that the same segments hold."""

    start: int
    stop: int
    sources: tuple[Source, ...]

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def is_hot(self) -> bool:
        return all(source.segment.tier == HOT for source in self.sources)


class View:
    """Rows of a table; a `RowSource` for the loader. Row i is the i-th of them, oldest first."""

    def __init__(self, parts: Sequence[Part], types: Mapping[str, ColumnType], backing: Backing) -> None:
        self.parts = list(parts)
        self._backing = backing
        self._types = dict(types)
        self._folder = backing.folder
        self._num_rows = sum([stop - start for start, stop, _ in self.parts])
        self._first_rows: np.ndarray | None = None
        self._decoded: dict[tuple[int, tuple[str, ...]], RowBatch] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, backing: Backing, pairs: Pairs, columns: Sequence[str]) -> View:
        """In a transaction. Errors: DataError for rows that do not have one of the columns yet."""
        catalog = backing.catalog
        types = {name: catalog.columns[name].type for name in columns}
        families = _families(catalog, columns)
        for ready, names in families:
            for start, stop in pairs:
                if not ready.covers(start, stop):
                    raise DataError(_not_ready(catalog, names[0], pairs))
        parts: list[Part] = []
        for start, stop in pairs:
            for first, end in catalog.chunk_ranges(start, stop):
                parts += _parts(backing, max(start, first), min(stop, end), families)
        return cls(parts, types, backing)

    # ---------------------------------------------------------------------------------------------- as a row source

    @property
    def num_rows(self) -> int:
        return self._num_rows

    @property
    def _starts(self) -> np.ndarray:
        """int64 [parts + 1]: the first row of each part, and the end."""
        found = self._first_rows
        if found is None:
            ends = accumulate([stop - start for start, stop, _ in self.parts])
            found = self._first_rows = np.array([0, *ends], np.int64)
        return found

    @property
    def types(self) -> dict[str, ColumnType]:
        return dict(self._types)

    def lengths(self, column: str) -> np.ndarray:
        """int64 [N]: values in each row of a list column."""
        found = [self._lengths(part, column) for part in self.parts]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _lengths(self, part: Part, column: str) -> np.ndarray:
        source = next(s for s in part.sources if column in s.names)
        if source.segment.tier == HOT:
            place = layouts.places(_layout(source.segment, column), source.root, source.segment.rows)
            if place is not None and place.length is not None:
                return place.length[part.start - source.segment.first : part.stop - source.segment.first]
        values: Ragged = self._read(part, (column,))[column]
        return values.lengths

    def group_indices(self, key: str | Sequence[str]) -> list[np.ndarray]:
        return self.batch([key] if isinstance(key, str) else list(key)).group_indices(key)

    def places(self, columns: Sequence[str]) -> Plan | None:
        """Where the values of all rows lie; None when some are compressed or on disk."""
        names = tuple(columns)
        first: Recipe | None = None
        now: Recipe | None = None
        alike: list[tuple[tuple[str, ...], str]] = []
        matrix = np.empty((0, 0), np.int64)
        at = 0
        for start, stop, sources in self.parts:
            texts = [split(segment.layouts) for segment, _, _ in sources]
            blocks = [(source.names, same) for source, (same, _) in zip(sources, texts, strict=True)]
            if now is None or blocks != alike:
                now, alike = recipe(names, self._types, blocks), blocks
                if now is None:
                    return None
            if first is None:
                first, matrix = now, np.empty((now.form.lines, self.num_rows), np.int64)
            elif now.kinds != first.kinds:
                return None  # values of an inner length that was not known for some of them
            for (segment, root, _), lines, (_, buffers) in zip(sources, now.lines, texts, strict=True):
                if lines is None:
                    continue
                low = start - segment.first
                if segment.tier == DISK or not locate(root, buffers, lines, low, stop - segment.first, matrix, at):
                    return None
            at += stop - start
        return None if first is None else Plan(first.form, matrix, self.parts)

    def rows(self, indices: np.ndarray, columns: Sequence[str] | None = None) -> RowBatch:
        """The rows `indices` in that order. Only the parts that hold them are read."""
        names = tuple(self._types if columns is None else columns)
        if not len(indices):
            return self._none(names)
        starts = self._starts
        home = np.searchsorted(starts, indices, side="right") - 1
        first = int(home[0])
        if (home == first).all():
            return _pick(self._read(self.parts[first], names), indices - starts[first])
        order = np.argsort(home, kind="stable")
        sorted_home = home[order]
        bounds = np.flatnonzero(np.diff(sorted_home, prepend=-1, append=-2))
        pieces = []
        for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            number = int(sorted_home[low])
            pieces.append(_pick(self._read(self.parts[number], names), indices[order[low:high]] - starts[number]))
        together = RowBatch.concat(pieces)
        if np.array_equal(order, np.arange(len(order))):
            return together
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return together.take(back)

    # ------------------------------------------------------------------------------------------------ part after part

    def batch(self, columns: Sequence[str] | None = None) -> RowBatch:
        """All rows as one batch."""
        names = tuple(self._types if columns is None else columns)
        parts = [self._read(part, names) for part in self.parts]
        return RowBatch.concat(parts) if parts else self._none(names)

    def scan(self, bounds: Sequence[tuple[int, int]], columns: Sequence[str] | None = None) -> Iterator[RowBatch]:
        """One batch for each of the chunks `bounds`."""
        names = tuple(self._types if columns is None else columns)
        place = 0
        for _, stop in bounds:
            held = []
            while place < len(self.parts) and self.parts[place].start < stop:
                held.append(self._read(self.parts[place], names))
                place += 1
            if held:
                yield RowBatch.concat(held)

    def _none(self, names: Sequence[str]) -> RowBatch:
        return RowBatch({name: [] for name in names}, {name: self._types[name] for name in names}, 0)

    def _read(self, part: Part, names: tuple[str, ...]) -> RowBatch:
        if part.is_hot:
            return self._decode(part, names)
        key = (part.start, names)
        with self._lock:
            found = self._decoded.pop(key, None)
            if found is not None:
                self._decoded[key] = found
                return found
        found = self._decode(part, names)
        with self._lock:
            self._decoded[key] = found
            while len(self._decoded) > DECODED_PARTS:
                del self._decoded[next(iter(self._decoded))]
        return found

    def _decode(self, part: Part, names: tuple[str, ...]) -> RowBatch:
        found: dict[str, Values] = {}
        types: dict[str, ColumnType] = {}
        for source in part.sources:
            wanted = [name for name in source.names if name in names]
            if not wanted:
                continue
            segment = source.segment
            values, kinds = _values(source, wanted, self._folder)
            whole = RowBatch.of_stored(values, kinds, segment.rows)
            if part.num_rows != segment.rows:
                whole = whole.slice(part.start - segment.first, part.stop - segment.first)
            found.update(whole.stored)
            types.update(kinds)
        kinds = {name: types[name] for name in names}
        batch = RowBatch.of_stored(_one_axis({name: found[name] for name in names}, kinds), kinds, part.num_rows)
        # an inner length that only a name stood for when these rows came is known by now
        return batch.as_types({name: self._types[name] for name in names})


def _pick(batch: RowBatch, rows: np.ndarray) -> RowBatch:
    first = int(rows[0])
    if int(rows[-1]) - first == len(rows) - 1 and np.array_equal(rows, np.arange(first, first + len(rows))):
        return batch if len(rows) == len(batch) else batch.slice(first, first + len(rows))
    return batch.take(rows)


def _one_axis(columns: dict[str, Values], types: Mapping[str, ColumnType]) -> dict[str, Values]:
    """TOKEN columns of several segments with one offsets array, as batches have it."""
    axis = None
    for name, values in columns.items():
        if isinstance(values, Ragged) and types[name].granularity is TOKEN:
            if axis is None:
                axis = values.offsets
            elif values.offsets is not axis:
                columns[name] = Ragged(values.values, axis)
    return columns


Families = list[tuple[RowSet, list[str]]]
"""Rows that have some columns, and the columns: those that lie in the same segments together."""


def _families(catalog: Catalog, columns: Sequence[str]) -> Families:
    found: dict[int, tuple[RowSet, list[str]]] = {}
    for name in columns:
        column = catalog.columns[name]
        if len(column.families) == 1:
            family = column.families[0]
            known = found.get(id(family))
            if known is None:
                found[id(family)] = (family.ready, [name])
            else:
                known[1].append(name)
        else:
            found[id(column)] = (column.ready, [name])
    return list(found.values())


def _parts(backing: Backing, start: int, stop: int, families: Families) -> list[Part]:
    """The rows from `start` to `stop`, cut where any column's segment ends."""
    catalog = backing.catalog
    sources: list[Source] = []
    edges = {start, stop}
    for _, names in families:
        for segment in catalog.columns[names[0]].between(start, stop):
            sources.append(Source(segment, backing.root(segment), tuple(names)))
            if segment.first > start:
                edges.add(segment.first)
            if segment.stop < stop:
                edges.add(segment.stop)
    if len(edges) == 2:
        return [Part(start, stop, tuple(sources))]
    return [
        Part(a, b, tuple(s for s in sources if s.segment.first <= a and b <= s.segment.stop))
        for a, b in pairwise(sorted(edges))
    ]


def parsed_layouts(segment: Segment) -> Sequence[layouts.ColumnLayout]:
    """The layouts of a segment; parsed once while it is in use."""
    return layouts.parsed(segment.layouts)


def _layout(segment: Segment, name: str) -> layouts.ColumnLayout:
    return next(found for found in parsed_layouts(segment) if found.name == name)


def _values(
    source: Source, names: Sequence[str], folder: Path | None
) -> tuple[dict[str, Values], dict[str, ColumnType]]:
    """Columns of a segment and the types they were stored with."""
    segment = source.segment
    found = {one.name: one for one in parsed_layouts(segment)}
    kinds = {name: found[name].type for name in names}
    if segment.tier == DISK and folder is not None:
        return read_segment([folder / name for name in segment.place], names), kinds
    cache: dict[int, np.ndarray] = {}
    values = {name: layouts.decode(found[name], source.root, segment.rows, offsets_cache=cache) for name in names}
    return values, kinds


def _not_ready(catalog: Catalog, name: str, pairs: Pairs) -> str:
    missing = [pair for start, stop in pairs for pair in catalog.missing(name, start, stop)]
    first = f" (the first is row number {missing[0][0]})" if missing else ""
    return (
        f"column '{name}' is not there yet for {length(missing)} of {length(pairs)} rows{first}; fill it (table.fill), "
        "wait for it (table.claim hands out rows that have their columns), or choose other columns"
    )


def check_columns(catalog: Catalog, names: Sequence[str] | str | None) -> list[str]:
    """The asked columns, or all. Errors: SchemaError for one that the table lacks."""
    if names is None:
        return list(catalog.columns)
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in catalog.columns:
            raise SchemaError(f"rows have no column '{name}'; {nearest(str(name), catalog.columns)}")
    return names


__all__ = ["View", "check_columns"]
