"""Training state beside the device: a streamed optimizer, one on the CPU and a resident one; parking and bringing back.

python -m benchmarks offload [--layers 28] [--repeats 3] [--save]
python -m benchmarks offload --tiny                      the same program on a CPU, to see that it works

Random weights in the shapes of Qwen2.5-7B, in bf16, with fp32 gradients as a trainer adds them up. Only the optimizer's step is
timed: clipping comes before it in any case. After the same steps with the same gradients, weights of the streamed optimizer are
compared with those of the resident one, bit by bit.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import median, report, table
from flowrl.cost.shapes import ModelShape
from flowrl.engines.offload.memory import HostMemory, Region
from flowrl.engines.offload.on_cpu import CpuAdamW
from flowrl.engines.offload.park import Parked
from flowrl.engines.offload.state import HostState
from flowrl.engines.offload.store import OptimizerStore, ResidentAdamW
from flowrl.engines.offload.streamed import StreamedAdamW
from flowrl.engines.weights import Weights
from flowrl.model import AdamW

OPTIONS = AdamW(lr=1e-3, weight_decay=0.1)
RATE = 1e-3
LINK_BYTES = 2**30
TINY = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 513, "tie_word_embeddings": False,
}  # fmt: skip


class Flat(nn.Module):
    """Parameters and nothing to compute."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        super().__init__()
        self.all = nn.ParameterList()
        for shape in shapes.values():
            self.all.append(nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device)))
        self.fill()

    @torch.no_grad()
    def fill(self) -> None:
        """The same values each time."""
        torch.manual_seed(0)
        for parameter in self.all:
            parameter.normal_(std=0.02)


class Given(Weights):
    """Weights whose gradients are always the same."""

    given: dict[str, Tensor]

    def gradients(self) -> dict[str, Tensor]:
        return self.given


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    settle(device)
    start = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - start


def allocated(device: torch.device, *, peak: bool = False) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)


def link(device: torch.device, num_bytes: int) -> dict[str, float]:
    """Bytes per second of a pinned copy, in, out and both at once (each way)."""
    regions = [Region(num_bytes, is_pinned=device.type == "cuda") for _ in range(2)]
    hosts = [region.view(0, num_bytes) for region in regions]
    there = [torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    side = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []

    def both() -> None:
        if not side:
            there[0].copy_(hosts[0])
            hosts[1].copy_(there[1])
            return
        with torch.cuda.stream(side[0]):
            there[0].copy_(hosts[0], non_blocking=True)
        with torch.cuda.stream(side[1]):
            hosts[1].copy_(there[1], non_blocking=True)

    ways = {
        "in": lambda: there[0].copy_(hosts[0], non_blocking=True),
        "out": lambda: hosts[1].copy_(there[1], non_blocking=True),
        "each of both": both,
    }
    return {name: num_bytes / min(seconds(way, device) for _ in range(4)) for name, way in ways.items()}


def steps(store: OptimizerStore, repeats: int, device: torch.device, before: int) -> dict[str, Any]:
    """What `repeats` steps take, the first one apart."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = [seconds(lambda: store.step(RATE), device) for _ in range(repeats + 1)]
    return {"first_s": times[0], "step_s": median(times[1:]), "peak_bytes": allocated(device, peak=True) - before}


def sums(module: nn.Module) -> list[int]:
    """Of the bits of each parameter."""
    return [int(parameter.detach().view(torch.int16).to(torch.int64).sum()) for parameter in module.parameters()]


@torch.no_grad()
def again(state: HostState, module: nn.Module) -> None:
    """As it was made: masters with the values of the module, moments of 0."""
    state.take({})
    for name, parameter in module.named_parameters():
        state.part("master", name).copy_(parameter)


def stores(
    module: Flat, grads: dict[str, Tensor], repeats: int, device: torch.device, before: int
) -> Iterator[dict[str, Any]]:
    """The three optimizers, one after the other, each from the same start."""
    expected: list[int] = []
    memory = HostMemory(device)
    start = time.perf_counter()
    state: HostState | None = HostState("policy", dict(module.named_parameters()), memory, with_masters=True)
    made_s = time.perf_counter() - start
    print(f"host state: {made_s:.1f} s", flush=True)
    for kind in ("streamed", "CPU", "resident"):
        module.fill()
        weights = Given("policy", module)
        weights.given = grads
        found: dict[str, Any] = {"kind": kind, "made_s": made_s, "host_bytes": 0}
        store: OptimizerStore
        if kind == "resident":
            state = None  # its memory is not needed any more
            weights.make_masters(torch.bfloat16)
            for name, grad in grads.items():
                weights.masters[name].grad = grad
            found["made_s"] = 0.0
            store = ResidentAdamW(weights, OPTIONS)
        else:
            assert state is not None
            again(state, module)
            weights.lead({name: state.part("master", name) for name in grads}, torch.bfloat16)
            found["host_bytes"] = state.host_bytes
            store = (
                StreamedAdamW(weights, OPTIONS, state)
                if kind == "streamed"
                else CpuAdamW(weights, OPTIONS, state, memory)
            )
        settle(device)
        found |= steps(store, 1 if kind == "CPU" else repeats, device, before)
        if kind != "CPU":
            expected = expected or sums(module)
            found["is_equal"] = sums(module) == expected
        del store, weights
        gc.collect()
        print(f"{kind}: {found}", flush=True)
        yield found


def parking(module: nn.Module, repeats: int, device: torch.device) -> dict[str, float]:
    """Bytes per second of the module out, in, and of one half of it out while the other comes in (both directions together)."""
    memory = HostMemory(device)
    every = list(module.parameters())
    whole = Parked("whole", lambda: every, memory, device)
    total = sum(parameter.numel() * parameter.element_size() for parameter in every)
    out_s, in_s = [], []
    first_s = seconds(whole.offload, device)
    whole.onload()
    for _ in range(repeats):
        out_s.append(seconds(whole.offload, device))
        in_s.append(seconds(whole.onload, device))
    whole.close()
    memory.trim()
    half: list[list[Tensor]] = [[], []]
    for parameter in sorted(every, key=lambda one: -one.numel()):
        min(half, key=lambda one: sum(p.numel() for p in one)).append(parameter)
    one, other = (Parked(f"half {i}", lambda i=i: half[i], memory, device) for i in range(2))  # type: ignore[misc]
    other.offload()
    other.onload()
    one.offload()
    both_s = []
    for number in range(repeats):
        leaving, coming = (other, one) if number % 2 == 0 else (one, other)

        def swap(leaving: Parked = leaving, coming: Parked = coming) -> None:
            leaving.begin_offload()
            coming.begin_onload()
            leaving.finish()
            coming.finish()

        both_s.append(seconds(swap, device))
    one.onload()
    other.onload()
    settle(device)
    return {
        "bytes": total, "first_out_s": first_s, "out_s": min(out_s), "in_s": min(in_s), "out": total / min(out_s),
        "in": total / min(in_s), "each of both": total / 2 / min(both_s),
    }  # fmt: skip


def text_of(rates: dict[str, float], found: Sequence[dict[str, Any]], parked: dict[str, float], num_params: int) -> str:
    gib = 2**30
    moved = {"streamed": (12, 12), "CPU": (2, 4), "resident": (0, 0)}
    rows = []
    for one in found:
        into, out = (count * num_params / one["step_s"] / 1e9 for count in moved[one["kind"]])
        rows.append([
            one["kind"], f"{one['step_s']:.3f}", f"{one['peak_bytes'] / gib:.1f}", f"{one['host_bytes'] / gib:.1f}",
            f"{into:.1f}", f"{out:.1f}", f"{100 * max(into, out) * 1e9 / rates['each of both']:.0f} %" if into else "",
            {True: "yes", False: "NO", None: ""}[one.get("is_equal")], f"{one['made_s']:.0f}",
        ])  # fmt: skip
    header = ["optimizer", "step s", "peak GiB", "host GiB", "in GB/s", "out GB/s", "of the link", "bits", "made in s"]
    pinned = ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates.items())
    ways = [
        [way, f"{parked[way] / 1e9:.1f}", f"{100 * parked[way] / rates[way]:.0f} %"]
        for way in ("out", "in", "each of both")
    ]
    return (
        f"{num_params:,} parameters. One pinned copy of 1 GiB: {pinned}.\n\n{table(header, rows)}\n\n"
        "peak: weights, fp32 gradients and what the optimizer takes. of the link: the busier direction against a copy in both.\n"
        "bits: weights equal those of the streamed one after the same steps. host: masters and moments.\n\n"
        f"Parking {parked['bytes'] / 1e9:.1f} GB of weights: out in {parked['out_s']:.3f} s, back in {parked['in_s']:.3f} s "
        f"(the first time, host memory and all, {parked['first_out_s']:.1f} s).\n\n"
        f"{table(['way', 'GB/s', 'of a pinned copy'], ways)}"
    )


def main(argv: Sequence[str]) -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks offload", description=__doc__)
    options.add_argument("--layers", type=int, default=28, help="of the model's 28")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--tiny", action="store_true", help="on a CPU")
    options.add_argument("--save", action="store_true")
    given = options.parse_args(argv)
    if not torch.cuda.is_available() and not given.tiny:
        print("offload needs a CUDA device; --tiny runs it on a CPU")
        return 2
    device = torch.device("cpu") if given.tiny else torch.device("cuda", torch.cuda.current_device())
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    shape = ModelShape.from_config(TINY) if given.tiny else ModelShape.of("Qwen/Qwen2.5-7B")
    shapes = {one.name: one.shape for one in shape.modules() if one.layer is None or one.layer < given.layers}
    before = allocated(device)
    rates = link(device, 2**20 if given.tiny else LINK_BYTES)
    print(f"link: {rates}", flush=True)
    module = Flat(shapes, device)
    num_params = sum(parameter.numel() for parameter in module.parameters())
    parked = parking(module, given.repeats, device)
    print(f"parking: {parked}", flush=True)
    gc.collect()
    names = dict(module.named_parameters())
    torch.manual_seed(1)
    grads = {name: torch.randn(p.shape, dtype=torch.float32, device=device).mul_(1e-3) for name, p in names.items()}
    found = list(stores(module, grads, given.repeats, device, before))
    where = "CPU" if given.tiny else torch.cuda.get_device_name(device)
    text = f"{where}; Qwen2.5-7B with {given.layers} of 28 layers, " if not given.tiny else f"{where}; tiny, "
    numbers = {"layers": given.layers, "params": num_params, "link_bytes_s": rates, "stores": found, "parking": parked}
    report("offload", text + text_of(rates, found, parked, num_params), numbers, save=given.save)
    return 0 if all(one.get("is_equal", True) for one in found) else 1
