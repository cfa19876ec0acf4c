"""Weights edges between real processes (gloo), from shards that FSDP2 and tensor parallelism made; and what a dead one leaves."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from flowrl.cost.shapes import ModelShape
from flowrl.engines.reshard.dist import DistTransport, GroupControl, board_for
from flowrl.engines.reshard.program import Program, program_for
from flowrl.engines.reshard.resharder import Resharder
from flowrl.engines.reshard.slots import VLLM_JOINS, Recipe
from flowrl.engines.reshard.verify import GatheredOracle
from flowrl.errors import EngineError, StaleWeightsError, WaitTimeout
from flowrl.mesh import Layout
from flowrl.planner.boxes import Holding

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


SHAPE = ModelShape.from_config(
    {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
     "num_key_value_heads": 2, "vocab_size": 97, "tie_word_embeddings": False}
)  # fmt: skip
TENSORS = tuple(SHAPE.modules())


def plain() -> nn.Module:
    """Modules with the names and shapes of a small Llama; nobody calls it."""
    torch.manual_seed(0)
    model = nn.Module()
    for one in TENSORS:
        *path, leaf, _ = one.name.split(".")
        at = model
        for word in path:
            if not hasattr(at, word):
                at.add_module(word, nn.Module())
            at = getattr(at, word)
        if one.kind == "norm":
            at.add_module(leaf, nn.RMSNorm(one.shape[0]))
        elif one.kind == "embedding":
            at.add_module(leaf, nn.Embedding(*one.shape))
        else:
            at.add_module(leaf, nn.Linear(one.shape[1], one.shape[0], bias=False))
    return model


def sharded(layout: Layout) -> nn.Module:
    """Tensor parallelism of the layers, then FSDP2, as torch does them."""
    model = plain()
    mesh = init_device_mesh("cpu", (layout.fsdp, layout.tp), mesh_dim_names=("fsdp", "tp"))
    for layer in model.model.layers.children():  # type: ignore[union-attr]
        if layout.tp > 1:
            plan = {**{name: ColwiseParallel() for name in COLUMNS}, **{name: RowwiseParallel() for name in ROWS}}
            parallelize_module(layer, mesh["tp"], plan, src_data_rank=None)
        fully_shard(layer, mesh=mesh["fsdp"])
    return fully_shard(model, mesh=mesh["fsdp"])


def step(model: nn.Module, version: int) -> None:
    """Other weights, in place, the same whatever the sharding."""
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.mul_(0.5).add_(0.01 * version)


def begin(rank: int, world: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=60))


def program_of(source: str, target: str, devices: int, **options: Any) -> Program:
    before, after = Layout.parse(source), Layout.parse(target)
    return program_for(
        TENSORS,
        Holding(before, tuple(range(before.size)), kv_heads=2),
        Holding(after, tuple(range(devices - after.size, devices)), kv_heads=2, vocab_multiple=64),
        source_dtype="float32", bucket_bytes=8192, direct_bytes=1024, target_recipe=Recipe(VLLM_JOINS), **options,
    )  # fmt: skip


def on_rank(rank: int, world: int, folder: str, cases: list[tuple[str, str, str]]) -> None:
    begin(rank, world, folder)
    found = [run(rank, world, *case) for case in cases]
    if world == 4:
        strided(rank, world)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def run(rank: int, world: int, source: str, target: str, control: str) -> list[tuple[int, int, int]]:
    """Three runs; (version, checked, received) of each."""
    layout = Layout.parse(source)
    program = program_of(source, target, world)
    is_sharded = layout.size == world
    model = sharded(layout) if is_sharded else plain()
    given = dict(model.named_parameters()) if rank < layout.size else {}
    shelf = program.target.get(rank)
    taken = {
        n: torch.full(s, torch.nan, dtype=torch.bfloat16)
        for n, s in (shelf.shapes if shelf is not None else {}).items()
    }
    agree = board_for(range(world), rank, timeout_s=60) if control == "board" else GroupControl(world, timeout_s=60)
    end = Resharder(
        program, rank, source=given, target=taken, transport=DistTransport(timeout_s=60), control=agree,
        oracle=GatheredOracle(program, rank, given, on=torch.device("cpu"), is_dtensor=is_sharded),
    )  # fmt: skip
    pointers = [one.data_ptr() for one in taken.values()]
    found = []
    for version, verify in ((1, "full"), (2, "sample"), (3, "full")):
        step(model, version)
        found.append(end.run(version, verify=verify))  # type: ignore[arg-type]
    assert [one.data_ptr() for one in taken.values()] == pointers
    assert not any(bool(one.isnan().any()) for one in taken.values())
    return [(one.version, one.num_checked, one.received_bytes) for one in found]


def strided(rank: int, world: int) -> None:
    """FSDP2 over tensor parallelism, 2 x 2: shards of shards."""
    layout = Layout.parse("f2t2")
    model = sharded(layout)
    given = {
        name: one for name, one in model.named_parameters() if ".layers." in name
    }  # torch was not asked to cut the others
    listed = tuple(one for one in TENSORS if one.name in given)
    ranks = tuple(range(world))
    program = program_for(
        listed, Holding(layout, ranks, kv_heads=2), Holding(Layout.parse("t4"), ranks, kv_heads=2),
        source_dtype="float32", target_dtype="float32", bucket_bytes=4096, direct_bytes=512,
    )  # fmt: skip
    taken = {n: torch.full(s, torch.nan) for n, s in program.target[rank].shapes.items()}
    end = Resharder(
        program, rank, source=given, target=taken, transport=DistTransport(),
        control=board_for(ranks, rank),
        oracle=GatheredOracle(program, rank, given, on=torch.device("cpu")),
    )  # fmt: skip
    for version in (1, 2):
        step(model, version)
        assert end.run(version, verify="full").num_checked == sum(one.nbytes for one in taken.values())


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [("f2", "t2", "group"), ("f2", "d2", "board"), ("d1", "d1", "board")]),
        (4, [("f4", "d2t2", "board"), ("f4", "t4", "group")]),
    ],
)
def test_what_arrives_is_what_full_tensor_gives(world: int, cases: list[tuple[str, str, str]], tmp_path: Path) -> None:
    """Every element is compared with `full_tensor()` on every rank; with four processes also of strided shards."""
    mp.spawn(on_rank, (world, str(tmp_path), cases), nprocs=world)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world)]
    for number, (source, target, _) in enumerate(cases):
        program = program_of(source, target, world)
        for rank, found in enumerate(one[number] for one in ranks):
            assert [version for version, *_ in found] == [1, 2, 3]
            held = program.target.get(rank)
            needed = sum(
                2 * torch.Size(slot.region.shape).numel()
                for slots in (held.slots.values() if held is not None else ())
                for slot in slots
            )
            assert [checked for _, checked, _ in found][::2] == [needed, needed]
            assert found[1][1] > 0
        assert sum(one[number][0][2] for one in ranks) == program.wire_bytes


def dying_on_rank(rank: int, world: int, folder: str, control: str) -> None:
    begin(rank, world, folder)
    program = program_of("f2", "t2", world)
    given = dict(sharded(Layout.parse("f2")).named_parameters())
    taken = {n: torch.full(s, torch.nan, dtype=torch.bfloat16) for n, s in program.target[rank].shapes.items()}
    agree = board_for((0, 1), rank, timeout_s=3) if control == "board" else GroupControl(2, timeout_s=3)
    transport = DistTransport(timeout_s=3)
    end = Resharder(program, rank, source=given, target=taken, transport=transport, control=agree)
    end.run(1)
    if rank == 1:
        begun = transport.start

        def start(bucket: int) -> None:
            if bucket == 1:
                os._exit(0)  # as a process that is killed: nothing is said to anybody
            begun(bucket)

        transport.start = start  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    try:
        end.run(2)
    except (EngineError, WaitTimeout) as error:
        found["error"] = str(error)
    try:
        end.run(3)
    except StaleWeightsError as error:
        found["refused"] = str(error)
    found["version"] = end.version
    torch.save(found, Path(folder) / "0.pt")
    os._exit(0)


@pytest.mark.parametrize("control", ["board", "group"])
def test_a_peer_that_dies_leaves_the_target_stale(control: str, tmp_path: Path) -> None:
    mp.spawn(dying_on_rank, (2, str(tmp_path), control), nprocs=2)
    found = torch.load(tmp_path / "0.pt")
    assert "bucket" in found["error"] or "end of version 2" in found["error"]
    assert "version 2 failed" in found["refused"]
    assert found["version"] == 1
