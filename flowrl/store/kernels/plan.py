"""What a batch consists of, as the numbers that both implementations work from.

A `Plan` is made once for a set of columns. For each batch, `measure` writes a line per output into `sizes` and `fill` writes
the outputs into the block:

    sizes[o] = (offset in the block, L or T of the output's axis)        sizes[-1] = (bytes of the block, 0)
"""

from __future__ import annotations

import math
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
    addresses: np.ndarray | None
    """int64 [N]; None for ENDS."""
    packed_name: str = ""
    """When it has another one there."""

    @property
    def numbers(self) -> int:
        """In one value."""
        return math.prod(self.inner)


class Plan:
    """Outputs in the order of the batch, and the same as arrays for compiled code."""

    __slots__ = ("axes", "lengths", "num_rows", "outputs", "table")

    def __init__(self, outputs: tuple[Output, ...], axes: tuple[np.ndarray, ...], num_rows: int) -> None:
        self.outputs, self.axes, self.num_rows = outputs, axes, num_rows
        self.lengths = np.array([_pointer(axis) for axis in axes], np.int64)
        """[A]: address of the lengths int64 [N] of each axis."""
        first = [next(i for i, other in enumerate(outputs) if other.axis == output.axis) for output in outputs]
        rows = [
            (o.what, o.axis, o.numbers * o.dtype.itemsize, o.numbers, _pointer(o.addresses), same)
            for o, same in zip(outputs, first, strict=True)
        ]
        self.table = np.array(rows, np.int64).reshape(-1, 6)
        """[O, 6]: what, axis, bytes of a value, numbers in it, address of the addresses, first output of the axis."""


def _pointer(array: np.ndarray | None) -> int:
    return 0 if array is None else int(array.__array_interface__["data"][0])
