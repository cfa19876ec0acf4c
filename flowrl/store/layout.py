"""Columns to the bytes of a block, and back without copying what need not be.

    prepared = prepare(batch columns, types, num_rows)     or prepare_rows(list of dicts, types)
    block = arenas.allocate(prepared.nbytes)
    prepared.write(arenas.write(block))                    # the only copy
    decode(prepared.layouts[0], root, num_rows)            # views of the block

    encoding   buffers
    plain      values [N, *inner]
    list       values [T, *inner], offsets int64 [N + 1]
    bits       booleans of a list column, one bit a value, each row from a byte boundary; offsets as in "list"
    text       UTF-8 (or bytes), bounds int64 [N + 1]
    texts      UTF-8 (or bytes), bounds int64 [T + 1], offsets int64 [N + 1]

With `once`, the rows are those of runs of equal neighbours (N is then the number of runs) and a last buffer int32 [rows]
gives the run of each row. TOKEN columns share one offsets buffer. Every buffer starts at a multiple of 64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.schema.types import ColumnType
from flowrl.store.columns import Values

ALIGN = 64
ENCODINGS = ("plain", "list", "bits", "text", "texts")


@dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes within a block."""

    offset: int
    stored: int
    """Bytes it takes in the block."""
    codec: str = "none"
    raw: int | None = None
    """Bytes it has when decoded; None when it is stored as it is."""


@dataclass(frozen=True, slots=True)
class ColumnLayout:
    """Where one column of a segment lies in its block."""

    name: str
    type: ColumnType
    """With inner lengths filled in, as far as they are known."""
    encoding: str
    buffers: tuple[Buffer, ...]
    inner: tuple[int, ...] = ()
    """Shape of one value as it is stored."""
    once: bool = False

    def to_json(self) -> list[Any]:
        raise NotImplementedError

    @classmethod
    def from_json(cls, found: Sequence[Any]) -> ColumnLayout:
        raise NotImplementedError


class Prepared:
    """Columns that are ready to be written: all is checked and counted, nothing is copied yet."""

    num_rows: int
    nbytes: int
    """Of the block they need, a multiple of 64."""
    raw_bytes: int
    """Of the values and offsets as a `RowBatch` counts them (`RowBatch.nbytes`), before bits and `once`."""
    layouts: tuple[ColumnLayout, ...]

    def write(self, into: np.ndarray) -> None:
        """Copy everything into `into`, uint8 [>= nbytes]. The values must not have changed since."""
        raise NotImplementedError


def prepare(columns: Mapping[str, Values], types: Mapping[str, ColumnType], num_rows: int) -> Prepared:
    """From stored values (`batch[name]` by name) of the types they have (`batch.types`)."""
    raise NotImplementedError


def prepare_rows(rows: Sequence[Mapping[str, Any]], types: Mapping[str, ColumnType]) -> Prepared:
    """From one dict per row, without an intermediate copy of arrays that have the right dtype already.

    Converts and refuses exactly what `RowBatch.from_rows` does; torch tensors on the CPU may stand for arrays.
    """
    raise NotImplementedError


def merge(parts: Sequence[tuple[Sequence[ColumnLayout], np.ndarray, int]]) -> Prepared:
    """Neighbouring segments (layouts, root, rows) of the same columns as one, in that order."""
    raise NotImplementedError


def decode(
    layout: ColumnLayout, root: np.ndarray, num_rows: int, *, offsets_cache: dict[int, np.ndarray] | None = None
) -> Values:
    """The column's stored values.

    Args:
        root: uint8, exactly the block. Views keep it alive.
        offsets_cache: by buffer offset; columns decoded with the same dict share one offsets array.

    "plain" and "list" are read-only views unless compressed or `once`; the rest is materialised.
    """
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Places:
    """Where each row of a column lies, for `flowrl.store.kernels.GatherColumn`."""

    address: np.ndarray
    """int64 [N]: of each row's first value."""
    length: np.ndarray | None
    """int64 [N]: values of each row; None for a column with one value per row."""
    bits: bool
    inner: tuple[int, ...]


def places(
    layout: ColumnLayout, root: np.ndarray, num_rows: int, *, offsets_cache: dict[int, np.ndarray] | None = None
) -> Places | None:
    """Addresses of the rows; None for text and for compressed columns, which must be decoded."""
    raise NotImplementedError
