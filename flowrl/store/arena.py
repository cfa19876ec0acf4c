"""Memory for rows: blocks in files in shared memory that are given out again, written by one process and read by all.

A fresh page costs 4 to 8 times what a warm one costs, so a freed block is given out before any new memory is taken.

[Note: Never a signal] The space of a file is allocated before the file is mapped. When there is none, that is a StoreError and
not a bus error in the middle of a copy.

[Note: Fork] The child of a fork must not write to its parent's arenas. It leaves them alone and makes its own, named after its
own slot. Private memory needs no care: the system copies it.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from bisect import bisect_left, insort
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowrl.errors import StoreError
from flowrl.store.folders import new_folder, reclaim_orphans, remove_folder, shm_folder

__all__ = ["Arenas", "Block", "Mapped", "new_folder", "reclaim_orphans", "remove_folder", "remove_unused", "shm_folder"]

ALIGNMENT = 64
_PAGE = 4096
_live: weakref.WeakSet[Arenas] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes in an arena."""

    arena: str
    """Name of the file."""
    offset: int
    """First byte, a multiple of 64."""
    nbytes: int
    """A multiple of 64."""


class Arenas:
    """The blocks this process writes.

    Args:
        folder: the table's memory; None for memory that only this process sees.
        slot: number of this process, in the names of its files. A function of it lets the child of a fork go on, with the slot
            it then has; with a number, a child cannot allocate.
        first_bytes: size of the first file; each further one is twice as large.
        most_bytes: and no larger than this, unless one block is.
    """

    def __init__(
        self,
        folder: Path | None,
        slot: int | Callable[[], int],
        *,
        first_bytes: int = 1 << 20,
        most_bytes: int = 64 << 20,
    ) -> None:
        self._folder, self._slot, self._most = folder, slot, most_bytes
        self._first = self._next = first_bytes
        self._lock = threading.RLock()
        self._made = 0
        self._forked = False
        self._inherited: set[str] = set()
        self._closed = False
        self._clear()
        _live.add(self)

    def _clear(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}
        self._sizes: list[tuple[int, str, int]] = []
        """Free stretches, the smallest first: bytes, arena, offset."""
        self._starts: dict[tuple[str, int], int] = {}
        """Arena and first byte of a free stretch to its bytes."""
        self._ends: dict[tuple[str, int], int] = {}
        """Arena and end of a free stretch to its first byte."""
        self._given: dict[tuple[str, int], int] = {}
        """Arena and first byte of a block that is in use to its bytes."""
        self._used_bytes = self._reserved_bytes = 0
        self._is_torn = False

    def fits(self, nbytes: int) -> bool:
        """Whether a block of so many bytes can be had without new memory."""
        with self._lock:
            return bool(self._sizes) and self._sizes[-1][0] >= nbytes

    def allocate(self, nbytes: int) -> Block:
        """A block of at least that many bytes: the smallest free stretch that holds it, or else new memory.

        Errors: StoreError when there is no memory.
        """
        wanted = max(nbytes + ALIGNMENT - 1 & -ALIGNMENT, ALIGNMENT)
        with self._lock:
            self._begin()
            at = bisect_left(self._sizes, (wanted,))
            if at == len(self._sizes):
                self._add_arena(wanted)
                at = bisect_left(self._sizes, (wanted,))
            size, arena, offset = self._sizes.pop(at)
            del self._starts[arena, offset]
            del self._ends[arena, offset + size]
            if size > wanted:
                self._put(arena, offset + wanted, size - wanted)
            self._given[arena, offset] = wanted
            self._used_bytes += wanted
            self._is_torn = False
        return Block(arena, offset, wanted)

    def free(self, block: Block) -> None:
        """Take a block back. One that a fork's child inherited is left to the parent.

        Errors: StoreError for a block that is not in use: it would be given out twice.
        """
        arena, offset = block.arena, block.offset
        with self._lock:
            self._begin()
            size = self._given.pop((arena, offset), 0)
            if size == 0:
                if arena in self._inherited or self._closed:
                    return
                raise StoreError(f"block {offset} of {arena} was freed twice, or is not of this process")
            self._used_bytes -= size
            before = self._ends.pop((arena, offset), None)
            if before is not None:
                self._take(arena, before, offset - before)
                offset, size = before, size + offset - before
            after = self._starts.get((arena, offset + size))
            if after is not None:
                del self._ends[arena, offset + size + after]
                self._take(arena, offset + size, after)
                size += after
            self._put(arena, offset, size)
            self._is_torn = False

    def write(self, block: Block) -> np.ndarray:
        """The bytes of a block in use, uint8, to write."""
        return np.frombuffer(self._maps[block.arena], np.uint8, block.nbytes, block.offset)

    @property
    def reserved_bytes(self) -> int:
        """Of all files."""
        return self._reserved_bytes

    @property
    def used_bytes(self) -> int:
        """Of all blocks in use."""
        return self._used_bytes

    def trim(self) -> int:
        """Give memory without a block in use back to the system, and say how many bytes."""
        with self._lock:
            self._begin()
            trimmed = 0
            for arena, mapped in list(self._maps.items()):
                size = len(mapped)
                if self._starts.get((arena, 0)) == size:
                    del self._ends[arena, size]
                    self._take(arena, 0, size)
                    del self._maps[arena]
                    self._unlink(arena)
                    trimmed += size
            self._reserved_bytes -= trimmed
            self._is_torn = False
            self._next = max(self._first, min(self._next, self._reserved_bytes))
            return trimmed

    def close(self, *, keep: bool = False) -> None:
        """End writing. Files are removed unless they are to be kept; mappings live as long as somebody has an array of them."""
        with self._lock:
            if not keep:
                for arena in self._maps:
                    self._unlink(arena)
            self._closed = True
            self._clear()

    def _begin(self) -> None:
        """Before the free stretches are changed. An exception in the middle of the last change (Ctrl-C) left them half done:
        then they are made anew from the blocks that are in use."""
        if self._is_torn:
            self._sizes, self._starts, self._ends = [], {}, {}
            for arena, mapped in self._maps.items():
                at = 0
                for offset, size in sorted((o, n) for (name, o), n in self._given.items() if name == arena):
                    if offset > at:
                        self._put(arena, at, offset - at)
                    at = offset + size
                if at < len(mapped):
                    self._put(arena, at, len(mapped) - at)
            self._used_bytes = sum(self._given.values())
            self._reserved_bytes = sum(map(len, self._maps.values()))
        self._is_torn = True

    def _put(self, arena: str, offset: int, size: int) -> None:
        self._starts[arena, offset] = size
        self._ends[arena, offset + size] = offset
        insort(self._sizes, (size, arena, offset))

    def _take(self, arena: str, offset: int, size: int) -> None:
        """Forget a free stretch, except its end."""
        del self._starts[arena, offset]
        del self._sizes[bisect_left(self._sizes, (size, arena, offset))]

    def _add_arena(self, wanted: int) -> None:
        if self._closed:
            raise StoreError("the table is closed; open it again")
        if self._forked and self._folder is not None and not callable(self._slot):
            raise StoreError(
                "the child of a fork cannot write to its parent's table; open the table again in the child"
            )
        slot = self._slot() if callable(self._slot) else self._slot
        name = f"arena-{slot}-{self._made + 1}"
        least = wanted + _PAGE - 1 & -_PAGE
        size = max(min(self._next, self._most), least)
        try:
            mapped = self._map(name, size)
        except OSError as error:
            if size == least or error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise self._full(size, error) from error
            size = least
            try:
                mapped = self._map(name, size)
            except OSError as again:
                raise self._full(size, again) from again
        self._made += 1
        self._maps[name] = mapped
        self._reserved_bytes += size
        self._next = min(2 * size, self._most)
        self._put(name, 0, size)

    def _map(self, name: str, size: int) -> mmap.mmap:
        if self._folder is None:
            return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        path = self._folder / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            return mmap.mmap(descriptor, size)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def _full(self, size: int, error: OSError) -> StoreError:
        needed = f"{size / (1 << 20):.2f} MiB more memory for rows"
        if self._folder is None:
            return StoreError(
                f"{needed} are needed and cannot be had: {error}. Keep fewer rows with max_bytes= or max_rows="
            )
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            return StoreError(f"{needed} cannot be made in {self._folder}: {error}")
        try:
            space = os.statvfs(self._folder)
            free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
        except OSError:
            free = total = 0
        return StoreError(
            f"{needed} are needed; {free / (1 << 20):.2f} MiB of {total / (1 << 20):.2f} MiB of {self._folder.parent} are "
            f"free: {error}. Make it larger (docker run --shm-size=...), keep rows in this process (memory='private'), or bound "
            "memory and write the rest to disk (path= with memory_bytes=)"
        )

    def _unlink(self, arena: str) -> None:
        if self._folder is not None:
            (self._folder / arena).unlink(missing_ok=True)

    def _in_child(self) -> None:
        self._lock = threading.RLock()
        self._forked = True
        if self._folder is None:
            return
        self._inherited.update(self._maps)
        self._clear()
        self._made = 0
        self._next = self._first


class Mapped:
    """Blocks of any process, to read.

    Args:
        source: the table's memory, or the private memory of this process.
    """

    def __init__(self, source: Path | Arenas) -> None:
        self._source = source
        self._views: dict[str, memoryview] = {}

    def root(self, block: Block) -> np.ndarray:
        """The bytes of exactly this block, uint8, read-only. Every view of them keeps this array alive.

        Errors: StoreError when the arena is gone or smaller than that.
        """
        view = self._views.get(block.arena)
        if view is None:
            view = self._map(block.arena)
        if block.offset + block.nbytes > len(view):
            raise StoreError(
                f"{block.arena} has {len(view)} bytes; a block ends at {block.offset + block.nbytes}: the table is damaged"
            )
        return np.frombuffer(view, np.uint8, block.nbytes, block.offset)

    def _map(self, arena: str) -> memoryview:
        if isinstance(self._source, Arenas):
            mapped = self._source._maps.get(arena)
            if mapped is None:
                raise StoreError(f"{arena} is not there any more; was the table closed?")
            view = memoryview(mapped).toreadonly()
        else:
            try:
                with open(self._source / arena, "rb", buffering=0) as file:
                    view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except (OSError, ValueError) as error:
                raise StoreError(
                    f"rows in {self._source / arena} cannot be read: {error}; was the table removed?"
                ) from error
        # replaced as a whole, so that other threads may read it meanwhile
        self._views = {name: kept for name, kept in self._views.items() if not self._is_gone(name)} | {arena: view}
        return view

    def _is_gone(self, arena: str) -> bool:
        if isinstance(self._source, Arenas):
            return arena not in self._source._maps
        return not (self._source / arena).exists()


def remove_unused(folder: Path, in_use: Collection[str], is_alive: Callable[[int], bool]) -> int:
    """Remove the arenas of dead processes in which no segment of the table lies any more. Returns their bytes.

    Inside a transaction of the log, so that `in_use` is all there is. Whoever still has an array of one keeps its bytes.
    """
    removed = 0
    for path in folder.glob("arena-*-*"):
        if path.name not in in_use and not is_alive(int(path.name.split("-")[1])):
            removed += path.stat().st_size
            path.unlink(missing_ok=True)
    return removed


def _in_child() -> None:
    for arenas in _live:
        arenas._in_child()


os.register_at_fork(after_in_child=_in_child)
