"""Gathering with NumPy alone: the same results, and every batch holds the interpreter lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from ctypes import memmove

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
    for output, (what, axis, size, numbers, *_rest) in enumerate(plan.table.tolist()):
        offset, along = sizes[output].tolist()
        have = lengths[axis] if axis >= 0 else np.ones(count, np.int64)
        room = np.full(count, along) if axis < 0 or not is_packed else have
        nbytes = int(room.sum()) * size
        target = block[offset : offset + nbytes]
        addresses = plan.outputs[output].addresses
        if what == ENDS and is_packed:
            bounds = block[offset : offset + 4 * (count + 1)].view(np.int32)
            bounds[0] = 0
            np.cumsum(have, out=bounds[1:])
        elif what == ENDS:
            np.less(np.arange(along), have[:, None], out=target.view(np.bool_).reshape(count, along))
        elif addresses is not None and what == BITS:
            bits = _bits(addresses[rows], have * numbers, along * numbers if not is_packed else None)
            if is_packed:
                target[:] = bits[np.arange(bits.shape[1]) < (have * numbers)[:, None]]
            else:
                target[:] = bits.reshape(-1)
        elif addresses is not None:
            starts = base + offset + np.cumsum(room * size) - room * size
            if not is_packed and axis >= 0 and along:
                _clear(target.reshape(count, -1), (have * size).tolist())
            _move(starts.tolist(), addresses[rows].tolist(), (have * size).tolist())


def _move(targets: Iterable[int], sources: Iterable[int], nbytes: Iterable[int]) -> None:
    deque(map(memmove, targets, sources, nbytes), maxlen=0)


def _clear(target: np.ndarray, used: list[int]) -> None:
    for row, start in zip(target, used, strict=True):
        row[start:] = 0


def _bits(addresses: np.ndarray, counts: np.ndarray, width: int | None) -> np.ndarray:
    """uint8 [M, width or the most], bits as bytes. Unused bits of a row's last byte are zero where they are stored."""
    width = int(counts.max(initial=0)) if width is None else width
    packed = np.zeros((len(addresses), -(-width // 8)), np.uint8)
    starts = packed.__array_interface__["data"][0] + packed.shape[1] * np.arange(len(addresses))
    _move(starts.tolist(), addresses.tolist(), ((counts + 7) // 8).tolist())
    return np.unpackbits(packed, axis=1, count=width, bitorder="little")
