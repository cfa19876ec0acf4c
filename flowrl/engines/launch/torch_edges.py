"""Weights edges between sites of the torch engine: from shards straight into the live parameters of copies that sample.

Which tensors there are, and along which dimension tensor parallelism has cut each, is read off the shards themselves and told to
the ranks that hold none, so that all of them make the same program (`flowrl.engines.reshard`).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from flowrl.engines.host_torch import TorchHost
from flowrl.engines.launch.board import Board
from flowrl.engines.launch.protocol import Site
from flowrl.engines.launch.torch_devices import GLOO, NCCL, PEERS, Devices
from flowrl.engines.mesh.weights import MeshWeights
from flowrl.engines.offload.state import local_of
from flowrl.engines.reshard.control import BoardControl
from flowrl.engines.reshard.dist import DistTransport
from flowrl.engines.reshard.peer_copy import PeerCopyTransport
from flowrl.engines.reshard.program import compile_program
from flowrl.engines.reshard.resharder import Resharder
from flowrl.engines.reshard.transports import Transport
from flowrl.errors import EngineError
from flowrl.mesh import Layout
from flowrl.planner.boxes import Holding
from flowrl.planner.reshard import reshard

HOW = "from shards straight into the samplers' parameters, box by box"


@dataclass(frozen=True, slots=True)
class Cut:
    """A parameter, as `flowrl.planner.boxes.Tensor`: what it is does not matter, only how it was cut."""

    name: str
    shape: tuple[int, ...]
    split_axis: int | None
    """That tensor parallelism has cut."""
    kind: str = "other"
    layer: int | None = None
    parts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Listed:
    """What one side has."""

    cuts: tuple[Cut, ...]
    dtypes: dict[str, str]
    is_whole: bool
    """Whether each rank has all of every tensor, whatever the site's layout says: vLLM takes its own part of them."""

    def lying(self, site: Site) -> Holding:
        """How the tensors lie on the ranks of the site."""
        return Holding(Layout(dp=len(site.ranks)) if self.is_whole else site.layout, site.ranks)


class Edges:
    """The edges of a job, each made when it is run first. All ranks of both sides call `run` together."""

    def __init__(self, board: Board, devices: Devices) -> None:
        self._board, self._devices = board, devices
        self._made: dict[tuple[Site, Site], Resharder] = {}
        self._groups: dict[tuple[Site, Site], dist.ProcessGroup] = {}
        self._wires: dict[tuple[Site, Site], str] = {}
        self._spare: dict[tuple[Site, Site], dist.ProcessGroup] = {}
        """Of NCCL, for edges that begin with copy engines."""
        self._mapped: dict[tuple[Site, Site], PeerCopyTransport] = {}
        self._pointers: dict[tuple[Site, Site], list[int]] = {}
        """Where this rank's tensors lay when each edge was run last."""
        self._runs: dict[tuple[Site, Site], int] = {}

    def connect(self, edges: Sequence[tuple[Site, Site]]) -> None:
        """Make the process group of each edge. All ranks of the job come here, with the edges in one order: torch names groups
        by their number in the process."""
        wait = timedelta(seconds=self._board.timeout_s)
        for edge in edges:
            ranks = sorted({rank for site in edge for rank in site.ranks})
            self._wires[edge] = wire = self._devices.wire(ranks)
            self._groups[edge] = dist.new_group(ranks, backend=NCCL if wire == NCCL else GLOO, timeout=wait)
            if wire == PEERS:
                self._spare[edge] = dist.new_group(ranks, backend=NCCL, timeout=wait)

    def how(self, source: Site, target: Site) -> str:
        """In words; of an edge that is connected also what carries it."""
        wire = self._wires.get((source, target))
        return HOW if wire is None else f"{HOW}, by {wire}"

    def close(self, meet: Callable[[], None]) -> None:
        """Let go of the memory of other ranks, then `meet` them: before that none of them may free its own."""
        for transport in self._mapped.values():
            transport.close()
        self._made.clear()
        if self._mapped:
            meet()
            self._mapped.clear()
            torch.cuda.ipc_collect()  # what was freed while others had it mapped

    def run(self, source: Site, giver: TorchHost | None, target: Site, taker: TorchHost | None, version: int) -> int:
        """Bring a version of the weights over; bytes that this rank took. Errors: those of `Resharder.run`."""
        key = (source, target)
        let_go = False
        if not self._stay(key, giver, taker):
            let_go = self._let_go(key)
            self._made[key] = self._make(source, giver, target, taker)
        ran = self._made[key].run(version)
        if let_go:
            torch.cuda.ipc_collect()  # all ranks have let go, since they have come to this run
        if taker is None:
            return 0
        taker.version = version
        return ran.received_bytes + ran.local_bytes

    def _let_go(self, edge: tuple[Site, Site]) -> bool:
        """Whether an edge that is made anew was mapped.

        [Note: What moves is not mapped] Memory that another rank has mapped is not free when it is parked. So an edge that has to
        be made anew, because a plan parks one of its ends, goes over NCCL from then on.
        """
        self._made.pop(edge, None)
        found = self._mapped.pop(edge, None)
        if found is None:
            return False
        found.close()
        self._wires[edge], self._groups[edge] = NCCL, self._spare[edge]
        return True

    def _stay(self, edge: tuple[Site, Site], giver: TorchHost | None, taker: TorchHost | None) -> bool:
        """Whether the tensors of all ranks lie where they lay. What was parked comes back to other memory, on one rank or on
        several, and then all make the edge anew."""
        board, number = self._board, self._runs.get(edge, 0)
        self._runs[edge] = number + 1
        here = [local_of(one).data_ptr() for host in (giver, taker) for one in _parameters(host).values()]
        stays, self._pointers[edge] = here == self._pointers.get(edge), here
        source, target = edge
        stem = f"run{board.num_runs}-{source.name}-{target.name}/stays"
        ranks = sorted({*source.ranks, *target.ranks})
        board.post(f"{stem}/{number}/{board.rank}", b"1" if stays else b"")
        said = board.get(
            [f"{stem}/{number}/{rank}" for rank in ranks], timeout_s=board.timeout_s,
            what=lambda missing: f"for new weights from {source.name} to {target.name}: {len(missing)} ranks have not come",
        )  # fmt: skip
        board.drop([f"{stem}/{number - 1}/{board.rank}"])  # who is here has read it
        return all(said)

    def _make(self, source: Site, giver: TorchHost | None, target: Site, taker: TorchHost | None) -> Resharder:
        board = self._board
        if board.folder is None:
            raise EngineError(f"weights from {source.name} to {target.name} need ranks, and this job has one")
        name = f"run{board.num_runs}-{source.name}-{target.name}.{self._runs[source, target]}"
        theirs = self._told(f"{name}/source", source.ranks[0], giver)
        mine = self._told(f"{name}/target", target.ranks[0], taker)
        edge = f"{source.name} -> {target.name}"
        cuts = cut_alike(theirs, mine, edge)
        found = reshard(cuts, theirs.lying(source), mine.lying(target))
        program = compile_program(
            cuts, found, source_dtype=lambda one: theirs.dtypes[one.name],
            target_dtype=lambda one: mine.dtypes[one.name], edge=edge,
        )  # fmt: skip
        control: BoardControl | MessageControl = MessageControl(board, f"{name}/agree", program.devices)
        if len({board.host_of[rank] for rank in program.devices}) == 1:
            path = board.folder / f"{name.replace('/', '_')}.board"
            control = BoardControl(path, program.devices, board.rank, timeout_s=board.timeout_s)
        return Resharder(
            program, board.rank, source=_parameters(giver), target=_parameters(taker),
            transport=self._transport((source, target), control), control=control, timeout_s=board.timeout_s,
        )  # fmt: skip

    def _transport(self, edge: tuple[Site, Site], control: BoardControl | MessageControl) -> Transport:
        group = self._groups[edge]
        if self._wires[edge] != PEERS or isinstance(control, MessageControl):
            return DistTransport(group=group, timeout_s=self._board.timeout_s)
        made = PeerCopyTransport(control, device=self._devices.own(), group=group)
        self._mapped[edge] = made
        return made

    def _told(self, key: str, teller: int, host: TorchHost | None) -> Listed:
        """What the first rank of a side lists."""
        board = self._board
        if board.rank == teller:
            assert host is not None
            listed = _listed(host)
            board.post(key, pickle.dumps(listed))
            return listed
        (data,) = board.get(
            [key], timeout_s=board.timeout_s, what=lambda _: f"for the tensors of rank {teller} ({key})"
        )
        found: Listed = pickle.loads(data)
        return found


class MessageControl:
    """See `flowrl.engines.reshard.control.Control`: agreement by the job's board, for devices on several hosts."""

    def __init__(self, board: Board, name: str, devices: Sequence[int]) -> None:
        self._board, self._name, self._devices = board, name, tuple(devices)
        self._attempt = self._count = 0
        self._last = ""

    def begin(self) -> None:
        self._attempt += 1
        self._count = 0

    def exchange(self, values: Sequence[int], what: str) -> list[list[int]]:
        self._count += 1
        board, key = self._board, f"{self._name}/{self._attempt}.{self._count}"
        mine = f"{key}/{board.rank}"
        board.post(mine, json.dumps([int(value) for value in values]).encode())

        def missing(keys: list[str]) -> str:
            return f"for devices {', '.join(one.rpartition('/')[2] for one in keys)} to come to {what}"

        found = board.get([f"{key}/{one}" for one in self._devices], timeout_s=board.timeout_s, what=missing)
        board.drop([self._last] if self._last else [])  # all have come here, so all have read what was before
        self._last = mine
        return [json.loads(data) for data in found]

    def fail(self) -> None:
        """Nothing: the rank that gave up fails, which ends the waits of all by the board."""


def _parameters(host: TorchHost | None) -> dict[str, Tensor]:
    return {} if host is None else {name: tensor.detach() for name, tensor in _leaders(host).items()}


def _leaders(host: TorchHost) -> dict[str, Any]:
    """The tensors that lead: masters where there are some, else the parameters themselves."""
    return dict(host.weights.masters) if host.trainer is not None else dict(host.weights.parameters)


def _listed(host: TorchHost) -> Listed:
    cuts, dtypes = [], {}
    for name, tensor in _leaders(host).items():
        cuts.append(Cut(name, tuple(tensor.shape), _split_axis(tensor)))
        dtypes[name] = str(tensor.dtype).removeprefix("torch.")
    return Listed(tuple(cuts), dtypes, not isinstance(host.weights, MeshWeights))


def cut_alike(source: Listed, target: Listed, edge: str) -> tuple[Cut, ...]:
    """The tensors with the dimension that tensor parallelism cuts on either side.

    Errors: EngineError where both sides cut one tensor in different ways: one of them may be cut where it does not divide.
    """
    theirs, mine = ({one.name: one.split_axis for one in side.cuts} for side in (source, target))
    both_cut = all(any(axis is not None for axis in side.values()) for side in (theirs, mine))
    found = []
    for one in source.cuts:
        axes = {theirs[one.name], mine.get(one.name)} - {None}
        if len(axes) > 1 or (both_cut and theirs[one.name] != mine.get(one.name)):
            raise EngineError(
                f"{edge}: tensor parallelism cuts '{one.name}' along {theirs[one.name]} on one side and along "
                f"{mine.get(one.name)} on the other; give both sites one tp, or one that divides its {one.shape[0]} rows"
            )
        found.append(replace(one, split_axis=axes.pop() if axes else None))
    return tuple(found)


def _split_axis(tensor: Tensor) -> int | None:
    """The dimension along which an axis "tp" of the tensor's mesh cuts it."""
    if not isinstance(tensor, DTensor):
        return None
    names = tensor.device_mesh.mesh_dim_names or ()
    for axis, placement in enumerate(tensor.placements):
        if names and names[axis] == "tp" and isinstance(placement, Shard):
            return placement.dim
    return None
