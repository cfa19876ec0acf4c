"""Where a loader's rows come from: a table's rows, or a `RowBatch`.

A loader asks for whole rows in one of two ways:

    source.places(columns)         every row's values as addresses: one kernel call gathers a batch (all rows are hot)
    source.rows(indices, columns)  a `RowBatch`: text, and rows that are compressed or spilled
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from flowrl.schema.ragged import Ragged
from flowrl.schema.types import ColumnType
from flowrl.store.kernels import GatherColumn
from flowrl.store.kernels.plan import Plan
from flowrl.store.rows import RowBatch


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

    def places(self, columns: Sequence[str]) -> Sequence[GatherColumn] | Plan | None:
        """Where all N rows of each column lie, in the order asked for, or a plan made from that; None when some rows do not
        lie in memory as plain values (compressed, on disk).

        Asked once for each loader, before its first batch and not when it is made, for columns of numbers only (never
        `str` or `bytes`). `keep` holds whatever would free or reuse the memory when it dies (mappings, pins); the loader
        holds it until it is closed or dies. List columns of equal lengths should share one `length` array.
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

    def places(self, columns: Sequence[str]) -> list[GatherColumn]:
        lengths: dict[int, np.ndarray] = {}  # by their offsets: TOKEN columns share them
        types, found = self._batch.types, []
        for name in columns:
            values, kind = self._batch[name], types[name]
            flat = values.values if isinstance(values, Ragged) else values
            flat = np.ascontiguousarray(flat)  # copies only what came strided
            stride = flat.itemsize * int(np.prod(flat.shape[1:], dtype=np.int64))
            start = flat.__array_interface__["data"][0]
            if isinstance(values, Ragged):
                length = lengths.setdefault(id(values.offsets), values.lengths)
                address = start + values.offsets[:-1] * stride
            else:
                length, address = None, start + np.arange(len(self._batch), dtype=np.int64) * stride
            found.append(GatherColumn(name, kind, address, length, inner=flat.shape[1:], keep=flat))
        return found

    def rows(self, indices: np.ndarray, columns: Sequence[str] | None) -> RowBatch:
        batch = self._batch if columns is None else self._batch.select(columns)
        first = int(indices[0]) if len(indices) else 0
        if np.array_equal(indices, np.arange(first, first + len(indices))):
            return batch.slice(first, first + len(indices))  # neighbours need no copy
        return batch.take(indices)


def as_source(rows: RowBatch | RowSource) -> RowSource:
    """A `RowBatch` as a source; a source as it is."""
    return BatchRows(rows) if isinstance(rows, RowBatch) else rows
