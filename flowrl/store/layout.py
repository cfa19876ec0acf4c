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
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, compress, pairwise
from operator import itemgetter, ne
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
from flowrl.store.kernels import packer
from flowrl.store.pyvalues import ARRAY, KNOWN, are_flat, are_parts, as_arrays, numbers_of
from flowrl.store.rows import RowBatch

__all__ = [
    "ALIGN", "Buffer", "ColumnLayout", "Places", "Prepared", "decode", "merge", "parsed", "places", "prepare", "prepare_rows",
]  # fmt: skip

ALIGN = 64


class _Found:
    """What compiled code found when it looked at columns of arrays."""

    __slots__ = ("base", "keep", "lines", "numbers", "step", "stride")

    def __init__(self, lines: list[list[int]], numbers: np.ndarray, keep: Sequence[Sequence[Any]]) -> None:
        self.lines, self.numbers, self.keep = lines, numbers, keep
        """Of `inspect` of `flowrl.store.kernels.packing`; and the columns, whose memory is to be copied."""
        self.base: int = numbers.__array_interface__["data"][0]
        self.step, self.stride, _ = numbers.strides


class _Pending:
    """A buffer to be written: arrays of one dtype end to end, or bytes; with `step`, what compiled code is to do."""

    __slots__ = ("nbytes", "place", "source", "step")

    def __init__(
        self,
        nbytes: int,
        source: Any,
        step: tuple[int, int, int, int, int] | None = None,
    ) -> None:
        self.step = step
        self.nbytes = nbytes
        self.source = source
        self.place: Buffer | None = None


class Prepared:
    """Columns that are ready to be written: all is checked and counted, and no numbers are copied yet.

    Made by `prepare`, `prepare_rows` and `merge`. Holds on to the arrays it was made from until it is gone.
    """

    __slots__ = ("_kernel", "_pending", "layouts", "nbytes", "num_rows", "raw_bytes")

    def __init__(
        self,
        layouts: tuple[ColumnLayout, ...],
        pending: list[_Pending],
        nbytes: int,
        num_rows: int,
        raw_bytes: int,
        kernel: Any = None,
    ) -> None:
        self._kernel = kernel
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
        flags = into.flags
        if not (flags.c_contiguous and flags.writeable):
            raise StoreError(
                "columns are written to one run of bytes that may be written; found strided or read-only memory"
            )
        into = into[: self.nbytes]
        raw = into.data
        lines = []
        typed: dict[np.dtype[Any], np.ndarray] = {}  # the block seen as each dtype, once
        for pending in self._pending:
            source, place = pending.source, pending.place
            if not pending.nbytes or place is None:
                continue
            start, stop = place.offset, place.offset + pending.nbytes
            if pending.step is not None:
                lines.append((*pending.step, start))
                continue
            if isinstance(source, bytes):
                raw[start:stop] = source
                continue
            first = source if isinstance(source, np.ndarray) else source[0]
            dtype = first.dtype
            whole = typed.get(dtype)
            if whole is None:
                whole = typed[dtype] = into.view(dtype)
            target = whole[start // dtype.itemsize : stop // dtype.itemsize]
            if first.ndim > 1:
                target = target.reshape(-1, *first.shape[1:])
            if first is source:
                target[:] = first
            else:
                np.concatenate(source, out=target, casting="no")
        if lines:
            self._kernel.write(lines, into.__array_interface__["data"][0])


class _Builder:
    """Collects columns; `finish` gives every buffer its place."""

    def __init__(self, num_rows: int, kernel: Any = None) -> None:
        self.num_rows = num_rows
        self.kernel = kernel
        self._columns: list[tuple[str, ColumnType, str, list[_Pending], tuple[int, ...], bool]] = []
        self._token: _Axis | None = None
        self._indexes: list[tuple[list[bool], _Pending]] = []
        self._raw = 0

    def finish(self) -> Prepared:
        placed: list[_Pending] = []
        end = 0
        layouts = []
        new = tuple.__new__  # what a named tuple does in the end, in a third of the time
        for name, kind, encoding, pending, inner, once in self._columns:
            for buffer in pending:
                if buffer.place is None:
                    buffer.place = new(Buffer, (end, buffer.nbytes, "none", None))
                    end += -(-buffer.nbytes // ALIGN) * ALIGN
                    placed.append(buffer)
            buffers = tuple([buffer.place for buffer in pending])
            layouts.append(new(ColumnLayout, (name, kind, encoding, buffers, inner, once)))
        return Prepared(tuple(layouts), placed, end, self.num_rows, self._raw, self.kernel)

    def add(self, name: str, kind: ColumnType, values: Values) -> bool:
        """A column in its stored form; False for TOKEN columns of different lengths."""
        if isinstance(values, Ragged):
            lengths = values.lengths.tolist()
            if values.dtype == object:
                return self._add_texts(name, kind, values, lengths)
            parts = list(values) if kind.granularity is PROMPT else [values.values]
            return self.add_list(name, kind, parts, lengths, values.values.shape[1:])
        if values.dtype == object:
            return self.add_text(name, kind, values.tolist())
        return self.add_plain(name, kind, values)

    def add_list(
        self, name: str, kind: ColumnType, parts: Sequence[np.ndarray], lengths: list[int], inner: tuple[int, ...]
    ) -> bool:
        """A list column of numbers, in pieces (one a row for PROMPT); False for TOKEN columns of different lengths."""
        axis = self._axis_of(kind, lengths)
        if axis is None:
            return False
        offsets, numbers = axis.offsets, math.prod(inner)
        size = NUMPY_DTYPES[kind.dtype].itemsize * numbers
        whole = size * axis.total
        self._raw += whole
        changes = None
        if kind.granularity is PROMPT and self.num_rows > 1:
            found = [a is not b and (len(a) != len(b) or a.tobytes() != b.tobytes()) for a, b in pairwise(parts)]
            fewer = list(compress(lengths, chain(_TRUE, found)))
            if self._saves(size * sum(fewer) + 8 * len(fewer) + 8, whole + offsets.nbytes):
                parts, lengths, whole, changes = (
                    list(compress(parts, chain(_TRUE, found))),
                    fewer,
                    size * sum(fewer),
                    found,
                )
                offsets = _offsets(lengths)
        if kind.dtype == "bool":
            rows = parts if len(parts) == len(lengths) else _rows(parts, lengths)
            return self._put(name, kind, "bits", [_array(_to_bits(rows, lengths, numbers)), offsets], inner, changes)
        if len(parts) > 1 and 0 in lengths:  # inner lengths may be unknown where there are no values
            parts = [part for part in parts if len(part)] or parts[:1]
        return self._put(name, kind, "list", [_Pending(whole, parts), offsets], inner, changes)

    def add_arrays(self, name: str, kind: ColumnType, found: _Found, place: int, inner: tuple[int, ...]) -> bool:
        """What `add_list` does, for the arrays of a column that compiled code has looked at."""
        # in the order of the constants of `packing`
        *_, itemsize, _, _, same, total, numbers, runs, run_total, bit_bytes, run_bit_bytes = found.lines[place]
        axis = self._found_axis(kind, found, place, same, total)
        if axis is None:
            return False
        size, count, offsets, changes, kernel = itemsize * numbers, self.num_rows, axis.offsets, None, self.kernel
        whole = size * total
        self._raw += whole
        which = found.base + found.step * place + found.stride * kernel.OFFSETS
        if runs < count and self._saves(size * run_total + 8 * runs + 8, whole + offsets.nbytes):
            whole, count, bit_bytes = size * run_total, runs, run_bit_bytes
            which += found.stride * (kernel.RUN_OFFSETS - kernel.OFFSETS)
            offsets = _Pending(8 * runs + 8, found, (kernel.FLAT, which, 0, 0, 8 * runs + 8))
            changes = found.numbers[place, kernel.CHANGES, 1:-1].tolist()
        addresses, lengths = which + found.stride, which + 2 * found.stride
        if kind.dtype == "bool":
            values = _Pending(bit_bytes, found, (kernel.BITS, addresses, lengths, count, numbers))
            return self._put(name, kind, "bits", [values, offsets], inner, changes)
        values = _Pending(whole, found, (kernel.COPY, addresses, lengths, count, size))
        return self._put(name, kind, "list", [values, offsets], inner, changes)

    def add_bits(
        self, name: str, kind: ColumnType, bits: list[np.ndarray], lengths: list[int], inner: tuple[int, ...]
    ) -> bool:
        """A list column of booleans that are bits already; False for TOKEN columns of different lengths."""
        axis = self._axis_of(kind, lengths)
        if axis is None:
            return False
        self._raw += axis.total * math.prod(inner)
        pending = _Pending(sum(map(len, bits)), bits)
        return self._put(name, kind, "bits", [pending, axis.offsets], inner, None)

    def add_encoded(self, name: str, kind: ColumnType, texts: list[np.ndarray], lengths: list[int]) -> bool:
        """One text per row, as bytes already."""
        pending = _Pending(sum(map(len, texts)), texts)
        self._raw += pending.nbytes
        return self._put(name, kind, "text", [pending, _offsets(lengths)], (), None)

    def add_plain(self, name: str, kind: ColumnType, values: np.ndarray) -> bool:
        """One value per row, [N, *inner]."""
        self._raw += values.nbytes
        changes = None
        if kind.granularity is PROMPT and len(values) > 1 and values.nbytes:
            flat = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
            found = (flat[1:] != flat[:-1]).any(axis=1).tolist()
            if self._saves(values.nbytes // len(values) * (1 + sum(found)), values.nbytes):
                values, changes = values[[True, *found]], found
        return self._put(name, kind, "plain", [_array(values)], values.shape[1:], changes)

    def add_text(self, name: str, kind: ColumnType, texts: Sequence[Any]) -> bool:
        """One text, or bytes, per row."""
        pieces, nbytes = _pieces(texts)
        self._raw += nbytes
        changes = None
        if kind.granularity is PROMPT and len(texts) > 1:
            found = list(map(ne, texts[1:], texts[:-1]))
            fewer = list(compress(pieces, chain(_TRUE, found)))
            once = sum(map(len, fewer))
            if self._saves(once + 8 * len(fewer) + 8, nbytes + 8 * len(pieces) + 8):
                pieces, nbytes, changes = fewer, once, found
        pending = [_Pending(nbytes, _together(pieces)), _offsets(map(len, pieces), len(pieces))]
        return self._put(name, kind, "text", pending, (), changes)

    def _add_texts(self, name: str, kind: ColumnType, values: Ragged, lengths: list[int]) -> bool:
        axis = self._axis_of(kind, lengths)
        if axis is None:
            return False
        offsets = axis.offsets
        pieces, nbytes = _pieces(values.values.tolist())
        self._raw += nbytes
        changes = None
        if kind.granularity is PROMPT and len(values) > 1:
            rows = values.to_list()
            found = list(map(ne, rows[1:], rows[:-1]))
            fewer, once = _pieces([text for row in compress(rows, chain(_TRUE, found)) for text in row])
            fewer_lengths = list(compress(lengths, chain(_TRUE, found)))
            saved = once + 8 * len(fewer) + 8 + 8 * len(fewer_lengths)
            if self._saves(saved, nbytes + 8 * len(pieces) + 8 + 8 * len(lengths)):
                pieces, nbytes, offsets, changes = fewer, once, _offsets(fewer_lengths), found
        pending = [_Pending(nbytes, _together(pieces)), _offsets(map(len, pieces), len(pieces)), offsets]
        return self._put(name, kind, "texts", pending, (), changes)

    def _axis_of(self, kind: ColumnType, lengths: list[int]) -> _Axis | None:
        """Row lengths, those of the TOKEN columns before; None when they should be and are not."""
        if kind.granularity is TOKEN and self._token is not None:
            return self._token if self._token.lengths == lengths else None
        axis = _Axis(lengths, _offsets(lengths), sum(lengths))
        self._raw += axis.offsets.nbytes
        if kind.granularity is TOKEN:
            self._token = axis
        return axis

    def _found_axis(self, kind: ColumnType, found: _Found, place: int, same: int, total: int) -> _Axis | None:
        """The same for what compiled code found."""
        token = self._token
        if kind.granularity is TOKEN and token is not None and token.same >= 0:
            return token if token.same == same else None
        lengths = found.numbers[place, self.kernel.LENGTHS, :-1]
        if kind.granularity is TOKEN and token is not None:
            return token if token.lengths == lengths.tolist() else None
        nbytes = 8 * self.num_rows + 8
        address = found.base + found.step * place + found.stride * self.kernel.OFFSETS
        axis = _Axis(lengths, _Pending(nbytes, found, (self.kernel.FLAT, address, 0, 0, nbytes)), total, same)
        self._raw += nbytes
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
        changes: list[bool] | None,
    ) -> bool:
        """`changes`: for each row but the first, whether its values are others than those before; None unless `once`."""
        if changes is not None:
            shared = next((p for known, p in self._indexes if known == changes), None)
            if shared is None:
                runs = accumulate(changes, initial=0)
                shared = _array(np.fromiter(runs, np.int32, len(changes) + 1))
                self._indexes.append((changes, shared))
            pending.append(shared)
        self._columns.append((name, kind, encoding, pending, inner, changes is not None))
        return True


def _round_up(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


_TRUE = (True,)
"""The first row begins a run."""


def _array(values: np.ndarray) -> _Pending:
    return _Pending(values.nbytes, values)


def _offsets(lengths: Iterable[int], count: int = -1) -> _Pending:
    """Where each of `count` lengths begins, and the end, int64 [count + 1]."""
    count = len(lengths) if isinstance(lengths, list) else count
    return _array(np.fromiter(accumulate(lengths, initial=0), np.int64, count + 1))


class _Axis:
    """Row lengths that columns share."""

    __slots__ = ("_lengths", "offsets", "same", "total")

    def __init__(self, lengths: list[int] | np.ndarray, offsets: _Pending, total: int, same: int = -1) -> None:
        self._lengths, self.offsets, self.total = lengths, offsets, total
        self.same = same
        """Equal for columns that have the same lengths, where compiled code found it; else -1."""

    @property
    def lengths(self) -> list[int]:
        return self._lengths.tolist() if isinstance(self._lengths, np.ndarray) else self._lengths


def _pieces(texts: Sequence[Any]) -> tuple[Sequence[Any], int]:
    """Each text in a form whose length is that of its bytes, and the bytes of all."""
    if not texts or isinstance(texts[0], bytes):
        return texts, len(b"".join(texts))
    text = "".join(texts)
    if text.isascii():
        return texts, len(text)
    # a lone surrogate is not UTF-8, and still must come back as it was
    pieces = [text.encode(errors="surrogatepass") for text in texts]
    return pieces, sum(map(len, pieces))


def _together(pieces: Sequence[Any]) -> bytes:
    """What `_pieces` gave, end to end."""
    return "".join(pieces).encode() if pieces and isinstance(pieces[0], str) else b"".join(pieces)


def _rows(parts: Sequence[np.ndarray], lengths: list[int]) -> list[np.ndarray]:
    """The values of each row, from pieces of several rows."""
    flat = np.concatenate(parts) if len(parts) > 1 else parts[0]
    return [flat[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]


def _to_bits(rows: Sequence[np.ndarray], lengths: list[int], numbers: int) -> np.ndarray:
    """One bit a value, least significant first, each row from a byte boundary. `numbers` in one value."""
    if not rows:
        return np.zeros(0, np.uint8)
    spread: list[Any] = [None] * (2 * len(rows))
    spread[::2] = rows if rows[0].ndim == 1 else [row.reshape(-1) for row in rows]
    spread[1::2] = [_SPACES[-length * numbers & 7] for length in lengths]
    return np.packbits(np.concatenate(spread), bitorder="little")


_SPACES = [np.zeros(count, np.bool_) for count in range(8)]


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
    plain = [dict(zip(row, as_arrays(list(row.values())), strict=True)) for row in rows]
    batch = RowBatch.from_rows(plain, types)
    return prepare({name: batch[name] for name in batch.names}, batch.types, len(batch))


def _from_dicts(rows: Sequence[Mapping[str, Any]], types: Mapping[str, ColumnType]) -> Prepared | None:
    """None when the rows are not as they should be."""
    plan = _plan_of(types)
    columns = _columns_of(rows, plan)
    if columns is None:
        return None
    kernel = packer(len(rows))
    found = None if kernel is None or not plan.arrays else _look(kernel, plan, columns, len(rows))
    builder = _Builder(len(rows), kernel)
    for (name, kind, how, dtype, place), values in zip(plan.columns, columns, strict=True):
        if found is not None and place >= 0 and found.lines[place][kernel.IS_GOOD]:
            inner = () if how == _FLAT else values[0].shape[1:]
            if not builder.add_arrays(name, kind if how == _FLAT else _typed(name, kind, inner), found, place, inner):
                return None
            continue
        kinds = set(map(type, values))
        if not kinds <= KNOWN:
            values = as_arrays(values)
            kinds = set(map(type, values))
        if type(None) in kinds:
            return None
        if how == _FLAT and kinds == ARRAY and are_flat(values, dtype):
            done = builder.add_list(name, kind, values, list(map(len, values)), ())
        elif how == _LISTS and kinds == ARRAY and are_parts(values, dtype):
            inner = values[0].shape[1:]
            done = builder.add_list(name, _typed(name, kind, inner), values, list(map(len, values)), inner)
        elif how == _NUMBER and (numbers := numbers_of(values, kinds, dtype)) is not None:
            done = builder.add_plain(name, kind, numbers)
        elif how == _TEXT and kinds == {str if kind.dtype == "str" else bytes}:
            done = builder.add_text(name, kind, values)
        else:
            stored, kind = to_stored(name, list(values), kind, len(rows))
            done = builder.add(name, kind, stored)
        if not done:
            return None
    return builder.finish()


def _look(kernel: Any, plan: _Plan, columns: Sequence[Sequence[Any]], num_rows: int) -> _Found:
    """At the columns that may be arrays to be copied as they are."""
    table, values = plan.table_for(kernel), [columns[column] for column in plan.arrays]
    numbers = kernel.inspect(table, values, num_rows)
    return _Found(table.tolist(), numbers, values)


_FLAT, _LISTS, _NUMBER, _TEXT, _OTHER = range(5)
"""Of a column: arrays [T] of numbers, arrays [T, *inner], one number, one text, anything else."""


class _Plan:
    """What does not change from one call to the next with the same types."""

    __slots__ = ("_table", "arrays", "columns", "names", "pick", "types")

    def __init__(self, types: Mapping[str, ColumnType]) -> None:
        self.types = tuple(types.values())
        self.names = tuple(types)
        self.pick: Any = itemgetter(*self.names) if len(self.names) > 1 else None
        hows = [_how(name, kind) for name, kind in types.items()]
        self.arrays = [column for column, how in enumerate(hows) if how in (_FLAT, _LISTS)]
        """Columns of arrays, if the rows are as they should be."""
        self.columns = [
            (name, kind, how, NUMPY_DTYPES[kind.dtype], self.arrays.index(column) if column in self.arrays else -1)
            for column, ((name, kind), how) in enumerate(zip(types.items(), hows, strict=True))
        ]
        self._table: np.ndarray | None = None

    def table_for(self, kernel: Any) -> np.ndarray:
        """A new table for `inspect`, a line for each of `arrays`."""
        if self._table is None:
            columns = [self.columns[number] for number in self.arrays]
            lines = [
                kernel.line_of(dtype, how == _FLAT, kind.granularity is PROMPT) for _, kind, how, dtype, _ in columns
            ]
            self._table = np.array(lines, np.int64)
        return self._table.copy()


def _how(name: str, kind: ColumnType) -> int:
    Column(name, kind)  # refuses names that are no identifiers
    check_storable(name, kind)
    if not kind.is_numeric:
        return _OTHER if is_list_column(kind) or kind.inner else _TEXT
    if is_list_column(kind):
        return _LISTS if inner_lengths(kind) else _FLAT
    return _OTHER if kind.inner else _NUMBER


_plans: dict[tuple[Any, ...], _Plan] = {}
_MOST_PLANS = 256


def _plan_of(types: Mapping[str, ColumnType]) -> _Plan:
    # types are compared by identity, which is faster; a plan keeps its own, so that no other comes to have their ids
    key = (*types, *map(id, types.values()))
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _Plan(types)
    return plan


def _columns_of(rows: Sequence[Mapping[str, Any]], plan: _Plan) -> list[Sequence[Any]] | None:
    """The values of each column; None unless every row has all of the columns and no other."""
    if not rows or set(map(type, rows)) != {dict} or set(map(len, rows)) != {len(plan.names)}:
        return None
    try:
        if plan.pick is None:
            return [tuple([row[name] for row in rows]) for name in plan.names]
        return list(zip(*map(plan.pick, rows), strict=True))
    except KeyError:
        return None


@lru_cache(maxsize=1024)
def _typed(name: str, kind: ColumnType, inner: tuple[int, ...]) -> ColumnType:
    """With inner lengths filled in."""
    return with_lengths(name, kind, np.empty((0, *inner)))


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
            builder.add_encoded(
                name, kind, [one.bytes(0) for one in stored], _joined(one.bounds() for one in stored).tolist()
            )
        elif first.encoding in ("text", "texts"):
            _add_texts(builder, name, kind, [one.values() for one in stored])
        elif kind.granularity is PROMPT:
            rows = [row for one in stored for row in one.rows()]
            builder.add_list(name, kind, rows, list(map(len, rows)), inner)
        elif first.encoding == "bits":
            lengths = _joined(one.offsets() for one in stored).tolist()
            builder.add_bits(name, kind, [one.bytes(0) for one in stored], lengths, inner)
        else:
            flat = [one.flat() for one in stored]
            builder.add_list(name, kind, flat, _joined(one.offsets() for one in stored).tolist(), inner)
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
