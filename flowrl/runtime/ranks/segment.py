"""Named arrays that several ranks make together, part after part, in one piece of shared memory.

    part 0 (rank 2)   values [5]  lengths [2]      each rank says how large its part is, works out where it begins,
    part 1 (rank 3)   values [7]  lengths [3]      and writes it there
    all ranks         values [12] lengths [5]      mapped, never copied

An `ExperienceTable` gathers rows of many writers too, in the order of their coming and in a chunk for each. Here the parts have a
place each, so that whoever reads them has one array, in one order, without a copy.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowrl.errors import RunError, StoreError

Arrays = Mapping[str, np.ndarray]
ALIGN_BYTES = 64
"""Each array begins at a multiple of this."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large one array of a part is.

    Example:
        Size("response_ids/values", "int32", (4096,))
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, array: np.ndarray) -> Size:
        return cls(name, array.dtype.str, tuple(array.shape))


def sizes_of(arrays: Arrays) -> tuple[Size, ...]:
    return tuple(Size.of(name, array) for name, array in arrays.items())


@dataclass(frozen=True, slots=True)
class Slot:
    """Where an array of all parts lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Bytes from the beginning."""
    firsts: tuple[int, ...]
    """Where each part begins, along the first axis; one more than parts: the end."""


@dataclass(frozen=True, slots=True)
class Placing:
    """Where everything lies."""

    slots: tuple[Slot, ...]
    num_bytes: int


def placing_of(parts: Sequence[Sequence[Size]]) -> Placing:
    """Where the arrays of all parts lie. Errors: RunError when the parts do not have the same arrays."""
    slots: list[Slot] = []
    at = 0
    names = [one.name for one in parts[0]]
    for number, part in enumerate(parts):
        if [one.name for one in part] != names:
            raise RunError(
                f"parts of one table need the same columns; part 0 has {', '.join(names)}, part {number} "
                f"{', '.join(one.name for one in part)}"
            )
    for column in zip(*parts, strict=True):
        kinds = {(one.dtype, one.shape[1:]) for one in column if one.shape[0]} or {
            (column[0].dtype, column[0].shape[1:])
        }
        if len(kinds) > 1:
            raise RunError(f"parts of one table need columns of one type; '{column[0].name}' has {sorted(kinds)}")
        dtype, inner = kinds.pop()
        firsts = tuple(np.cumsum([0, *(one.shape[0] for one in column)]).tolist())
        shape = (firsts[-1], *inner)
        at = -(-at // ALIGN_BYTES) * ALIGN_BYTES
        slots.append(Slot(column[0].name, dtype, shape, at, firsts))
        at += int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return Placing(tuple(slots), at)


def write(path: Path, placing: Placing, part: int, arrays: Arrays) -> None:
    """Write one part; the first that comes makes the file. Errors: StoreError when shared memory is full."""
    if not placing.num_bytes:
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, placing.num_bytes)  # else a full memory is a SIGBUS, later
        with mmap.mmap(descriptor, placing.num_bytes) as memory:
            for slot in placing.slots:
                first, stop = slot.firsts[part], slot.firsts[part + 1]
                if first == stop:
                    continue
                whole = np.frombuffer(memory, slot.dtype, count=_count(slot), offset=slot.start).reshape(slot.shape)
                whole[first:stop] = arrays[slot.name]
                del whole  # a view keeps the mapping from being closed
    except OSError as error:
        raise StoreError(
            f"{placing.num_bytes:,} bytes of shared memory cannot be written to {path}: {error}; make /dev/shm larger "
            "(docker run --shm-size=...)"
        ) from error
    finally:
        os.close(descriptor)


def pieces(placing: Placing, part: int) -> list[tuple[int, int]]:
    """Where a part lies: first byte and end of each array that it has values of."""
    found = []
    for slot in placing.slots:
        row_bytes = int(np.prod(slot.shape[1:], dtype=np.int64)) * np.dtype(slot.dtype).itemsize
        first, stop = (slot.start + row_bytes * row for row in slot.firsts[part : part + 2])
        if stop > first:
            found.append((first, stop))
    return found


def read(path: Path, placing: Placing) -> dict[str, np.ndarray]:
    """All parts, mapped and read-only; the memory stays for as long as an array of it does, even when the file goes."""
    if not placing.num_bytes:
        return {slot.name: np.zeros(slot.shape, slot.dtype) for slot in placing.slots}
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(descriptor, placing.num_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
    return {
        slot.name: np.frombuffer(memory, slot.dtype, count=_count(slot), offset=slot.start).reshape(slot.shape)
        for slot in placing.slots
    }


def _count(slot: Slot) -> int:
    return int(np.prod(slot.shape, dtype=np.int64))
