"""One process of `reshard`: its ends of every edge, timed, beside the way over whole tensors."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from flowrl.cost.shapes import ModelShape
from flowrl.engines.calibrate.worker import joined
from flowrl.engines.reshard.dist import DistTransport, board_for
from flowrl.engines.reshard.peer_copy import PeerCopyTransport
from flowrl.engines.reshard.program import Program, program_for
from flowrl.engines.reshard.resharder import Ran, Resharder
from flowrl.engines.reshard.transports import Stretch, Traffic, Transport
from flowrl.engines.reshard.verify import GatheredOracle
from flowrl.mesh import Layout
from flowrl.planner.boxes import Holding

LINK_BYTES = 2**30
"""Of the copy that measures the link."""
WAIT_S = 120.0
"""For other processes, at most."""


@dataclass(frozen=True, slots=True)
class Case:
    """An edge. Example: Case("7B f2 -> t2", "Qwen/Qwen2.5-7B", "f2", "t2", "peer copy")."""

    name: str
    model: str
    """A published name; "tiny" for a few small layers."""
    source: str
    target: str
    """Layouts. Of one device each: the second device is the target."""
    transport: str
    """`peer copy`, `nccl` or `gloo`; `whole tensors` for the way that gathers each parameter and cuts it."""
    source_dtype: str = "bfloat16"
    bucket_mib: int = 128


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does."""

    rank: int
    world: int
    folder: str
    is_gpu: bool
    repeats: int
    cases: tuple[Case, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        found = json.loads(text)
        return cls(**{**found, "cases": tuple(Case(**case) for case in found["cases"])})


def shape_of(model: str) -> ModelShape:
    if model != "tiny":
        return ModelShape.of(model)
    return ModelShape.from_config(
        {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 128, "vocab_size": 513, "tie_word_embeddings": True}
    )  # fmt: skip


class Setting:
    """The tensors of a case on this process."""

    def __init__(self, case: Case, job: Job, device: torch.device, mesh: DeviceMesh) -> None:
        self.case, self.rank, self.device = case, job.rank, device
        shape = shape_of(case.model)
        self.tensors = shape.modules()
        source, target = Layout.parse(case.source), Layout.parse(case.target)
        self.is_apart = source.size == 1 and target.size == 1
        before = Holding(source, range(source.size))
        after = Holding(target, [1] if self.is_apart else range(target.size), kv_heads=shape.kv_heads)
        self.program: Program = program_for(
            self.tensors, before, after, source_dtype=case.source_dtype, bucket_bytes=case.bucket_mib * 2**20
        )
        torch.manual_seed(job.rank)
        self.source: dict[str, Tensor] = {}
        held = self.program.source.get(self.rank)
        for one in self.tensors if held is not None else ():
            dtype = getattr(torch, case.source_dtype)
            local = torch.empty(held.shapes[one.name] if held is not None else (), dtype=dtype, device=device).normal_()
            if source.fsdp > 1:
                stride = torch.empty(one.shape, device="meta").stride()
                self.source[one.name] = DTensor.from_local(
                    local, mesh, [Shard(0)], run_check=False, shape=torch.Size(one.shape), stride=stride
                )
            else:
                self.source[one.name] = local
        need = self.program.target.get(self.rank)
        self.target: dict[str, Tensor] = {}
        for name, sizes in need.shapes.items() if need is not None else ():
            self.target[name] = torch.full(sizes, torch.nan, dtype=torch.bfloat16, device=device)

    def by_whole_tensors(self) -> None:
        """Each parameter gathered (or broadcast), cut, and copied into the target."""
        need = self.program.target.get(self.rank)
        for one in self.tensors:
            given = self.source.get(one.name)
            if isinstance(given, DTensor):
                whole = given.full_tensor()
            else:
                whole = torch.empty(one.shape, dtype=torch.bfloat16, device=self.device) if given is None else given
                dist.broadcast(whole, 0)
            for slot in need.slots.get(one.name, ()) if need is not None else ():
                cut = whole[tuple(slice(*interval) for interval in slot.box)]
                self.target[slot.region.storage].copy_(cut)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def most(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def taken(device: torch.device) -> int:
    """Bytes of the device that are not free, whoever has them."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def timed(work: Callable[[], Ran | None], device: torch.device, repeats: int, objects: Any) -> dict[str, Any]:
    """Milliseconds of `repeats` runs, of the slowest process in each."""
    for _ in range(3):
        work()
    own = []
    for _ in range(repeats):
        wait(device)
        dist.barrier(group=objects)
        begun = time.perf_counter()
        ran = work()
        wait(device)
        own.append(time.perf_counter() - begun if ran is None else ran.seconds)
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, own, group=objects)
    slowest = sorted(1e3 * max(each) for each in zip(*of_all, strict=True))
    return {"median_ms": statistics.median(slowest), "p90_ms": slowest[min(len(slowest) - 1, int(0.9 * len(slowest)))]}


def measure(case: Case, job: Job, device: torch.device, mesh: DeviceMesh, objects: Any) -> dict[str, Any]:
    setting = Setting(case, job, device, mesh)
    program = setting.program
    wait(device)
    base, base_taken = most_reset(device), taken(device)
    found: dict[str, Any] = {
        "wire_bytes": max(
            [sum(n for (_, b), n in program.peers().items() if b == d) for d in program.devices]
            + [sum(n for (a, _), n in program.peers().items() if a == d) for d in program.devices]
        ),
        "total_bytes": program.wire_bytes,
        "buckets": program.num_buckets,
    }
    if case.transport == "whole tensors":
        found |= timed(lambda: setting.by_whole_tensors(), device, max(5, job.repeats // 2), objects)  # type: ignore[arg-type, return-value]
        found["extra_bytes"] = most(device) - base
        found["device_bytes"] = taken(device) - base_taken
        return found
    control = board_for(range(job.world), job.rank, group=objects, timeout_s=30)
    transport: Transport
    if case.transport == "peer copy":
        transport = PeerCopyTransport(control, device=device, group=objects)
    else:
        transport = DistTransport(group=objects if case.transport == "gloo" else None, timeout_s=30)
    begun = time.perf_counter()
    end = Resharder(
        program, job.rank, source=setting.source, target=setting.target, transport=transport, control=control,
        oracle=GatheredOracle(program, job.rank, setting.source, on=device, is_dtensor="f" in case.source, group=None),
        timeout_s=30,
    )  # fmt: skip
    found["prepare_s"] = time.perf_counter() - begun
    version = 0

    def run(verify: Any) -> Ran:
        nonlocal version
        version += 1
        return end.run(version, verify=verify)

    found |= timed(lambda: run("sample"), device, job.repeats, objects)
    found["extra_bytes"] = most(device) - base
    found["device_bytes"] = taken(device) - base_taken
    found["off_ms"] = timed(lambda: run("off"), device, job.repeats, objects)["median_ms"]
    found["lanes_ms"] = {name: 1e3 * seconds for name, seconds in run("off").lanes_s.items()}
    found["full_bytes"] = run("full").num_checked
    return found


def most_reset(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def link(job: Job, device: torch.device, objects: Any) -> dict[str, float]:
    """Bytes per second of one large copy between two devices by copy engines: one way, and both ways at once."""
    found = {}
    for name, readers in (("one_way", (1,)), ("both_ways", (0, 1))):
        control = board_for(range(job.world), job.rank, group=objects, timeout_s=30)
        transport = PeerCopyTransport(control, device=device, group=objects)
        given = torch.ones(LINK_BYTES, dtype=torch.uint8, device=device)
        taken_ = torch.zeros_like(given)
        peer = 1 - job.rank
        sends = (Stretch(peer, given),) if peer in readers else ()
        receives = (Stretch(peer, taken_),) if job.rank in readers else ()
        transport.bind([Traffic(sends, receives)])
        times = []
        for _ in range(6):
            control.begin()
            control.exchange([0], "the start")
            wait(device)
            begun = time.perf_counter()
            transport.ready(0)
            transport.start(0)
            wait(device)
            times.append(time.perf_counter() - begun)
            control.exchange([0], "the end")
        if job.rank in readers:
            found[name] = LINK_BYTES / statistics.median(times[1:])
            assert bool((taken_ == 1).all())
        dist.barrier(group=objects)
    return found


def main(argument: str) -> None:
    job = Job.from_json(argument)
    path = Path(job.folder) / f"{job.rank}.jsonl"

    def write(line: dict[str, Any]) -> None:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    with joined(job.rank, job.world, job.folder, is_gpu=job.is_gpu, wait_s=WAIT_S) as device:
        objects = dist.new_group(backend="gloo")
        mesh = init_device_mesh(device.type, (job.world,))
        if job.is_gpu:
            write({"name": "link", "value": link(job, device, objects)})
        for number, case in enumerate(job.cases):
            try:
                line = {"name": str(number), "value": measure(case, job, device, mesh, objects)}
            except Exception as error:  # whatever one case dies of, the others are measured all the same
                line = {"name": str(number), "error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
            write(line)
            gc.collect()
            dist.barrier(group=objects)  # nobody has memory of the other mapped
            if device.type == "cuda":
                torch.cuda.ipc_collect()
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1])
