"""Ranks that fail together: a wait says what it waits for, and the first error of any rank ends the others.

    rank 1   raises OperatorError ----> store: failure/1 = "rank 1, at gradients of 'policy': OperatorError: ..."
    rank 0   waits in a collective      its watcher sees failure/1, aborts the process groups;
                                        the wait raises EngineError naming rank 1 and its error

[Note: A wait that cannot be aborted]
NCCL ends its waits when a process group is aborted; gloo does so only when the other process is gone. A rank that still
waits `grace_s` after another one has failed prints the first error and ends its process: no job hangs on a dead one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from flowrl.errors import EngineError, WaitTimeout

EXIT_CODE = 70
"""Of a process that could not be woken (EX_SOFTWARE of sysexits.h)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first error of a job."""

    rank: int
    at: str
    """What that rank was doing."""
    error: str
    """Type and first line."""

    def __str__(self) -> str:
        return f"rank {self.rank} failed first, at {self.at or 'nothing named'}: {self.error}"


@dataclass(frozen=True, slots=True)
class Patience:
    """How long ranks wait for each other, in seconds."""

    timeout_s: float = 600.0
    """For a collective."""
    poll_s: float = 0.5
    """Between two looks at whether another rank has failed."""
    grace_s: float = 5.0
    """From another rank's failure to the end of a process whose wait cannot be aborted."""


class Guard:
    """Tells ranks of each other's failures through the job's key-value store."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], patience: Patience) -> None:
        self.rank = rank
        self.ranks = tuple(ranks)
        self.patience = patience
        self.failure: Failure | None = None
        self._store = store
        client: Any = store
        self._own_store: Store = client.clone()  # a client of its own: the other's lock may be held by a wait
        self._at: list[str] = []
        self._groups: list[dist.ProcessGroup] = []
        self._ended = threading.Event()
        self._left = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="flowrl-guard", daemon=True)
        self._watcher.start()

    def watch_over(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Process groups to abort when a rank has failed; their waits get this guard's timeout."""
        for group in groups:
            set_timeout(group, self.patience.timeout_s)
        self._groups.extend(groups)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around work in which ranks wait for each other.

        An error inside is told to the other ranks. Errors: EngineError naming the rank that failed first, if it was another;
        WaitTimeout naming `what` and where the other ranks are; else the error itself.
        """
        self._refuse(what)
        self._at.append(what)
        self._tell(f"at/{self.rank}", what)
        try:
            yield
        except BaseException as error:
            explained = self._explained(error, what)
            if explained is error:
                raise
            raise explained from error
        finally:
            self._at.pop()
            if not self._at:
                self._left.set()
                self._left = threading.Event()

    def close(self) -> None:
        """End the watcher; the process groups stay."""
        self._ended.set()
        self._watcher.join(self.patience.grace_s)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _refuse(self, what: str) -> None:
        if self.failure is not None:
            raise EngineError(f"{what} cannot begin: {self.failure}; the job has ended, start it anew")

    def _explained(self, error: BaseException, what: str) -> BaseException:
        failure = self._first(error, what)
        text = first_line(error)
        if failure.rank != self.rank:
            return EngineError(f"{failure}; rank {self.rank} was at {what} ({text})")
        if not isinstance(error, RuntimeError) or not is_of_collective(error):
            return error
        if is_timeout(error):
            return WaitTimeout(
                f"rank {self.rank} waited {self.patience.timeout_s:g} s for {what}; {self._others()}; all ranks must come to "
                f"it: look at those that are elsewhere, or raise timeout_s ({text})"
            )
        return EngineError(f"rank {self.rank} lost another rank while it waited for {what}; {self._others()} ({text})")

    def _first(self, error: BaseException, what: str) -> Failure:
        """The first failure of the job; this one, when no other rank has failed yet."""
        mine = Failure(self.rank, what, first_line(error))
        if self.failure is not None:
            return self.failure
        try:
            number = self._store.add("failures", 1)
            if number == 1:
                self._store.set("failure", json.dumps(asdict(mine)))
                self.failure = mine
            else:
                self._store.wait(["failure"], timedelta(seconds=self.patience.grace_s))
                self.failure = _read(self._store.get("failure"))
        except (RuntimeError, dist.DistError, ValueError):  # the store went with the rank that held it
            self.failure = mine
        return self.failure

    def _tell(self, key: str, text: str) -> None:
        try:
            self._store.set(key, text)
        except (RuntimeError, dist.DistError) as error:
            raise EngineError(f"rank {self.rank} lost the job's store, and with it the rank that held it") from error

    def _others(self) -> str:
        """Where the other ranks are, as far as they said."""
        places = []
        for rank in self.ranks:
            key = f"at/{rank}"
            try:
                at = self._store.get(key).decode() if self._store.check([key]) else "not there yet"
            except (RuntimeError, dist.DistError):
                return "where the others are is not known: the job's store is gone"
            if rank != self.rank:
                places.append(f"rank {rank} was last at {at}")
        return ", ".join(places) or "there is no other rank"

    def _watch(self) -> None:
        while not self._ended.wait(self.patience.poll_s):
            try:
                if not self._own_store.check(["failure"]):
                    continue
                self.failure = self.failure or _read(self._own_store.get("failure"))
            except (RuntimeError, dist.DistError):
                # whoever held the store has ended: rightly, when this rank waits for nobody
                if not self._at:
                    continue
                self.failure = self.failure or Failure(-1, "", "the process that held the job's store has ended")
            if self.failure.rank != self.rank:
                self._end_waits(self.failure)
            return

    def _end_waits(self, failure: Failure) -> None:
        for group in self._groups:
            attempt(group.abort)
        left = self._left
        if self._at and not left.wait(self.patience.grace_s) and not self._ended.is_set():
            print(
                f"flowrl: {failure}; rank {self.rank} waits at {self._at[-1]} and cannot be woken, so its process ends",
                file=sys.stderr,
                flush=True,
            )
            os._exit(EXIT_CODE)


def set_timeout(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Longest wait of a process group's collectives."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timedelta(seconds=timeout_s), group)


def attempt(function: Callable[[], Any]) -> None:
    """Call what may fail because its work is done already."""
    try:
        function()
    except (RuntimeError, dist.DistError):
        traceback.print_exc()


def is_of_collective(error: BaseException) -> bool:
    """Whether an error comes from ranks that did not meet."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "connection", "timed out", "socket", "process group"))


def is_timeout(error: BaseException) -> bool:
    """Whether a collective waited too long."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


def first_line(error: BaseException) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")


def _read(data: bytes) -> Failure:
    return Failure(**json.loads(data.decode()))
