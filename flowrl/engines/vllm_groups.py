"""The process groups of vLLM, beside those of the job.

vLLM takes whatever default process group it finds for its own, makes groups of all of its ranks, and destroys all there is when
it ends. A rank that also trains has groups that are none of vLLM's business. So while vLLM runs, `torch.distributed` shows it a
world of its own, with the ranks of one engine only:

    rank 2 of a job     default group of 4 ranks; groups of meshes and edges
      inside()          default group of the engine: 1 rank, or those of its tensor parallelism

Code that reads the state of `torch.distributed` finds it in one object of the module, which is another one meanwhile. Process
groups themselves do not look there: watchdogs and waits of other threads go on.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, _unregister_process_group
from torch.distributed import distributed_c10d

from flowrl.errors import EngineError

FIRST_NAME = 1_000_000_000
"""Groups are named by number, and torch keeps one list of names for the process: those of a world begin here, or later."""
NAMES = 10_000
"""Names that a world may use."""


@dataclass(frozen=True, slots=True)
class Team:
    """The ranks of one vLLM engine.

    Example:
        Team()                                                      # this process alone
        Team(rank=1, size=2, device=1, key="policy/0", store=store)
    """

    rank: int = 0
    """Of this process, in the team."""
    size: int = 1
    """Its tensor parallelism."""
    device: int = 0
    """Number of the GPU, where there are any."""
    key: str = ""
    """Equal on all ranks of the team, unlike that of any other team that shares the store."""
    store: Store | None = None
    """In which the ranks meet; needed when there are several."""
    timeout_s: float = 600.0
    """Longest wait for each other."""

    def is_like(self, other: Team) -> bool:
        """Whether two engines of one process may have the same groups."""
        return (self.rank, self.size, self.device) == (other.rank, other.size, other.device)


@dataclass(eq=False)
class World:
    """State of `torch.distributed`, as `torch.distributed.distributed_c10d` looks at it."""

    group_count: int
    default_pg: Any = None
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_names: dict[Any, Any] = field(default_factory=dict)
    pg_group_ranks: dict[Any, Any] = field(default_factory=dict)
    pg_backend_config: dict[Any, Any] = field(default_factory=dict)
    tags_to_pg: dict[Any, Any] = field(default_factory=dict)
    pg_to_tag: dict[Any, Any] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, Any] = field(default_factory=dict)
    comms: list[Any] = field(default_factory=list)


_opened: dict[str, int] = {}
"""Key -> worlds that were made with it in this process."""


class OwnGroups:
    """The world of the vLLM engines of this process."""

    def __init__(self, team: Team, backend: str) -> None:
        """`backend`: of the device. A team of several ranks meets here."""
        if team.size > 1 and team.store is None:
            raise EngineError(f"a vLLM engine on {team.size} ranks needs a store in which they meet")
        self.team = team
        number = _opened[team.key] = _opened.get(team.key, 0) + 1
        self._first = FIRST_NAME + NAMES * (zlib.crc32(f"{team.key}/{number}".encode()) % FIRST_NAME)
        self._world = World(self._first)
        self._depth = 0
        with self.inside():
            store = HashStore() if team.store is None else PrefixStore(f"vllm/{team.key}/{number}", team.store)
            dist.init_process_group(
                backend, store=store, rank=team.rank, world_size=team.size, timeout=timedelta(seconds=team.timeout_s)
            )

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While open, `torch.distributed` has these groups only."""
        if self._depth:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
            return
        module: Any = distributed_c10d
        kept = {name: getattr(module, name, None) for name in _STATE}
        hook = sys.excepthook
        module._world, module._unregister_all_process_groups = self._world, self._unregister
        self._depth = 1
        try:
            yield
        finally:
            self._depth = 0
            for name, value in kept.items():
                setattr(module, name, value)
            sys.excepthook = hook  # a group that is made puts its rank before what is printed

    def close(self) -> None:
        """Destroy what is left."""
        with self.inside():
            if dist.is_initialized():
                dist.destroy_process_group()

    def _unregister(self) -> None:
        """Instead of forgetting all names of the process."""
        for number in range(self._first, self._world.group_count):
            try:
                _unregister_process_group(str(number))  # type: ignore[arg-type]
            except RuntimeError:  # a group that was destroyed by itself
                continue


_STATE = ("_world", "_unregister_all_process_groups", "_backend", "_default_pg_init_method")
"""What of the module changes, inside."""


def executor_of(team: Team) -> type:
    """An executor of vLLM for one rank of a team: one worker in this process, whose groups are there already."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class TeamExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            # the address is none, but what comes behind the last colon names the team's shared memory
            return f"flowrl:{team.key.replace('/', '-')}", team.rank, team.device

    return TeamExecutor
