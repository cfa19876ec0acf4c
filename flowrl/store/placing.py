"""Where the rows of segments lie, for all number columns at once and without decoding anything.

    text of a segment's layouts -> what is the same for all segments written alike (a `Recipe`, remembered), buffers
    recipe, buffers, address of the block -> a line of a plan's matrix per column, by one call of a kernel

Small segments are read as often as they are written, and then this is most of the way from a record to a batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from flowrl.schema.types import ColumnType
from flowrl.store.columns import NUMPY_DTYPES
from flowrl.store.kernels import GatherColumn, form_of
from flowrl.store.kernels.plan import BITS, FIXED, LIST, Form

_BUFFERS = {"plain": 1, "list": 2, "bits": 2, "text": 2, "texts": 3}
"""By encoding; one more for columns stored `once`."""
_WHAT = {"plain": FIXED, "list": LIST, "bits": BITS}
_NONE = np.zeros(0, np.int64)
_TO_FLAT = str.maketrans("", "", "[]")

Names = tuple[str, ...]


class Recipe(NamedTuple):
    """How the wanted columns are found in the blocks of a part of the rows."""

    form: Form
    lines: tuple[np.ndarray | None, ...]
    """For each block what `kernels.locate` takes; None where none of the columns is in it."""
    kinds: tuple[tuple[int, tuple[int, ...]], ...]
    """Encoding and stored inner lengths of each column. Rows of other kinds cannot be in one batch."""
    types: tuple[ColumnType, ...]
    """Kept, so that no other type comes to have the id of one."""


@lru_cache(maxsize=4096)
def split(text: str) -> tuple[str, np.ndarray]:
    """A segment's layouts: what it shares with others, and int64 [2 B], offset and bytes of each buffer.

    Bytes of -1 mean that the buffer is compressed.
    """
    same, buffers = text.split("\n")
    if '"' not in buffers:  # no codec is named
        return same, np.array(json.loads(f"[{buffers.translate(_TO_FLAT)}]"), np.int64)
    found = [(b[0], b[1] if len(b) == 2 else -1) for column in json.loads(buffers) for b in column]
    return same, np.array(found, np.int64).reshape(-1)


_recipes: dict[tuple[object, ...], Recipe | None] = {}
_MOST_RECIPES = 256


def recipe(columns: Names, types: Mapping[str, ColumnType], blocks: Sequence[tuple[Names, str]]) -> Recipe | None:
    """How `columns` of these types are read from blocks; None for text, which has no places.

    Args:
        blocks: of each, the columns to take from it, and the first part of its layouts.
    """
    wanted = [types[name] for name in columns]
    key = (columns, tuple(map(id, wanted)), tuple(blocks))
    try:
        return _recipes[key]
    except KeyError:
        pass
    made = _recipe(columns, wanted, blocks)
    if len(_recipes) >= _MOST_RECIPES:
        _recipes.clear()
    if made is not None:
        _recipes[key] = made
    return made


def _recipe(columns: Names, types: Sequence[ColumnType], blocks: Sequence[tuple[Names, str]]) -> Recipe | None:
    found: dict[str, tuple[int, list[int], tuple[int, ...]]] = {}  # block, line without places in the matrix, inner
    for block, (names, same) in enumerate(blocks):
        first = 0
        for name, kind, encoding, inner, once in json.loads(same):
            count = _BUFFERS[encoding]
            if name in names and name in columns and encoding in _WHAT:
                numbers = math.prod(inner)
                size = NUMPY_DTYPES[ColumnType.parse(kind).dtype].itemsize * numbers
                ends = first + 1 if count == 2 else -1
                runs = first + count if once else -1
                found[name] = block, [_WHAT[encoding], size, numbers, first, ends, runs], tuple(inner)
            first += count + bool(once)
    if len(found) != len(columns):
        return None
    made, kinds = [], []
    for name, kind in zip(columns, types, strict=True):
        _, line, inner = found[name]
        kinds.append((line[0], inner))
        made.append(GatherColumn(name, kind, _NONE, None if line[0] == FIXED else _NONE, line[0] == BITS, inner))
    form = form_of(tuple(made))
    lines: list[list[list[int]]] = [[] for _ in blocks]
    for number, name in enumerate(columns):
        block, line, _ = found[name]
        axis = len(columns) + form.keys.index(number) if number in form.keys else -1
        lines[block].append([*line, number, axis])
    arrays = tuple([np.array(of, np.int64) if of else None for of in lines])
    return Recipe(form, arrays, tuple(kinds), tuple(types))
