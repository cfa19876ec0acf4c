"""Where columns lie in a block, and reading them there: as views where they can be, else made anew.

The forms in which columns are stored are described in `flowrl.store.layout`, which writes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from flowrl.errors import StoreError
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import ColumnType
from flowrl.store.columns import NUMPY_DTYPES, Values

_LONG = 32
"""Mean number of values per row from which rows are copied one by one."""


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
    """Where one column of a segment lies in its block.

    Example:
        ColumnLayout("response_ids", TOKEN.i32, "list", (Buffer(0, 4096), Buffer(4096, 72)))
    """

    name: str
    type: ColumnType
    """With inner lengths filled in, as far as they are known."""
    encoding: str
    buffers: tuple[Buffer, ...]
    inner: tuple[int, ...] = ()
    """Shape of one value as it is stored."""
    once: bool = False

    def to_json(self) -> list[Any]:
        buffers = [
            [b.offset, b.stored] if b.raw is None else [b.offset, b.stored, b.codec, b.raw] for b in self.buffers
        ]
        return [self.name, str(self.type), self.encoding, buffers, list(self.inner), int(self.once)]

    @classmethod
    def from_json(cls, found: Sequence[Any]) -> ColumnLayout:
        name, kind, encoding, buffers, inner, once = found
        return cls(name, _parsed(kind), encoding, tuple(Buffer(*b) for b in buffers), tuple(inner), bool(once))


_parsed = lru_cache(maxsize=1024)(ColumnType.parse)


def decode(
    layout: ColumnLayout, root: np.ndarray, num_rows: int, *, offsets_cache: dict[int, np.ndarray] | None = None
) -> Values:
    """The column's stored values.

    Args:
        root: uint8, exactly the block. Views keep it alive.
        offsets_cache: by buffer offset; columns decoded with the same dict share one offsets array.

    "plain" and "list" are read-only views unless compressed or `once`; the rest is materialised.
    """
    dtype = NUMPY_DTYPES[layout.type.dtype]
    index = _bytes(layout, root, -1, 4).view(np.int32) if layout.once else None
    if layout.encoding == "plain":
        stored = num_rows if index is None else int(index[-1]) + 1
        values = _values(layout, root, dtype, stored)
        return values if index is None else _sealed(values[index])
    if layout.encoding == "text":
        texts = _texts(layout, root)
        return texts if index is None else _sealed(texts[index])
    offsets = _offsets_of(layout, root, -1 - layout.once, offsets_cache)
    if layout.encoding == "texts":
        flat = _texts(layout, root)
    elif layout.encoding == "bits":
        flat = _sealed(_from_bits(_bytes(layout, root, 0, 1), _lengths(offsets), layout.inner))
    else:
        flat = _values(layout, root, dtype, int(offsets[-1]))
    return Ragged(flat, offsets) if index is None else _repeated(flat, offsets, index)


def _values(layout: ColumnLayout, root: np.ndarray, dtype: np.dtype[Any], count: int) -> np.ndarray:
    return _sealed(_bytes(layout, root, 0, dtype.itemsize).view(dtype).reshape(count, *layout.inner))


def _bytes(layout: ColumnLayout, root: np.ndarray, which: int, itemsize: int) -> np.ndarray:
    """uint8, what a buffer holds."""
    buffer = layout.buffers[which]
    found = root[buffer.offset : buffer.offset + buffer.stored]
    if len(found) != buffer.stored:
        raise StoreError(
            f"column '{layout.name}' lies in bytes {buffer.offset} to {buffer.offset + buffer.stored} of its block, which has "
            f"{len(root)}: the block is not the one the layout was written for"
        )
    if buffer.raw is None:
        return found
    from flowrl.store.codecs import decode_buffer

    decoded: np.ndarray = decode_buffer(found, buffer.codec, buffer.raw, itemsize=itemsize, inner=layout.inner)
    return decoded


def _offsets_of(layout: ColumnLayout, root: np.ndarray, which: int, cache: dict[int, np.ndarray] | None) -> np.ndarray:
    key = layout.buffers[which].offset
    found = cache.get(key) if cache is not None else None
    if found is None:
        found = _sealed(_bytes(layout, root, which, 8).view(np.int64))
        if cache is not None:
            found = cache.setdefault(key, found)  # one array, also when two threads decode
    return found


def _texts(layout: ColumnLayout, root: np.ndarray) -> np.ndarray:
    raw = _bytes(layout, root, 0, 1).tobytes()
    bounds = _bytes(layout, root, 1, 8).view(np.int64).tolist()
    made: Iterable[Any]
    if layout.type.dtype == "bytes":
        made = [raw[start:stop] for start, stop in pairwise(bounds)]
    elif raw.isascii():
        text = raw.decode()
        made = [text[start:stop] for start, stop in pairwise(bounds)]
    else:
        made = [raw[start:stop].decode(errors="surrogatepass") for start, stop in pairwise(bounds)]
    texts = np.empty(len(bounds) - 1, object)
    texts[:] = made
    return _sealed(texts)


def _repeated(flat: np.ndarray, offsets: np.ndarray, index: np.ndarray) -> Ragged:
    """The list of each row from those of the runs."""
    if len(flat) < _LONG * (len(offsets) - 1):
        taken = Ragged(flat, offsets).take(index)
        return Ragged(_sealed(taken.values), _sealed(taken.offsets))
    rows = [flat[start:stop] for start, stop in pairwise(offsets.tolist())]
    spread = np.zeros(len(index) + 1, np.int64)
    np.cumsum(_lengths(offsets)[index], out=spread[1:])
    return Ragged(_sealed(np.concatenate([rows[run] for run in index.tolist()])), _sealed(spread))


def _lengths(offsets: np.ndarray) -> np.ndarray:
    return offsets[1:] - offsets[:-1]  # for a few rows np.diff takes as long as all the rest


def _sealed(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


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
    if layout.encoding in ("text", "texts") or any(buffer.raw is not None for buffer in layout.buffers):
        return None
    base = root.__array_interface__["data"][0] + layout.buffers[0].offset
    size = NUMPY_DTYPES[layout.type.dtype].itemsize * math.prod(layout.inner)
    index = _bytes(layout, root, -1, 4).view(np.int32) if layout.once else None
    if layout.encoding == "plain":
        return Places(
            base + size * (np.arange(num_rows) if index is None else index.astype(np.int64)), None, False, layout.inner
        )
    offsets = _offsets_of(layout, root, -1 - layout.once, offsets_cache)
    lengths = _lengths(offsets)
    is_bits = layout.encoding == "bits"
    address = base + (_bit_starts(lengths, layout.inner)[:-1] if is_bits else size * offsets[:-1])
    if index is not None:
        address, lengths = address[index], lengths[index]
    return Places(address, lengths, is_bits, layout.inner)


def _bit_starts(lengths: np.ndarray, inner: tuple[int, ...]) -> np.ndarray:
    """Byte at which each row's bits begin, and the end: int64 [N + 1]."""
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum((lengths * math.prod(inner) + 7) >> 3, out=starts[1:])
    return starts


def _from_bits(bits: np.ndarray, lengths: np.ndarray, inner: tuple[int, ...]) -> np.ndarray:
    """bool [T, *inner]"""
    if not lengths.any():
        return np.zeros((0, *inner), np.bool_)
    starts = (8 * _bit_starts(lengths, inner)[:-1]).tolist()
    counts = (lengths * math.prod(inner)).tolist()
    spread = np.unpackbits(bits, bitorder="little").view(np.bool_)
    rows = [spread[start : start + count] for start, count in zip(starts, counts, strict=True)]
    return np.concatenate(rows).reshape(int(lengths.sum()), *inner)
