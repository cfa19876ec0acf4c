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

    __slots__ = ("keys", "lines", "outputs", "packed", "padded", "table")

    def __init__(self, outputs: Sequence[Output], keys: Sequence[int], padded: Any, packed: Any) -> None:
        self.outputs = tuple(outputs)
        self.keys = tuple(keys)
        """[A]: the column that gives the row lengths of each axis."""
        self.padded, self.packed = padded, packed
        """How the arrays of a batch are made."""
        first = [next(i for i, other in enumerate(outputs) if other.axis == output.axis) for output in outputs]
        count = sum(output.column >= 0 for output in outputs)
        rows = [
            (o.what, -1 if o.axis < 0 else count + o.axis, o.numbers * o.dtype.itemsize, o.numbers, o.column, same)
            for o, same in zip(outputs, first, strict=True)
        ]
        self.table = np.array(rows, np.int64).reshape(-1, 6)
        """[O, 6]: what, row of the plan's matrix with the lengths, bytes of a value, numbers in it, row of the matrix with the
        addresses, first output of the axis. -1 for no such row."""
        self.lines = count + len(self.keys)
        """C + A, lines of the plan's matrix."""


class Plan:
    """Where the rows of all columns lie: a form, and its N rows."""

    __slots__ = ("form", "keep", "matrix", "num_rows")

    def __init__(self, form: Form, matrix: np.ndarray, keep: Any = None) -> None:
        self.form, self.matrix, self.keep = form, matrix, keep
        """int64 [C + A, N]: addresses of the rows of each of C columns, then row lengths of each of A axes. `keep` holds
        whatever keeps the memory there."""
        self.num_rows = matrix.shape[1]
