"""Rows as named arrays, and back: how a table's columns lie in a segment.

    SAMPLE.f32      name            [N]
    TOKEN.i32       name/values     [T]        name/lengths [N]
    SAMPLE.str      name/text       [bytes]    name/sizes   [N]        a list of texts has name/lengths, too

Put one part after the other, these are the arrays of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flowrl.runtime.ranks.segment import Arrays
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import ColumnType
from flowrl.store.rows import RowBatch

VALUES, LENGTHS, TEXT, SIZES = "values", "lengths", "text", "sizes"


@dataclass(frozen=True, slots=True)
class Shape:
    """What the arrays do not say: columns, their types, rows."""

    num_rows: int
    types: tuple[tuple[str, ColumnType], ...]


def shape_of(rows: RowBatch) -> Shape:
    return Shape(len(rows), tuple(rows.types.items()))


def pack(rows: RowBatch) -> dict[str, np.ndarray]:
    """The arrays of rows; numbers are not copied."""
    found: dict[str, np.ndarray] = {}
    for name, values in rows.stored.items():
        flat = values.values if isinstance(values, Ragged) else values
        if isinstance(values, Ragged):
            found[f"{name}/{LENGTHS}"] = values.lengths
        if flat.dtype == object:
            texts = [one if isinstance(one, bytes) else one.encode("utf-8", "surrogatepass") for one in flat.tolist()]
            found[f"{name}/{SIZES}"] = np.fromiter(map(len, texts), np.int64, len(texts))
            found[f"{name}/{TEXT}"] = np.frombuffer(b"".join(texts), np.uint8)
        else:
            found[f"{name}/{VALUES}"] = np.ascontiguousarray(flat)
    return found


def unpack(arrays: Arrays, shapes: Sequence[Shape]) -> RowBatch:
    """The rows of all parts. Types are those of the first part that has rows: an empty one may not know inner lengths."""
    known = next((shape for shape in shapes if shape.num_rows), shapes[0])
    num_rows = sum(shape.num_rows for shape in shapes)
    columns = {name: _column(name, kind, arrays) for name, kind in known.types}
    return RowBatch(columns, dict(known.types), num_rows)


def _column(name: str, kind: ColumnType, arrays: Mapping[str, np.ndarray]) -> np.ndarray | Ragged:
    if f"{name}/{TEXT}" in arrays:
        flat = _texts(arrays[f"{name}/{TEXT}"], arrays[f"{name}/{SIZES}"], is_bytes=kind.dtype == "bytes")
    else:
        flat = arrays[f"{name}/{VALUES}"]
    if f"{name}/{LENGTHS}" not in arrays:
        return flat
    lengths = arrays[f"{name}/{LENGTHS}"]
    return Ragged(flat, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]))


def _texts(data: np.ndarray, sizes: np.ndarray, *, is_bytes: bool) -> np.ndarray:
    whole = data.tobytes()
    found = np.empty(len(sizes), dtype=object)
    at = 0
    for index, size in enumerate(sizes.tolist()):
        part = whole[at : at + size]
        found[index] = part if is_bytes else part.decode("utf-8", "surrogatepass")
        at += size
    found.flags.writeable = False
    return found
