"""Weights edges over `torch.distributed`: point to point (gloo on CPUs, NCCL on GPUs), and agreement in a gloo group."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from flowrl.engines.reshard.control import BoardControl
from flowrl.engines.reshard.transports import Traffic
from flowrl.errors import EngineError, WaitTimeout

SHARED = Path("/dev/shm")


class DistTransport:
    """`batch_isend_irecv`, one group call for each bucket.

    Args:
        ranks: device -> global rank of its process; default: the device's own number.
        group: of gloo or NCCL; default: the job's.
        timeout_s: on CPUs, how long a bucket may take. On GPUs nothing is waited for here; the one who waits for the stream does.
    """

    def __init__(
        self, *, ranks: Mapping[int, int] | None = None, group: dist.ProcessGroup | None = None, timeout_s: float = 60.0
    ) -> None:
        self.name = str(dist.get_backend(group))
        self._ranks, self._group, self._timeout_s = ranks, group, timeout_s
        self._traffic: Sequence[Traffic] = ()
        self._ops: list[list[dist.P2POp]] = []
        self._works: dict[int, list[dist.Work]] = {}

    def bind(self, traffic: Sequence[Traffic]) -> None:
        self._traffic = traffic
        self._ops = []
        for bucket, one in enumerate(traffic):
            ops = [self._op(dist.isend, side.data, side.peer, bucket) for side in one.sends]
            ops += [self._op(dist.irecv, side.data, side.peer, bucket) for side in one.receives]
            self._ops.append(ops)
        if self.name == "nccl":
            # the first call on a communicator needs all its ranks, and a bucket has few
            dist.all_reduce(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())), group=self._group)

    def ready(self, bucket: int) -> None:
        pass

    def start(self, bucket: int) -> None:
        if self._ops[bucket]:
            self._works[bucket] = dist.batch_isend_irecv(self._ops[bucket])

    def finish(self, bucket: int) -> None:
        for work in self._works.pop(bucket, ()):
            if self.name == "nccl":
                work.wait()  # the current stream waits, not this thread
                continue
            try:
                work.wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as error:  # gloo: too late, or a peer's connection is gone
                raise _late(error, f"bucket {bucket} ({self._traffic[bucket].peers()})", self._timeout_s) from error

    def release(self, bucket: int) -> None:
        self.finish(bucket)

    def _op(self, what: object, data: torch.Tensor, peer: int, bucket: int) -> dist.P2POp:
        rank = peer if self._ranks is None else self._ranks[peer]
        return dist.P2POp(what, data, rank, group=self._group, tag=bucket)  # type: ignore[arg-type]


class GroupControl:
    """Agreement in a process group on CPUs (gloo) that has one process for each device, in their order."""

    def __init__(self, num_devices: int, *, group: dist.ProcessGroup | None = None, timeout_s: float = 60.0) -> None:
        if dist.get_world_size(group) != num_devices:
            raise EngineError(
                f"an edge of {num_devices} devices needs a group of as many; found {dist.get_world_size(group)}"
            )
        self._group, self._timeout_s, self._num = group, timeout_s, num_devices

    def begin(self) -> None:
        pass

    def exchange(self, values: Sequence[int], what: str) -> list[list[int]]:
        mine = torch.tensor(list(values), dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(self._num)]
        try:
            work = dist.all_gather(found, mine, group=self._group, async_op=True)
            work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise _late(error, what, self._timeout_s) from error
        return [one.tolist() for one in found]

    def fail(self) -> None:
        pass  # the others find out when their time is over, or at once when this process ends


def board_for(
    devices: Sequence[int],
    device: int,
    *,
    group: dist.ProcessGroup | None = None,
    width: int = 2048,
    timeout_s: float = 60.0,
) -> BoardControl:
    """A board of its own for the processes of a group on one machine, in the order of the devices. Nothing is left of it in any
    folder: once all have it open, its file is removed."""
    is_first = dist.get_rank(group) == 0
    path = [""]
    if is_first:
        descriptor, path[0] = tempfile.mkstemp(prefix="flowrl-board-", dir=SHARED if SHARED.is_dir() else None)
        os.close(descriptor)
    dist.broadcast_object_list(path, group_src=0, group=group)
    board = BoardControl(path[0], devices, device, width=width, timeout_s=timeout_s)
    opened: list[bool] = [False] * dist.get_world_size(group)
    dist.all_gather_object(opened, True, group=group)
    if is_first:
        os.unlink(path[0])
    return board


def _late(error: RuntimeError, what: str, timeout_s: float) -> Exception:
    text = str(error)
    if "imed out" in text or "imeout" in text:
        return WaitTimeout(f"some device did not come to {what} within {timeout_s:g} s")
    return EngineError(f"{what}: a device is gone ({text.splitlines()[0][:200] if text else type(error).__name__})")
