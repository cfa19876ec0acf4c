"""Offload without a device of its own: what leaves comes back, and an optimizer elsewhere takes the same steps to the bit."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from benchmarks import offload
from flowrl.cost.offload import Offload
from flowrl.engines.offload.home import Home
from flowrl.engines.offload.layout import LINE, FlatLayout
from flowrl.engines.offload.memory import HostMemory, Region
from flowrl.engines.offload.on_cpu import CpuAdamW
from flowrl.engines.offload.park import Parked, Place
from flowrl.engines.offload.state import HostState
from flowrl.engines.offload.store import OptimizerStore, ResidentAdamW, open_store
from flowrl.engines.offload.streamed import StreamedAdamW
from flowrl.engines.weights import Weights
from flowrl.errors import ConfigError, EngineError
from flowrl.model import AdamW

CPU = torch.device("cpu")
OPTIONS = AdamW(lr=1e-2, weight_decay=0.1)
BYTES = 3 * 4 * 3 * LINE
"""Of a bucket: three lines of masters and moments, fewer than any matrix below has."""


class Net(nn.Module):
    """A tied weight, sizes that are no multiples of a line, a frozen parameter, a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(37, 13)
        self.inner = nn.Linear(13, 29)
        self.outer = nn.Linear(29, 13, bias=False)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.head = nn.Linear(13, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.outer(torch.tanh(self.inner(self.embed(ids)))) * self.scale)


def backward(module: nn.Module, seed: int, parts: int = 2) -> None:
    """Gradients of several micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(parts):
        module(torch.randint(37, (11,), generator=generator)).float().square().mean().backward()


def opened(kind: str, precision: torch.dtype, seed: int = 0) -> tuple[Net, Weights, OptimizerStore]:
    module = Net(seed)
    weights = Weights("policy", module)
    parameters, memory = weights.trained_parameters(), HostMemory(CPU)
    is_rounded = precision != torch.float32
    if kind == "resident":
        weights.make_masters(precision)
        return module, weights, ResidentAdamW(weights, OPTIONS)
    state = HostState("policy", parameters, memory, with_masters=is_rounded or kind == "cpu")
    if is_rounded or kind == "cpu":
        weights.lead({name: state.part("master", name) for name in parameters}, precision)
    if kind == "streamed":
        return module, weights, StreamedAdamW(weights, OPTIONS, state, bucket_bytes=BYTES)
    return module, weights, CpuAdamW(weights, OPTIONS, state, memory, bucket_bytes=4 * 3 * LINE)


def train(module: nn.Module, weights: Weights, store: OptimizerStore, steps: range) -> None:
    for step in steps:
        backward(module, step)
        store.step(1e-2 / (step + 1))
        weights.drop_gradients()


def assert_equal(one: tuple[Net, Weights, OptimizerStore], other: tuple[Net, Weights, OptimizerStore]) -> None:
    """Module, masters and moments, every bit."""
    for name, parameter in one[0].state_dict().items():
        assert torch.equal(parameter, other[0].state_dict()[name]), name
    for name, master in one[1].masters.items():
        assert torch.equal(master, other[1].masters[name]), name
    mine, theirs = one[2].entries(), other[2].entries()
    assert mine.keys() == theirs.keys()
    for name, entry in mine.items():
        assert entry["step"] == theirs[name]["step"]
        assert torch.equal(entry["exp_avg"], theirs[name]["exp_avg"]), name
        assert torch.equal(entry["exp_avg_sq"], theirs[name]["exp_avg_sq"]), name


# -------------------------------------------------------------------------------------------------------------- layout


@given(st.lists(st.integers(0, 500), min_size=1, max_size=12), st.integers(LINE, 700))
@settings(max_examples=200, deadline=None)
def test_buckets_hold_every_element_once(sizes, most):
    layout = FlatLayout.of({f"p{i}": size for i, size in enumerate(sizes)})
    buckets = layout.buckets(most)
    assert [b.start for b in buckets[1:]] == [b.stop for b in buckets[:-1]]
    assert all(b.stop - b.start <= most for b in buckets)
    seen: dict[str, list[tuple[int, int]]] = {}
    for bucket in buckets:
        for piece in bucket.pieces:
            assert piece.start < piece.stop and piece.end <= bucket.stop - bucket.start
            assert bucket.start + piece.at == layout.starts[piece.name] + piece.start
            assert piece.start % LINE == 0 and piece.at % LINE == 0
            seen.setdefault(piece.name, []).append((piece.start, piece.stop))
    for name, size in layout.sizes.items():
        parts = seen.get(name, [])
        assert sum(stop - start for start, stop in parts) == size
        assert all(first[1] == second[0] for first, second in pairwise(parts))


def test_a_bucket_has_a_least_size():
    with pytest.raises(ConfigError, match="at least 64 elements; found 63"):
        FlatLayout.of({"a": 5}).buckets(63)


# -------------------------------------------------------------------------------------------------------------- stores


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["streamed", "cpu"])
def test_an_optimizer_elsewhere_takes_the_same_steps(kind, precision):
    resident, other = opened("resident", precision), opened(kind, precision)
    for step in range(4):
        train(*resident, range(step, step + 1))
        train(*other, range(step, step + 1))
        assert_equal(other, resident)
    assert other[2].entries().keys() == {"embed.weight", "inner.weight", "inner.bias", "outer.weight"}
    assert not torch.equal(other[0].inner.weight.float(), Net().inner.weight)
    assert torch.equal(other[1].masters["frozen"], Net().frozen)


def test_a_parameter_that_a_gradient_reaches_late_counts_its_own_steps():
    resident, streamed = opened("resident", torch.float32), opened("streamed", torch.float32)
    for one in (resident, streamed):
        train(*one, range(2))
        one[0].unused(torch.ones(3)).sum().backward()
        train(*one, range(2, 4))
    assert streamed[2].entries()["unused.weight"]["step"] == 1 and streamed[2].entries()["inner.bias"]["step"] == 4
    assert_equal(streamed, resident)


@pytest.mark.parametrize("kind", ["resident", "streamed", "cpu"])
def test_state_of_one_store_goes_on_in_another(kind):
    """Three steps here and two there are five."""
    whole = opened("resident", torch.bfloat16)
    train(*whole, range(5))
    first = opened("streamed", torch.bfloat16)
    train(*first, range(3))
    second = opened(kind, torch.bfloat16, seed=1)
    second[1].load(first[1].export())
    second[2].load(
        {name: {**entry, "exp_avg": entry["exp_avg"].clone(), "exp_avg_sq": entry["exp_avg_sq"].clone()}
         for name, entry in first[2].entries().items()}
    )  # fmt: skip
    train(*second, range(3, 5))
    assert_equal(second, whole)


def test_bf16_gradients_are_what_their_fp32_copies_are():
    """A loop of one's own may leave gradients in the type of the weights."""
    one, other = opened("streamed", torch.bfloat16), opened("streamed", torch.bfloat16)
    for module, weights, store in (one, other):
        backward(module, 0, parts=1)
        for name in weights.gradients():
            if module is one[0]:
                weights._holder(name).grad = weights.gradients()[name].bfloat16()
        store.step(1e-2)
    assert_equal(one, other)


def test_places_of_other_engines_are_refused():
    weights = Weights("policy", Net())
    assert open_store(weights, OPTIONS, torch.float32, Offload.PARK) is None
    with pytest.raises(EngineError, match=r"offload='all'.* layer by layer.*use 'sopt'"):
        open_store(weights, OPTIONS, torch.float32, Offload.STREAM_ALL)
    module = Net()
    module.inner.weight = nn.Parameter(torch.randn(13, 29).t())
    with pytest.raises(EngineError, match=r"'inner.weight' of model 'policy' is not contiguous"):
        open_store(Weights("policy", module), OPTIONS, torch.float32, Offload.STREAM_OPTIMIZER)


# --------------------------------------------------------------------------------------------------------------- parks


def held(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_what_leaves_comes_back_the_same():
    module = Net()
    ids = torch.arange(11)
    before, values = module(ids), {name: value.clone() for name, value in module.state_dict().items()}
    objects = [*module.parameters(), *module.buffers()]
    storages = [tensor.untyped_storage() for tensor in objects]
    view = module.inner.weight.detach()[3:5]
    memory = HostMemory(CPU)
    parked = Parked("policy", lambda: objects, memory, CPU, faces=lambda: objects)
    size = held(objects)
    for round_ in range(5):
        assert parked.offload() == size and parked.place is Place.PARKED
        assert sum(storage.nbytes() for storage in storages) == 0
        assert all(torch.isnan(tensor).all() for tensor in objects) and module.inner.weight.shape == (29, 13)
        assert parked.offload() == 0
        assert parked.onload() == size and parked.onload() == 0
        assert [id(tensor) for tensor in (*module.parameters(), *module.buffers())] == [id(one) for one in objects]
        assert module.head.weight is module.embed.weight
        for name, value in module.state_dict().items():
            assert torch.equal(value, values[name]), (round_, name)
        assert torch.equal(view, values["inner.weight"][3:5])
        assert torch.equal(module(ids), before)
        assert (memory.num_made, memory.held_bytes) == (1, parked.host_bytes)


def test_what_did_not_change_is_not_copied():
    tensors = [torch.arange(10.0), torch.arange(7.0)]
    parked = Parked("ref", lambda: tensors, HostMemory(CPU), CPU)
    assert parked.offload(writes=False) == held(tensors) or parked.onload()  # no copy yet: it is made
    parked.onload()
    assert parked.offload(writes=False) == 0
    assert parked.onload() == 68
    assert tensors[0].tolist() == list(range(10)) and tensors[1].tolist() == list(range(7))
    tensors[0] += 1
    assert parked.offload(writes=False) == 68  # PyTorch knows better
    parked.onload()
    assert tensors[0].tolist() == list(range(1, 11))
    tensors.append(torch.ones(3))
    assert parked.offload(writes=False) == 80  # the copy is of other tensors
    parked.onload()
    assert tensors[2].tolist() == [1, 1, 1]


def test_moves_out_of_turn_are_refused_and_a_failure_leaves_it_here():
    tensors = [torch.zeros(4)]
    parked = Parked("policy", lambda: tensors, HostMemory(CPU), CPU)
    with pytest.raises(EngineError, match="'policy' is on the device, so it cannot be on its way to the device next"):
        parked.begin_onload()
    parked.begin_offload()
    assert tensors[0].untyped_storage().nbytes() == 16  # still to be read
    with pytest.raises(EngineError, match="on its way to the host"):
        parked.begin_offload()
    parked.finish()
    parked.onload()
    tensors.append(torch.frombuffer(bytearray(8), dtype=torch.float32))
    with pytest.raises(EngineError, match="memory that is not PyTorch's own"):
        parked.offload()
    assert parked.is_here and tensors[0].tolist() == [0] * 4


def test_host_memory_is_used_again():
    memory = HostMemory(CPU)
    first = memory.take(5_000_000)
    memory.give(first)
    assert memory.take(4_500_000) is first
    memory.give(first)
    other = memory.take(1_000_000)  # too small a request for so much
    assert other is not first and memory.num_made == 2
    memory.trim()
    assert memory.held_bytes == other.num_bytes
    with pytest.raises(EngineError, match="GiB of host memory"):
        Region(2**62, is_pinned=False)


def test_a_parked_model_cannot_be_used():
    module, weights, store = opened("resident", torch.bfloat16)
    train(module, weights, store, range(1))
    home = Home("policy", weights, store.tensors, CPU)
    moments = [entry["exp_avg"] for entry in store.entries().values()]
    master = weights.masters["inner.weight"]
    expected = master.detach().clone()
    home.offload()
    assert held([master, *moments]) == 0
    for call in (module, module.inner, module.head):
        with pytest.raises(EngineError, match=r"'policy' is parked in host memory, and a call of \w+ needs it on cpu"):
            call(torch.zeros(13))
    with home.brought(writes=False):
        assert torch.equal(master, expected)
    assert not home.is_here and held([master, *moments]) == 0
    home.onload()
    assert home.offload(writes=False) == 0
    home.onload()
    other = opened("resident", torch.bfloat16)
    train(*other, range(4))
    train(module, weights, store, range(1, 4))
    assert home.offload(writes=False) > 0
    home.onload()
    assert_equal((module, weights, store), other)


def test_what_only_training_needs_may_leave_alone():
    module, weights, store = opened("resident", torch.float32)
    train(module, weights, store, range(1))
    home = Home("policy", weights, store.tensors, CPU)
    copied = home.offload(keep_model=True)
    moments = list(store.tensors())
    assert copied > 0 and held(moments) == 0
    module(torch.arange(3))
    home.require("a forward pass")
    with pytest.raises(EngineError, match="training needs it"):
        home.require("training", training=True)
    home.onload()
    assert held(moments) == copied


# --------------------------------------------------------------------------------------------------------------- shards


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[object]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh) -> tuple[nn.Linear, Weights]:
    torch.manual_seed(0)
    module = nn.Linear(13, 29)
    for name in ("weight", "bias"):
        whole = getattr(module, name).detach()
        setattr(module, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
    return module, Weights("policy", module)


def test_shards_leave_and_come_back(mesh):
    module, _ = sharded(mesh)
    local = module.weight.to_local()
    before = local.detach().clone()
    parked = Parked("policy", module.parameters, HostMemory(CPU), CPU, faces=module.parameters)
    assert parked.offload() == 4 * (13 * 29 + 29)
    assert local.untyped_storage().nbytes() == 0
    parked.onload()
    assert torch.equal(module.weight.to_local(), before) and torch.equal(local, before)


def test_optimizers_with_their_state_on_the_host_take_shards(mesh):
    found = []
    for kind in (None, StreamedAdamW, CpuAdamW):
        module, weights = sharded(mesh)
        if kind is None:
            store: OptimizerStore = ResidentAdamW(weights, OPTIONS)
        else:
            store = kind.over(weights, OPTIONS, torch.float32)
            assert not weights.leads  # shards are the masters
            assert store.state.kinds == ("exp_avg", "exp_avg_sq") and store.host_bytes >= 2 * 4 * (13 * 29 + 29)
        for step in range(3):
            x = distribute_tensor(torch.randn(5, 13, generator=torch.Generator().manual_seed(step)), mesh)
            module(x).to_local().square().sum().backward()
            store.step(1e-2)
            weights.drop_gradients()
        entries = store.entries()
        assert all(isinstance(entry["exp_avg"], DTensor) for entry in entries.values())
        found.append(
            [module.weight.to_local(), *(entries[n][k].to_local() for n in entries for k in ("exp_avg", "exp_avg_sq"))]
        )
        store.load(entries)
        assert store.entries()["bias"]["step"] == 3
    assert all(torch.equal(one, two) and torch.equal(one, three) for one, two, three in zip(*found, strict=True))


# ----------------------------------------------------------------------------------------------------------- benchmark


def test_the_benchmark_compares_equal_steps(capsys):
    assert offload.main(["--tiny", "--repeats", "1"]) == 0
    said = capsys.readouterr().out
    assert said.count("'is_equal': True") == 2 and "177,088 parameters" in said
