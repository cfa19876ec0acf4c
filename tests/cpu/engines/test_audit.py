"""The measured sharding audit on one process: bytes, types, what is trained, placements on a mesh."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from flowrl.cost.audit import Audit
from flowrl.cost.shapes import ModelShape
from flowrl.engines.audit import audit_module
from flowrl.mesh import Layout
from flowrl.planner.audit import audit_layout


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 7))


def test_bytes_after_a_step() -> None:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    before = audit_module(made, optimizer)
    elements = sum(parameter.numel() for parameter in made.parameters())
    assert before.device_bytes == 4 * elements
    made(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    after = audit_module(made, optimizer)
    assert after.device_bytes == 16 * elements  # both moments; the counter of steps is none of it
    assert after.findings == ()
    assert "measured: " in str(after) and not after.is_predicted


def test_one_process_holds_everything_and_nothing_twice() -> None:
    parts = audit_module(model()).parts
    assert {(part.devices, part.copies) for part in parts} == {(1, 1)}
    tied = model()
    tied[1] = tied[0]
    assert len(audit_module(tied).parts) == 2  # what is shared is listed once


def test_a_frozen_module_in_fp32_is_found() -> None:
    made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    made[0].requires_grad_(False)
    (found,) = audit_module(made).problems
    assert (found.kind, found.modules, found.num_tensors) == ("frozen_fp32", ("*",), 1)
    assert found.wasted_bytes == 2 * 64 * 64
    made[0].bfloat16()
    assert audit_module(made).problems == ()


def test_fp32_among_bf16_is_found() -> None:
    made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8)).bfloat16()
    assert audit_module(made).problems == ()
    made[2].float()
    (found,) = audit_module(made).problems
    assert found.kind == "fp32_leftover" and found.num_tensors == 2


def test_state_of_the_whole_parameter_is_found() -> None:
    """As when the optimizer was made before the parameters were sharded."""
    made = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(made.parameters())
    optimizer.state[made.weight] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(128, 64)}
    (found,) = audit_module(made, optimizer).problems
    assert found.kind == "state_not_sharded" and found.wasted_bytes == 4 * 64 * 64


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """This process as the first of some ranks that are not there: nothing is communicated."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


def llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                    vocab_size=96, tie_word_embeddings=False)
    )  # fmt: skip


def bytes_of(audit: Audit) -> dict[str, int]:
    return {part.name: part.param_bytes for part in audit.parts}


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_copies_of_shards(ranks: int) -> None:
    """Two copies, each cut in two: what a layout of copies asks for is no finding."""
    made = llama()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
    for layer in made.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(made, mesh=mesh)
    found = audit_module(made)
    predicted = audit_layout(ModelShape.from_config(made.config), Layout.parse("d2f2"))
    assert bytes_of(found) == bytes_of(predicted)
    assert {(part.devices, part.copies) for part in found.parts} == {(4, 2)}
    assert found.findings == () and found.groups[0].how == "1/2 in 2 copies"


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_tensor_parallel_and_shards(ranks: int) -> None:
    """Bytes of each parameter are those that are predicted for f2t2."""
    made = llama()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    columns = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel())
    rows = dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel())
    plan = {
        name: ({**columns, **rows})[name.rpartition(".")[2]]
        for name, _ in made.named_modules()
        if name.rpartition(".")[2] in {**columns, **rows}
    }
    plan |= {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()), "lm_head": ColwiseParallel()}
    parallelize_module(made, mesh["tp"], plan, src_data_rank=None)
    for layer in made.model.layers:
        fully_shard(layer, mesh=mesh["fsdp"])
    fully_shard(made, mesh=mesh["fsdp"])
    found = audit_module(made)
    predicted = audit_layout(ModelShape.from_config(made.config), Layout.parse("f2t2"))
    assert bytes_of(found) == bytes_of(predicted)
    assert found.problems == ()
    assert {part.copies for part in found.parts if "proj" in part.name} == {1}


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_a_plain_module_of_several_ranks_is_replicated(ranks: int) -> None:
    """As under data parallelism without shards."""
    (found,) = audit_module(llama()).problems
    assert found.kind == "replicated" and "each of 4 devices" in found.what


def test_what_lies_on_the_host_is_counted_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights on a device (here one that holds nothing), optimizer state in host memory."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    made = nn.Linear(64, 64, bias=False, device="meta")
    optimizer = torch.optim.AdamW(made.parameters())
    optimizer.state[made.weight] = {"exp_avg": torch.zeros(64, 64), "exp_avg_sq": torch.zeros(64, 64)}
    audit = audit_module(made, optimizer)
    assert (audit.device_bytes, audit.host_bytes) == (4 * 64 * 64, 8 * 64 * 64)
    assert "on host" in str(audit) and audit.problems == ()
