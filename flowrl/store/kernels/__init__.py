"""Rows to batches: one call copies all columns of a batch from where they lie into one block of memory.

    gather = Gather(columns)                       # once for a set of rows: where each row of each column lies
    batch = gather.padded(rows, take=staging.take) # dict of arrays [M, L, *inner], zeros to the right, and "mask" [M, L]
    batch = gather.packed(rows)                    # dict of arrays [T, *inner], and "cu_seqlens" [M + 1] int32

Two implementations, equal bit for bit: `numba_path` (compiled, lets other threads run) and `numpy_path`. Rows are read by
address, so nothing here knows of tables, segments or processes; whoever builds a `Gather` keeps their memory alive
(`GatherColumn.keep`).

Shape letters: N rows that can be asked for, M rows of a batch, L the longest of them, T values of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.schema.types import ColumnType

KERNELS = ("auto", "numba", "numpy")

Take = Callable[[int], np.ndarray]
"""Gives a writable uint8 array of at least so many bytes that starts at a multiple of 64. The arrays of a batch are views of
it: it may be used again when they are gone."""


@dataclass(frozen=True, slots=True)
class GatherColumn:
    """Where the rows of one column lie. Numbers and booleans only; text has no fixed width and is not gathered.

    Example:
        GatherColumn("reward", SAMPLE.f32, address=base + 4 * np.arange(n), keep=block)
        GatherColumn("response_ids", TOKEN.i32, address=base + 4 * offsets[:-1], length=np.diff(offsets), keep=block)
    """

    name: str
    type: ColumnType
    address: np.ndarray
    """int64 [N]: of each row's first value, in bytes."""
    length: np.ndarray | None = None
    """int64 [N]: values of each row; None for a column with one value per row. Equal for all TOKEN columns."""
    bits: bool = False
    """Booleans stored one bit a value, least significant first, each row from a byte boundary."""
    inner: tuple[int, ...] = ()
    """Shape of one value."""
    keep: Any = None
    """Whatever keeps the memory at `address` where it is."""


class Gather:
    """Columns of N rows, ready to be copied into batches. Threads may share one.

    Errors: SchemaError for a text column, or TOKEN columns of different lengths.
    """

    def __init__(self, columns: Sequence[GatherColumn], kernel: str = "auto") -> None:
        raise NotImplementedError

    def padded(self, rows: np.ndarray, *, multiple: int = 1, take: Take | None = None) -> dict[str, np.ndarray]:
        """The given rows, filled with zeros on the right up to the longest.

        Args:
            rows: int64 [M], each from 0 to N - 1 (checked); they may repeat.
            multiple: L is rounded up to a multiple of this, for each column. Multiples of 64 are copied fastest.
            take: where the bytes come from; None makes new ones.

        Returns what `flowrl.store.loader.padded` returns for the same rows: columns in their order, list columns as
        [M, L, *inner] with "mask" [M, L] after the first TOKEN column and "<column>.mask" after every other list column.

        Errors: DataError for a row number out of range.
        """
        raise NotImplementedError

    def packed(self, rows: np.ndarray, *, take: Take | None = None) -> dict[str, np.ndarray]:
        """The given rows end to end.

        Returns what `flowrl.store.loader.packed` returns for the same rows: list columns as [T, *inner] with "cu_seqlens"
        [M + 1] int32 after the first TOKEN column and "<column>.cu_seqlens" after every other list column.

        Errors: DataError for a row number out of range, or 2^31 values and more of one column.
        """
        raise NotImplementedError


def gather_padded(
    columns: Sequence[GatherColumn],
    rows: np.ndarray,
    *,
    multiple: int = 1,
    take: Take | None = None,
    kernel: str = "auto",
) -> dict[str, np.ndarray]:
    """`Gather.padded` for one batch."""
    return Gather(columns, kernel).padded(rows, multiple=multiple, take=take)


def gather_packed(
    columns: Sequence[GatherColumn], rows: np.ndarray, *, take: Take | None = None, kernel: str = "auto"
) -> dict[str, np.ndarray]:
    """`Gather.packed` for one batch."""
    return Gather(columns, kernel).packed(rows, take=take)


def choose(name: str = "auto") -> str:
    """The kernel to use: "numba" or "numpy".

    "auto" is numba where it can be imported. Imports numba when it is chosen.

    Errors: ConfigError for another name; MissingExtra when numba is asked for by name and is not installed.
    """
    raise NotImplementedError


def aligned(nbytes: int) -> np.ndarray:
    """New memory, uint8 [nbytes], that starts at a multiple of 64. Its contents are undefined."""
    room = np.empty(nbytes + 63, np.uint8)
    start = -room.__array_interface__["data"][0] % 64
    return room[start : start + nbytes]
