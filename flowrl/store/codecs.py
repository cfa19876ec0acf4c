"""Codecs for the bytes of a column, and the choice of one by what it saves on a sample.

    codec                  what it does                                           made for
    none                   -                                                      hot rows, noise
    lz4                    LZ4 frame                                              ids, text, masks
    zstd                   Zstandard, level 1                                     the same, on disk
    shuffle-lz4            bytes of equal rank side by side, then LZ4             floats
    bitshuffle-lz4         bits of equal rank side by side, then LZ4              floats, small integers
    delta-bitshuffle-lz4   differences along the inner axis, then as above        sorted top-k logits
    shuffle-zstd           as shuffle-lz4, with Zstandard                         floats, ids, on disk
    delta-shuffle-zstd     differences along the inner axis, then as above        sorted top-k logits, on disk

All are lossless for every bit pattern: differences are taken between integers of the same order as the floats. Codecs that
shuffle need blosc2 (`flowrl[codecs]`); without it they are never chosen. A buffer is decoded as a whole: a page is a chunk,
and reading rows here and there from compressed pages costs a hundred times what plain ones cost.
Compression and decompression release the GIL.
"""

from __future__ import annotations

import importlib.util
import math
import struct
import threading
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from flowrl.errors import ConfigError, MissingExtra, StoreError
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import ColumnType
from flowrl.store.columns import Values

PLAIN = ("none", "lz4", "zstd")
"""Those that Arrow's own files have."""
FILTERED = (
    "shuffle-lz4", "bitshuffle-lz4", "delta-bitshuffle-lz4", "shuffle-zstd", "delta-shuffle-zstd",
)  # fmt: skip
CODECS = (*PLAIN, *FILTERED)
COMPRESSIONS = ("none", "lz4", "zstd", "auto")

WORTH = 0.15
"""Share of the bytes that a codec must save to be chosen."""
SMALLEST = 512
"""Bytes below which a column is left as it is: a call costs more than it saves."""
SLICE = 64 << 10
SLICES = 3

_FRAME = 512 << 20
"""Bytes encoded in one piece; LZ4 and blosc2 have a limit near 2 GiB."""
_BLOCK = 256 << 10
"""Bytes whose differences are taken at a time, so that they stay in the cache."""

_SLOWER = {"lz4": 0.0, "shuffle-lz4": 0.02, "bitshuffle-lz4": 0.02, "delta-bitshuffle-lz4": 0.03, "zstd": 0.03,
           "shuffle-zstd": 0.04, "delta-shuffle-zstd": 0.05}  # fmt: skip
"""Share of the bytes that a codec must save beyond LZ4 to be worth its slower decoding."""


# ------------------------------------------------------------------------------------------------------------- buffers


def encode_buffer(
    raw: np.ndarray, codec: str, *, itemsize: int, inner: int | tuple[int, ...] = 1
) -> bytes | np.ndarray:
    """The bytes of one buffer, encoded.

    Args:
        raw: uint8 [B], any length.
        itemsize: bytes of one number (1, 2, 4 or 8); what the length is no multiple of is kept as it is.
        inner: length of the last axis, along which differences are taken; of a shape, its last number.

    Errors: ConfigError for an unknown codec; MissingExtra when the codec needs blosc2.
    """
    _check(codec)
    raw = np.ascontiguousarray(raw)
    if codec == "none" or not raw.nbytes:
        return raw
    width = _last(inner)
    if len(raw) <= _FRAME:
        return _encode(raw, codec, itemsize, width)
    frames = [bytes(_encode(raw[at : at + _FRAME], codec, itemsize, width)) for at in range(0, len(raw), _FRAME)]
    return b"".join([struct.pack(f"<{len(frames)}Q", *map(len, frames)), *frames])


def decode_buffer(
    stored: np.ndarray | bytes | memoryview,
    codec: str,
    raw_bytes: int,
    *,
    itemsize: int,
    inner: int | tuple[int, ...] = 1,
) -> np.ndarray:
    """What `encode_buffer` was given, uint8 [raw_bytes], with the same `itemsize` and `inner`.

    Errors: StoreError for bytes that the codec did not write; MissingExtra when it needs blosc2.
    """
    _check(codec)
    found = np.frombuffer(stored, np.uint8) if not isinstance(stored, np.ndarray) else stored
    if codec == "none" or not raw_bytes:
        if len(found) != raw_bytes:
            raise StoreError(f"a buffer of {raw_bytes} bytes is stored in {len(found)}; it is damaged")
        return found
    width = _last(inner)
    if raw_bytes <= _FRAME:
        return _decode(found, raw_bytes, codec, itemsize, width)
    count = -(-raw_bytes // _FRAME)
    sizes = np.frombuffer(found[: 8 * count].tobytes(), "<u8").tolist() if len(found) >= 8 * count else []
    if len(sizes) != count or 8 * count + sum(sizes) != len(found):
        raise _damaged(codec, len(found), raw_bytes)
    out = _empty(raw_bytes)
    at = 8 * count
    for number, size in enumerate(sizes):
        part = out[number * _FRAME : (number + 1) * _FRAME]
        part[:] = _decode(found[at : at + size], len(part), codec, itemsize, width)
        at += size
    return out


def _empty(nbytes: int) -> np.ndarray:
    """From Arrow's pool: pages that are new to the process cost more than decoding into them."""
    return np.frombuffer(pa.allocate_buffer(nbytes), np.uint8)


def _check(codec: str) -> None:
    if codec not in CODECS:
        raise ConfigError(f"a codec is one of {', '.join(CODECS)}; found '{codec}'")


def _last(inner: int | tuple[int, ...]) -> int:
    return max(1, inner if isinstance(inner, int) else inner[-1] if inner else 1)


def _damaged(codec: str, stored: int, raw: int) -> StoreError:
    return StoreError(
        f"a buffer of {raw} bytes, stored in {stored} with the codec {codec}, cannot be decoded; it is damaged"
    )


def _encode(raw: np.ndarray, codec: str, itemsize: int, inner: int) -> bytes | np.ndarray:
    if codec in PLAIN:
        # through NumPy: the buffer's own memoryview tells the length before it was shrunk
        packed = np.frombuffer(_arrow_codec(codec).compress(raw, asbytes=False), np.uint8)
        return np.concatenate([_length(len(raw)), packed]) if codec == "lz4" else packed
    body = len(raw) // (itemsize * inner) * (itemsize * inner)
    if codec.startswith("delta-"):
        raw = np.concatenate([_differences(raw[:body], itemsize, inner), raw[body:]])
    whole = len(raw) // itemsize * itemsize
    if not whole:
        return raw.tobytes()
    blosc2 = _blosc2()
    shuffled: bytes = blosc2.compress2(raw[:whole], **_parameters(codec, itemsize))
    return shuffled + raw[whole:].tobytes() if whole < len(raw) else shuffled


def _decode(stored: np.ndarray, raw_bytes: int, codec: str, itemsize: int, inner: int) -> np.ndarray:
    damaged = _damaged(codec, len(stored), raw_bytes)
    if codec in PLAIN:
        if codec == "lz4":  # Arrow does not say when a frame held fewer bytes than were asked for
            if stored[:8].tobytes() != _length(raw_bytes).tobytes():
                raise damaged
            stored = stored[8:]
        try:
            decoded = _arrow_codec(codec).decompress(pa.py_buffer(stored), raw_bytes, asbytes=False)
        except (pa.ArrowException, ValueError, OSError, RuntimeError) as error:
            raise damaged from error
        return np.frombuffer(decoded, np.uint8)
    blosc2 = _blosc2()
    out = _empty(raw_bytes)
    whole = raw_bytes // itemsize * itemsize
    packed = len(stored) - (raw_bytes - whole)
    # a blosc2 frame begins with its sizes; they are looked at before C code believes them
    sizes = struct.unpack("<iii", stored[4:16].tobytes()) if packed >= 32 else (0, 0, 0)
    if (sizes[0], sizes[2]) != (whole, packed) and (whole or packed):
        raise damaged
    out[whole:] = stored[packed:]
    if whole:
        try:
            blosc2.decompress2(stored[:packed], dst=out[:whole], nthreads=1)
        except (RuntimeError, ValueError) as error:
            raise damaged from error
    if codec.startswith("delta-"):
        _sums(out[: raw_bytes // (itemsize * inner) * (itemsize * inner)], itemsize, inner)
    return out


def _length(nbytes: int) -> np.ndarray:
    return np.array([nbytes], "<u8").view(np.uint8)


@lru_cache(maxsize=4)
def _arrow_codec(codec: str) -> Any:
    # LZ4 in frames: a bare block that was torn can decode without an error, to fewer bytes
    if codec == "lz4":
        return pa.Codec("lz4") if pa.Codec.is_available("lz4") else _Lz4Frames()
    return pa.Codec("zstd", 1)


class _Lz4Frames:
    """The same frames from the package lz4, for an Arrow that was built without them. Arrow's decode 1.1 to 2.8 times faster."""

    @staticmethod
    def compress(raw: np.ndarray, *, asbytes: bool) -> bytes:
        import lz4.frame

        packed: bytes = lz4.frame.compress(raw.data)
        return packed

    @staticmethod
    def decompress(stored: Any, raw_bytes: int, *, asbytes: bool) -> bytes:
        import lz4.frame

        raw: bytes = lz4.frame.decompress(stored)
        if len(raw) != raw_bytes:
            raise ValueError(f"{len(raw)} bytes instead of {raw_bytes}")
        return raw


# --------------------------------------------------------------------------------------------------------- differences


def _differences(raw: np.ndarray, itemsize: int, inner: int) -> np.ndarray:
    """Along the last axis [n, inner], previous minus next, between integers that are ordered as the floats are.

    Top-k logits come in falling order, so the differences are small and not negative.
    """
    unsigned, signed = _integers(itemsize)
    numbers = raw.view(unsigned).reshape(-1, inner)
    made = np.empty_like(numbers)
    rows = max(1, _BLOCK // (itemsize * inner))
    for start in range(0, len(numbers), rows):
        part, into = numbers[start : start + rows], made[start : start + rows]
        order = (part.view(signed) >> (8 * itemsize - 1)).view(unsigned)
        order |= unsigned.type(1 << (8 * itemsize - 1))  # negative: turn all bits over; else the first
        order ^= part
        into[:, 0] = order[:, 0]
        np.subtract(order[:, :-1], order[:, 1:], out=into[:, 1:])
    return made.reshape(-1).view(np.uint8)


def _sums(raw: np.ndarray, itemsize: int, inner: int) -> None:
    """The inverse of `_differences`, in place."""
    unsigned, signed = _integers(itemsize)
    numbers = raw.view(unsigned).reshape(-1, inner)
    rows = max(1, _BLOCK // (itemsize * inner))
    for start in range(0, len(numbers), rows):
        part = numbers[start : start + rows]
        summed = np.subtract.accumulate(part, axis=1)
        order = (summed.view(signed) >> (8 * itemsize - 1)).view(unsigned)
        np.invert(order, out=order)
        order |= unsigned.type(1 << (8 * itemsize - 1))
        np.bitwise_xor(summed, order, out=part)


@lru_cache(maxsize=8)
def _integers(itemsize: int) -> tuple[np.dtype[Any], np.dtype[Any]]:
    return np.dtype(f"<u{itemsize}"), np.dtype(f"<i{itemsize}")


# -------------------------------------------------------------------------------------------------------------- blosc2

_loading = threading.Lock()


@lru_cache(maxsize=1)
def has_blosc2() -> bool:
    return importlib.util.find_spec("blosc2") is not None


def load() -> None:
    """Import what the codecs need, now and in this thread."""
    if has_blosc2():
        _blosc2()


def _blosc2() -> Any:
    try:
        import blosc2
    except ImportError as error:
        raise MissingExtra(
            "codecs that shuffle need the package blosc2, which is not installed; pip install 'flowrl[codecs]'"
        ) from error
    return _prepared(blosc2)


@lru_cache(maxsize=1)
def _prepared(blosc2: Any) -> Any:
    with _loading:
        blosc2.set_releasegil(True)  # it holds the GIL unless told
    return blosc2


@lru_cache(maxsize=64)
def _parameters(codec: str, itemsize: int) -> dict[str, Any]:
    """Each call has a context and one thread of its own: blosc2's shared state would make threads wait for each other."""
    blosc2 = _blosc2()
    is_lz4 = codec.endswith("lz4")
    bits = "bitshuffle" in codec
    return {
        "codec": blosc2.Codec.LZ4 if is_lz4 else blosc2.Codec.ZSTD,
        "clevel": 5 if is_lz4 else 1,
        "typesize": itemsize,
        "filters": [blosc2.Filter.BITSHUFFLE if bits else blosc2.Filter.SHUFFLE],
        "nthreads": 1,
    }


# -------------------------------------------------------------------------------------------------------------- choice


def choose(values: Values, kind: ColumnType, compression: str = "auto") -> str:
    """The codec for a column like `values`, by what it saves on slices of them; "none" when that is little.

    Args:
        values: the column of a chunk, in its stored form.
        compression: "lz4" tries codecs with LZ4 only; "zstd" and "auto" those with Zstandard, too; "none" nothing.

    Errors: ConfigError for another word.
    """
    if compression not in COMPRESSIONS:
        raise ConfigError(f"compression is one of {', '.join(COMPRESSIONS)}; found '{compression}'")
    flat = values.values if isinstance(values, Ragged) else values
    if compression == "none" or not len(flat):
        return "none"
    inner = flat.shape[1:]
    slices, itemsize = _sample(flat, kind)
    raw = sum(map(len, slices))
    if raw < SMALLEST:
        return "none"
    best, lowest = "none", 1.0 - WORTH
    for codec in _candidates(kind, itemsize, _last(inner), compression):
        stored = sum(len(encode_buffer(part, codec, itemsize=itemsize, inner=inner)) for part in slices)
        share = stored / raw
        if share < 1.0 - WORTH and share + _SLOWER[codec] < lowest:
            best, lowest = codec, share + _SLOWER[codec]
    return best


def _candidates(kind: ColumnType, itemsize: int, inner: int, compression: str) -> list[str]:
    with_zstd = compression != "lz4"
    found = ["lz4", "zstd"] if with_zstd else ["lz4"]
    if itemsize == 1 or not has_blosc2():
        return found
    found += ["shuffle-lz4", "bitshuffle-lz4"]
    found += ["shuffle-zstd"] if with_zstd else []
    if inner > 1:
        found += ["delta-bitshuffle-lz4"]
        found += ["delta-shuffle-zstd"] if with_zstd else []
    return found


def _sample(flat: np.ndarray, kind: ColumnType) -> tuple[list[np.ndarray], int]:
    """Slices of at most 64 KiB from the beginning, the middle and the end, as bytes, and the size of one number."""
    if flat.dtype == object:
        return _text_sample(flat, kind), 1
    itemsize = flat.dtype.itemsize
    width = itemsize * math.prod(flat.shape[1:])
    if not width:
        return [], itemsize
    slices = []
    for start, stop in _spans(len(flat), max(1, (8 if kind.dtype == "bool" else 1) * SLICE // width)):
        part = np.ascontiguousarray(flat[start:stop]).reshape(-1)
        slices.append(np.packbits(part, bitorder="little") if kind.dtype == "bool" else part.view(np.uint8))
    return slices, itemsize


def _spans(count: int, most: int) -> list[tuple[int, int]]:
    if count <= SLICES * most:
        return [(start, min(start + most, count)) for start in range(0, count, most)]
    starts = [0, (count - most) // 2, count - most]
    return [(start, start + most) for start in starts]


def _text_sample(flat: np.ndarray, kind: ColumnType) -> list[np.ndarray]:
    slices = []
    for start, stop in _spans(len(flat), max(1, len(flat) // SLICES)):
        pieces, size = [], 0
        for text in flat[start:stop].tolist():
            piece = text if kind.dtype == "bytes" else text[:SLICE].encode(errors="surrogatepass")
            pieces.append(piece[: SLICE - size])
            size += len(pieces[-1])
            if size >= SLICE:
                break
        slices.append(np.frombuffer(b"".join(pieces), np.uint8))
    return slices[:SLICES]
