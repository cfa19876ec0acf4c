"""One process of `predict`: a plain FSDP2 training step, as the cost model assumes it, with its times and its memory.

fully_shard of each layer and of the whole; fp32 weights, gradients and Adam; compute in bf16; gradients reduced in fp32;
every layer recomputed in the backward pass; the loss in chunks; several micro-batches a step, each reduced.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import median
from flowrl.cost.configs import shape_of_config
from flowrl.engines.calibrate.loss import chunked_loss
from flowrl.engines.calibrate.worker import joined

CHUNK = 1024
WAIT_S = 120.0
"""For other processes, at most."""
KINDS = (
    ("communication", ("nccl",)),
    ("products", ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas")),
    ("attention", ("flash", "fmha", "cudnn", "attention")),
    ("optimizer", ("adam",)),
    ("copies", ("memcpy", "memset", "catarray", "chunk_cat", "split_with_sizes", "copy")),
)
"""Kind of a kernel and words of its name; the first that fits. What fits none passes over memory."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model and what it is trained on. Example: Case("Qwen2.5-0.5B", {"model_type": "qwen2", ...}, rows=4, sequence=2048)."""

    name: str
    config: dict[str, Any]
    rows: int
    sequence: int
    micro_batches: int = 2
    steps: int = 3

    @property
    def tokens(self) -> int:
        """Of a micro-batch on one device."""
        return self.rows * self.sequence


@dataclass(frozen=True, slots=True)
class Job:
    """What one process does."""

    rank: int
    world: int
    folder: str
    is_gpu: bool
    cases: tuple[Case, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        found = json.loads(text)
        return cls(**{**found, "cases": tuple(Case(**case) for case in found["cases"])})


class Scored(nn.Module):
    """A causal model and its loss: the head is called inside, so that sharding gathers it with the rest of the root."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base, self.head = model.model, model.lm_head

    def forward(self, ids: Tensor) -> Tensor:
        """Mean cross entropy of [B, L] tokens, each predicting itself: work and memory are those of real labels."""
        hidden = self.base(input_ids=ids).last_hidden_state
        return chunked_loss(self.head, hidden.flatten(0, 1), ids.flatten(), CHUNK) / ids.numel()


class Clock:
    """Times between marks, on the device's own clock where it has one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def spans(self) -> list[float]:
        """Seconds from each mark to the next; forgets the marks."""
        marks, self._marks = self._marks, []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [a.elapsed_time(b) / 1e3 for a, b in pairwise(marks)]
        return [b - a for a, b in pairwise(marks)]


def built(case: Case, device: torch.device, mesh: DeviceMesh) -> Scored:
    """The sharded model with random fp32 weights, drawn on the device."""
    config = AutoConfig.for_model(**case.config, use_cache=False, attn_implementation="sdpa")
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    scored = Scored(model)
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for layer in scored.base.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(scored, mesh=mesh, mp_policy=policy)


def measure(case: Case, device: torch.device, mesh: DeviceMesh) -> dict[str, Any]:
    """Median seconds of each part of a step, and bytes."""
    alone = transfers(case, device, mesh)
    model = built(case, device, mesh)
    free(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ids = torch.randint(case.config["vocab_size"], (case.rows, case.sequence), device=device)
    clock, parts = Clock(device), []

    def step(between: Callable[[str], None] = lambda _: None) -> None:
        clock.mark()
        for _ in range(case.micro_batches):
            loss = model(ids) / case.micro_batches
            clock.mark()
            loss.backward()
            clock.mark()
        between("state")
        optimizer.step()
        clock.mark()
        optimizer.zero_grad(set_to_none=True)

    for count in range(2 + case.steps):
        if count == 2 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        begun = time.perf_counter()
        step()
        spans = clock.spans()
        micro = spans[:-1]
        parts.append(
            {
                "forward_s": sum(micro[0::2]),
                "backward_s": sum(micro[1::2]),
                "compute_s": sum(micro),
                "optimizer_s": spans[-1],
                "step_s": sum(spans),
                "host_s": time.perf_counter() - begun,
            }
        )
    found: dict[str, Any] = {name: median([one[name] for one in parts[2:]]) for name in parts[0]}
    found["steps_s"] = [one["step_s"] for one in parts[2:]]
    if device.type == "cuda":
        found |= memory(device)

        def state(_: str) -> None:
            found["state_bytes"] = torch.cuda.memory_allocated(device)

        step(state)
        clock.spans()
        found["kernels_s"], found["most_s"] = kernels(step)
        clock.spans()
    found["score_s"] = score(case, model, ids, clock)
    return found | alone


def transfers(case: Case, device: torch.device, mesh: DeviceMesh) -> dict[str, float]:
    """Seconds of a step's transfers with nothing else going on: layers gathered twice, the root once, and gradients reduced."""
    ranks = mesh.size()
    if ranks == 1:
        return {}
    shape, group = shape_of_config(case.config), mesh.get_group()
    compute = torch.bfloat16 if device.type == "cuda" else torch.float32
    counts = [(-(-shape.root_params() // ranks), 1)]
    counts += [(-(-shape.layer_params(layer) // ranks), 2) for layer in range(shape.layers)]
    longest = max(count for count, _ in counts)
    part, whole = (torch.zeros(longest * times, dtype=compute, device=device) for times in (1, ranks))
    summed, gradient = (torch.zeros(longest * times, dtype=torch.float32, device=device) for times in (1, ranks))
    clock, found = Clock(device), []
    for _ in range(2 + case.steps):
        dist.barrier(group)
        clock.mark()
        for count, gathers in counts:
            for _ in range(gathers):
                dist.all_gather_into_tensor(whole[: count * ranks], part[:count], group=group)
            dist.reduce_scatter_tensor(summed[:count], gradient[: count * ranks], group=group)
        clock.mark()
        found.append(clock.spans()[0])
    return {"communication_s": case.micro_batches * median(found[2:])}


def memory(device: torch.device) -> dict[str, int]:
    """Bytes at the worst moment since the peaks were reset: asked for, held by the allocator, and taken from the device."""
    available, whole = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    most = torch.cuda.max_memory_reserved(device)
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": most,
        "context_bytes": whole - available - held,
        "device_bytes": whole - available - held + most,
    }


def score(case: Case, model: nn.Module, ids: Tensor, clock: Clock) -> float:
    """Seconds of a forward pass without gradients over one micro-batch."""
    found = []
    with torch.no_grad():
        for _ in range(2 + case.steps):
            clock.mark()
            model(ids)
            clock.mark()
            found.append(clock.spans()[0])
    return median(found[2:])


def kernels(step: Callable[[], None]) -> tuple[dict[str, float], dict[str, float]]:
    """(seconds on the device by kind of kernel, the same of the longest by name) in one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kinds: dict[str, float] = {}
    names: dict[str, float] = {}
    for event in profile.key_averages():
        took = event.self_device_time_total / 1e6
        if not took:
            continue
        low = event.key.lower()
        kind = next((kind for kind, words in KINDS if any(word in low for word in words)), "memory")
        kinds[kind] = kinds.get(kind, 0.0) + took
        names[event.key[:90]] = names.get(event.key[:90], 0.0) + took
    longest = sorted(names.items(), key=lambda one: -one[1])[:24]
    return kinds, dict(longest)


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(argument: str) -> None:
    job = Job.from_json(argument)
    path = Path(job.folder) / f"{job.rank}.jsonl"
    with joined(job.rank, job.world, job.folder, is_gpu=job.is_gpu, wait_s=WAIT_S) as device:
        mesh = init_device_mesh(device.type, (job.world,))
        for index, case in enumerate(job.cases):
            try:
                line = {"name": str(index), "value": measure(case, device, mesh)}
            except torch.OutOfMemoryError as error:  # a result too: the others are measured all the same
                line = {"name": str(index), "error": str(error).splitlines()[0]}
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            free(device)


if __name__ == "__main__":
    main(sys.argv[1])
