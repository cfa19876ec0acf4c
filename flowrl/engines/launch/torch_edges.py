"""Weights edges between sites of the torch engine: from shards straight into the live parameters of copies that sample.

Which tensors there are, and along which dimension tensor parallelism has cut each, is read off the shards themselves and told to
the ranks that hold none, so that all of them make the same program (`flowrl.engines.reshard`).
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from flowrl.engines.host_torch import TorchHost
from flowrl.engines.launch.board import Board
from flowrl.engines.launch.protocol import Site
from flowrl.engines.reshard.control import BoardControl
from flowrl.engines.reshard.dist import DistTransport
from flowrl.engines.reshard.program import compile_program
from flowrl.engines.reshard.resharder import Resharder
from flowrl.errors import EngineError
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


class Edges:
    """The edges of a job, each made when it is run first. All ranks of both sides call `run` together."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._made: dict[tuple[Site, Site], Resharder] = {}
        self._groups: dict[tuple[Site, Site], dist.ProcessGroup] = {}

    def connect(self, edges: Sequence[tuple[Site, Site]]) -> None:
        """Make the process group of each edge. All ranks of the job come here, with the edges in one order: torch names groups
        by their number in the process."""
        for source, target in edges:
            self._groups[source, target] = dist.new_group(sorted({*source.ranks, *target.ranks}))

    def run(self, source: Site, giver: TorchHost | None, target: Site, taker: TorchHost | None, version: int) -> int:
        """Bring a version of the weights over; bytes that this rank took. Errors: those of `Resharder.run`."""
        key = (source, target)
        if key not in self._made:
            self._made[key] = self._make(source, giver, target, taker)
        ran = self._made[key].run(version)
        if taker is None:
            return 0
        taker.version = version
        return ran.received_bytes + ran.local_bytes

    def _make(self, source: Site, giver: TorchHost | None, target: Site, taker: TorchHost | None) -> Resharder:
        board = self._board
        if board.folder is None:
            raise EngineError(f"weights from {source.name} to {target.name} need ranks, and this job has one")
        name = f"run{board.num_runs}-{source.name}-{target.name}"
        theirs = self._told(f"{name}/source", source.ranks[0], giver)
        mine = self._told(f"{name}/target", target.ranks[0], taker)
        found = reshard(theirs.cuts, Holding(source.layout, source.ranks), Holding(target.layout, target.ranks))
        program = compile_program(
            theirs.cuts, found, source_dtype=lambda one: theirs.dtypes[one.name],
            target_dtype=lambda one: mine.dtypes[one.name], edge=f"{source.name} -> {target.name}",
        )  # fmt: skip
        control: BoardControl | MessageControl = MessageControl(board, f"{name}/agree", program.devices)
        if len({board.host_of[rank] for rank in program.devices}) == 1:
            path = board.folder / f"{name.replace('/', '_')}.board"
            control = BoardControl(path, program.devices, board.rank, timeout_s=board.timeout_s)
        return Resharder(
            program, board.rank, source=_parameters(giver), target=_parameters(taker),
            transport=DistTransport(group=self._groups[source, target], timeout_s=board.timeout_s),
            control=control, timeout_s=board.timeout_s,
        )  # fmt: skip

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
    return Listed(tuple(cuts), dtypes)


def _split_axis(tensor: Tensor) -> int | None:
    """The dimension along which an axis "tp" of the tensor's mesh cuts it."""
    if not isinstance(tensor, DTensor):
        return None
    names = tensor.device_mesh.mesh_dim_names or ()
    for axis, placement in enumerate(tensor.placements):
        if names and names[axis] == "tp" and isinstance(placement, Shard):
            return placement.dim
    return None
