"""A ragged column: one list per row, stored flat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from flowrl.errors import SchemaError


class Ragged:
    """Lists of different lengths in one flat array. Behaves like a sequence of arrays; arithmetic is elementwise.

    Shapes: `values` [T, ...] with T the sum of `lengths` [N]; `offsets` [N + 1].

    Example:
        column = Ragged.of([[1.0, 2.0], [], [3.0]])
        column.lengths            # array([2, 0, 1])
        column * 2 - column.spread(np.array([1.0, 5.0, 0.0]))
    """

    __slots__ = ("offsets", "values")

    def __init__(self, values: np.ndarray, offsets: np.ndarray) -> None:
        offsets = np.asarray(offsets, dtype=np.int64)
        if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(values):
            raise SchemaError(
                f"offsets must run from 0 to the number of values ({len(values)}); found {offsets[:1]} to {offsets[-1:]}"
            )
        self.values = values
        self.offsets = offsets

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any] | np.ndarray], dtype: Any = None) -> Ragged:
        """From one list per row. `dtype` is needed when there may be no rows or only empty ones."""
        rows = rows if isinstance(rows, list) else list(rows)
        if dtype is not None and set(map(type, rows)) <= {list}:  # one array for all, not one for each
            offsets = np.zeros(len(rows) + 1, np.int64)
            np.cumsum(list(map(len, rows)), out=offsets[1:])
            return cls(np.array(list(chain.from_iterable(rows)), dtype=dtype), offsets)
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(a) for a in arrays], out=offsets[1:])
        full = [a for a in arrays if len(a)]
        if full:
            values = np.concatenate(full)
        else:
            values = arrays[0] if arrays else np.zeros(0, dtype or np.float32)
        return cls(values if dtype is None else values.astype(dtype, copy=False), offsets)

    @classmethod
    def like(cls, values: np.ndarray, other: Ragged) -> Ragged:
        """`values` [T, ...] with the row boundaries of `other`."""
        return cls(values, other.offsets)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @property
    def row_index(self) -> np.ndarray:
        """For each value the row it belongs to, [T]."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a ragged column with {len(self)} rows")
        row %= len(self)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.values[a:b] for a, b in zip(self.offsets[:-1], self.offsets[1:], strict=True))

    def take(self, rows: np.ndarray) -> Ragged:
        """The given rows in the given order."""
        rows = np.asarray(rows, dtype=np.int64)
        lengths = self.lengths[rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        # position of each taken value: start of its row + place inside the row
        inside = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        return Ragged(self.values[np.repeat(self.offsets[:-1][rows], lengths) + inside], offsets)

    def spread(self, per_row: np.ndarray) -> np.ndarray:
        """One value per row repeated over the row's values: [N] to [T]."""
        per_row = np.asarray(per_row)
        if len(per_row) != len(self):
            raise SchemaError(f"spread needs one value per row ({len(self)}); found {len(per_row)}")
        return np.repeat(per_row, self.lengths, axis=0)

    def sum(self, where: Ragged | None = None) -> np.ndarray:
        """Sum per row, [N]; only where `where` is true."""
        values = self.values if where is None else np.where(self._values_of(where), self.values, 0)
        total = np.zeros((len(self), *values.shape[1:]), np.float64 if values.dtype.kind == "f" else np.int64)
        filled = np.flatnonzero(self.lengths)
        if len(filled):
            total[filled] = np.add.reduceat(values, self.offsets[:-1][filled], axis=0, dtype=total.dtype)
        return total

    def mean(self, where: Ragged | None = None) -> np.ndarray:
        """Mean per row, [N]; 0 for rows without values."""
        count = self.lengths if where is None else Ragged.like(self._values_of(where).astype(np.int64), self).sum()
        return self.sum(where) / np.maximum(count, 1)

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> Ragged:
        """Apply a function to every row; it must keep the row's length or change all rows' values consistently."""
        return Ragged.of([function(row) for row in self], dtype=None if len(self.values) else self.values.dtype)

    def astype(self, dtype: Any) -> Ragged:
        return Ragged(self.values.astype(dtype, copy=False), self.offsets)

    def to_list(self) -> list[list[Any]]:
        return [row.tolist() for row in self]

    def _values_of(self, other: Any) -> Any:
        if isinstance(other, Ragged):
            if other.offsets is not self.offsets and not np.array_equal(other.offsets, self.offsets):
                raise SchemaError("two ragged columns must have the same row lengths to be combined")
            return other.values
        if isinstance(other, np.ndarray) and other.ndim > 0 and len(other) == len(self):
            return self.spread(other)
        return other

    def _binary(self, other: Any, operation: Callable[[Any, Any], np.ndarray], swapped: bool = False) -> Ragged:
        theirs = self._values_of(other)
        return Ragged(operation(theirs, self.values) if swapped else operation(self.values, theirs), self.offsets)

    def __add__(self, other: Any) -> Ragged:
        return self._binary(other, np.add)

    def __radd__(self, other: Any) -> Ragged:
        return self._binary(other, np.add, swapped=True)

    def __sub__(self, other: Any) -> Ragged:
        return self._binary(other, np.subtract)

    def __rsub__(self, other: Any) -> Ragged:
        return self._binary(other, np.subtract, swapped=True)

    def __mul__(self, other: Any) -> Ragged:
        return self._binary(other, np.multiply)

    def __rmul__(self, other: Any) -> Ragged:
        return self._binary(other, np.multiply, swapped=True)

    def __truediv__(self, other: Any) -> Ragged:
        return self._binary(other, np.divide)

    def __and__(self, other: Any) -> Ragged:
        return self._binary(other, np.logical_and)

    def __neg__(self) -> Ragged:
        return Ragged(-self.values, self.offsets)

    def __invert__(self) -> Ragged:
        return Ragged(~self.values, self.offsets)

    __array_priority__ = 1000  # numpy scalars and arrays defer to the methods above

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {len(self.values)} values, {self.values.dtype})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Ragged)
            and np.array_equal(self.offsets, other.offsets)
            and self.values.shape == other.values.shape
            and bool(np.array_equal(self.values, other.values, equal_nan=self.values.dtype.kind == "f"))
        )

    __hash__ = None  # type: ignore[assignment]
