"""Where an open table's rows lie, seen from one process: its log, its place among the processes, its memory.

    record -> log -> every attached process applies it to its catalog
    bytes  -> a block in this process's own arenas, read by all through a read-only mapping

[Note: When a block is used again] A segment that leaves the catalog is retired. Its bytes stay as they are until no living
process has it pinned; only then does the process whose arena it lies in give the block out again. Pins are taken inside
a transaction, after the log was read to its end, so a segment that was retired before cannot be pinned any more, and one
that is pinned is seen by whoever wants the block. A view that a reader was given keeps its pin until it is collected.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from sys import is_finalizing

import numpy as np

from flowrl.errors import StoreError
from flowrl.store.arena import Arenas, Block, Mapped, remove_unused
from flowrl.store.catalog import DISK, HOT, PACKED, Catalog, Record, Segment
from flowrl.store.local_log import LocalLog
from flowrl.store.log import CommitLog
from flowrl.store.presence import LocalPresence, Presence
from flowrl.store.staging import ArrayCarrier

COMPACT_BYTES = 4 << 20
"""A log is rewritten as one snapshot when it has grown by this much, or by twice the last snapshot."""

RECYCLE_BYTES = 4 << 20
"""Retired bytes after which it is looked who still reads them, which costs a look into every process's list."""

_living: weakref.WeakSet[Backing] = weakref.WeakSet()


_pins: dict[int, weakref.ref[np.ndarray]] = {}
"""References that call back when nobody can read a segment's bytes any more, by the id of those: as long as they are here
they do, whoever else is gone. A `weakref.finalize` takes longer to make than all else that a small claim does with its memory."""


class Backing:
    """The parts of one attached process, and the rules between them."""

    def __init__(
        self,
        log: CommitLog | LocalLog,
        presence: Presence | LocalPresence | None,
        arenas: Arenas | None,
        mapped: Mapped,
    ) -> None:
        self.log, self.presence, self.arenas, self.mapped = log, presence, arenas, mapped
        self.catalog = Catalog()
        self.mutex = threading.RLock()
        """Held while the catalog is read or changed; never while waiting for the log's lock."""
        self._roots: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
        self._unpinned: deque[int] = deque()
        self._idle = threading.Lock()
        """Held around every use of pins. A view may be collected in the middle of one, in the same thread: then the lock is
        found held, and the pin is left for the next use to take back."""
        self._waiting: dict[int, Block] = {}
        """Retired blocks of ours that somebody may still read."""
        self._waiting_bytes = 0
        self.folder: Path | None = None
        """The table's own, where its files are; None for a table in memory only."""
        self.memory: Path | None = None
        """The folder of its memory; None for a table of one process."""
        self.timeout_s = 30.0
        """Longest wait for the log's lock."""
        self.readonly = False
        self.removes_files = False
        """Whether this process removes the files of rows that are gone."""
        self._files: dict[int, list[Path]] = {}
        """Files of retired segments that somebody may still read."""
        self._counter = 0
        self._dropped: deque[tuple[str, str, tuple[Record, ...]]] = deque()
        """Claims that nobody holds any more: node, token, what is to be said before they are given back."""
        self.looked: dict[tuple[object, ...], tuple[int, float]] = {}
        """Claims that were asked for in vain: the log's sequence then, and when."""
        self._depth = 0
        self._is_torn = False
        """Whether an exception left the catalog in the middle of a record."""
        self._compact_at = COMPACT_BYTES
        self._tidied = 0
        """Bytes of our arenas when others' were last looked at."""
        self._leaving = False
        self.closed = False
        self.forks = 0
        self._threads = threading.local()
        _living.add(self)

    # ------------------------------------------------------------------------------------------------------- records

    def replay(self) -> None:
        """Apply what others, or this process, have committed."""
        with self.mutex:
            if self._is_torn:
                self._begin_again()
            self._is_torn = True
            for record in self._unread():
                self.catalog.apply(record)
            if self.catalog.retired:
                retired, self.catalog.retired = self.catalog.retired, []
                self._sort_out(retired)
            self._is_torn = False

    def _unread(self) -> list[Record]:
        try:
            return self.log.read()
        except StoreError:  # of a damaged log; what precedes was applied
            self._is_torn = False
            raise

    def _begin_again(self) -> None:
        """The catalog from the log alone, after an exception (Ctrl-C) in the middle of a record."""
        self.log.rewind()
        before, fresh = self.catalog, Catalog()
        for record in self.log.read():
            fresh.apply(record)
        # what left before is not to be given back again
        left = {s.uid: s for s in (*before.segments.values(), *before.retired) if s.uid not in self._waiting}
        fresh.retired = [segment for uid, segment in left.items() if uid not in fresh.segments]
        fresh.columns_version += before.columns_version + 1
        before.__dict__ = fresh.__dict__

    @contextmanager
    def transaction(self, timeout_s: float | None = None) -> Iterator[Catalog]:
        """The catalog as of now, with nobody else changing it until the end.

        A reader that could not announce itself in the table's memory (it may not write there) takes no lock: its catalog stays
        as it is inside, and rows that a writer drops meanwhile may be overwritten under it.
        """
        self.check_open()
        if self.presence is None:
            with self.mutex:
                if not self._depth:
                    self.replay()
                self._depth += 1
                try:
                    yield self.catalog
                finally:
                    self._depth -= 1
            return
        with self.log.transaction(self.timeout_s if timeout_s is None else timeout_s):
            self.replay()
            if self._dropped and not self.readonly and not self._depth:
                self._commit_dropped()
            self._depth += 1
            try:
                yield self.catalog
            finally:
                self._depth -= 1

    @property
    def has_dropped(self) -> bool:
        """Whether claims wait to be given back with the next transaction."""
        return bool(self._dropped)

    def drop(self, node: str, token: str, *records: Record) -> None:
        """Give a claim back with the next transaction of this process. May be called by the collector, anywhere."""
        self._dropped.append((node, token, records))

    def _commit_dropped(self) -> None:
        while self._dropped:
            node, token, records = self._dropped.popleft()
            # the claim may have ended meanwhile; then the records change nothing
            self.commit(*records, {"kind": "release", "node": node, "token": token})

    def commit(self, *records: Record, is_last: bool = False) -> None:
        """Make the records part of the table, all or none. Inside a transaction.

        Args: is_last: nothing that needs the lock follows in this transaction; other processes may go on while this one
            takes note of the records.
        """
        with self.mutex:  # nobody reads the log in between
            before, was_torn = self.log.sequence, self._is_torn
            self._is_torn = True
            log = self.log
            length = log.bytes_since_snapshot
            is_long = length > self._compact_at and length > 2 * log.snapshot_bytes
            try:
                if log.append_read(*records, is_last=is_last and not is_long):
                    for record in records:
                        self.catalog.apply(record)
            except BaseException:
                if log.sequence == before:  # a full disk, or what JSON does not know: nothing was committed
                    self._is_torn = was_torn
                raise
            self._is_torn = False
        self.replay()
        if is_long:
            self._compact()

    def _compact(self) -> None:
        try:
            self.log.compact(self.catalog.snapshot())
            self._compact_at = COMPACT_BYTES
        except StoreError as error:
            # what was committed is committed; the log is as it was, only longer than it should be
            if self._compact_at == COMPACT_BYTES:
                warnings.warn(f"the table goes on with a log that grows: {error}", stacklevel=2)
            self._compact_at = self.log.bytes_since_snapshot + COMPACT_BYTES
            return
        self.replay()

    def check_open(self) -> None:
        if self.closed:
            raise StoreError("the table is closed; open it again with ExperienceTable.open(path_or_name)")

    # -------------------------------------------------------------------------------------------------------- blocks

    def new_uid(self) -> int:
        assert self.presence is not None
        with self.mutex:
            self._counter += 1
            return (self.presence.slot << 40) | self._counter

    def allocate(self, nbytes: int) -> tuple[Block, np.ndarray]:
        """A block of ours and its bytes to write. Errors: StoreError when there is no memory for it."""
        assert self.arenas is not None
        with self.mutex:
            if self._waiting and (self._waiting_bytes > RECYCLE_BYTES or not self.arenas.fits(nbytes)):
                self.recycle()
            block = self.arenas.allocate(nbytes)
            return block, self.arenas.write(block)

    def discard_uncommitted(self, segments: Iterable[Segment]) -> None:
        """Give back the blocks of those segments that are not in the table, after an exception at any place. Never raises
        an error of its own in its place."""
        with self.mutex:
            try:
                self.replay()
            except StoreError:  # of a log that is closed or damaged: nobody knows what is in the table
                return
            known = self.catalog.segments.keys() | self._waiting.keys()
            self.discard(Block(*s.place) for s in segments if s.uid not in known)

    def discard(self, blocks: Iterable[Block]) -> None:
        """Give back blocks that were never committed."""
        assert self.arenas is not None
        with self.mutex:
            for block in blocks:
                self.arenas.free(block)

    def recycle(self) -> None:
        """Give retired blocks that nobody reads any more out again."""
        with self.mutex:
            self._take_back_pins()
            if not (self._waiting or self._files) or self.presence is None or self.arenas is None:
                return
            # fmt: off
            with self._idle: pinned = self.presence.pinned([*self._waiting, *self._files])  # noqa: E701  as in `root`
            # fmt: on
            self._take_back_pins()
            for uid in [uid for uid in self._files if uid not in pinned]:
                for file in self._files.pop(uid):
                    file.unlink(missing_ok=True)
            for uid in [uid for uid in self._waiting if uid not in pinned]:
                block = self._waiting.pop(uid)
                self._waiting_bytes -= block.nbytes
                self.arenas.free(block)

    @property
    def pinned_bytes(self) -> int:
        """Of our retired blocks that somebody still reads."""
        with self.mutex:
            return self._waiting_bytes

    def _sort_out(self, retired: Sequence[Segment]) -> None:
        own = None if self.presence is None else f"arena-{self.presence.slot}-"
        for segment in retired:
            if segment.tier != DISK and own is not None and str(segment.place[0]).startswith(own):
                block = Block(*segment.place)
                self._waiting[segment.uid] = block
                self._waiting_bytes += block.nbytes
            elif segment.tier == DISK and self.folder is not None and self.removes_files:
                self._files[segment.uid] = [self.folder / str(name) for name in segment.place]
        if self._files:
            self.recycle()

    # ------------------------------------------------------------------------------------------------------- reading

    def root(self, segment: Segment) -> np.ndarray:
        """The bytes of a segment in memory, uint8, read-only. Every view of them keeps them as they are.

        Inside a transaction, with the segment in the catalog (see the note above).
        """
        with self.mutex:
            found = self._roots.get(segment.uid)
            if found is not None:
                return found
            # a file has no bytes to map; its pin keeps the file
            root = np.empty(1, np.uint8) if segment.tier == DISK else self.mapped.root(Block(*segment.place))
            if self.presence is not None:
                # fmt: off
                with self._idle: self.presence.pin(segment.uid)  # noqa: E701  one line: an interruption never leaves it held
                # fmt: on
                self._take_back_pins()
                key = id(root)
                _pins[key] = weakref.ref(root, partial(self._collected, segment.uid, self.forks, key))
            self._roots[segment.uid] = root
            return root

    def carrier(self) -> ArrayCarrier:
        """What claims of this thread make batches in."""
        found: ArrayCarrier | None = getattr(self._threads, "carrier", None)
        if found is None:
            found = self._threads.carrier = ArrayCarrier(2)
        return found

    def _collected(self, uid: int, fork: int, key: int, _: object) -> None:
        # runs wherever the collector runs, so it waits for nothing
        if is_finalizing():
            return
        _pins.pop(key, None)
        if fork != self.forks:
            return  # made before a fork, in the parent: the pin is the parent's
        self._unpinned.append(uid)
        while self._unpinned and self._idle.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._idle.release()

    def _take_back_pins(self) -> None:
        # whoever finds the lock held leaves its pin to the holder, so the holder looks again once it has let go
        while self._unpinned and self._idle.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._idle.release()

    def _drain(self) -> None:
        if self.presence is None:
            return
        while self._unpinned:
            self.presence.unpin(self._unpinned.popleft())
        if self._leaving and not self._roots:
            self.presence.close()

    # -------------------------------------------------------------------------------------------------------- others

    def release_the_dead(self) -> bool:
        """Free what ended processes had claimed; whether there was any. Inside a transaction."""
        if self.presence is None:
            return False
        slots = {slot for node in self.catalog.nodes.values() for slot, _ in node.open.values()}
        gone = [slot for slot in slots if not self.presence.is_alive(slot)]
        if gone:
            self.commit(*({"kind": "gone", "slot": slot} for slot in gone))
            self.remove_unused()
        return bool(gone)

    def tidy(self) -> None:
        """Remove files that a reader has let go; when our memory has grown, also memory of ended processes that has no rows any
        more. Inside a transaction."""
        if self._files:
            self.recycle()
        if self.arenas is not None and self.arenas.reserved_bytes > self._tidied:
            self._tidied = self.arenas.reserved_bytes
            self.remove_unused()

    def remove_unused(self) -> None:
        """Remove memory of ended processes in which no row lies any more. Inside a transaction."""
        if self.presence is None or self.memory is None:
            return
        in_use = {str(s.place[0]) for tier in (HOT, PACKED) for s in self.catalog.tiers[tier].values()}
        remove_unused(self.memory, in_use, self.presence.is_alive)

    def close(self, *, keep: bool) -> None:
        """End this process's part. With `keep`, its arenas stay for others.

        Rows that were read stay as they are for whoever holds them: while any is held, the process stays on the list of
        those that read, and is none of those that have the table open.
        """
        if self.closed:
            return
        self.closed = True
        if self.arenas is not None:
            self.arenas.close(keep=keep)
        self.leave_presence()
        self.log.close()

    def in_child(self) -> None:
        """After a fork, in the child: it has no pins, and blocks and files that wait are the parent's to free. Private memory
        is a copy, with all that belongs to it."""
        self.mutex, self._idle = threading.RLock(), threading.Lock()
        self._depth = 0
        if isinstance(self.presence, LocalPresence):
            return
        self._dropped.clear()
        self._roots = weakref.WeakValueDictionary()
        self._unpinned.clear()
        self._waiting.clear()
        self._files.clear()
        self._waiting_bytes = 0
        self.forks += 1

    def leave_presence(self) -> None:
        self._leaving = True
        if isinstance(self.presence, Presence):
            self.presence.leave()
        with self._idle:
            self._drain()
        self._take_back_pins()


def _in_child() -> None:
    for backing in _living:
        backing.in_child()


os.register_at_fork(after_in_child=_in_child)
