"""How this process was started, read from its environment in one place.

FLOWRL_JOB=/dev/shm/...  RANK  WORLD_SIZE       by `flowrl run --nproc N` (`flowrl.engines.launch.spawn`)
RANK  WORLD_SIZE  MASTER_ADDR  MASTER_PORT      by torchrun
nothing                                         by hand: a job of one rank
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flowrl.engines.launch.board import Alone, Board
from flowrl.engines.launch.folder import FolderBoard
from flowrl.errors import ConfigError

JOB = "FLOWRL_JOB"
MEETING = "flowrl.engines.launch.meeting:folder_of_job"
"""Where processes that torchrun started agree on a folder; it imports torch."""


@dataclass(frozen=True, slots=True)
class Place:
    """This process in its job."""

    rank: int = 0
    world: int = 1
    job: str = ""
    """Folder of the job, where a launcher of FlowRL has made one."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """Errors: ConfigError for numbers that make no sense."""
        try:
            place = cls(
                int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1")), environment.get(JOB, "")
            )
        except ValueError as error:
            raise ConfigError(f"RANK and WORLD_SIZE are whole numbers, which a launcher sets; {error}") from error
        if not 0 <= place.rank < place.world:
            raise ConfigError(f"RANK is from 0 to WORLD_SIZE - 1; found RANK={place.rank} and WORLD_SIZE={place.world}")
        return place

    def environment(self) -> dict[str, str]:
        """For a rank whose job is all on one host: what `of` reads, what torch reads besides, and where modules are found."""
        rank, world = str(self.rank), str(self.world)
        return {
            "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, JOB: self.job,
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
    if place.job:
        return FolderBoard(Path(place.job), place.rank, place.world)
    if place.world == 1:
        return Alone()
    module, _, name = MEETING.partition(":")
    folder: Path = getattr(importlib.import_module(module), name)(place.rank, place.world, timeout_s=timeout_s)
    return FolderBoard(folder, place.rank, place.world)
