"""How the ranks of an edge agree: small numbers to all, and word of a failure. No weights pass here.

Three ways: threads of one process (`LoopControl`), processes of one machine that share a page of memory (`BoardControl`), and a
process group (`GroupControl` in `dist`).
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flowrl.errors import EngineError, WaitTimeout

SPIN_S = 2e-3
"""A wait looks again at once for this long; after that it naps in between."""
NAP_S = 5e-5


class Control(Protocol):
    """One rank's end. Every rank calls `begin` and `exchange` in the same order."""

    def begin(self) -> None:
        """A new attempt: failures of earlier ones are forgotten."""
        ...

    def exchange(self, values: Sequence[int], what: str) -> list[list[int]]:
        """The values of every device, in the order of the devices. Errors: WaitTimeout that says who did not come to `what`;
        EngineError when another device has failed."""
        ...

    def fail(self) -> None:
        """Tell the others that this device gave up."""
        ...


class Late:
    """A time by which something must have happened."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._began = time.monotonic()

    @property
    def left_s(self) -> float:
        return max(0.0, self.timeout_s - (time.monotonic() - self._began))

    def wait(self, is_done: Callable[[], bool], message: Callable[[], str], *, spin_s: float = SPIN_S) -> None:
        """Until `is_done`; looks again at once for `spin_s`. Errors: WaitTimeout with the message."""
        while not is_done():
            passed = time.monotonic() - self._began
            if passed > self.timeout_s:
                raise WaitTimeout(f"{message()} within {self.timeout_s:g} s")
            if passed > spin_s:
                pause()


def pause() -> None:
    """Between two looks."""
    time.sleep(NAP_S)


# --------------------------------------------------------------------------------------------------------- one process


class Loop:
    """What the ranks of one process share; each is run by a thread of its own."""

    def __init__(self, devices: Sequence[int], *, timeout_s: float = 30.0) -> None:
        self.devices = tuple(devices)
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.said: dict[tuple[int, int], dict[int, list[int]]] = {}
        """(attempt, number of the exchange) -> values by device."""
        self.failed: dict[int, int] = {}
        """Attempt -> the first device that gave up."""
        self.mail: dict[tuple[int, int, int, int], list[Any]] = {}
        """(attempt, bucket, sender, receiver) -> tensors that were sent and not yet taken."""
        self.taken: dict[tuple[int, int, int, int], Any] = {}
        """The same -> what the sender waits for on a GPU before it writes there again."""

    def wait(self, attempt: int, is_done: Callable[[], bool], message: Callable[[], str]) -> None:
        """With the lock held. Errors: as of `Control.exchange`."""
        late = Late(self.timeout_s)
        while not is_done():
            if attempt in self.failed:
                raise EngineError(f"device {self.failed[attempt]} gave up, so that {message()}")
            if not self.changed.wait(late.left_s) and not is_done():
                raise WaitTimeout(f"{message()} within {self.timeout_s:g} s")

    def forget(self, attempt: int) -> None:
        """With the lock held: drop what attempts before this one have left."""
        self.said = {key: values for key, values in self.said.items() if key[0] >= attempt}
        self.mail = {key: tensors for key, tensors in self.mail.items() if key[0] >= attempt}
        self.taken = {key: mark for key, mark in self.taken.items() if key[0] >= attempt}


class LoopControl:
    """The end of one thread."""

    def __init__(self, loop: Loop, device: int) -> None:
        self.loop, self.device = loop, device
        self.attempt = 0
        self._count = 0

    def begin(self) -> None:
        self.attempt += 1
        self._count = 0

    def exchange(self, values: Sequence[int], what: str) -> list[list[int]]:
        self._count += 1
        loop = self.loop
        with loop.changed:
            said = loop.said.setdefault((self.attempt, self._count), {})
            said[self.device] = list(values)
            loop.changed.notify_all()

            def missing() -> list[int]:
                return [device for device in loop.devices if device not in said]

            loop.wait(self.attempt, lambda: not missing(), lambda: f"devices {missing()} did not come to {what}")
            loop.forget(self.attempt)
            return [said[device] for device in loop.devices]

    def fail(self) -> None:
        with self.loop.changed:
            self.loop.failed.setdefault(self.attempt, self.device)
            self.loop.changed.notify_all()


# --------------------------------------------------------------------------------------------------------- one machine

_ATTEMPT = 2**20
"""Counters of an attempt begin at its number times this, so that those of earlier ones are always smaller."""


class BoardControl:
    """A page of shared memory on which every process writes lines of its own and reads those of all. Values are written before
    the count that announces them; a reader sees them in that order on processors that keep the order of stores, as x86 does.

    A line has: how far its exchanges are, the attempt that failed, how far it has packed and pulled, and the values of the last
    two exchanges (two, because the slowest reader may still be at the one before).
    """

    EXCHANGED, FAILED, PACKED, PULLED, VALUES = range(5)

    def __init__(
        self, path: str | Path, devices: Sequence[int], device: int, *, width: int = 2048, timeout_s: float = 60.0
    ) -> None:
        """`path` names a file that all processes open, best in `/dev/shm`; the first one makes it. It must be a new one for each
        edge of each job: `flowrl.engines.reshard.dist.board_for` sees to that. `width`: most values of an exchange."""
        self.devices, self.device, self.width, self.timeout_s = tuple(devices), device, width, timeout_s
        self.attempt = 0
        self._count = 0
        line = self.VALUES + 2 * (width + 1)
        size = 8 * line * len(self.devices)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(descriptor).st_size < size:
                os.ftruncate(descriptor, size)
            self._memory = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._lines = np.frombuffer(self._memory, dtype=np.int64).reshape(len(self.devices), line)
        self._row = {device: row for row, device in enumerate(self.devices)}

    def begin(self) -> None:
        self.attempt += 1
        self._count = 0

    def exchange(self, values: Sequence[int], what: str) -> list[list[int]]:
        if len(values) > self.width:
            raise EngineError(f"an exchange of {len(values)} numbers needs a board of that width; found {self.width}")
        self._count += 1
        first = self.VALUES + (self._count % 2) * (self.width + 1)
        mine = self._lines[self._row[self.device]]
        mine[first] = len(values)
        mine[first + 1 : first + 1 + len(values)] = values
        goal = self.attempt * _ATTEMPT + self._count
        mine[self.EXCHANGED] = goal
        for device in self.devices:
            self._wait(device, self.EXCHANGED, goal, f"come to {what}")
        return [[int(value) for value in line[first + 1 : first + 1 + int(line[first])]] for line in self._lines]

    def fail(self) -> None:
        self._lines[self._row[self.device], self.FAILED] = self.attempt

    def post(self, field: int, count: int) -> None:
        """Say how far this device is with what a field counts."""
        self._lines[self._row[self.device], field] = self.attempt * _ATTEMPT + count

    def await_(self, device: int, field: int, count: int, what: str) -> None:
        """Until another device has posted at least `count`. Errors: as of `exchange`."""
        self._wait(device, field, self.attempt * _ATTEMPT + count, what)

    def _wait(self, device: int, field: int, goal: int, what: str) -> None:
        line, failed = self._lines[self._row[device]], self._lines[:, self.FAILED]

        def is_done() -> bool:
            if line[field] >= goal:
                return True
            for row in np.flatnonzero(failed == self.attempt):
                raise EngineError(f"device {self.devices[row]} gave up, so that device {device} did not {what}")
            return False

        Late(self.timeout_s).wait(is_done, lambda: f"device {device} did not {what}")
