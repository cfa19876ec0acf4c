"""The sharding audit over real ranks (gloo) and FSDP2: what is left out of the wrap is found, and what was predicted is there."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from flowrl.cost.audit import Audit
from flowrl.cost.shapes import ModelShape
from flowrl.engines.audit import audit_module
from flowrl.mesh import Layout
from flowrl.planner.audit import audit_layout

WORLD = 2
VOCAB = 97  # odd: the last rank has a row less


def config(layers: int = 2) -> Any:
    return LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, tie_word_embeddings=False,
    )  # fmt: skip


def step(wrap: str, *, freeze: bool = False) -> Audit:
    """A training step of a small Llama; the audit after it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config())
    if freeze:
        model.model.embed_tokens.requires_grad_(False)
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if wrap == "all":
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    tokens = torch.arange(12).view(2, 6)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return audit_module(model, optimizer)


def on_rank(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/rendezvous", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    found = {
        "all": step("all"),
        "layers": step("layers"),
        "frozen": step("layers", freeze=True),
    }
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Audit]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(on_rank, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


def sizes(audit: Audit) -> dict[str, tuple[int, ...]]:
    return {
        part.name: (part.param_bytes, part.grad_bytes, part.optimizer_bytes, part.uneven_bytes, part.copies)
        for part in audit.parts
    }


def shape() -> ModelShape:
    return ModelShape.from_config(config())


def test_what_was_predicted_is_there(ranks: list[dict[str, Audit]]) -> None:
    """Byte for byte and tensor by tensor on the first rank, which is the fullest, with and without the root in the wrap."""
    for wrap in ("all", "layers"):
        predicted = audit_layout(shape(), Layout(fsdp=WORLD), wrap=wrap)
        assert sizes(ranks[0][wrap]) == sizes(predicted)
        assert ranks[0][wrap].device_bytes == predicted.device_bytes
        assert ranks[0][wrap].groups[0].how == predicted.groups[0].how


def test_all_ranks_hold_everything_once(ranks: list[dict[str, Audit]]) -> None:
    assert sum(rank["all"].device_bytes for rank in ranks) == 16 * shape().params()
    embedding = [rank["all"].parts[0].param_bytes for rank in ranks]
    assert embedding == [4 * 32 * 49, 4 * 32 * 48]


def test_a_whole_wrap_has_no_problems(ranks: list[dict[str, Audit]]) -> None:
    for rank in ranks:
        assert rank["all"].problems == ()
        assert [one.kind for one in rank["all"].findings] == ["uneven"]  # 97 rows over two ranks


def test_embedding_and_head_outside_the_wrap_are_found(ranks: list[dict[str, Audit]]) -> None:
    for rank in ranks:
        (found,) = rank["layers"].problems
        assert found.kind == "replicated"
        assert found.modules == ("model.embed_tokens", "model.norm", "lm_head")
        assert found.wasted_bytes == 16 * shape().root_params() // 2


def test_a_frozen_embedding_outside_the_wrap_is_found(ranks: list[dict[str, Audit]]) -> None:
    kinds = {one.kind: one.modules for one in ranks[0]["frozen"].problems}
    assert kinds["replicated_frozen"] == ("model.embed_tokens",)
    assert kinds["replicated"] == ("model.norm", "lm_head")
    assert "frozen_fp32" in kinds
