"""Holding a log's lock while a block runs, and letting go whatever happens."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowrl.store.local_log import LocalLog
    from flowrl.store.log import CommitLog


class Transaction:
    """Holds a log's lock while a `with` block runs.

    An exception may come between any two lines (Ctrl-C, an alarm), on the way in and out, too. What is held is noted here, so
    that it is given back then, at the latest when the exception is over and this object is collected.
    """

    __slots__ = ("_log", "_timeout_s", "epoch", "has_thread", "is_counted")

    def __init__(self, log: CommitLog | LocalLog, timeout_s: float) -> None:
        self._log, self._timeout_s = log, timeout_s
        self.epoch = 0
        self.has_thread: bool | None = False
        """Whether other threads are kept out."""
        self.is_counted = False
        """Whether other processes are, too."""

    def __enter__(self) -> None:
        try:
            self._log._acquire(self, self._timeout_s)
        except BaseException:
            self._log._release(self)
            raise

    def __del__(self) -> None:
        if getattr(self, "has_thread", False):
            with contextlib.suppress(RuntimeError):  # collected in another thread
                self._log._release(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log._release(self)
