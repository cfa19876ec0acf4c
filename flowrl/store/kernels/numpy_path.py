"""Gathering with NumPy alone: the same results, and every batch holds the interpreter lock."""

from __future__ import annotations

from collections import deque
from ctypes import PYFUNCTYPE, c_size_t, c_void_p, cast, memmove

import numpy as np

from flowrl.store.kernels.plan import ALIGN, BITS, ENDS, Plan


def measure(plan: Plan, rows: np.ndarray, multiple: int, is_packed: bool, sizes: np.ndarray) -> int:
    """Sizes of a batch's outputs (see `plan`); the place of a row number out of range, or -1."""
    wrong = (rows < 0) | (rows >= plan.num_rows)
    if wrong.any():
        return int(np.flatnonzero(wrong)[0])
    along = []
    for lengths in plan.axes:
        found = lengths[rows]
        along.append(int(found.sum()) if is_packed else -(-int(found.max(initial=0)) // multiple) * multiple)
    end = 0
    for output, (what, axis, size, *_rest) in enumerate(plan.table.tolist()):
        values = along[axis] if axis >= 0 else 1
        sizes[output] = end, values
        if what == ENDS and is_packed:
            nbytes = 4 * (len(rows) + 1)
        else:
            nbytes = values * size if is_packed and axis >= 0 else len(rows) * values * size
        end += -(-nbytes // ALIGN) * ALIGN
    sizes[-1] = end, 0
    return -1


def fill(plan: Plan, rows: np.ndarray, is_packed: bool, sizes: np.ndarray, block: np.ndarray, base: int) -> None:
    """Write a batch into its block, which begins at the address `base`."""
    count = len(rows)
    lengths = [axis[rows] for axis in plan.axes]
    if not is_packed:
        block[: sizes[-1, 0]] = 0  # all at once: the rest of each row would cost a call for each
    targets, sources, nbytes = [], [], []
    for output, (what, axis, size, numbers, *_rest), (offset, along) in zip(
        plan.outputs, plan.table.tolist(), sizes[:-1].tolist(), strict=True
    ):
        have = lengths[axis] if axis >= 0 else np.ones(count, np.int64)
        if what == ENDS:
            target = block[offset:]
            _bounds(have, target) if is_packed else _mask(have, along, target)
        elif output.addresses is not None and what == BITS:
            width = along * numbers if not is_packed else int(have.max(initial=0)) * numbers
            bits = _bits(output.addresses[rows], have * numbers, width)
            if is_packed and count:
                bits = np.concatenate([row[:n] for row, n in zip(bits, (have * numbers).tolist(), strict=True)])
            block[offset : offset + bits.size] = bits.reshape(-1)
        elif output.addresses is not None:
            before = np.cumsum(have) - have if is_packed or axis < 0 else along * np.arange(count)
            targets.append(base + offset + size * before)
            sources.append(output.addresses[rows])
            nbytes.append(size * have)
    if targets:
        _move(np.concatenate(targets), np.concatenate(sources), np.concatenate(nbytes))


_memmove = PYFUNCTYPE(c_void_p, c_void_p, c_void_p, c_size_t)(cast(memmove, c_void_p).value or 0)
"""Unlike `ctypes.memmove` it keeps the interpreter lock: to give it away and take it back costs more than a row."""


def _move(targets: np.ndarray, sources: np.ndarray, nbytes: np.ndarray) -> None:
    deque(map(_memmove, targets.tolist(), sources.tolist(), nbytes.tolist()), maxlen=0)


def _bounds(lengths: np.ndarray, target: np.ndarray) -> None:
    bounds = target[: 4 * len(lengths) + 4].view(np.int32)
    bounds[0] = 0
    np.cumsum(lengths, out=bounds[1:])


def _mask(lengths: np.ndarray, along: int, target: np.ndarray) -> None:
    narrow = np.int16 if along < 1 << 15 else np.int32 if along < 1 << 31 else np.int64
    mask = target[: len(lengths) * along].view(np.bool_).reshape(len(lengths), along)
    np.less(np.arange(along, dtype=narrow), lengths.astype(narrow)[:, None], out=mask)


def _bits(addresses: np.ndarray, counts: np.ndarray, width: int) -> np.ndarray:
    """uint8 [M, width], a byte for each bit. Unused bits of a row's last byte are zero where they are stored."""
    packed = np.zeros((len(addresses), -(-width // 8)), np.uint8)
    starts = packed.__array_interface__["data"][0] + packed.shape[1] * np.arange(len(addresses))
    _move(starts, addresses, (counts + 7) // 8)
    return np.unpackbits(packed, axis=1, count=width, bitorder="little")
