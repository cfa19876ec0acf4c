"""Gathering by compiled code: one call for all columns, without the interpreter lock.

Imports numba, so it is imported on first use. Addresses are plain int64; what Python has no word for (memory at an address) is
written for LLVM in the functions marked `@intrinsic`. The machine code is kept in numba's cache where one can be written.

Stores that pass the caches by were measured and left out: on a server with a large cache they were 0.6 to 0.95 times as fast
for padded batches, and slower still for whoever reads the batch next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, njit
from numba.core import cgutils, types
from numba.extending import intrinsic, register_jitable

from flowrl.store.kernels.plan import ALIGN, BITS, ENDS, FIXED, LIST, Plan

if config.DISABLE_JIT:
    raise ImportError("numba compiles nothing while NUMBA_DISABLE_JIT is set")

_ROWS_AHEAD, _LINES, _FAR = 2, 48, 2048
"""Which row's values to load ahead, and at most how many lines of 64 bytes of them; bytes ahead of a write."""
_BOOLS = ir.VectorType(ir.IntType(1), 64)
_BYTES = ir.VectorType(ir.IntType(8), 64)
_WORDS = ir.VectorType(ir.IntType(64), 8)


_READ = types.Array(types.uint8, 1, "C", readonly=True)
_LINE, _TABLE = types.Array(types.int64, 1, "C"), types.Array(types.int64, 2, "C")
_LOCATE = types.boolean(_READ, _LINE, _TABLE, types.int64, types.int64, _TABLE, types.int64)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, ir.PointerType(kind))


def _void(*names: str) -> Any:
    return types.void(*(types.int64 for _ in names))


@intrinsic
def _word(typing: Any, address: Any) -> Any:
    """The int64 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_pointer(builder, arguments[0], ir.IntType(64)), align=8)

    return types.int64(types.int64), generate


@intrinsic
def _half(typing: Any, address: Any) -> Any:
    """The int32 at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        found = builder.load(_pointer(builder, arguments[0], ir.IntType(32)), align=4)
        return builder.sext(found, ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def _byte(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.zext(builder.load(_pointer(builder, arguments[0], ir.IntType(8))), ir.IntType(64))

    return types.int64(types.int64), generate


@intrinsic
def _set_byte(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.trunc(arguments[1], ir.IntType(8))
        builder.store(value, _pointer(builder, arguments[0], ir.IntType(8)))
        return context.get_dummy_value()

    return _void("address", "value"), generate


@intrinsic
def _set_int32(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.trunc(arguments[1], ir.IntType(32))
        builder.store(value, _pointer(builder, arguments[0], ir.IntType(32)))
        return context.get_dummy_value()

    return _void("address", "value"), generate


@intrinsic
def _copy(typing: Any, target: Any, source: Any, nbytes: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.IntType(8)
        target, source = (_pointer(builder, address, kind) for address in arguments[:2])
        cgutils.raw_memcpy(builder, target, source, arguments[2], 1)
        return context.get_dummy_value()

    return _void("target", "source", "nbytes"), generate


@intrinsic
def _set_64(typing: Any, target: Any, word: Any) -> Any:
    """64 bytes, the same 8 again and again."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        none = ir.Constant(_WORDS, ir.Undefined)
        first = builder.insert_element(none, arguments[1], ir.IntType(32)(0))
        same = ir.Constant(ir.VectorType(ir.IntType(32), 8), [0] * 8)
        words = builder.shuffle_vector(first, none, same)
        builder.store(words, _pointer(builder, arguments[0], _WORDS), align=1)
        return context.get_dummy_value()

    return _void("target", "word"), generate


@intrinsic
def _will_read(typing: Any, address: Any) -> Any:
    """Begin to load what lies at an address; it may be any."""
    return _void("address"), _prefetching(writes=0, cache=3)


@intrinsic
def _will_read_later(typing: Any, address: Any) -> Any:
    """The same, for what is not read next: into the second cache, where it pushes nothing out of the first."""
    return _void("address"), _prefetching(writes=0, cache=2)


@intrinsic
def _will_write(typing: Any, address: Any) -> Any:
    return _void("address"), _prefetching(writes=1, cache=2)


def _prefetching(writes: int, cache: int) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(32)
        pointer = _pointer(builder, arguments[0], ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", (pointer.type,), kind)
        builder.call(function, [pointer, number(writes), number(cache), number(1)])
        return context.get_dummy_value()

    return generate


@intrinsic
def _expand_64(typing: Any, target: Any, source: Any) -> Any:
    """64 bits to 64 bytes of 0 or 1."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits = builder.load(_pointer(builder, arguments[1], ir.IntType(64)), align=1)
        value = builder.zext(builder.bitcast(bits, _BOOLS), _BYTES)
        builder.store(value, _pointer(builder, arguments[0], _BYTES), align=1)
        return context.get_dummy_value()

    return _void("target", "source"), generate


def _compiled(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile now, and keep the machine code in a cache where one can be written."""
    options: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(signature, cache=True, **options)(function)
        except (RuntimeError, OSError):  # no folder for a cache, or it cannot be written
            return njit(signature, **options)(function)

    return decorate


@register_jitable
def _set(target: int, nbytes: int, value: int) -> None:
    """As memset, and faster where the memory is in no cache near: what is written soon is asked for in time."""
    if nbytes < 64:
        for place in range(nbytes):
            _set_byte(target + place, value)
        return
    word = value * 0x0101010101010101
    _set_64(target, word)
    at, last = (target + 64) & -64, target + nbytes - 64
    while at < last:
        _will_write(at + _FAR)
        _set_64(at, word)
        at += 64
    _set_64(last, word)


@register_jitable
def _expand(target: int, source: int, count: int) -> None:
    done = 0
    while done + 64 <= count:
        _expand_64(target + done, source + (done >> 3))
        done += 64
    while done < count:
        _set_byte(target + done, (_byte(source + (done >> 3)) >> (done & 7)) & 1)
        done += 1


@_compiled("int64(int64[::1], int64[:, ::1], int64[:, ::1], int64, boolean, int64[:, ::1])")
def _measure(rows: Any, outputs: Any, matrix: Any, multiple: int, is_packed: bool, sizes: Any) -> int:
    count = len(rows)
    num_rows = matrix.shape[1]
    for place in range(count):
        if rows[place] < 0 or rows[place] >= num_rows:
            return place
    end = 0
    for output in range(len(outputs)):
        what, axis, size, _, _, first = outputs[output]
        along = 1
        if axis >= 0 and first < output:
            along = sizes[first, 1]
        elif axis >= 0:
            along = 0
            for place in range(count):
                length = matrix[axis, rows[place]]
                along = along + length if is_packed else max(along, length)
            if not is_packed:
                along = (along + multiple - 1) // multiple * multiple
        sizes[output, 0] = end
        sizes[output, 1] = along
        if what == ENDS and is_packed:
            nbytes = 4 * (count + 1)
        else:
            nbytes = along * size if is_packed and axis >= 0 else count * along * size
        end += (nbytes + 63) // 64 * 64
    sizes[len(outputs), 0] = end
    sizes[len(outputs), 1] = 0
    return -1


@_compiled("boolean(int64[::1], int64[:, ::1], int64[:, ::1], boolean, int64[:, ::1], uint8[::1])")
def _fill_block(rows: Any, outputs: Any, matrix: Any, is_packed: bool, sizes: Any, into: Any) -> bool:
    count, nbytes = len(rows), sizes[len(outputs), 0]
    block = np.int64(into.ctypes.data)
    if len(into) < nbytes or (nbytes and block % ALIGN):
        return False
    if count > 0 and rows[count - 1] - rows[0] != count - 1:
        # of rows in order the matrix has a few lines of memory, of others one for each row
        table = np.int64(matrix.ctypes.data)
        for line in range(len(matrix)):
            for place in range(count):
                _will_read(table + 8 * (line * matrix.shape[1] + rows[place]))
    for output in range(len(outputs)):
        what, axis, size, numbers, column, _ = outputs[output]
        target = block + sizes[output, 0]
        room = sizes[output, 1] * size
        total = 0
        for place in range(count):
            row = rows[place]
            length = matrix[axis, row] if axis >= 0 else 1
            nbytes = length * size
            if (what == LIST or what == BITS) and place + _ROWS_AHEAD < count:
                later = rows[place + _ROWS_AHEAD]  # it lies elsewhere, so the processor does not guess it
                lines = (matrix[axis, later] * size + 63) >> (6 if what == LIST else 9)
                for line in range(min(lines, _LINES)):
                    _will_read_later(matrix[column, later] + 64 * line)
            if what == FIXED or what == LIST:
                _copy(target, matrix[column, row], nbytes)
            elif what == BITS:
                _expand(target, matrix[column, row], length * numbers)
            elif is_packed:
                _set_int32(target + 4 * place, total)
                total += length
                continue
            else:
                _set(target, nbytes, 1)
            target += nbytes
            if not is_packed and axis >= 0:
                _set(target, room - nbytes, 0)
                target += room - nbytes
        if what == ENDS and is_packed:
            _set_int32(target + 4 * count, total)
    return True


@_compiled(_LOCATE)
def _locate(root: Any, buffers: Any, lines: Any, low: int, high: int, matrix: Any, at: int) -> bool:
    base, nbytes = np.int64(root.ctypes.data), len(root)
    for line in range(len(lines)):
        what, size, numbers, values, offsets, runs, addresses, axis = lines[line]
        for which in range(3, 6):
            number = lines[line, which]
            if number >= 0:
                begin, stored = buffers[2 * number], buffers[2 * number + 1]
                if begin < 0 or stored < 0 or stored > nbytes - begin:
                    return False
        if runs >= 0 and buffers[2 * runs + 1] // 4 < high:
            return False
        start = base + buffers[2 * values]
        index = base + buffers[2 * runs] if runs >= 0 else 0
        bounds = base + buffers[2 * offsets] if offsets >= 0 else 0
        if offsets >= 0:
            there = buffers[2 * offsets + 1] // 8 - 1
        else:
            there = buffers[2 * values + 1] // size if size else high
        run = done = 0  # BITS: the row or run whose bits begin at byte `done`
        for place in range(high - low):
            row = _half(index + 4 * (low + place)) if runs >= 0 else low + place
            if row < 0 or row >= there:
                return False
            if what == FIXED:
                matrix[addresses, at + place] = start + size * row
                continue
            begin = _word(bounds + 8 * row)
            if what == BITS:
                if row < run:
                    run = done = 0
                while run < row:
                    done += ((_word(bounds + 8 * run + 8) - _word(bounds + 8 * run)) * numbers + 7) >> 3
                    run += 1
                matrix[addresses, at + place] = start + done
            else:
                matrix[addresses, at + place] = start + size * begin
            if axis >= 0:
                matrix[axis, at + place] = _word(bounds + 8 * row + 8) - begin
    return True


def measure(plan: Plan, rows: np.ndarray, multiple: int, is_packed: bool, sizes: np.ndarray) -> int:
    """Sizes of a batch's outputs (see `plan`); the place of a row number out of range, or -1."""
    wrong: int = _measure(rows, plan.form.table, plan.matrix, multiple, is_packed, sizes)
    return wrong


def fill(plan: Plan, rows: np.ndarray, is_packed: bool, sizes: np.ndarray, block: np.ndarray) -> bool:
    """Write a batch into its block; False for one that is too small or does not begin at a multiple of 64."""
    is_done: bool = _fill_block(rows, plan.form.table, plan.matrix, is_packed, sizes, block)
    return is_done


def locate(
    root: np.ndarray, buffers: np.ndarray, lines: np.ndarray, low: int, high: int, matrix: np.ndarray, at: int
) -> bool:
    """As `numpy_path.locate`."""
    found: bool = _locate(root, buffers, lines, low, high, matrix, at)
    return found
