"""Offload on a GPU: memory really leaves and comes back, copies run in streams of their own, and no bit changes."""

from __future__ import annotations

import gc
import os

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from flowrl.engines.offload.home import Home  # noqa: E402
from flowrl.engines.offload.memory import HostMemory, Region  # noqa: E402
from flowrl.engines.offload.on_cpu import CpuAdamW  # noqa: E402
from flowrl.engines.offload.park import Parked  # noqa: E402
from flowrl.engines.offload.store import OptimizerStore, ResidentAdamW  # noqa: E402
from flowrl.engines.offload.streamed import StreamedAdamW  # noqa: E402
from flowrl.engines.weights import Weights  # noqa: E402
from flowrl.errors import EngineError  # noqa: E402
from flowrl.model import AdamW  # noqa: E402

CUDA = "cuda:0"
OPTIONS = AdamW(lr=1e-3, weight_decay=0.1)
BUCKET_BYTES = 6 * 2**20
"""Of masters and moments: a matrix below takes more than one."""


def build() -> nn.Module:
    with torch.random.fork_rng(devices=[0]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(501, 1023), nn.Linear(1023, 2049), nn.Tanh(), nn.Linear(2049, 511)).to(CUDA)


def opened(kind: str, precision: torch.dtype) -> tuple[nn.Module, Weights, OptimizerStore]:
    module = build()
    weights = Weights("policy", module)
    if kind == "resident":
        weights.make_masters(precision)
        return module, weights, ResidentAdamW(weights, OPTIONS)
    if kind == "cpu":
        return module, weights, CpuAdamW.over(weights, OPTIONS, precision)
    streamed = StreamedAdamW.over(weights, OPTIONS, precision)
    return module, weights, StreamedAdamW(weights, OPTIONS, streamed.state, bucket_bytes=BUCKET_BYTES)


def train(module: nn.Module, weights: Weights, store: OptimizerStore, steps: range) -> None:
    for step in steps:
        for part in range(2):
            ids = torch.arange(64, device=CUDA) * (step + 2 * part + 1) % 501
            module(ids).float().square().mean().backward()
        store.step(1e-3 / (step + 1))
        weights.drop_gradients()


def step_alike(
    one: tuple[nn.Module, Weights, OptimizerStore], other: tuple[nn.Module, Weights, OptimizerStore], step: int
) -> None:
    """Both with the gradients of one: a backward pass need not give the same bits twice."""
    ids = torch.arange(64, device=CUDA) * (step + 1) % 501
    one[0](ids).float().square().mean().backward()
    for name, grad in one[1].gradients().items():
        other[1]._holder(name).grad = grad.clone()
    for _, weights, store in (one, other):
        store.step(1e-3 / (step + 1))
        weights.drop_gradients()


def requested(what: str = "current") -> int:
    """Bytes that tensors asked for; what the allocator hands out for them may be more, and differ."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{what}"])


def off(found: torch.Tensor, expected: torch.Tensor) -> tuple[int, float]:
    """(elements that differ, by how much at most)."""
    apart = (found.float() - expected.float()).abs()
    return int((apart > 0).sum()), float(apart.max())


def bits(module: nn.Module, weights: Weights, store: OptimizerStore) -> dict[str, torch.Tensor]:
    found = {name: value.cpu() for name, value in module.state_dict().items()}
    found |= {f"master {name}": value.detach().cpu() for name, value in weights.masters.items()}
    for name, entry in store.entries().items():
        found |= {f"{key} {name}": entry[key].cpu() for key in ("exp_avg", "exp_avg_sq")}
    return found


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_streamed_optimizer_is_equal_to_the_resident_one(precision):
    dtype = getattr(torch, precision)
    resident, streamed = opened("resident", dtype), opened("streamed", dtype)
    assert len(streamed[2]._buckets) > 3
    for step in range(5):
        step_alike(resident, streamed, step)
    expected, found = bits(*resident), bits(*streamed)
    assert found.keys() == expected.keys()
    assert {
        name: off(found[name], value) for name, value in expected.items() if not torch.equal(found[name], value)
    } == {}


def test_an_optimizer_on_the_cpu_takes_the_same_steps_but_for_rounding():
    resident, other = opened("resident", torch.bfloat16), opened("cpu", torch.bfloat16)
    step_alike(resident, other, 0)
    expected, found = bits(*resident), bits(*other)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name].float(), value.float(), rtol=1e-2 if value.dtype == torch.bfloat16 else 1e-5, atol=1e-7
        )


def test_a_step_takes_two_buckets_of_the_device_and_gives_them_back():
    module, weights, store = opened("streamed", torch.bfloat16)
    train(module, weights, store, range(1))
    for ids in range(2):
        module(torch.full((64,), ids, device=CUDA)).float().square().mean().backward()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    store.step(1e-3)
    extra = torch.cuda.max_memory_allocated() - before
    assert 2 * BUCKET_BYTES * 0.9 < extra <= 2 * BUCKET_BYTES + 2**16
    assert torch.cuda.memory_allocated() == before
    parameters = sum(p.numel() for p in module.parameters())
    assert store.state.host_bytes >= 12 * parameters


def test_parked_memory_is_free_and_five_rounds_are_flat():
    gc.collect()  # what earlier tests left would go in between
    baseline = torch.cuda.memory_allocated()
    module, weights, store = opened("resident", torch.bfloat16)
    train(module, weights, store, range(1))
    home = Home("policy", weights, store.tensors, torch.device(CUDA))
    here, expected = requested(), bits(module, weights, store)
    peaks, copied = [], []
    for _ in range(5):
        torch.cuda.reset_peak_memory_stats()
        copied.append(home.offload())
        assert torch.cuda.memory_allocated() == baseline
        with pytest.raises(EngineError, match="parked"):
            module(torch.zeros(1, dtype=torch.long, device=CUDA))
        assert home.onload() == copied[-1]
        assert requested() == here
        peaks.append(requested("peak"))
        assert (home.memory.num_made, home.offload(writes=False)) == (2, 0)
        home.onload()
    assert len(set(peaks)) == 1 and len(set(copied)) == 1
    found = bits(module, weights, store)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    train(module, weights, store, range(1, 2))
    assert not torch.equal(module[1].weight.cpu(), expected["1.weight"])


def test_memory_that_leaves_is_not_written_before_it_has_left():
    """Others get the memory at once and write to it, while the copy would still be running."""
    values = torch.arange(2**27, device=CUDA, dtype=torch.float32)
    expected = values.clone()
    parked = Parked("policy", lambda: [values], HostMemory(torch.device(CUDA)), torch.device(CUDA))
    for _ in range(3):
        parked.offload()
        other = torch.full((2**27,), -1.0, device=CUDA)
        del other
        parked.begin_onload()
        parked.finish()
        assert torch.equal(values, expected)


def test_work_goes_on_beside_a_copy():
    """The current stream does not wait for a copy that has only begun."""
    values = torch.ones(2**29, device=CUDA)
    parked = Parked("policy", lambda: [values], HostMemory(torch.device(CUDA)), torch.device(CUDA))
    parked.offload()
    parked.onload()
    small = torch.ones(8, device=CUDA)
    small.sum()  # kernels are loaded when they are used first
    torch.cuda.synchronize()
    parked.begin_offload()  # two gibibytes take some 40 ms
    work, done = small.sum(), torch.cuda.Event()
    done.record()
    done.synchronize()  # to read the number would wait for the copy: both leave through one engine
    is_copying = not parked._lanes._out.query()
    parked.finish()
    parked.onload()
    assert is_copying and float(work) == 8 and bool((values == 1).all())


def test_pinned_memory_has_its_exact_size():
    before = os.sysconf("SC_PAGE_SIZE")
    region = Region(5 * 2**20 + 1, is_pinned=True)
    assert region.num_bytes == 5 * 2**20 + before and region.data.is_pinned()
    address = region.data
    del region
    assert not address.is_pinned()  # given back to the driver with its region
