"""Where the rows of a segment lie, for all its number columns at once.

The same as `layout.places` column by column, with what columns share worked out once: small segments are read as often as they
are written, and then this is most of the way from a record to a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from flowrl.store.columns import NUMPY_DTYPES
from flowrl.store.decoding import ColumnLayout, Places

_FEW = np.arange(1024)


def places_of(columns: Sequence[ColumnLayout], root: np.ndarray, num_rows: int) -> dict[str, Places]:
    """Places by column, except of text and of what is compressed.

    Args:
        root: uint8, exactly the block.
        num_rows: of the segment.
    """
    found: dict[str, Places] = {}
    base: int = root.__array_interface__["data"][0]
    words, halves = root.view(np.int64), root.view(np.int32)
    axes: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by where offsets begin: offsets, lengths
    for column in columns:
        if column.encoding in ("text", "texts") or any(buffer.raw is not None for buffer in column.buffers):
            continue
        values = column.buffers[0]
        start = base + values.offset
        size = NUMPY_DTYPES[column.type.dtype].itemsize
        if column.inner:
            size *= math.prod(column.inner)
        index = None
        if column.once:
            last = column.buffers[-1]
            index = halves[last.offset // 4 : (last.offset + last.stored) // 4]
        if column.encoding == "plain":
            rows = (_FEW[:num_rows] if num_rows <= len(_FEW) else np.arange(num_rows)) if index is None else index
            found[column.name] = Places(start + size * rows.astype(np.int64, copy=False), None, False, column.inner)
            continue
        buffer = column.buffers[-2 if column.once else -1]
        axis = axes.get(buffer.offset)
        if axis is None:
            offsets = words[buffer.offset // 8 : (buffer.offset + buffer.stored) // 8]
            axis = axes[buffer.offset] = (offsets, offsets[1:] - offsets[:-1])
        offsets, lengths = axis
        is_bits = column.encoding == "bits"
        if is_bits:
            address = np.empty(len(lengths), np.int64)
            address[:1] = 0
            np.cumsum((lengths[:-1] * math.prod(column.inner) + 7) >> 3, out=address[1:])
            address += start
        else:
            address = size * offsets[:-1]
            address += start
        if index is not None:
            address, lengths = address[index], lengths[index]
        found[column.name] = Places(address, lengths, is_bits, column.inner)
    return found
