"""Columns to the bytes of a block, and back without copying what need not be.

    prepared = prepare(batch columns, types, num_rows)     or prepare_rows(list of dicts, types)
    block = arenas.allocate(prepared.nbytes)
    prepared.write(arenas.write(block))                    # the only copy of numbers
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

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter, itemgetter, ne
from typing import Any

import numpy as np

from flowrl.errors import StoreError
from flowrl.schema.columns import Column
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import PROMPT, TOKEN, ColumnType
from flowrl.store.columns import (
    NUMPY_DTYPES,
    Values,
    check_storable,
    inner_lengths,
    is_list_column,
    to_stored,
    with_lengths,
)
from flowrl.store.decoding import Buffer, ColumnLayout, Places, Stored, decode, parsed, places
from flowrl.store.rows import RowBatch

__all__ = [
    "ALIGN", "Buffer", "ColumnLayout", "Places", "Prepared", "decode", "merge", "parsed", "places", "prepare", "prepare_rows",
]  # fmt: skip

ALIGN = 64


@dataclass(slots=True, eq=False)
class _Pending:
    """A buffer to be written: arrays of one dtype end to end, or bytes."""

    nbytes: int
    source: Sequence[np.ndarray] | bytes
    place: Buffer | None = None

    def write(self, into: np.ndarray) -> None:
        start = self.place.offset if self.place is not None else 0
        target = into[start : start + self.nbytes]
        if isinstance(self.source, bytes):
            target[:] = np.frombuffer(self.source, np.uint8)
        elif self.nbytes:
            parts = self.source
            shaped = target.view(parts[0].dtype).reshape(-1, *parts[0].shape[1:])
            np.concatenate(parts, out=shaped, casting="no")


class Prepared:
    """Columns that are ready to be written: all is checked and counted, and no numbers are copied yet.

    Made by `prepare`, `prepare_rows` and `merge`. Holds on to the arrays it was made from until it is gone.
    """

    __slots__ = ("_pending", "layouts", "nbytes", "num_rows", "raw_bytes")

    def __init__(
        self,
        layouts: tuple[ColumnLayout, ...],
        pending: list[_Pending],
        nbytes: int,
        num_rows: int,
        raw_bytes: int,
    ) -> None:
        self.layouts = layouts
        self.num_rows = num_rows
        self.nbytes = nbytes
        """Of the block they need, a multiple of 64."""
        self.raw_bytes = raw_bytes
        """Of the values and offsets as a `RowBatch` counts them (`RowBatch.nbytes`), before bits and `once`."""
        self._pending = pending

    @property
    def types(self) -> dict[str, ColumnType]:
        return {layout.name: layout.type for layout in self.layouts}

    def write(self, into: np.ndarray) -> None:
        """Copy everything into `into`, uint8 [>= nbytes]. The values must not have changed since they were prepared."""
        if into.dtype != np.uint8 or into.ndim != 1 or len(into) < self.nbytes:
            raise StoreError(
                f"these columns need a block of {self.nbytes} bytes; found {into.dtype} of shape {into.shape}. Allocate "
                "`prepared.nbytes`"
            )
        for pending in self._pending:
            pending.write(into)


class _Builder:
    """Collects columns; `finish` gives every buffer its place."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._columns: list[tuple[str, ColumnType, str, list[_Pending], tuple[int, ...], bool]] = []
        self._token: _Axis | None = None
        self._indexes: list[tuple[np.ndarray, _Pending]] = []
        self._raw = 0

    def finish(self) -> Prepared:
        placed: list[_Pending] = []
        end = 0
        layouts = []
        for name, kind, encoding, pending, inner, once in self._columns:
            for buffer in pending:
                if buffer.place is None:
                    buffer.place = Buffer(end, buffer.nbytes)
                    end = _round_up(end + buffer.nbytes)
                    placed.append(buffer)
            buffers = tuple([buffer.place for buffer in pending if buffer.place is not None])
            layouts.append(ColumnLayout(name, kind, encoding, buffers, inner, once))
        return Prepared(tuple(layouts), placed, end, self.num_rows, self._raw)

    def add(self, name: str, kind: ColumnType, values: Values) -> bool:
        """A column in its stored form; False for TOKEN columns of different lengths."""
        if isinstance(values, Ragged):
            if values.dtype == object:
                return self._add_texts(name, kind, values)
            parts = list(values) if kind.granularity is PROMPT else [values.values]
            return self.add_list(name, kind, parts, values.lengths, values.values.shape[1:])
        if values.dtype == object:
            return self.add_text(name, kind, values.tolist())
        return self._add_plain(name, kind, values)

    def add_list(
        self,
        name: str,
        kind: ColumnType,
        parts: Sequence[np.ndarray],
        row_lengths: np.ndarray | list[int],
        inner: tuple[int, ...],
    ) -> bool:
        """A list column of numbers, in pieces (one a row for PROMPT); False for TOKEN columns of different lengths."""
        axis = self._axis_of(kind, row_lengths)
        if axis is None:
            return False
        lengths, offsets = axis.lengths, axis.offsets
        size = NUMPY_DTYPES[kind.dtype].itemsize * math.prod(inner)
        whole = size * axis.total
        self._raw += whole
        index = None
        if kind.granularity is PROMPT and self.num_rows > 1:
            starts, runs = _runs([part.tobytes() for part in parts], lengths)
            fewer = size * int(lengths[starts].sum())
            if self._saves(fewer + 8 * len(starts) + 8, whole + offsets.nbytes):
                parts, lengths, whole, index = [parts[start] for start in starts.tolist()], lengths[starts], fewer, runs
                offsets = _offsets(lengths)
        if kind.dtype == "bool":
            bits = _to_bits(parts if len(parts) == len(lengths) else _rows(parts, lengths))
            return self._put(name, kind, "bits", [_array(bits), offsets], inner, index)
        if len(parts) > 1 and axis.has_empty_rows:  # inner lengths may be unknown where there are no values
            parts = [part for part in parts if len(part)] or parts[:1]
        return self._put(name, kind, "list", [_Pending(whole, parts), offsets], inner, index)

    def add_bits(
        self, name: str, kind: ColumnType, bits: list[np.ndarray], lengths: np.ndarray, inner: tuple[int, ...]
    ) -> bool:
        """A list column of booleans that are bits already; False for TOKEN columns of different lengths."""
        axis = self._axis_of(kind, lengths)
        if axis is None:
            return False
        self._raw += axis.total * math.prod(inner)
        pending = _Pending(sum(map(len, bits)), bits)
        return self._put(name, kind, "bits", [pending, axis.offsets], inner, None)

    def add_encoded(self, name: str, kind: ColumnType, texts: list[np.ndarray], lengths: np.ndarray) -> bool:
        """One text per row, as bytes already."""
        pending = _Pending(sum(map(len, texts)), texts)
        self._raw += pending.nbytes
        return self._put(name, kind, "text", [pending, _offsets(lengths)], (), None)

    def _add_plain(self, name: str, kind: ColumnType, values: np.ndarray) -> bool:
        self._raw += values.nbytes
        index = None
        if kind.granularity is PROMPT and len(values) > 1 and values.nbytes:
            flat = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
            starts, index = _starts((flat[1:] != flat[:-1]).any(axis=1))
            if self._saves(values.nbytes // len(values) * len(starts), values.nbytes):
                values = values[starts]
            else:
                index = None
        return self._put(name, kind, "plain", [_Pending(values.nbytes, [values])], values.shape[1:], index)

    def add_text(self, name: str, kind: ColumnType, texts: Sequence[Any]) -> bool:
        """One text, or bytes, per row."""
        encoded, bounds = _encoded(texts)
        self._raw += len(encoded)
        index = None
        if kind.granularity is PROMPT and len(texts) > 1:
            starts, index = _runs(texts)
            fewer, fewer_bounds = _encoded([texts[start] for start in starts.tolist()])
            if self._saves(len(fewer) + fewer_bounds.nbytes, len(encoded) + bounds.nbytes):
                encoded, bounds = fewer, fewer_bounds
            else:
                index = None
        return self._put(name, kind, "text", [_Pending(len(encoded), encoded), _array(bounds)], (), index)

    def _add_texts(self, name: str, kind: ColumnType, values: Ragged) -> bool:
        axis = self._axis_of(kind, values.lengths)
        if axis is None:
            return False
        lengths, offsets = axis.lengths, axis.offsets
        encoded, bounds = _encoded(values.values.tolist())
        self._raw += len(encoded)
        index = None
        if kind.granularity is PROMPT and len(values) > 1:
            rows = values.to_list()
            starts, index = _runs(rows)
            fewer, fewer_bounds = _encoded([text for start in starts.tolist() for text in rows[start]])
            saved = len(fewer) + fewer_bounds.nbytes + 8 * len(starts)
            if self._saves(saved, len(encoded) + bounds.nbytes + 8 * len(lengths)):
                encoded, bounds, offsets = fewer, fewer_bounds, _offsets(lengths[starts])
            else:
                index = None
        pending = [_Pending(len(encoded), encoded), _array(bounds), offsets]
        return self._put(name, kind, "texts", pending, (), index)

    def _axis_of(self, kind: ColumnType, lengths: np.ndarray | list[int]) -> _Axis | None:
        """Row lengths, those of the TOKEN columns before; None when they should be and are not."""
        if kind.granularity is TOKEN and self._token is not None:
            return self._token if self._token.has(lengths) else None
        axis = _Axis(lengths)
        self._raw += axis.offsets.nbytes
        if kind.granularity is TOKEN:
            self._token = axis
        return axis

    def _saves(self, once: int, each: int) -> bool:
        return _round_up(once) + _round_up(4 * self.num_rows) < _round_up(each)

    def _put(
        self,
        name: str,
        kind: ColumnType,
        encoding: str,
        pending: list[_Pending],
        inner: tuple[int, ...],
        index: np.ndarray | None,
    ) -> bool:
        if index is not None:
            shared = next((p for known, p in self._indexes if np.array_equal(known, index)), None)
            if shared is None:
                shared = _array(index)
                self._indexes.append((index, shared))
            pending.append(shared)
        self._columns.append((name, kind, encoding, pending, inner, index is not None))
        return True


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _array(values: np.ndarray) -> _Pending:
    return _Pending(values.nbytes, [values])


def _offsets(lengths: np.ndarray) -> _Pending:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return _array(offsets)


class _Axis:
    """Row lengths that columns share."""

    def __init__(self, lengths: np.ndarray | list[int]) -> None:
        self.lengths = np.asarray(lengths, np.int64)
        self.offsets = _offsets(self.lengths)
        self.total = int(self.lengths.sum())
        self.has_empty_rows = not self.lengths.all()
        self._known = lengths

    def has(self, lengths: np.ndarray | list[int]) -> bool:
        if isinstance(self._known, list) and isinstance(lengths, list):
            return self._known == lengths  # comparing lists beats making an array
        return np.array_equal(self.lengths, lengths)


def _runs(keys: Sequence[Any], lengths: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """First row of each run of equal neighbours, and for each row its run (int32)."""
    changes = np.fromiter(map(ne, keys[1:], keys[:-1]), np.bool_, len(keys) - 1)
    if lengths is not None:  # values without bytes still have a number
        changes |= lengths[1:] != lengths[:-1]
    return _starts(changes)


def _starts(changes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    first = np.concatenate([[True], changes])
    return np.flatnonzero(first), np.cumsum(first, dtype=np.int32) - np.int32(1)


def _encoded(texts: Sequence[Any]) -> tuple[bytes, np.ndarray]:
    """All texts as bytes, end to end, and where each begins and ends, int64 [len + 1]."""
    bounds = np.zeros(len(texts) + 1, np.int64)
    if not texts or isinstance(texts[0], bytes):
        pieces, joined = texts, b"".join(texts)
    elif (text := "".join(texts)).isascii():
        pieces, joined = texts, text.encode()
    else:  # a lone surrogate is not UTF-8, and still must come back as it was
        pieces = [text.encode(errors="surrogatepass") for text in texts]
        joined = b"".join(pieces)
    np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)), out=bounds[1:])
    return joined, bounds


def _rows(parts: Sequence[np.ndarray], lengths: np.ndarray) -> list[np.ndarray]:
    """The values of each row, from pieces of several rows."""
    flat = np.concatenate(parts) if len(parts) > 1 else parts[0]
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return [flat[start:stop] for start, stop in pairwise(bounds.tolist())]


def _to_bits(rows: Iterable[np.ndarray]) -> np.ndarray:
    """One bit a value, least significant first, each row from a byte boundary."""
    spread: list[bytes] = []
    for row in map(np.ndarray.tobytes, rows):
        spread += (row, _SPACES[-len(row) & 7])
    return np.packbits(np.frombuffer(b"".join(spread), np.bool_), bitorder="little")


_SPACES = [bytes(count) for count in range(8)]


# ---------------------------------------------------------------------------------------------------------- preparing


def prepare(columns: Mapping[str, Values], types: Mapping[str, ColumnType], num_rows: int) -> Prepared:
    """From stored values (`batch[name]` by name) of the types they have (`batch.types`)."""
    builder = _Builder(num_rows)
    for name, values in columns.items():
        builder.add(name, types[name], values)
    return builder.finish()


def prepare_rows(rows: Sequence[Mapping[str, Any]], types: Mapping[str, ColumnType]) -> Prepared:
    """From one dict per row, without an intermediate copy of arrays that have the right dtype already.

    Converts and refuses exactly what `RowBatch.from_rows` does; torch tensors on the CPU may stand for arrays.
    """
    try:
        prepared = _from_dicts(rows, types)
    except (TypeError, ValueError, OverflowError):  # from_rows says it in its own words, with the row
        prepared = None
    if prepared is not None:
        return prepared
    plain = [dict(zip(row, _arrays(list(row.values())), strict=True)) for row in rows]
    batch = RowBatch.from_rows(plain, types)
    return prepare({name: batch[name] for name in batch.names}, batch.types, len(batch))


def _from_dicts(rows: Sequence[Mapping[str, Any]], types: Mapping[str, ColumnType]) -> Prepared | None:
    """None when the rows are not as they should be."""
    columns = _columns_of(rows, types)
    if columns is None:
        return None
    builder = _Builder(len(rows))
    for name, kind in types.items():
        values = columns[name]
        kinds = set(map(type, values))
        if not kinds <= _KNOWN:
            values = _arrays(values)
            kinds = set(map(type, values))
        if type(None) in kinds:
            return None
        if kinds == {np.ndarray} and _are_parts(values, kind):
            inner = values[0].shape[1:]
            done = builder.add_list(name, _typed(name, kind, inner), values, list(map(len, values)), inner)
        elif kinds == {_TEXT.get(kind.dtype)} and not is_list_column(kind):
            done = builder.add_text(name, _typed(name, kind, ()), values)
        else:
            stored, kind = to_stored(name, values, _checked(name, kind), len(rows))
            done = builder.add(name, kind, stored)
        if not done:
            return None
    return builder.finish()


def _columns_of(rows: Sequence[Mapping[str, Any]], types: Mapping[str, ColumnType]) -> dict[str, list[Any]] | None:
    """The values of each column; None unless every row has all of the columns and no other."""
    if not rows or set(map(type, rows)) != {dict} or set(map(len, rows)) != {len(types)}:
        return None
    try:
        return {name: list(map(itemgetter(name), rows)) for name in types}
    except KeyError:
        return None


_KNOWN = {np.ndarray, list, str, bytes, int, float, bool}
_TEXT = {"str": str, "bytes": bytes}


@lru_cache(maxsize=1024)
def _checked(name: str, kind: ColumnType) -> ColumnType:
    Column(name, kind)  # refuses names that are no identifiers
    check_storable(name, kind)
    return kind


@lru_cache(maxsize=1024)
def _typed(name: str, kind: ColumnType, inner: tuple[int, ...]) -> ColumnType:
    """With inner lengths filled in."""
    return with_lengths(name, _checked(name, kind), np.empty((0, *inner)))


def _are_parts(values: Sequence[np.ndarray], kind: ColumnType) -> bool:
    """Whether arrays can stand end to end as they are."""
    dtype = NUMPY_DTYPES[kind.dtype]
    if not kind.is_numeric or not is_list_column(kind) or list(map(_DTYPE, values)).count(dtype) != len(values):
        return False
    if not inner_lengths(kind):
        return list(map(_NDIM, values)).count(1) == len(values)
    return values[0].ndim > 0 and len({value.shape[1:] for value in values}) == 1


_DTYPE, _NDIM = attrgetter("dtype"), attrgetter("ndim")


def _arrays(values: list[Any]) -> list[Any]:
    """With torch tensors that share their memory with NumPy as arrays; torch is not imported for it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return values
    return [_array_of(value) if isinstance(value, torch.Tensor) else value for value in values]


def _array_of(tensor: Any) -> Any:
    try:
        return np.asarray(tensor)
    except (TypeError, RuntimeError):  # on a device, bfloat16, or part of a graph: refused as what it is
        return tensor


def merge(parts: Sequence[tuple[Sequence[ColumnLayout], np.ndarray, int]]) -> Prepared:
    """Neighbouring segments (layouts, root, rows) of the same columns as one, in that order."""
    builder = _Builder(sum(num_rows for _, _, num_rows in parts))
    named = [{layout.name: layout for layout in columns} for columns, _, _ in parts]
    caches: list[dict[int, np.ndarray]] = [{} for _ in parts]
    for name, first in named[0].items():
        if any(columns.keys() != named[0].keys() for columns in named):
            raise StoreError(f"segments to be merged have the same columns; found '{name}' beside others")
        stored = [
            Stored(columns[name], root, num_rows, cache)
            for columns, (_, root, num_rows), cache in zip(named, parts, caches, strict=True)
        ]
        types = [one.layout.type for one in stored]
        kind = next((k for k in types if all(isinstance(n, int) for n in inner_lengths(k))), first.type)
        inner = max((one.layout.inner for one in stored), key=math.prod)  # some may not know it yet
        if first.encoding == "plain":
            values = [one.values() for one in stored if one.num_rows] or [stored[0].values()]
            builder.add(name, kind, np.concatenate(values))  # type: ignore[arg-type]
        elif first.encoding == "text" and kind.granularity is not PROMPT:
            builder.add_encoded(name, kind, [one.bytes(0) for one in stored], _joined(one.bounds() for one in stored))
        elif first.encoding in ("text", "texts"):
            _add_texts(builder, name, kind, [one.values() for one in stored])
        elif kind.granularity is PROMPT:
            rows = [row for one in stored for row in one.rows()]
            builder.add_list(name, kind, rows, list(map(len, rows)), inner)
        elif first.encoding == "bits":
            lengths = _joined(one.offsets() for one in stored)
            builder.add_bits(name, kind, [one.bytes(0) for one in stored], lengths, inner)
        else:
            flat = [one.flat() for one in stored]
            builder.add_list(name, kind, flat, _joined(one.offsets() for one in stored), inner)
    return builder.finish()


def _joined(offsets: Iterable[np.ndarray]) -> np.ndarray:
    """Row lengths from the offsets of several segments."""
    return np.concatenate([one[1:] - one[:-1] for one in offsets])


def _add_texts(builder: _Builder, name: str, kind: ColumnType, values: list[Values]) -> None:
    flat = np.concatenate([part.values if isinstance(part, Ragged) else part for part in values])
    ragged = [part for part in values if isinstance(part, Ragged)]
    if ragged:
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(_joined(part.offsets for part in ragged))])
        builder.add(name, kind, Ragged(flat, offsets))
    else:
        builder.add(name, kind, flat)
