"""Where columns lie in a block, and reading them there: as views where they can be, else made anew.

The forms in which columns are stored are described in `flowrl.store.layout`, which writes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from flowrl.errors import StoreError
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import ColumnType
from flowrl.store.columns import NUMPY_DTYPES, Values

_LONG = 32
"""Mean number of values per row from which rows are copied one by one."""


class Buffer(NamedTuple):
    """Bytes within a block."""

    offset: int
    stored: int
    """Bytes it takes in the block."""
    codec: str = "none"
    raw: int | None = None
    """Bytes it has when decoded; None when it is stored as it is."""

    def to_json(self) -> list[Any]:
        return [self.offset, self.stored] if self.raw is None else [self.offset, self.stored, self.codec, self.raw]

    def to_text(self) -> str:
        """`to_json` as text."""
        return (
            f"[{self.offset},{self.stored}]" if self.raw is None else json.dumps(self.to_json(), separators=(",", ":"))
        )


class ColumnLayout(NamedTuple):
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
        buffers = [b.to_json() for b in self.buffers]
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
    return Stored(layout, root, num_rows, {} if offsets_cache is None else offsets_cache).values()


@lru_cache(maxsize=4096)
def parsed(text: str) -> tuple[ColumnLayout, ...]:
    """Layouts from their text, as a segment's record has it."""
    same, buffers = text.split("\n")
    return tuple(
        [
            ColumnLayout(name, kind, encoding, tuple([Buffer(*b) for b in one]), inner, once)
            for (name, kind, encoding, inner, once), one in zip(_parsed_line(same), json.loads(buffers), strict=True)
        ]
    )


@lru_cache(maxsize=1024)
def _parsed_line(text: str) -> list[tuple[str, ColumnType, str, tuple[int, ...], bool]]:
    return [(name, _parsed(kind), form, tuple(inner), bool(once)) for name, kind, form, inner, once in json.loads(text)]


@dataclass(frozen=True, slots=True)
class Stored:
    """A column as it lies in a block, part by part. With `once`, parts are those of the runs."""

    layout: ColumnLayout
    root: np.ndarray
    num_rows: int
    cache: dict[int, np.ndarray]

    def values(self) -> Values:
        """What `decode` gives."""
        layout = self.layout
        index = self.index()
        if layout.encoding == "plain":
            plain = self._numbers(self.num_rows if index is None else int(index[-1]) + 1)
            return plain if index is None else _sealed(plain[index])
        if layout.encoding == "text":
            texts = self._texts()
            return texts if index is None else _sealed(texts[index])
        flat, offsets = self.flat(), self.offsets()
        return Ragged(flat, offsets) if index is None else _repeated(flat, offsets, index)

    def rows(self) -> list[np.ndarray]:
        """The values of each row of a list column; rows of one run share theirs."""
        flat = self.flat()
        rows = [flat[start:stop] for start, stop in pairwise(self.offsets().tolist())]
        index = self.index()
        return rows if index is None else [rows[run] for run in index.tolist()]

    def flat(self) -> np.ndarray:
        """[T, *inner] of a list column."""
        if self.layout.encoding == "texts":
            return self._texts()
        if self.layout.encoding == "bits":
            return _sealed(_from_bits(self.bytes(0), _lengths(self.offsets()), self.layout.inner))
        return self._numbers(int(self.offsets()[-1]))

    def index(self) -> np.ndarray | None:
        """int32 [rows]: the run of each row; None unless `once`."""
        return self.bytes(-1, 4).view(np.int32) if self.layout.once else None

    def offsets(self) -> np.ndarray:
        """int64 [N + 1] of a list column."""
        which = -2 if self.layout.once else -1
        key = self.layout.buffers[which].offset  # no other offsets start there: they are never empty
        found = self.cache.get(key)
        if found is None:
            found = self.cache.setdefault(
                key, _sealed(self.bytes(which, 8).view(np.int64))
            )  # one array for all threads
        return found

    def bounds(self) -> np.ndarray:
        """int64: where each text begins, and the end."""
        return self.bytes(1, 8).view(np.int64)

    def bytes(self, which: int, itemsize: int = 1) -> np.ndarray:
        """uint8, what a buffer holds, decoded."""
        buffer = self.layout.buffers[which]
        found = self.root[buffer.offset : buffer.offset + buffer.stored]
        if len(found) != buffer.stored:
            raise StoreError(
                f"column '{self.layout.name}' lies in bytes {buffer.offset} to {buffer.offset + buffer.stored} of its block, "
                f"which has {len(self.root)}: the block is not the one the layout was written for"
            )
        if buffer.raw is None:
            return found
        from flowrl.store.codecs import decode_buffer

        inner = self.layout.inner
        decoded: np.ndarray = decode_buffer(found, buffer.codec, buffer.raw, itemsize=itemsize, inner=inner)
        return decoded

    def _numbers(self, count: int) -> np.ndarray:
        dtype = NUMPY_DTYPES[self.layout.type.dtype]
        return _sealed(self.bytes(0, dtype.itemsize).view(dtype).reshape(count, *self.layout.inner))

    def _texts(self) -> np.ndarray:
        raw, bounds = self.bytes(0).tobytes(), self.bounds().tolist()
        made: Iterable[Any]
        if self.layout.type.dtype == "bytes":
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


def places(layout: ColumnLayout, root: np.ndarray, num_rows: int) -> Places | None:
    """Addresses of the rows; None for text and for compressed columns, which must be decoded."""
    if layout.encoding in ("text", "texts") or any(buffer.raw is not None for buffer in layout.buffers):
        return None
    stored = Stored(layout, root, num_rows, {})
    base = root.__array_interface__["data"][0] + layout.buffers[0].offset
    size = NUMPY_DTYPES[layout.type.dtype].itemsize * math.prod(layout.inner)
    index = stored.index()
    if layout.encoding == "plain":
        row = np.arange(num_rows) if index is None else index.astype(np.int64)
        return Places(base + size * row, None, False, layout.inner)
    offsets = stored.offsets()
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
