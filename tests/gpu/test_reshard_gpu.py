"""Weights edges on GPUs: streams and events give what whole tensors give, bit for bit, in every run."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from flowrl.cost.shapes import ModelShape  # noqa: E402
from flowrl.engines.reshard.control import Loop, LoopControl  # noqa: E402
from flowrl.engines.reshard.dist import DistTransport, board_for  # noqa: E402
from flowrl.engines.reshard.peer_copy import PeerCopyTransport  # noqa: E402
from flowrl.engines.reshard.program import Program, program_for  # noqa: E402
from flowrl.engines.reshard.resharder import Resharder  # noqa: E402
from flowrl.engines.reshard.transports import LoopTransport  # noqa: E402
from flowrl.errors import EngineError, WaitTimeout  # noqa: E402
from flowrl.mesh import Layout  # noqa: E402
from flowrl.planner.boxes import Holding  # noqa: E402

SHAPE = ModelShape.from_config(
    {"model_type": "qwen2", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
     "intermediate_size": 512, "vocab_size": 1001, "tie_word_embeddings": True}
)  # fmt: skip


def whole(version: int, dtype: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {one.name: torch.randn(one.shape, generator=generator).to(getattr(torch, dtype)) for one in SHAPE.modules()}


def program_of(source: str, target: str, dtype: str, *, is_on_host: bool = False) -> Program:
    before, after = Layout.parse(source), Layout.parse(target)
    return program_for(
        SHAPE.modules(), Holding(before, tuple(range(before.size)), kv_heads=2),
        Holding(after, tuple(range(after.size)), kv_heads=2),
        source_dtype=dtype, bucket_bytes=2**16, direct_bytes=2**13, is_on_host=is_on_host,
    )  # fmt: skip


def fill(program: Program, device: int, tensors: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    """Write this device's part of whole tensors into its shards."""
    shelf = program.source.get(device)
    for name, slots in shelf.slots.items() if shelf is not None else ():
        for slot in slots:
            tensors[name].copy_(values[name][tuple(slice(*interval) for interval in slot.box)])


def tensors_of(
    program: Program, device: int, dtype: str, at: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    before, after = program.source.get(device), program.target.get(device)
    given = {
        n: torch.empty(s, dtype=getattr(torch, dtype), device=at) for n, s in (before.shapes if before else {}).items()
    }
    taken = {
        n: torch.full(s, torch.nan, dtype=torch.bfloat16, device=at) for n, s in (after.shapes if after else {}).items()
    }
    return given, taken


def differing(
    program: Program, device: int, target: dict[str, torch.Tensor], values: dict[str, torch.Tensor]
) -> list[str]:
    shelf = program.target.get(device)
    return [
        name
        for name, slots in (shelf.slots.items() if shelf is not None else ())
        for slot in slots
        if not torch.equal(
            target[slot.region.storage].cpu(),
            values[name][tuple(slice(*interval) for interval in slot.box)].to(torch.bfloat16),
        )
    ]


@pytest.mark.parametrize("is_on_host", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("source", "target"), [("f2", "t2"), ("f4", "d2t2"), ("f3", "d3"), ("f2t2", "t4"), ("d1", "d1")]
)
def test_ranks_of_one_gpu(source: str, target: str, dtype: str, is_on_host: bool) -> None:
    program = program_of(source, target, dtype, is_on_host=is_on_host)
    loop = Loop(program.devices, timeout_s=20)
    sides = {device: tensors_of(program, device, dtype, "cuda") for device in program.devices}
    if is_on_host:  # a parked trainer
        sides = {
            device: ({n: t.cpu().pin_memory() for n, t in given.items()}, taken)
            for device, (given, taken) in sides.items()
        }
    ends = []
    for device, (given, taken) in sides.items():
        control = LoopControl(loop, device)
        ends.append(
            Resharder(
                program, device, source=given, target=taken, transport=LoopTransport(loop, control), control=control
            )
        )
    for version in (1, 2, 3):
        values = whole(version, dtype)
        for device, (given, _) in sides.items():
            fill(program, device, given, values)
        torch.cuda.synchronize()
        with ThreadPoolExecutor(len(ends)) as pool:
            list(pool.map(Resharder.run, ends, [version] * len(ends)))
        for device, (_, taken) in sides.items():
            assert differing(program, device, taken, values) == []


def on_rank(rank: int, folder: str, how: str, dies: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    at = torch.device("cuda", rank)
    torch.cuda.set_device(at)
    dist.init_process_group(
        "nccl", f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=60), device_id=at
    )
    group = dist.new_group(backend="gloo")
    found: dict[str, Any] = {}
    for source, target, dtype in (("f2", "t2", "bfloat16"), ("f2", "d2", "float32"), ("f2", "d2", "bfloat16")):
        program = program_of(source, target, dtype)
        given, taken = tensors_of(program, rank, dtype, f"cuda:{rank}")
        control = board_for((0, 1), rank, group=group, timeout_s=10)
        transport = PeerCopyTransport(control, device=at, group=group) if how == "peer copy" else DistTransport()
        end = Resharder(program, rank, source=given, target=taken, transport=transport, control=control, timeout_s=10)
        pointers = [one.data_ptr() for one in taken.values()]
        for version in (1, 2, 3):
            values = whole(version, dtype)
            fill(program, rank, given, values)
            end.run(version)
            found[f"{source} {target} {dtype} {version}"] = differing(program, rank, taken, values)
        assert pointers == [one.data_ptr() for one in taken.values()]
        if dies:
            if rank == 1:
                os._exit(0)
            try:
                end.run(4)
            except (WaitTimeout, EngineError) as error:
                found = {"error": str(error), "is_stale": end.is_stale}
            torch.save(found, Path(folder) / "died.pt")
            os._exit(0)
        dist.barrier(group=group)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_gpus
@pytest.mark.parametrize("how", ["peer copy", "nccl"])
def test_two_gpus(how: str, tmp_path: Path) -> None:
    mp.spawn(on_rank, (str(tmp_path), how, False), nprocs=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert len(found) == 9
        assert all(names == [] for names in found.values()), found


@two_gpus
def test_a_dead_peer_is_named_in_time(tmp_path: Path) -> None:
    mp.spawn(on_rank, (str(tmp_path), "peer copy", True), nprocs=2)
    found = torch.load(tmp_path / "died.pt")
    assert found["is_stale"]
    assert "device 1 did not come to the start of version 4" in found["error"]
