"""Which device each rank of a job works on, and what carries tensors between two of them.

    LOCAL_RANK=1, 8 GPUs       cuda:1
    LOCAL_RANK=1, 1 GPU        cuda:0: a launcher that shows each rank a GPU of its own (two ranks on one GPU are refused later)
    no GPU, or Model(device="cpu") for all models of the run       cpu

    weights edge on CPUs                                   gloo
    between GPUs of one host that read each other          copy engines
    other GPUs                                             NCCL

[Note: NCCL beside gloo, bound to no device] The job's group has both, and NCCL makes a communicator when a group is used first.
Were the group bound to a device (`device_id`), torch would split every further group off its communicator, with all ranks of the
job: a rank that is not of a group of gloo would wait for a split that the group's members never make.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from flowrl.engines.launch.board import Board
from flowrl.errors import ConfigError, EngineError
from flowrl.model import Model

GLOO, NCCL, PEERS = "gloo", "nccl", "copy engines"
BOTH = "cpu:gloo,cuda:nccl"


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank works."""

    rank: int
    host: str
    device: str
    """`cuda:1`, or `cpu`."""
    uuid: str = ""
    """Of its GPU."""
    reaches: frozenset[str] = frozenset()
    """Of the GPUs whose memory it can map."""


class Devices:
    """The devices of a job, from one of its ranks."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._seats: tuple[Seat, ...] = ()
        self.on_gpu = False
        """Whether any model of the run is on one."""

    def look_at(self, model: Model) -> str:
        """Take note of a model, before any is opened; why it cannot be where it is to be, or "". Each rank shows all models."""
        if kind_of(model) != "cuda":
            return ""
        self.on_gpu = True
        try:
            self.own()
        except ConfigError as error:
            return str(error)
        return ""

    def own(self) -> torch.device:
        """That this rank works on. Errors: ConfigError when the host has fewer GPUs than ranks."""
        if not self.on_gpu:
            return torch.device("cpu")
        if self._board.world == 1:
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cuda", gpu_of(os.environ, self._board.rank, torch.cuda.device_count()))

    def take(self) -> torch.device:
        """The device of this rank, made the current one."""
        device = self.own()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device

    def placed(self, model: Model) -> Model:
        """A model as this rank opens it: on its own GPU, whatever number `Model(device=)` has."""
        if kind_of(model) != "cuda" or self._board.world == 1:
            return model
        return replace(model, device=str(self.own()))

    @property
    def backend(self) -> str:
        """Of the job's process group."""
        return BOTH if self.on_gpu else GLOO

    def meet(self, timeout_s: float) -> None:
        """Learn where the other ranks work; all ranks come here. Errors: EngineError for two ranks on one GPU."""
        board, key = self._board, f"run{self._board.num_runs}/torch/seat"
        if not self.on_gpu:
            return
        board.post(f"{key}/{board.rank}", pickle.dumps(self._seat()))
        found = board.get(
            [f"{key}/{rank}" for rank in range(board.world)], timeout_s=timeout_s,
            what=lambda missing: f"for the devices of {len(missing)} other ranks",
        )  # fmt: skip
        self._seats = tuple(pickle.loads(data) for data in found)
        refuse_shared(self._seats)

    def wire(self, ranks: Sequence[int]) -> str:
        """What carries weights between ranks: the same answer on all of them."""
        return wire_between([self._seats[rank] for rank in ranks]) if self.on_gpu else GLOO

    def _seat(self) -> Seat:
        device = self.own()
        index = device.index or 0
        others = [other for other in range(torch.cuda.device_count()) if other != index]
        reached = [other for other in others if torch.cuda.can_device_access_peer(index, other)]
        host = f"{socket.gethostname()} (host {self._board.host_of[self._board.rank]})"
        return Seat(self._board.rank, host, str(device), _uuid(index), frozenset(map(_uuid, reached)))


def kind_of(model: Model) -> str:
    """`cpu` or `cuda`."""
    asked = (model.device or "cuda").partition(":")[0]
    return "cpu" if asked == "cpu" or not torch.cuda.is_available() else "cuda"


def gpu_of(environment: Mapping[str, str], rank: int, count: int) -> int:
    """Number of a rank's GPU among the `count` that its process sees. Errors: ConfigError when there are too few."""
    local = int(environment.get("LOCAL_RANK", rank))
    if local < count:
        return local
    if count == 1:
        return 0
    raise ConfigError(
        f"rank {rank} is number {local} on its host, which has {count} GPUs (0 to {count - 1}); start at most {count} ranks "
        'there, or keep all models on the CPU: Model(device="cpu")'
    )


def refuse_shared(seats: Sequence[Seat]) -> None:
    """Errors: EngineError when two ranks work on one GPU."""
    taken: dict[str, int] = {}
    for seat in seats:
        other = taken.setdefault(seat.uuid, seat.rank) if seat.uuid else seat.rank
        if other != seat.rank:
            raise EngineError(
                f"ranks {other} and {seat.rank} both work on GPU {seat.uuid} of {seat.host}, and NCCL needs one for each; start "
                'fewer ranks, let each see a GPU of its own, or keep all models on the CPU: Model(device="cpu")'
            )


def wire_between(seats: Sequence[Seat]) -> str:
    """`PEERS` where each rank can map the memory of all others, else `NCCL`."""
    uuids = {seat.uuid for seat in seats}
    is_one_host = len({seat.host for seat in seats}) == 1
    return PEERS if is_one_host and all(uuids <= seat.reaches | {seat.uuid} for seat in seats) else NCCL


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
