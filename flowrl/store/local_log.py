"""The commit log of a table that only one process has: `flowrl.store.log` without files."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from flowrl.errors import StoreError, WaitTimeout
from flowrl.store.transaction import Transaction

Record = dict[str, Any]

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_live: weakref.WeakSet[LocalLog] = weakref.WeakSet()


class LocalLog:
    """As `CommitLog`, in this process only. Records go through JSON, so that they look the same."""

    def __init__(self) -> None:
        self.bytes_since_snapshot = self.snapshot_bytes = 0
        self._threads = threading.RLock()
        self._changed = threading.Condition(threading.Lock())
        # commits since the last snapshot, and how many of them were read; replaced as one where both change
        self._kept: tuple[list[str], int] = ([], 0)
        self._sequence = 1
        self._depth = 0
        self._epoch = 0
        self._closed = False
        _live.add(self)

    def transaction(self, timeout_s: float = 30.0) -> Transaction:
        """Keep other threads out. Errors: WaitTimeout."""
        return Transaction(self, timeout_s)

    def append(self, *records: Record) -> int:
        """Commit records, inside a transaction."""
        return self._put(_encode(records), is_snapshot=False)

    def append_read(self, *records: Record, is_last: bool = False) -> bool:
        """The same; `read` gives them to this process, too."""
        self.append(*records)
        return False

    def compact(self, state: Mapping[str, Any]) -> None:
        """Let a snapshot stand for all records before it."""
        self._put(_encode([{"kind": "snapshot", "state": state}]), is_snapshot=True)

    def _put(self, text: str, *, is_snapshot: bool) -> int:
        if not (self._depth and self._threads._is_owned()):  # type: ignore[attr-defined]
            raise StoreError("records are appended inside a transaction: with log.transaction(): ...")
        with self._changed:
            self._sequence += 1  # first: where it is as it was, nothing was committed
            if is_snapshot:
                self._kept = ([text], 0)
                self.snapshot_bytes, self.bytes_since_snapshot = len(text), 0
            else:
                self._kept[0].append(text)
                self.bytes_since_snapshot += len(text)
            self._changed.notify_all()
            return self._sequence

    def rewind(self) -> None:
        """Let `read` begin anew with all there is, for who lost what was read."""
        with self._changed:
            self._kept = (self._kept[0], 0)

    def read(self) -> list[Record]:
        """Records that were not read yet."""
        texts, start = self._kept
        if len(texts) == start:
            return []
        with self._changed:
            texts, start = self._kept
            records = [record for text in texts[start:] for record in json.loads(text)]
            self._kept = (texts, len(texts))
            return records

    @property
    def sequence(self) -> int:
        """Grows with every commit."""
        return self._sequence

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Wait until `sequence` is not `seen`; False when the time is over."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._sequence != seen or self._closed, min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
            )
            return self._sequence != seen

    def sync(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """End it. Waiting threads stop waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _acquire(self, held: Transaction, timeout_s: float) -> None:
        held.epoch = self._epoch
        held.has_thread = self._threads.acquire(timeout=min(max(timeout_s, 0.0), threading.TIMEOUT_MAX))
        if not held.has_thread:
            raise WaitTimeout(f"waited {timeout_s:g} s for the table: another thread is at it")
        if self._closed:
            raise StoreError("the table is closed; a table with memory='private' cannot be opened again")
        held.is_counted, self._depth = True, self._depth + 1

    def _release(self, held: Transaction) -> None:
        if held.epoch == self._epoch and held.has_thread:
            if held.is_counted:
                held.is_counted, self._depth = False, self._depth - 1
            held.has_thread = self._threads.release()  # type: ignore[func-returns-value]

    def _in_child(self) -> None:
        self._epoch += 1
        self._threads, self._changed = threading.RLock(), threading.Condition(threading.Lock())
        self._depth = 0


def _in_child() -> None:
    for log in _live:
        log._in_child()


os.register_at_fork(after_in_child=_in_child)
