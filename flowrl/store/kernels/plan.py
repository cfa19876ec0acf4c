"""What a batch consists of, as the numbers that both implementations work from.

A `Plan` is made once for a set of columns. For each batch, `measure` writes a line per output into `sizes` and `fill` writes
the outputs into the block:

    sizes[o] = (offset in the block, L or T of the output's axis)        sizes[-1] = (bytes of the block, 0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ALIGN = 64

FIXED, LIST, BITS, ENDS = 0, 1, 2, 3
"""One value per row; a list per row; a list of bits per row; where rows end (a mask if padded, bounds if packed)."""


@dataclass(frozen=True, slots=True)
class Output:
    """One array of a batch."""

    name: str
    what: int
    axis: int
    """Outputs of one axis have the same row lengths; -1 for one value per row."""
    dtype: np.dtype[Any]
    inner: tuple[int, ...]
    column: int
    """Whose values it has; -1 for ENDS."""
    packed_name: str = ""
    """When it has another one there."""

    @property
    def numbers(self) -> int:
        """In one value."""
        return math.prod(self.inner)


class Form:
    """All of a plan but where the rows lie: the same for all batches with the same columns."""

    __slots__ = ("columns", "keys", "lines", "outputs", "packed", "padded", "table")

    def __init__(self, outputs: Sequence[Output], keys: Sequence[int], padded: Any, packed: Any) -> None:
        self.outputs = tuple(outputs)
        self.keys = tuple(keys)
        """[A]: the column that gives the row lengths of each axis."""
        self.padded, self.packed = padded, packed
        """How the arrays of a batch are made."""
        self.lines = [number for number, output in enumerate(outputs) if output.column >= 0]
        self.columns = [outputs[line].column for line in self.lines]
        """The outputs that are columns, and which."""
        first = [next(i for i, other in enumerate(outputs) if other.axis == output.axis) for output in outputs]
        rows = [
            (o.what, o.axis, o.numbers * o.dtype.itemsize, o.numbers, 0, same)
            for o, same in zip(outputs, first, strict=True)
        ]
        self.table = np.array(rows, np.int64).reshape(-1, 6)


class Plan:
    """Outputs in the order of the batch, and the same as arrays for compiled code."""

    __slots__ = ("addresses", "axes", "form", "lengths", "num_rows", "outputs", "table")

    def __init__(self, form: Form, addresses: Sequence[np.ndarray], axes: Sequence[np.ndarray], num_rows: int) -> None:
        self.form, self.outputs, self.num_rows = form, form.outputs, num_rows
        self.addresses, self.axes = addresses, axes
        """int64 [N] of each column, and of each axis."""
        self.lengths = np.array([_pointer(axis) for axis in axes], np.int64)
        """[A]: address of the lengths int64 [N] of each axis."""
        self.table = form.table.copy()
        """[O, 6]: what, axis, bytes of a value, numbers in it, address of the addresses, first output of the axis."""
        if addresses:
            self.table[form.lines, 4] = [_pointer(addresses[column]) for column in form.columns]


def _pointer(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
