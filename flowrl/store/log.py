"""The commit log of a table: an append-only list of JSON records that several processes write and replay.

    <folder>/head              4 KiB, mapped by everyone
        0   magic "FLOWRLT2"           16  place: generation << 40 | bytes of log.<generation> that are committed (u64)
        8   format version (u32)       24  process id of the lock's holder, 0 when free (u32)
        12  doorbell (u32)
    <folder>/lock              flock, held by whoever appends
    <folder>/log.<generation>  64 bytes of header, then frames: length u32, crc32 u32, JSON of a list of records, zeros to 8 bytes
        0   magic "FLOWRLOG"    8   generation (u64)    16   where the snapshot that it starts with ends (u64)

[Note: Atomic commits] `place` is one aligned 8-byte word that is stored last, so a reader without a lock sees a commit whole or
not at all, and a generation never without its length. A writer killed before that store leaves bytes that nobody looks at
and the next writer overwrites. Bytes go through read and write calls and not through a mapping: there is nothing to map
again when the file grows, and a full disk is an error and not a signal. On processors that may reorder, a reader could see
the word before the bytes; it notices by the checksum and reads again.

[Note: No lost wake-up] The doorbell changes under the lock after `place`; a waiter reads it before it looks at `place`, and the
system lets it sleep only while the doorbell still has that value. The wake-up is sent at once: a waiter takes longer to run
than a transaction to end. A writer killed between the two wakes nobody, so nobody sleeps longer than LONGEST_SLEEP_S without
looking.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from flowrl.errors import FlowError, StoreError, WaitTimeout
from flowrl.store import futex
from flowrl.store.folders import lock_until, locked, sync_folder
from flowrl.store.transaction import Transaction

Record = dict[str, Any]

FORMAT = 2
"""Version of what lies in a table's folder."""
LONGEST_SLEEP_S = 0.1
"""Longest sleep of a waiter before it looks again by itself."""

_HEAD_BYTES = 4096
_MAGIC = b"FLOWRLT2"
_LOG_MAGIC = b"FLOWRLOG"
_START = 64
"""Where the frames of a log file begin."""
_FIRST_BYTES = 64 << 10
_FRAME = struct.Struct("=II")
_LOG_HEADER = struct.Struct("=8sQQ")
_SHIFT = 40
_OFFSET = (1 << _SHIFT) - 1
_DOORBELL, _HOLDER = 3, 6  # in 4-byte words of the head
_PLACE = 2  # in 8-byte words
_NEVER = -1

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_decode = json.JSONDecoder().raw_decode
_live: weakref.WeakSet[CommitLog] = weakref.WeakSet()


class CommitLog:
    """One process's attachment to a table's log.

    All methods may be called from any thread. `create` and `open` make one.
    """

    def __init__(self, folder: Path, *, readonly: bool, durable: bool | None) -> None:
        self._folder, self._readonly = folder, readonly
        self._files = _Files()
        weakref.finalize(self, self._files.close).atexit = False
        self._threads = threading.RLock()
        """Held by the thread in a transaction, around the lock of the file."""
        self._reading = threading.RLock()
        self._depth = 0
        self._epoch = 0
        """Counts forks: a transaction of the parent is none in its child."""
        self._keeps_out = False
        """Whether other processes are kept out by this one."""
        self._capacity = 0
        """Bytes of the log file that are surely there to write to."""
        self._map_head()
        # generation, where to read next in its file, where its snapshot ends; replaced as one, so that a fork finds it whole
        self._at: tuple[int, int, int] = (_NEVER, 0, 0)
        self._seen = _NEVER
        """The place up to which everything is read."""
        self._durable = _is_on_disk(folder) if durable is None else durable
        self._closed = False
        _live.add(self)

    # ------------------------------------------------------------------------------------------------------- opening

    @classmethod
    def create(cls, folder: Path, *, durable: bool | None = None) -> CommitLog:
        """A new, empty log in an existing folder.

        Args:
            folder: where.
            durable: whether `sync` and `close` wait until the disk has it. By default, when the folder is not in memory.

        Errors: StoreError when there is a log already, no space, or no permission; WaitTimeout.
        """
        try:
            with locked(folder / "lock"):
                if (folder / "head").exists():
                    raise StoreError(f"there is a table in {folder} already; open it, or choose another folder")
                _write_log(folder, 1, b"")
                head = bytearray(_HEAD_BYTES)
                struct.pack_into("=8sIIQ", head, 0, _MAGIC, FORMAT, 0, 1 << _SHIFT | _START)
                _write_whole(folder / "head", bytes(head), folder / f"head.{os.getpid()}")
        except OSError as error:
            if isinstance(error, FlowError):
                raise
            raise StoreError(f"a table's log cannot be made in {folder}: {error}") from error
        return cls(folder, readonly=False, durable=durable)

    @classmethod
    def open(cls, folder: Path, *, readonly: bool = False, durable: bool | None = None) -> CommitLog:
        """An existing log. Errors: StoreError when there is none, it is of another format, or may not be read (written)."""
        return cls(folder, readonly=readonly, durable=durable)

    def _map_head(self) -> None:
        path = self._folder / "head"
        try:
            with open(path, "rb" if self._readonly else "r+b", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                access = mmap.ACCESS_READ if self._readonly else mmap.ACCESS_WRITE
                head = mmap.mmap(file.fileno(), _HEAD_BYTES, access=access) if size >= _HEAD_BYTES else None
        except FileNotFoundError as error:
            raise StoreError(f"there is no table in {self._folder}: {path} is missing") from error
        except PermissionError as error:
            raise StoreError(
                f"{path} may not be {'read' if self._readonly else 'written'}: {error}. "
                f"{'Ask its owner for access' if self._readonly else 'Open it with readonly=True, or as its owner'}"
            ) from error
        except OSError as error:
            raise StoreError(f"{path} cannot be opened: {error}") from error
        if head is None or head[:7] != _MAGIC[:7]:
            raise StoreError(f"{path} is not a table's: its first bytes are {b'' if head is None else head[:8]!r}")
        found = int.from_bytes(head[8:12], "little") if head[:8] == _MAGIC else head[7:8].decode("latin-1")
        if found != FORMAT:
            raise StoreError(
                f"{self._folder} was written by table format {found}, this version reads {FORMAT}; open it with the version of "
                "flowrl that wrote it"
            )
        self._places = memoryview(head).cast("Q")
        self._words = memoryview(head).cast("I")
        self._head = head
        self._bell = np.frombuffer(head, np.uint32).ctypes.data + 4 * _DOORBELL

    def close(self) -> None:
        """End this attachment. Waiting threads of this process stop waiting. May be called again."""
        with self._reading:
            if self._closed:
                return
            if self._durable and not self._readonly:
                self.sync()
            self._closed = True
            self._seen = _NEVER
            self._files.close()
        futex.wake(self._bell)

    def sync(self) -> None:
        """Wait until the disk has everything committed so far. Nothing to do in shared memory."""
        if self._readonly or not self._durable:
            return
        with self._reading:
            self._check_open()
            try:
                self._switch(self._places[_PLACE] >> _SHIFT)
                os.fdatasync(self._files.log)
                self._head.flush()
            except OSError as error:
                raise StoreError(f"the log in {self._folder} cannot be written to disk: {error}") from error

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the log of the table in {self._folder} is closed; open the table again")

    # ------------------------------------------------------------------------------------------------------- writing

    def transaction(self, timeout_s: float = 30.0) -> Transaction:
        """Hold the log's lock, against other threads and processes; a thread may nest transactions.

        Errors: WaitTimeout when it is not free in time; StoreError when the log is read-only, closed or removed.
        """
        return Transaction(self, timeout_s)

    def append(self, *records: Record) -> int:
        """Commit records, all or none, inside a transaction. Returns `sequence` after it.

        Errors: StoreError when there is no space; the log is then as it was. TypeError for what JSON does not know.
        """
        return self._append(records, is_read=False, is_last=False)[0]

    def append_read(self, *records: Record, is_last: bool = False) -> bool:
        """The same, for a caller that takes note of the records now. Returns whether `read` leaves them out: it does not when
        there is something before them that was not read.

        Args: is_last: nothing more is committed in this transaction, so other processes need not wait for its end.
        """
        return self._append(records, is_read=True, is_last=is_last)[1]

    def _append(self, records: Sequence[Record], *, is_read: bool, is_last: bool) -> tuple[int, bool]:
        """`sequence`, and whether the records count as read."""
        self._check_inside()
        if self._readonly:
            raise StoreError(f"the table in {self._folder} was opened with readonly=True; open it without to change it")
        text = _encode(records).encode()
        place = self._places[_PLACE]
        generation, offset = place >> _SHIFT, place & _OFFSET
        frame = _framed(text)
        end = offset + len(frame)
        with self._reading:
            self._check_open()
            if self._at[0] != generation:
                self._switch(generation)
            self._reserve(end)
            try:
                written = os.pwrite(self._files.log, frame, offset)
                while written < len(frame):  # a signal, or more than the system takes at once
                    written += os.pwrite(self._files.log, frame[written:], offset + written)
            except OSError as error:
                raise StoreError(f"{self._folder}/log.{generation} cannot be written: {error}") from error
            place = self._publish(generation << _SHIFT | end)
            counts = is_read and self._at[1] == offset
            if counts:
                self._at, self._seen = (generation, end, self._at[2]), place
        if is_last and self._depth == 1:
            self._unlock()
        futex.wake(self._bell)
        return place, counts

    def compact(self, state: Mapping[str, Any]) -> None:
        """Replace all records by a snapshot, inside a transaction: from now on `read` starts with it, for everyone.

        Errors: StoreError when there is no space; the log is then as it was.
        """
        self._check_inside()
        generation = (self._places[_PLACE] >> _SHIFT) + 1
        frame = _framed(_encode([{"kind": "snapshot", "state": state}]).encode())
        try:
            _write_log(self._folder, generation, frame)
        except OSError as error:
            raise StoreError(
                f"the log in {self._folder} cannot be compacted to {_mib(len(frame))}: {error}; "
                f"{_mib(_free(self._folder))} are free"
            ) from error
        self._publish(generation << _SHIFT | (_START + len(frame)))
        if self._durable:  # the disk must know of the new file before it forgets the old one
            self._head.flush()
            sync_folder(self._folder)
        for name in os.listdir(self._folder):
            if name.startswith("log.") and name != f"log.{generation}":
                (self._folder / name).unlink(missing_ok=True)
        futex.wake(self._bell)

    def _publish(self, place: int) -> int:
        words = self._words
        self._places[_PLACE] = place
        words[_DOORBELL] = (words[_DOORBELL] + 1) & 0xFFFFFFFF
        return place

    def _check_inside(self) -> None:
        # another thread's transaction is not this one's
        if not (self._keeps_out and self._threads._is_owned()):  # type: ignore[attr-defined]
            raise StoreError(
                "records are appended inside a transaction, and none after its last: with log.transaction(): ..."
            )

    def _reserve(self, end: int) -> None:
        if end <= self._capacity:
            return
        size = os.fstat(self._files.log).st_size
        if end > size or self._capacity == 0:
            wanted = max(size, _FIRST_BYTES)
            while wanted < end:
                wanted *= 2
            try:
                os.posix_fallocate(self._files.log, 0, wanted)
            except OSError as error:
                raise StoreError(
                    f"the log in {self._folder} must grow to {_mib(wanted)} and cannot: {error}; "
                    f"{_mib(_free(self._folder))} are free"
                ) from error
            size = wanted
        self._capacity = size

    def _acquire(self, held: Transaction, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        held.epoch = self._epoch
        held.has_thread = self._threads.acquire(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
        if not held.has_thread:
            raise WaitTimeout(
                f"waited {timeout_s:g} s for the table in {self._folder}: another thread of this process is at it"
            )
        if self._depth == 0:
            self._check_open()
            if self._files.lock < 0:
                self._files.lock = self._open_lock()
            self._flock(deadline, timeout_s)
            self._keeps_out = True
            if not self._readonly:
                self._words[_HOLDER] = os.getpid()
        held.is_counted, self._depth = True, self._depth + 1

    def _flock(self, deadline: float, timeout_s: float) -> None:
        descriptor = self._files.lock
        try:
            is_ours = lock_until(descriptor, deadline)
        except OSError as error:
            raise StoreError(
                f"{self._folder}/lock cannot be locked: {error}; a table needs a local file system"
            ) from error
        if not is_ours:
            holder = self._words[_HOLDER]
            raise WaitTimeout(
                f"waited {timeout_s:g} s for the lock of the table in {self._folder}"
                + (f"; process {holder} holds it" if holder else "")
            )
        if os.fstat(descriptor).st_nlink == 0:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            raise StoreError(f"the table in {self._folder} was removed by the last process that had it open")

    def _open_lock(self) -> int:
        try:
            return os.open(self._folder / "lock", (os.O_RDONLY if self._readonly else os.O_RDWR) | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(
                f"{self._folder}/lock cannot be opened: {error}; the table may have been removed"
            ) from error

    def _release(self, held: Transaction) -> None:
        if held.epoch != self._epoch or not held.has_thread:  # in a fork's child, which never had it
            return
        if held.is_counted:
            held.is_counted, self._depth = False, self._depth - 1
        if self._depth == 0:
            self._unlock()
        held.has_thread = self._threads.release()  # type: ignore[func-returns-value]

    def _unlock(self) -> None:
        """Let other processes in; once more changes nothing."""
        if self._keeps_out and not self._readonly and self._words[_HOLDER] == os.getpid():
            self._words[_HOLDER] = 0
        self._keeps_out = False
        if self._files.lock >= 0:
            fcntl.flock(self._files.lock, fcntl.LOCK_UN)

    # ------------------------------------------------------------------------------------------------------- reading

    @property
    def sequence(self) -> int:
        """Grows with every commit, by anyone."""
        return self._places[_PLACE]

    @property
    def bytes_since_snapshot(self) -> int:
        """Of the log, after its snapshot or its beginning."""
        with self._reading:
            self._check_open()
            place = self._places[_PLACE]
            self._switch(place >> _SHIFT)
            return (self._places[_PLACE] & _OFFSET) - self._at[2]

    @property
    def snapshot_bytes(self) -> int:
        """Of the snapshot that the log starts with, 0 without one."""
        with self._reading:
            self._check_open()
            self._switch(self._places[_PLACE] >> _SHIFT)
            return self._at[2] - _START

    def read(self) -> list[Record]:
        """Committed records that were not read yet by this attachment, in order.

        After a compaction the first is {"kind": "snapshot", "state": ...}, which stands for all before it.
        Errors: StoreError for damaged bytes, once what precedes them has been read.
        """
        if self._places[_PLACE] == self._seen:
            return []
        with self._reading:
            self._check_open()
            while True:
                place = self._places[_PLACE]
                self._switch(place >> _SHIFT)
                if self._at[0] == place >> _SHIFT:  # else compacted again meanwhile
                    break
            generation, start, snapshot = self._at
            end = place & _OFFSET
            records, stop = self._parse(generation, start, end)
            self._at = (generation, stop, snapshot)
            self._seen = place if stop == end else _NEVER
            return records

    def rewind(self) -> None:
        """Let `read` begin anew with all there is, for who lost what was read."""
        with self._reading:
            self._at, self._seen = (self._at[0], _START, self._at[2]), _NEVER

    def _parse(self, generation: int, start: int, end: int) -> tuple[list[Record], int]:
        records: list[Record] = []
        at = start
        data = self._bytes(start, end)
        tries = 0
        while at < end:
            length, crc = _FRAME.unpack_from(data, at - start) if end - at >= 8 else (0, 0)
            first = at - start + 8
            text = data[first : first + length]
            if length and len(text) == length and crc32(text, length) == crc:
                records.extend(_decode(text.decode())[0])
                at += 8 + (length + 7 & ~7)
                continue
            if tries < 3:  # see the note on atomic commits
                tries += 1
                data = self._bytes(start, end)
                continue
            if not records:
                raise StoreError(
                    f"log damaged: {self._folder}/log.{generation} at byte {at} of {end}. What precedes it was read; "
                    "copy the table from what is readable, or restore the file"
                )
            break
        return records, at

    def _bytes(self, start: int, end: int) -> bytes:
        data = os.pread(self._files.log, end - start, start)
        while 0 < len(data) < end - start:  # more than the system gives at once
            more = os.pread(self._files.log, end - start - len(data), start + len(data))
            if not more:
                break
            data += more
        return data

    def _switch(self, generation: int) -> None:
        """Have the file of this generation open, or of a later one."""
        while self._at[0] != generation:
            path = self._folder / f"log.{generation}"
            try:
                descriptor = os.open(path, (os.O_RDONLY if self._readonly else os.O_RDWR) | os.O_CLOEXEC)
            except FileNotFoundError as error:
                now = self._places[_PLACE] >> _SHIFT
                if now == generation:
                    raise StoreError(f"{path} is missing; the table was removed or is damaged") from error
                generation = now
                continue
            except OSError as error:
                raise StoreError(f"{path} cannot be opened: {error}") from error
            magic, number, snapshot = _LOG_HEADER.unpack(
                os.pread(descriptor, _LOG_HEADER.size, 0).ljust(_LOG_HEADER.size)
            )
            if magic != _LOG_MAGIC or number != generation:
                os.close(descriptor)
                raise StoreError(f"log damaged: {path} at byte 0, its header is not of generation {generation}")
            old, self._files.log = self._files.log, descriptor
            self._at, self._seen, self._capacity = (generation, _START, snapshot), _NEVER, 0
            if old >= 0:
                os.close(old)

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Wait until `sequence` is not `seen`. False when the time is over, or the log was closed meanwhile."""
        deadline = time.monotonic() + timeout_s
        words, places = self._words, self._places
        while True:
            bell = words[_DOORBELL]
            if places[_PLACE] != seen:
                return True
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                return False
            futex.sleep(self._bell, bell, min(left, LONGEST_SLEEP_S))

    def _in_child(self) -> None:
        self._epoch += 1
        self._threads, self._reading = threading.RLock(), threading.RLock()
        self._depth, self._keeps_out = 0, False
        lock, self._files.lock = self._files.lock, -1  # opened anew when first needed; the parent keeps its own lock
        if lock >= 0:
            os.close(lock)


class _Files:
    """The open files of a log, closed once, also when the log is collected."""

    def __init__(self) -> None:
        self.lock = self.log = -1

    def close(self) -> None:
        for name in ("lock", "log"):
            descriptor = getattr(self, name)
            setattr(self, name, -1)
            if descriptor >= 0:
                os.close(descriptor)


def _framed(text: bytes) -> bytes:
    if len(text) >= 1 << 32:
        raise StoreError(f"one commit of {_mib(len(text))} is too large; commit fewer records at once")
    return b"".join((_FRAME.pack(len(text), crc32(text, len(text))), text, bytes(-len(text) % 8)))


def _write_log(folder: Path, generation: int, frame: bytes) -> None:
    header = _LOG_HEADER.pack(_LOG_MAGIC, generation, _START + len(frame)).ljust(_START, b"\0")
    path = folder / f"log.{generation}"
    # left behind by somebody killed; never written in place, as a reader may have its mode or size in mind
    path.unlink(missing_ok=True)
    try:
        _write_whole(path, header + frame, None, at_least=_FIRST_BYTES)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _write_whole(path: Path, content: bytes, aside: Path | None, *, at_least: int = 0) -> None:
    """A file that has all of its content and its space before it has its name, if it gets a name `aside` first."""
    target = path if aside is None else aside
    descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, max(len(content), at_least))
        written = 0
        while written < len(content):
            written += os.pwrite(descriptor, content[written:], written)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if aside is not None:
        aside.replace(path)
        sync_folder(path.parent)


def _is_on_disk(folder: Path) -> bool:
    memory = Path("/dev/shm")
    return not memory.exists() or os.stat(folder).st_dev != os.stat(memory).st_dev


def _free(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.2f} MiB"


def _in_child() -> None:
    for log in _live:
        log._in_child()


os.register_at_fork(after_in_child=_in_child)
