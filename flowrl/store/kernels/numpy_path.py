"""Gathering with NumPy alone: the same results, and every batch holds the interpreter lock."""

from __future__ import annotations

from collections import deque
from ctypes import PYFUNCTYPE, c_void_p, cast, memmove
from itertools import accumulate

import numpy as np

from flowrl.store.kernels.plan import ALIGN, BITS, ENDS, FIXED, Plan


def measure(plan: Plan, rows: np.ndarray, multiple: int, is_packed: bool, sizes: np.ndarray) -> int:
    """Sizes of a batch's outputs (see `plan`); the place of a row number out of range, or -1."""
    if len(rows) and (rows.min() < 0 or rows.max() >= plan.num_rows):
        return int(np.flatnonzero((rows < 0) | (rows >= plan.num_rows))[0])
    form = plan.form
    along = {}
    for axis in range(form.lines - len(form.keys), form.lines):
        found = plan.matrix[axis][rows]
        along[axis] = int(found.sum()) if is_packed else -(-int(found.max(initial=0)) // multiple) * multiple
    end = 0
    for output, (what, axis, size, *_rest) in enumerate(form.table.tolist()):
        values = along[axis] if axis >= 0 else 1
        sizes[output] = end, values
        if what == ENDS and is_packed:
            nbytes = 4 * (len(rows) + 1)
        else:
            nbytes = values * size if is_packed and axis >= 0 else len(rows) * values * size
        end += -(-nbytes // ALIGN) * ALIGN
    sizes[-1] = end, 0
    return -1


def fill(plan: Plan, rows: np.ndarray, is_packed: bool, sizes: np.ndarray, block: np.ndarray) -> bool:
    """Write a batch into its block; False for one that is too small or does not begin at a multiple of 64."""
    count, nbytes, base = len(rows), int(sizes[-1, 0]), _address(block)
    if len(block) < nbytes or (nbytes and base % ALIGN):
        return False
    for (what, axis, size, numbers, column, _), (offset, along) in zip(
        plan.form.table.tolist(), sizes[:-1].tolist(), strict=True
    ):
        have = plan.matrix[axis][rows] if axis >= 0 else np.ones(count, np.int64)
        target = block[offset:]
        if what == ENDS:
            _bounds(have, target) if is_packed else _mask(have, along, target)
            continue
        starts = plan.matrix[column][rows]
        if not count:
            continue
        if what == BITS:
            _bits(starts, have * numbers, None if is_packed else along * numbers, target)
        elif is_packed or axis < 0:
            _copy_runs(starts, size * have, base + offset)
        else:
            # all at once: to clear the rest of each row would cost a call for each
            target[: size * count * along] = 0
            _move(base + offset + size * along * np.arange(count), starts, size * have)
    return True


def locate(
    root: np.ndarray, buffers: np.ndarray, lines: np.ndarray, low: int, high: int, matrix: np.ndarray, at: int
) -> bool:
    """Where the rows `low` to `high` of a block lie, written into a plan's matrix from column `at` on.

    Args:
        root: uint8, exactly the block.
        buffers: int64 [2 B]: offset and bytes of each buffer; bytes of -1 for one that is compressed.
        lines: int64 [C, 8]: what, bytes of a value, numbers in it, buffer of the values, of offsets, of the rows' runs,
            row of the matrix for addresses, for lengths. -1 for none.

    Returns False when a buffer is compressed, or is not in the block.
    """
    base, count, target = _address(root), high - low, slice(at, at + high - low)
    places = buffers.tolist()
    known: dict[int, np.ndarray | None] = {-1: root[:0]}

    def part(number: int) -> np.ndarray | None:
        """The bytes of a buffer; none of none."""
        if number not in known:
            begin, stored = places[2 * number : 2 * number + 2]
            is_there = begin >= 0 and 0 <= stored <= len(root) - begin
            known[number] = root[begin : begin + stored] if is_there else None
        return known[number]

    every = np.arange(low, high)
    for what, size, numbers, values, offsets, runs, addresses, axis in lines.tolist():
        ends, index = part(offsets), part(runs)
        if part(values) is None or ends is None or index is None:
            return False
        start, there = base + places[2 * values], len(ends) // 8 - 1
        if what == FIXED:
            there = places[2 * values + 1] // size if size else high
        rows, least, most = every, low, high - 1
        if runs >= 0 and count:
            rows = index.view(np.int32)[low:high]
            least, most = int(rows.min(initial=0)), int(rows.max(initial=0))
        if len(rows) < count or (count and not 0 <= least <= most < there):
            return False
        if what == FIXED:
            matrix[addresses, target] = start + size * rows.astype(np.int64, copy=False)
            continue
        bounds = ends.view(np.int64)
        if what == BITS:
            nbytes = ((bounds[1:] - bounds[:-1]) * numbers + 7) >> 3
            matrix[addresses, target] = start + (np.cumsum(nbytes) - nbytes)[rows]
        else:
            matrix[addresses, target] = start + size * bounds[rows]
        if axis >= 0:
            matrix[axis, target] = (bounds[1:] - bounds[:-1])[rows]
    return True


_memmove = PYFUNCTYPE(None, c_void_p, c_void_p, c_void_p)(cast(memmove, c_void_p).value or 0)
"""`ctypes.memmove` gives the interpreter lock away and takes it back, which costs more than a row; this does not. All three
arguments are declared as pointers because ctypes converts those fastest."""


def _move(targets: np.ndarray, sources: np.ndarray, nbytes: np.ndarray) -> None:
    deque(map(_memmove, targets.tolist(), sources.tolist(), nbytes.tolist()), maxlen=0)


def _copy_runs(starts: np.ndarray, nbytes: np.ndarray, target: int) -> None:
    """The bytes at each address, end to end. What lies side by side already is copied at once."""
    begin = end = int(starts[0])
    for start, count in zip(starts.tolist(), nbytes.tolist(), strict=True):
        if start != end:
            _memmove(target, begin, end - begin)
            target += end - begin
            begin = start
        end = start + count
    _memmove(target, begin, end - begin)


def _bounds(lengths: np.ndarray, target: np.ndarray) -> None:
    bounds = target[: 4 * len(lengths) + 4].view(np.int32)
    bounds[0] = 0
    np.cumsum(lengths, out=bounds[1:])


def _mask(lengths: np.ndarray, along: int, target: np.ndarray) -> None:
    narrow = np.int16 if along < 1 << 15 else np.int32 if along < 1 << 31 else np.int64
    mask = target[: len(lengths) * along].view(np.bool_).reshape(len(lengths), along)
    np.less(np.arange(along, dtype=narrow), lengths.astype(narrow)[:, None], out=mask)


def _bits(starts: np.ndarray, counts: np.ndarray, width: int | None, target: np.ndarray) -> None:
    """A byte for each bit: rows [M, width], or end to end when `width` is None.

    Unused bits of a row's last byte are zero where they are stored.
    """
    nbytes = (counts + 7) >> 3
    if width is not None:
        table = np.zeros((len(starts), -(-width // 8)), np.uint8)
        _move(_address(table) + table.shape[1] * np.arange(len(starts)), starts, nbytes)
        bits = np.unpackbits(table, axis=1, count=width, bitorder="little")
        target[: bits.size] = bits.reshape(-1)
        return
    packed = np.empty(int(nbytes.sum()), np.uint8)
    _copy_runs(starts, nbytes, _address(packed))
    bits = np.unpackbits(packed, bitorder="little")
    rows = zip(accumulate((8 * nbytes).tolist(), initial=0), counts.tolist(), strict=False)
    np.concatenate([bits[first : first + count] for first, count in rows], out=target[: int(counts.sum())])


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
