"""The trackers of a run: fed from a thread of their own, so that a slow or broken one costs the run nothing but a note."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.errors import ConfigError
from flowrl.runtime.trackers import Session, Tracker, check_installed, check_names, opener_of

MOST_WAITING = 1000
"""Steps that a tracker may be behind; more are not sent to it, which is noted."""
CLOSE_S = 30.0
"""How long the end of a run waits for a tracker to take what is left."""


class Trackers:
    """Context-free: `log` each step, `close` once. Never raises after it was opened.

    Example:
        trackers = Trackers.open(("tensorboard",), Session("grpo-3", "grpo", path))
        trackers.log(0, {"reward/mean": 0.25})
        trackers.notes()             # () or what went wrong since it was asked
        trackers.close("finished")
    """

    def __init__(self, opened: Sequence[tuple[str, Tracker]] = (), notes: Iterable[str] = ()) -> None:
        self._followers = [Follower(name, tracker) for name, tracker in opened]
        self._notes = list(notes)

    @classmethod
    def open(cls, names: Sequence[str], session: Session) -> Trackers:
        """Open each. Errors: ConfigError for an unknown name or a package that is not installed; what else goes wrong, such as a
        server that does not answer, is a note."""
        check_names(names)
        check_installed(names)
        openers = [(name, opener_of(name)) for name in names]
        opened: list[tuple[str, Tracker]] = []
        notes = []
        for name, opener in openers:
            try:
                opened.append((name, opener(session)))
            except ConfigError:  # it cannot be as it was asked for, and says what to change
                raise
            except Exception as error:  # of somebody else's package and servers: the run matters more
                notes.append(_said(name, "does not start", error))
        return cls(opened, notes)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for follower in self._followers:
            follower.put(step, dict(metrics))

    def notes(self) -> tuple[str, ...]:
        """What went wrong and was not told yet; each thing once."""
        found = [*self._notes, *(note for one in self._followers for note in one.take_notes())]
        self._notes = []
        return tuple(found)

    def close(self, status: str) -> tuple[str, ...]:
        """Wait until all have taken what was logged, within `CLOSE_S`. Returns what is left to note."""
        for follower in self._followers:
            follower.end(status)
        for follower in self._followers:
            follower.join(CLOSE_S)
        return self.notes()


@dataclass(frozen=True, slots=True)
class _End:
    status: str


class Follower:
    """One tracker and the thread that feeds it."""

    def __init__(self, name: str, tracker: Tracker, *, most_waiting: int = MOST_WAITING) -> None:
        self.name = name
        self._tracker = tracker
        self._waiting: queue.Queue[tuple[int, dict[str, float]] | _End] = queue.Queue()
        self._most = most_waiting
        self._notes: list[str] = []
        self._has_failed = False
        self._has_dropped = False
        # a daemon: one that hangs does not keep the process
        self._thread = threading.Thread(target=self._work, name=f"flowrl tracker {name}", daemon=True)
        self._thread.start()

    def put(self, step: int, metrics: dict[str, float]) -> None:
        if self._has_failed:
            return
        if self._waiting.qsize() >= self._most:
            if not self._has_dropped:
                self._has_dropped = True
                self._notes.append(f"tracker '{self.name}' is {self._most} steps behind; some are not sent to it")
            return
        self._waiting.put((step, metrics))

    def end(self, status: str) -> None:
        self._waiting.put(_End(status))

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._notes.append(
                f"tracker '{self.name}' took more than {timeout_s:g} s to end; what it was still given may be lost"
            )

    def take_notes(self) -> list[str]:
        found, self._notes = self._notes, []
        return found

    def _work(self) -> None:
        while True:
            item = self._waiting.get()
            if isinstance(item, _End):
                self._safely("cannot be closed", self._tracker.close, item.status)
                return
            if not self._has_failed:
                self._has_failed = not self._safely("has failed, and is not fed any more", self._tracker.log, *item)

    def _safely(self, what: str, act: Any, *args: Any) -> bool:
        try:
            act(*args)
        except Exception as error:  # of somebody else's package and servers: the run matters more
            if not self._has_failed:
                self._notes.append(_said(self.name, what, error))
            return False
        return True


def _said(name: str, what: str, error: Exception) -> str:
    return f"tracker '{name}' {what}: {type(error).__name__}: {error}"
