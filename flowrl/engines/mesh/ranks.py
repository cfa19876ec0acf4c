"""A flowrl layout as process groups of torch: which rank is where, and what ranks tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh

from flowrl.engines.mesh.guard import Guard, Patience
from flowrl.errors import ConfigError, EngineError
from flowrl.mesh import Layout
from flowrl.mesh.layout import Coordinate

AXES = ("dp", "fsdp", "tp")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class RankMesh:
    """The ranks of one layout, seen from one of them.

    Example:
        mesh = RankMesh.join(Layout.parse("f2t2"), "policy")         # on every process of the job
    """

    name: str
    layout: Layout
    ranks: tuple[int, ...]
    """Rank in the job of each rank of the layout."""
    rank: int
    """This process, in the layout."""
    device: torch.device
    axes: DeviceMesh
    """[dp, fsdp, tp] ranks, axes named so; an axis of size 1 is there too."""
    guard: Guard
    control: dist.ProcessGroup
    """Between the hosts (gloo): numbers and objects, never weights."""

    @classmethod
    def join(
        cls,
        layout: Layout,
        name: str,
        *,
        device: torch.device | str | None = None,
        ranks: Sequence[int] | None = None,
        patience: Patience | None = None,
    ) -> RankMesh | None:
        """Build the mesh; every process of the job calls this, in the same order for all its meshes.

        Args:
            name: of the mesh, unique in the job; in errors.
            device: of this process; None takes `cuda:<current>` where the job's backend is NCCL, else the CPU.
            ranks: ranks in the job, rising, in the order of the layout; None takes all of them.

        Returns None on a process that is not of the mesh.
        Errors: EngineError when torch.distributed is not initialised; ConfigError when layout and ranks do not fit.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise EngineError(
                f"mesh '{name}' needs torch.distributed: call torch.distributed.init_process_group first (torchrun sets what it "
                "reads)"
            )
        world = dist.get_world_size()
        chosen = tuple(range(world)) if ranks is None else tuple(ranks)
        _check(layout, name, chosen, world, is_all=ranks is None)
        patience = patience or Patience()
        place = _device(device)
        grid = torch.tensor(
            [
                [
                    [chosen[layout.rank(Coordinate(dp, 0, fsdp, tp))] for tp in range(layout.tp)]
                    for fsdp in range(layout.fsdp)
                ]
                for dp in range(layout.dp)
            ]
        )
        axes = DeviceMesh(place.type, grid, mesh_dim_names=AXES)
        control = dist.new_group(list(chosen), backend="gloo")
        me = dist.get_rank()
        if me not in chosen:
            return None
        groups = [axes.get_group(axis) for axis in AXES]
        guard = Guard(_store(name), chosen.index(me), range(len(chosen)), patience)
        guard.watch_over([*groups, control])
        return cls(name, layout, chosen, chosen.index(me), place, axes, guard, control)

    @property
    def at(self) -> Coordinate:
        """Where this rank stands."""
        return self.layout.coordinate(self.rank)

    @property
    def data_size(self) -> int:
        """Ranks that see different rows."""
        return self.layout.dp * self.layout.fsdp

    @property
    def data_rank(self) -> int:
        """Which share of the rows this rank sees; ranks of one tp group see the same."""
        return self.at.dp * self.layout.fsdp + self.at.fsdp

    @property
    def is_first_of_tp(self) -> bool:
        """Whether this rank speaks for its tp group, whose ranks compute the same numbers."""
        return self.at.tp == 0

    @property
    def shard_axes(self) -> DeviceMesh:
        """What `fully_shard` gets: copies along dp, if there are any, and cuts along fsdp."""
        return self.axes["dp", "fsdp"] if self.layout.dp > 1 else self.axes["fsdp"]

    @property
    def tp_axis(self) -> DeviceMesh:
        return self.axes["tp"]

    def exchange(self, value: T, what: str) -> list[T]:
        """What every rank gives, in the order of ranks. Values are pickled."""
        if len(self.ranks) == 1:
            return [value]
        found: list[Any] = [None] * len(self.ranks)
        with self.guard.waiting(what):
            dist.all_gather_object(found, value, group=self.control)
        return found

    def total(self, array: np.ndarray, what: str) -> np.ndarray:
        """The sum over ranks of an array, a tp group's counted once."""
        if len(self.ranks) == 1:
            return array
        mine = torch.from_numpy(np.ascontiguousarray(array if self.is_first_of_tp else np.zeros_like(array)))
        with self.guard.waiting(what):
            dist.all_reduce(mine, group=self.control)
        found: np.ndarray = mine.numpy()
        return found

    def close(self) -> None:
        """Watch no longer. The process groups are the job's: `torch.distributed.destroy_process_group` ends them."""
        self.guard.close()


def local_part(whole: Tensor, like: Any) -> Tensor:
    """What this rank holds of a whole tensor that is laid out as a sharded one is: a view.

    Where tp and fsdp cut one dimension, tp cuts first and fsdp cuts its block (see `Layout`).
    """
    mesh, part = like.device_mesh, whole
    names = mesh.mesh_dim_names or ()
    for axis in sorted(range(mesh.ndim), key=lambda axis: names[axis] != "tp"):
        placement = like.placements[axis]
        if placement.is_replicate() or placement.is_partial():
            continue
        dim = placement.dim
        mine = _interval(part.shape[dim], mesh.size(axis), mesh.get_local_rank(axis))
        part = part.narrow(dim, mine.start, len(mine))
    return part


def whole_of(sharded: Any) -> Tensor:
    """All of a sharded tensor, on every rank of its mesh: the inverse of `local_part`. Gathers over fsdp, then over tp."""
    mesh, part = sharded.device_mesh, sharded.detach().to_local()
    names = mesh.mesh_dim_names or ()
    tp_first = sorted(range(mesh.ndim), key=lambda axis: names[axis] != "tp")
    extents: dict[int, int] = {}  # axis -> length along its dimension before this axis cut it
    shape = list(sharded.shape)
    for axis in tp_first:
        placement = sharded.placements[axis]
        if not (placement.is_replicate() or placement.is_partial()):
            extents[axis] = shape[placement.dim]
            shape[placement.dim] = len(_interval(shape[placement.dim], mesh.size(axis), mesh.get_local_rank(axis)))
    for axis in reversed([axis for axis in tp_first if axis in extents]):
        dim, size = sharded.placements[axis].dim, mesh.size(axis)
        if size == 1:
            continue
        lengths = list(part.shape)
        lengths[dim] = -(-extents[axis] // size)
        padded = part.new_zeros(lengths)
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded, group=mesh.get_group(axis))
        part = torch.cat(parts, dim).narrow(dim, 0, extents[axis])
    return part


def _interval(length: int, parts: int, index: int) -> range:
    """What part `index` gets of a length, as `torch.chunk` deals it: the first parts are full, the last short or empty."""
    step = -(-length // parts)
    return range(min(index * step, length), min((index + 1) * step, length))


def _check(layout: Layout, name: str, ranks: tuple[int, ...], world: int, *, is_all: bool) -> None:
    if layout.pp > 1:
        raise ConfigError(f"mesh '{name}': the torch engine has no pipeline stages; found layout {layout}; use pp 1")
    if len(ranks) != layout.size:
        whose = f"the job has {world} processes" if is_all else f"{len(ranks)} ranks were given"
        raise ConfigError(
            f"mesh '{name}': layout {layout} needs {layout.size} ranks, and {whose}; start as many processes or change the layout"
        )
    if list(ranks) != sorted(set(ranks)) or not all(0 <= rank < world for rank in ranks):
        # a process group of torch counts its members by rank, whatever order they are given in: parts would change places
        raise ConfigError(f"mesh '{name}' needs different, rising ranks from 0 to {world - 1}; found {list(ranks)}")


def _device(asked: torch.device | str | None) -> torch.device:
    if asked is not None:
        return torch.device(asked)
    if "nccl" in str(dist.get_backend()):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _store(name: str) -> Store:
    from torch.distributed.distributed_c10d import _get_default_store

    return PrefixStore(f"flowrl/{name}", _get_default_store())
