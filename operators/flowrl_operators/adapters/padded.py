"""Padded matrices and ragged columns: [B, T] with a mask on one side, `fr.Ragged` on the other. NumPy only.

Other systems keep prompts padded on the left and responses on the right; FlowRL keeps no padding at all.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

import flowrl as fr
from flowrl.errors import SchemaError

__all__ = ["cut", "lengths_of", "mask_of", "matrix", "ragged", "until_end"]


def until_end(ids: np.ndarray, ends: Collection[int]) -> np.ndarray:
    """[B, T] true up to the first end token of each row, which still belongs to it; all true where there is none.

    For matrices of token ids that come without a mask. A model may have several end tokens.
    """
    is_end = np.isin(np.asarray(ids), np.asarray(list(ends), np.int64))
    return np.cumsum(is_end, axis=-1) - is_end == 0


def lengths_of(mask: np.ndarray) -> np.ndarray:
    """[B] tokens up to the last true one: padding on the right is left out, holes inside stay."""
    inside = np.asarray(mask) != 0
    width = inside.shape[1]
    return np.where(inside.any(axis=1), width - np.argmax(inside[:, ::-1], axis=1), 0) if width else inside.sum(axis=1)


def ragged(matrix: np.ndarray, mask: np.ndarray) -> fr.Ragged:
    """The values where `mask` [B, T] is true, row after row: [B, T, ...] padded on either side, or on both.

    Errors: SchemaError when the two have different shapes.
    """
    matrix, inside = np.asarray(matrix), np.asarray(mask) != 0
    if inside.ndim != 2 or matrix.shape[:2] != inside.shape:
        raise SchemaError(f"a mask of shape {inside.shape} does not say which of {matrix.shape} values are there")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(inside.sum(axis=1), dtype=np.int64)])
    return fr.Ragged(matrix[inside], offsets)


def cut(matrix: np.ndarray, lengths: np.ndarray) -> fr.Ragged:
    """The first `lengths` [B] values of each row."""
    matrix = np.asarray(matrix)
    return ragged(matrix, np.arange(matrix.shape[1]) < np.asarray(lengths)[:, None])


def matrix(column: fr.Ragged, *, fill: Any = 0, side: str = "right", width: int | None = None) -> np.ndarray:
    """[B, T, ...] with `fill` on the `side` named; T is the longest row's length, or `width`.

    Errors: SchemaError for a row longer than `width`, since cutting it would lose tokens that others count on.
    """
    mask = mask_of(column, side=side, width=width)
    made = np.full((*mask.shape, *column.values.shape[1:]), fill, dtype=column.values.dtype)
    made[mask] = column.values
    return made


def mask_of(column: fr.Ragged, *, side: str = "right", width: int | None = None) -> np.ndarray:
    """[B, T] true where `matrix` of the same arguments holds a value."""
    if side not in ("left", "right"):
        raise SchemaError(f"padding is on the left or the right; found {side!r}")
    longest = int(column.lengths.max(initial=0))
    if width is not None and longest > width:
        row = int(column.lengths.argmax())
        raise SchemaError(f"row {row} has {longest} tokens and the matrix {width} columns; make it wider")
    place = np.arange(longest if width is None else width)
    lengths = column.lengths[:, None]
    return place < lengths if side == "right" else place >= len(place) - lengths
