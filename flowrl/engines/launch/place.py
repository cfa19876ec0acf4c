"""How this process was started, read from its environment in one place.

FLOWRL_JOB=/dev/shm/...  RANK  WORLD_SIZE       by `flowrl run --nproc N` (`flowrl.engines.launch.spawn`), on one host
the same and FLOWRL_ACROSS={...}                by Ray, on several hosts
RANK  WORLD_SIZE  MASTER_ADDR  MASTER_PORT      by torchrun, on one host or several
nothing                                         by hand: a job of one rank
"""

from __future__ import annotations

import _thread
import atexit
import importlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.engines.launch.across import Across
from flowrl.engines.launch.board import INTERRUPT, Alone, Board, Failure
from flowrl.engines.launch.folder import FolderBoard, fail
from flowrl.errors import ConfigError

JOB = "FLOWRL_JOB"
ACROSS = "FLOWRL_ACROSS"
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""What torchrun sets, and nobody else."""
GRACE_S = 10.0
"""From the end of torchrun to that of a rank which does not end by itself."""
FAILED = 1
MEETING = "flowrl.engines.launch.meeting:meet"
"""Where processes that torchrun started agree on a folder, and on who is on which host; it imports torch."""


@dataclass(frozen=True, slots=True)
class Place:
    """This process in its job."""

    rank: int = 0
    world: int = 1
    job: str = ""
    """Folder of the job in this host's memory, where a launcher of FlowRL has made one."""
    across: Across | None = None
    """Of a job on several hosts, where a launcher of FlowRL has made it."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """Errors: ConfigError for numbers that make no sense."""
        try:
            place = cls(
                int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1")), environment.get(JOB, ""),
                Across.from_text(environment[ACROSS]) if environment.get(ACROSS) else None,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(f"RANK and WORLD_SIZE are whole numbers, which a launcher sets; {error}") from error
        if not 0 <= place.rank < place.world:
            unset = " (WORLD_SIZE is not set)" if "WORLD_SIZE" not in environment else ""
            raise ConfigError(
                f"RANK is from 0 to WORLD_SIZE - 1; found RANK={place.rank} and WORLD_SIZE={place.world}{unset}; a launcher sets "
                "both, and by hand neither is set"
            )
        return place

    def environment(self) -> dict[str, str]:
        """For a rank: what `of` reads, what torch reads besides, and where modules are found."""
        host_of = (0,) * self.world if self.across is None else self.across.host_of
        mates = [rank for rank, host in enumerate(host_of) if host == host_of[self.rank]]
        return {
            "RANK": str(self.rank), "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(mates.index(self.rank)), "LOCAL_WORLD_SIZE": str(len(mates)),
            JOB: self.job, ACROSS: "" if self.across is None else self.across.to_text(),
            "PYTHONPATH": os.pathsep.join(module_paths()),
        }  # fmt: skip


def module_paths() -> list[str]:
    """Where this process finds modules, for ranks that are to find the same."""
    return list(dict.fromkeys([*(os.path.abspath(path) for path in sys.path if path), os.getcwd()]))


_joined: list[Board] = []
"""The job of this process, once it has joined it: there is one in a process's life."""


def join(*, timeout_s: float) -> Board:
    """The board of the job that this process is a rank of; it leaves the job when Python ends.

    Errors: ConfigError for an environment that makes no sense; RunError when the job has gone.
    """
    if not _joined:
        _joined.append(_join(Place.of(os.environ), timeout_s))
        atexit.register(_joined[0].close)
    return _joined[0]


def _join(place: Place, timeout_s: float) -> Board:
    if place.across is not None:
        from flowrl.engines.launch.hub import HubBoard  # loads what a job on one host needs not

        return HubBoard(place.across, Path(place.job), place.rank, place.world)
    if place.job:
        return FolderBoard(Path(place.job), place.rank, place.world)
    if place.world == 1:
        return Alone()
    module, _, name = MEETING.partition(":")
    meet: Any = getattr(importlib.import_module(module), name)
    _end_in_order()
    launcher = os.getppid()
    board: Board = meet(place.rank, place.world, timeout_s=timeout_s)
    if TORCHRUN in os.environ:  # else whoever started this process may rightly be gone
        threading.Thread(target=_end_with, args=(launcher, board), name="flowrl-launcher", daemon=True).start()
    return board


def _end_with(launcher: int, board: Board) -> None:
    """End this rank when torchrun is gone, however it ended: it would train on for nobody."""
    try:
        descriptor = os.pidfd_open(launcher)
    except OSError:  # gone already
        pass
    else:
        select.select([descriptor], [], [])
        os.close(descriptor)
    board.fail(Failure(board.rank, board.place, f"{INTERRUPT}: torchrun has ended"))
    _thread.interrupt_main()  # the run is written to its end
    time.sleep(GRACE_S)
    os._exit(FAILED)  # the main thread waits in a call that cannot be interrupted


def _end_in_order() -> None:
    """What torchrun ends (SIGTERM, when another rank has failed) gives back its memory before it goes."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit("ended by SIGTERM, as torchrun ends all ranks when one has failed or is gone")


def tell_failure(failure: Failure) -> None:
    """Tell the job of this process, joined or not, that it failed; an earlier failure stays the first."""
    place = Place.of(os.environ)
    if _joined:
        _joined[0].fail(failure)
    elif place.across is not None:
        from flowrl.engines.launch.hub import tell

        tell(place.across, failure)
    elif place.job:
        fail(Path(place.job), failure)
