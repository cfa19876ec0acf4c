"""Which processes have a table open, and which segments each of them is reading.

Every attached process has a file `process-<slot>` and holds its lock while it lives; the system frees the lock however the
process ends. The file lists the pinned segments:

    0   magic "FLOWRLP1"    16   process id (u64)                                    64...   uids (u64, 0 = free)
    8   entries in use at most (u64)    24   1: the process only reads, or has left and its rows are still held (u64)

[Note: Who has the table open] One that only reads, or that has left while rows it gave out are held, keeps pins and nothing
else. The table may end without it: arrays stay valid when the files that they map are removed.

[Note: Who sees a pin] Pins are taken inside a transaction of the log, once replay has shown that the segment is in the table.
A segment leaves the table in a transaction. So whoever looks for pins after that sees every pin there is, or will be: an
entry is one aligned 8-byte store, and entries are never moved.

[Note: Fork] A child has no pins: views it inherited stay valid only while the parent keeps them. It takes a slot of its own
when it first needs one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from flowrl.errors import StoreError, WaitTimeout
from flowrl.store import folders

_MAGIC = int.from_bytes(b"FLOWRLP1", "little")
_FIRST = 8
"""Index of the first uid, in 8-byte words."""
_FIRST_BYTES = 4096

_living: weakref.WeakSet[Presence] = weakref.WeakSet()


class Presence:
    """This process's place among those that have a table open.

    Args:
        folder: the table's memory.
        counter: folder whose `slots` file counts the slots too, where numbers must be unique for longer than `folder` lives.
        only_reads: whether the table may end while this process is on the list.

    Errors: StoreError when the folder is gone, full, or may not be written; WaitTimeout.
    """

    def __init__(self, folder: Path, *, counter: Path | None = None, only_reads: bool = False) -> None:
        self._folder, self._counter, self._only_reads = folder, counter, only_reads
        self._lock = threading.RLock()
        self._pins: dict[int, list[int]] = {}
        """Uid to its count and the index of its entry."""
        self._free: list[int] = []
        self._used = _FIRST
        self._slot: int | None = None
        self._words: memoryview | None = None
        self._closed = False
        self._descriptor = _Descriptor()
        weakref.finalize(self, self._descriptor.close).atexit = False
        self._take()
        _living.add(self)

    @property
    def slot(self) -> int:
        """Number of this process, from 1, never given to another one."""
        if self._slot is None:
            with self._lock:
                if self._slot is None:
                    self._take()
        assert self._slot is not None
        return self._slot

    @property
    def has_joined(self) -> bool:
        """Whether this process is on the list. The child of a fork is when it has used the table."""
        return self._slot is not None and not self._closed

    def pin(self, uid: int) -> None:
        """Keep a segment's bytes as they are; counted. Inside a transaction of the log."""
        with self._lock:
            entry = self._pins.get(uid)
            if entry is not None:
                entry[0] += 1
                return
            if self._slot is None or self._closed:
                self._take()
            assert self._words is not None
            if self._free:
                at = self._free.pop()
            else:
                if self._used == len(self._words):
                    self._grow()
                at = self._used
                self._used += 1
            self._words[at] = uid
            self._words[1] = self._used
            self._pins[uid] = [1, at]

    def unpin(self, uid: int) -> None:
        """Take one pin back. A uid that is not pinned, as after a fork or `close`, is left alone."""
        with self._lock:
            entry = self._pins.get(uid)
            if entry is None:
                return
            entry[0] -= 1
            if entry[0] == 0:
                del self._pins[uid]
                assert self._words is not None
                self._words[entry[1]] = 0
                self._free.append(entry[1])

    def is_alive(self, slot: int) -> bool:
        """Whether the process of a slot is still attached."""
        return (slot == self._slot and not self._closed) or self.alive_in(self._folder, slot)

    @staticmethod
    def alive_in(folder: Path, slot: int) -> bool:
        """Whether the process of a slot has the table whose memory is `folder` open, not only to read it."""
        return folders.has_open(folder / f"process-{slot}")

    def pinned(self, uids: Iterable[int]) -> set[int]:
        """Of these segments, those that a living process has pinned. Files of dead processes are removed on the way."""
        wanted = set(uids)
        if not wanted:
            return wanted
        with self._lock:
            found = wanted & self._pins.keys()
        for slot in folders.slots(self._folder):
            if slot == self._slot or len(found) == len(wanted):
                continue
            file = self._folder / f"process-{slot}"
            try:
                with open(file, "rb", buffering=0) as opened:
                    words = np.frombuffer(opened.readall(), np.uint64)
            except FileNotFoundError:
                continue
            if not folders.is_held(file):
                file.unlink(missing_ok=True)
            elif len(words) > _FIRST:
                found |= wanted.intersection(words[_FIRST : int(words[1])].tolist())
        return found

    def leave(self) -> None:
        """Be one that only keeps its pins, until `close`."""
        with self._lock:
            self._only_reads = True
            if self._words is not None:
                self._words[folders.ONLY_READS] = 1

    def close(self) -> None:
        """Leave. Pins are gone with it. May be called again."""
        with self._lock:
            self._closed = True
            if self._slot is not None and self._descriptor.number >= 0:
                (self._folder / f"process-{self._slot}").unlink(missing_ok=True)
            self._pins.clear()
            self._descriptor.close()

    def _take(self) -> None:
        if self._closed:
            raise StoreError(f"the table in {self._folder} is closed; open it again")
        try:
            with folders.locked(self._folder / "slots") as slots:
                slot = _count(slots, 0)
                if self._counter is not None and self._counter != self._folder:
                    with folders.locked(self._counter / "slots") as longer:
                        slot = _count(longer, slot - 1)
                    os.pwrite(slots, b"%020d" % slot, 0)
                self._make(slot)
        except WaitTimeout:
            raise
        except FileNotFoundError as error:
            raise StoreError(
                f"the table's memory {self._folder} is gone: the last process with it open has left"
            ) from error
        except PermissionError as error:
            raise StoreError(
                f"the table's memory {self._folder} may not be written: {error}; open it as its owner"
            ) from error
        except OSError as error:
            raise StoreError(f"no process can be added in {self._folder}: {error}. {folders.REMEDY}") from error
        folders.settled(self._folder)

    def _make(self, slot: int) -> None:
        # locked before it has its name, so that nobody can find it unlocked
        aside = self._folder / f"new-{slot}"
        descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(descriptor, 0, _FIRST_BYTES)
            words = memoryview(mmap.mmap(descriptor, _FIRST_BYTES)).cast("Q")
            words[0], words[1], words[2] = _MAGIC, _FIRST, os.getpid()
            words[folders.ONLY_READS] = int(self._only_reads)
            aside.rename(self._folder / f"process-{slot}")
        except BaseException:
            aside.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        self._descriptor.number, self._words, self._slot = descriptor, words, slot

    def _grow(self) -> None:
        assert self._words is not None
        nbytes = 2 * self._words.nbytes
        try:
            os.posix_fallocate(self._descriptor.number, 0, nbytes)
        except OSError as error:
            raise StoreError(
                f"{len(self._pins)} segments are read and one more cannot be noted: {error}. {folders.REMEDY}"
            ) from error
        self._words = memoryview(mmap.mmap(self._descriptor.number, nbytes)).cast("Q")

    def _in_child(self) -> None:
        self._lock = threading.RLock()
        self._descriptor.close()  # the lock stays with the parent
        self._slot, self._words = None, None
        self._pins, self._free, self._used = {}, [], _FIRST


class LocalPresence:
    """The same for a table that only this process can see."""

    slot = 1

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pins: dict[int, int] = {}
        _local.add(self)

    def pin(self, uid: int) -> None:
        """Keep a segment's bytes as they are; counted."""
        with self._lock:
            self._pins[uid] = self._pins.get(uid, 0) + 1

    def unpin(self, uid: int) -> None:
        """Take one pin back."""
        with self._lock:
            count = self._pins.get(uid, 0)
            if count > 1:
                self._pins[uid] = count - 1
            else:
                self._pins.pop(uid, None)

    def is_alive(self, slot: int) -> bool:
        """Whether that is this process."""
        return slot == self.slot

    def pinned(self, uids: Iterable[int]) -> set[int]:
        """Of these segments, those that are pinned."""
        with self._lock:
            return {uid for uid in uids if uid in self._pins}

    def close(self) -> None:
        """Pins end."""
        with self._lock:
            self._pins.clear()

    def _in_child(self) -> None:
        self._lock = threading.RLock()


_local: weakref.WeakSet[LocalPresence] = weakref.WeakSet()


class _Descriptor:
    """An open file that is closed once, also when its owner is collected."""

    def __init__(self) -> None:
        self.number = -1

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)


def _count(descriptor: int, at_least: int) -> int:
    """The next number of a counter file whose lock is held."""
    text = os.pread(descriptor, 20, 0)
    number = max(int(text) if text else 0, at_least) + 1
    os.pwrite(descriptor, b"%020d" % number, 0)
    return number


def _in_child() -> None:
    for presence in _living:
        presence._in_child()
    for local in _local:
        local._in_child()


os.register_at_fork(after_in_child=_in_child)
