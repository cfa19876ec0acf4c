"""Where a loader's rows come from: a table's rows, or a `RowBatch`.

A loader asks for whole rows in one of two ways:

    source.places(columns)         every row's values as addresses: one kernel call gathers a batch (all rows are hot)
    source.rows(indices, columns)  a `RowBatch`: text, and rows that are compressed or spilled
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flowrl.schema.ragged import Ragged
from flowrl.schema.types import ColumnType
from flowrl.store.rows import RowBatch


@dataclass(frozen=True, slots=True)
class Place:
    """Where the values of one column lie, for each of N rows.

    Example: three rows of a TOKEN.i32 column with 2, 0 and 3 tokens, end to end from byte 4096 on
        Place(address=[4096, 4104, 4104], length=[2, 0, 3])
    """

    address: np.ndarray
    """int64 [N]: address in this process of each row's first byte; any number for a row without values."""
    length: np.ndarray
    """int64 [N]: values of each row (tokens, turns); all ones for a column with one value per row. Columns of equal
    lengths should share one array: what is computed from it is then computed once."""
    encoding: str = "plain"
    """"plain": each value is `inner` numbers of the column's dtype, end to end. "bits": booleans, one bit each, every
    row from a byte of its own on."""


@dataclass(frozen=True, slots=True)
class Places:
    """Places of several columns, and what keeps their memory alive."""

    columns: Mapping[str, Place]
    roots: Any = None
    """Held as long as the addresses are used: arrays, mappings or pins whose death would free or reuse the memory."""


class RowSource(Protocol):
    """N rows that do not change: row i is the same row at every call, whatever is appended to or evicted from a table.

    All methods may be called from another thread than the one that made the source.
    """

    @property
    def num_rows(self) -> int: ...

    @property
    def types(self) -> dict[str, ColumnType]:
        """Type of every column, in the order batches have; inner lengths that are known are filled in."""
        ...

    def lengths(self, column: str) -> np.ndarray:
        """int64 [N]: values in each row of a list column. Read once, when the loader is made."""
        ...

    def group_indices(self, key: str | Sequence[str]) -> list[np.ndarray]:
        """Rows of each group of equal `key`, as `RowBatch.group_indices`. Read once, when the loader is made."""
        ...

    def places(self, columns: Sequence[str]) -> Places | None:
        """Where the rows lie, or None when some of them do not lie in memory as plain values (compressed, on disk).

        Asked once for each loader, before its first batch and not when it is made, for columns of numbers only (never
        `str` or `bytes`).
        """
        ...

    def rows(self, indices: np.ndarray, columns: Sequence[str] | None) -> RowBatch:
        """The rows `indices` (int64 [M], in range, in any order, may repeat) with `columns` (None: all), from any tier."""
        ...


class BatchRows:
    """The rows of a `RowBatch` as a source."""

    def __init__(self, batch: RowBatch) -> None:
        self._batch = batch

    @property
    def num_rows(self) -> int:
        return len(self._batch)

    @property
    def types(self) -> dict[str, ColumnType]:
        return self._batch.types

    def lengths(self, column: str) -> np.ndarray:
        values: Ragged = self._batch[column]
        return values.lengths

    def group_indices(self, key: str | Sequence[str]) -> list[np.ndarray]:
        return self._batch.group_indices(key)

    def places(self, columns: Sequence[str]) -> Places | None:
        lengths: dict[int, np.ndarray] = {}  # by their offsets: TOKEN columns share them
        found: dict[str, Place] = {}
        kept = []
        ones = np.ones(len(self._batch), np.int64)
        for name in columns:
            values = self._batch[name]
            flat = values.values if isinstance(values, Ragged) else values
            flat = np.ascontiguousarray(flat)  # a copy only of what came strided; made once for the loader
            kept.append(flat)
            stride = flat.itemsize * int(np.prod(flat.shape[1:], dtype=np.int64))
            start = flat.__array_interface__["data"][0]
            if isinstance(values, Ragged):
                length = lengths.setdefault(id(values.offsets), values.lengths)
                found[name] = Place(start + values.offsets[:-1] * stride, length)
            else:
                found[name] = Place(start + np.arange(len(self._batch), dtype=np.int64) * stride, ones)
        return Places(found, (self._batch, kept))

    def rows(self, indices: np.ndarray, columns: Sequence[str] | None) -> RowBatch:
        batch = self._batch if columns is None else self._batch.select(columns)
        first = int(indices[0]) if len(indices) else 0
        if np.array_equal(indices, np.arange(first, first + len(indices))):
            return batch.slice(first, first + len(indices))  # neighbours need no copy
        return batch.take(indices)


def as_source(rows: RowBatch | RowSource) -> RowSource:
    """A `RowBatch` as a source; a source as it is."""
    return BatchRows(rows) if isinstance(rows, RowBatch) else rows
