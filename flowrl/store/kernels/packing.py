"""Rows of NumPy arrays to the bytes of a block, by compiled code: one call to look at all arrays, one to copy them.

Python needs about 0.1 us to ask an array for its dtype, number of axes or length, and waits for memory each time. `inspect`
reads the same from where NumPy keeps it: the fields that the macros of its C API read (`PyArrayObject_fields` in
ndarraytypes.h), and the items of a tuple (`PyTupleObject`). They are checked against what Python says when this module is
imported; where anything is found to be different, importing fails and rows are written by NumPy.

Imports numba, so it is imported on first use. What is not an array of exactly the right kind is left to the caller.
"""

from __future__ import annotations

import ctypes
import pickle
import struct
import sys
import sysconfig
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic, register_jitable

from flowrl.store.kernels.numba_path import (
    _FAR,
    _LINES,
    _ROWS_AHEAD,
    _WORDS,
    _byte,
    _copy,
    _pointer,
    _set_byte,
    _will_read,
    _will_read_later,
    _will_write,
    _word,
)

_TYPE, _DATA, _NDIM, _SHAPE, _DESCR, _FLAGS, _ITEMS = 8, 16, 24, 32, 56, 64, tuple.__basicsize__
"""Where fields lie in an object, in bytes; the last one in a tuple."""
_KIND = 24
"""Of a dtype: kind, character, byte order and flags (a byte each), number of the type (int32)."""
_KIND_WITHOUT_FLAGS = ~(0xFF << 24)
_CONTIGUOUS = 1
_AHEAD = 6
"""Arrays whose headers are loaded ahead."""

# columns of the table that `inspect` fills
VALUES, DESCR, KIND, IS_FLAT, SIZE, LOOKS_FOR_RUNS = range(6)
IS_GOOD, SAME, TOTAL, NUMBERS, RUNS, RUN_TOTAL, BIT_BYTES, RUN_BIT_BYTES = range(6, 14)
WIDTH = 14
# and of what it finds for each row
OFFSETS, ADDRESSES, LENGTHS, RUN_OFFSETS, RUN_ADDRESSES, RUN_LENGTHS, CHANGES = range(7)
DEPTH = 7

COPY, BITS, FLAT = range(3)
"""What `write` does with a line: copies rows, packs rows to bits, copies one run of bytes."""


@intrinsic
def _differ(typing: Any, one: Any, other: Any, nbytes: Any) -> Any:
    """Whether bytes differ: memcmp of the C library."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        size, number = ir.IntType(64), ir.IntType(32)
        pointers = [_pointer(builder, address, ir.IntType(8)) for address in arguments[:2]]
        kind = ir.FunctionType(number, [pointers[0].type, pointers[1].type, size])
        function = cgutils.get_or_insert_function(builder.module, kind, "memcmp")
        found = builder.call(function, [*pointers, arguments[2]])
        return builder.icmp_signed("!=", found, number(0))

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def _copy_64(typing: Any, target: Any, source: Any) -> Any:
    """64 bytes, at any address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = builder.load(_pointer(builder, arguments[1], _WORDS), align=1)
        builder.store(found, _pointer(builder, arguments[0], _WORDS), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@register_jitable
def _copy_row(target: int, source: int, nbytes: int) -> None:
    """As memcpy, for what is in no cache near at either end."""
    if nbytes < 64:
        _copy(target, source, nbytes)
        return
    last = nbytes - 64
    done = 0
    while done < last:
        _will_write(target + done + _FAR)
        _copy_64(target + done, source + done)
        done += 64
    _copy_64(target + last, source + last)


def _packing(count: int) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        many = ir.VectorType(ir.IntType(8), count)
        found = builder.load(_pointer(builder, arguments[1], many), align=1)
        are_set = builder.icmp_unsigned("!=", found, ir.Constant(many, [0] * count))
        bits = builder.bitcast(are_set, ir.IntType(count))
        builder.store(bits, _pointer(builder, arguments[0], ir.IntType(count)), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _pack_64(typing: Any, target: Any, source: Any) -> Any:
    """64 bytes to 64 bits, set where a byte is not zero."""
    return _packing(64)


@intrinsic
def _pack_8(typing: Any, target: Any, source: Any) -> Any:
    return _packing(8)


@register_jitable
def _pack(target: int, source: int, count: int) -> None:
    done = 0
    while done + 64 <= count:
        _pack_64(target + (done >> 3), source + done)
        done += 64
    while done + 8 <= count:
        _pack_8(target + (done >> 3), source + done)
        done += 8
    if done < count:
        bits = 0
        for place in range(count - done):
            if _byte(source + done + place) != 0:
                bits |= 1 << place
        _set_byte(target + (done >> 3), bits)


@register_jitable
def _are_good(line: Any, num_rows: int, array: int, found: Any) -> bool:
    """Whether all values of a column are contiguous arrays of its dtype, with one shape of a value."""
    items, descr, total, bit_bytes, numbers = line[VALUES] + _ITEMS, line[DESCR], 0, 0, 1
    first_shape = first_ndim = 0
    for row in range(num_rows):
        if row + 2 * _AHEAD < num_rows:
            later = _word(items + 8 * (row + 2 * _AHEAD))
            _will_read(later)
            _will_read(later + _FLAGS)
        if row + _AHEAD < num_rows:
            later = _word(items + 8 * (row + _AHEAD))
            if _word(later + _TYPE) == array:  # others may end before
                _will_read(_word(later + _SHAPE))
        value = _word(items + 8 * row)
        if _word(value + _TYPE) != array or _word(value + _FLAGS) & _CONTIGUOUS == 0:
            return False
        dtype = _word(value + _DESCR)
        if dtype != descr and _word(dtype + _KIND) & _KIND_WITHOUT_FLAGS != line[KIND]:
            return False
        ndim, shape = _word(value + _NDIM) & 0xFFFFFFFF, _word(value + _SHAPE)
        if ndim != 1 and (ndim == 0 or line[IS_FLAT]):
            return False
        if row == 0:
            first_ndim, first_shape = ndim, shape
            for axis in range(1, ndim):
                numbers *= _word(shape + 8 * axis)
        elif ndim != first_ndim:
            return False
        for axis in range(1, ndim):
            if _word(shape + 8 * axis) != _word(first_shape + 8 * axis):
                return False
        length = _word(shape)
        found[OFFSETS, row] = total
        found[ADDRESSES, row] = _word(value + _DATA)
        found[LENGTHS, row] = length
        total += length
        bit_bytes += (length * numbers + 7) >> 3
    found[OFFSETS, num_rows] = total
    line[TOTAL], line[NUMBERS], line[BIT_BYTES] = total, numbers, bit_bytes
    return True


@register_jitable
def _find_runs(line: Any, num_rows: int, found: Any) -> None:
    """Which rows have other values than the row before, and those rows by themselves."""
    items, size, numbers = line[VALUES] + _ITEMS, line[SIZE] * line[NUMBERS], line[NUMBERS]
    runs = total = bit_bytes = 0
    for row in range(num_rows):
        length, is_other = found[LENGTHS, row], True
        if row > 0 and found[LENGTHS, row - 1] == length:
            is_other = _word(items + 8 * row) != _word(items + 8 * row - 8) and _differ(
                found[ADDRESSES, row], found[ADDRESSES, row - 1], length * size
            )
        found[CHANGES, row] = is_other
        if is_other:
            found[RUN_OFFSETS, runs] = total
            found[RUN_ADDRESSES, runs] = found[ADDRESSES, row]
            found[RUN_LENGTHS, runs] = length
            runs += 1
            total += length
            bit_bytes += (length * numbers + 7) >> 3
    found[RUN_OFFSETS, runs] = total
    line[RUNS], line[RUN_TOTAL], line[RUN_BIT_BYTES] = runs, total, bit_bytes


def _inspect(table: Any, num_rows: int, array: int, found: Any) -> None:
    for column in range(len(table)):
        line = table[column]
        line[IS_GOOD] = _are_good(line, num_rows, array, found[column])
        if not line[IS_GOOD]:
            continue
        line[RUNS] = num_rows
        if line[LOOKS_FOR_RUNS] and num_rows > 1:
            _find_runs(line, num_rows, found[column])
        line[SAME] = column
        for other in range(column):
            if not table[other, IS_GOOD] or table[other, SAME] != other or table[other, TOTAL] != line[TOTAL]:
                continue
            row = 0
            while row < num_rows and found[column, LENGTHS, row] == found[other, LENGTHS, row]:
                row += 1
            if row == num_rows:
                line[SAME] = other
                break


def _write(lines: Any, block: int) -> None:
    for number in range(len(lines)):
        what, addresses, lengths, count, size, offset = lines[number]
        target = block + offset
        if what == FLAT:
            _copy(target, addresses, size)
            continue
        for row in range(count):
            address = _word(addresses + 8 * row)
            values = _word(lengths + 8 * row) * size
            if row + _ROWS_AHEAD < count:
                later = 8 * (row + _ROWS_AHEAD)  # it lies elsewhere, so the processor does not guess it
                for line in range(min((_word(lengths + later) * size + 63) >> 6, _LINES)):
                    _will_read_later(_word(addresses + later) + 64 * line)
            if what == COPY:
                _copy_row(target, address, values)
                target += values
            else:
                _pack(target, address, values)
                target += (values + 7) >> 3


def _compiled(function: Any, signature: str, nogil: bool) -> Any:
    options: dict[str, Any] = {"nogil": nogil, "boundscheck": False, "error_model": "numpy"}
    try:
        return njit(signature, cache=True, **options)(function)
    except (RuntimeError, OSError):  # no folder for a cache, or it cannot be written
        return njit(signature, **options)(function)


# with the interpreter lock: another thread might give an array a new shape meanwhile
_inspect_all = _compiled(_inspect, "void(int64[:, ::1], int64, int64, int64[:, :, ::1])", nogil=False)
_write_all = _compiled(_write, "void(int64[:, ::1], int64)", nogil=True)
_ARRAY = id(np.ndarray)


def line_of(dtype: np.dtype[Any], is_flat: bool, looks_for_runs: bool) -> list[int]:
    """A line of the table for `inspect`, but for the address of its values. The dtype must stay alive."""
    kind = _read(id(dtype) + _KIND) & _KIND_WITHOUT_FLAGS
    return [0, id(dtype), kind, is_flat, dtype.itemsize, looks_for_runs, *(0,) * (WIDTH - 6)]


def inspect(table: np.ndarray, columns: Sequence[tuple[Any, ...]], num_rows: int) -> np.ndarray:
    """Look at every value of some columns.

    Args:
        table: int64 [C, WIDTH], a `line_of` each column; what is found is written into it. Without IS_GOOD the rest of a line
            means nothing.
        columns: C tuples of `num_rows` values; they keep the addresses valid.

    Returns int64 [C, DEPTH, num_rows + 1]: offsets, addresses and lengths of all rows; where runs were looked for, the same of
    the first row of each, and whether a row begins one.
    """
    table[:, VALUES] = list(map(id, columns))
    found = np.empty((len(columns), DEPTH, num_rows + 1), np.int64)
    _inspect_all(table, num_rows, _ARRAY, found)
    return found


def write(lines: Sequence[tuple[int, int, int, int, int, int]], block: int) -> None:
    """Copy to the block at an address.

    Args:
        lines: (COPY, address of the addresses, address of the lengths, rows, bytes of a value, offset in the block),
            (BITS, the same, numbers in a value, offset) or (FLAT, address, 0, 0, bytes, offset).
    """
    _write_all(np.array(lines, np.int64), block)


# ------------------------------------------------------------------------------------------------------ checked at import


def _read(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def _refuse(what: str) -> None:
    raise ImportError(f"arrays are not read by address here: {what}")


def _check_build() -> None:
    if sys.implementation.name != "cpython" or struct.calcsize("P") != 8 or sys.byteorder != "little":
        _refuse("it needs CPython on a little-endian machine of 64 bits")
    if sysconfig.get_config_var("Py_GIL_DISABLED") or hasattr(sys, "getobjects"):
        _refuse("objects have other headers in this build of Python")
    if np.ndarray.__basicsize__ < _FLAGS + 8 or np.dtype.__basicsize__ < _KIND + 8:
        _refuse("objects have another size")


def _check_fields() -> None:
    """What is read by address is what Python says."""
    samples: tuple[np.ndarray, ...] = (
        np.arange(5, dtype=np.int32), np.zeros((3, 2, 4), np.float16), np.arange(9.0)[::2], np.arange(9.0)[3:7],
        np.ones(3, np.bool_), np.asfortranarray(np.zeros((2, 3))), np.zeros(0, np.uint8), np.ones(2, ">i4"),
        np.array(1, np.int64), np.zeros((0, 7), np.float32),
    )  # fmt: skip
    for place, array in enumerate(samples):
        at = id(array)
        expected = {
            _TYPE: id(np.ndarray), _DATA: array.ctypes.data, _DESCR: id(array.dtype),
        }  # fmt: skip
        if _read(id(samples) + _ITEMS + 8 * place) != at or any(_read(at + o) != v for o, v in expected.items()):
            _refuse("fields lie elsewhere")
        if _read(at + _NDIM) & 0xFFFFFFFF != array.ndim:
            _refuse("the number of axes lies elsewhere")
        if bool(_read(at + _FLAGS) & _CONTIGUOUS) != array.flags.c_contiguous:
            _refuse("flags lie elsewhere")
        if tuple(_read(_read(at + _SHAPE) + 8 * axis) for axis in range(array.ndim)) != array.shape:
            _refuse("shapes lie elsewhere")
    codes = "?bBhHiIlLqQefd"
    kinds = {_read(id(np.dtype(order + code)) + _KIND) & _KIND_WITHOUT_FLAGS for code in codes for order in "<>"}
    copy = pickle.loads(pickle.dumps(np.dtype(np.int32)))
    expected_kind = ord("i") | ord("i") << 8 | ord("=") << 16 | np.dtype(np.int32).num << 32
    if (
        len(kinds) != 2 * len(codes) - 3  # one byte has one order
        or _read(id(copy) + _KIND) & _KIND_WITHOUT_FLAGS != expected_kind
    ):
        _refuse("dtypes are described otherwise")


_check_build()
_check_fields()
