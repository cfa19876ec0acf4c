"""The torch engine on a mesh, as far as one process can see it: what is refused, and modules without weights."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from flowrl.engines.mesh.host import open_on_mesh
from flowrl.engines.mesh.plans import FAMILIES, cut_layer, family_of
from flowrl.engines.mesh.ranks import RankMesh
from flowrl.engines.mesh.sharding import find_layers
from flowrl.engines.mesh.sources import (
    Safetensors,
    StateDict,
    empty_module,
    materialise,
    missing,
    parameters_on_meta,
    safetensors_files,
)
from flowrl.errors import ConfigError, EngineError
from flowrl.mesh import Layout
from tests.distributed.mesh_cases import CASES, job_of, metrics_of, model_of, uses_of

SMALL = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


def llama(**more: object) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, **more}))


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A job of four of which only rank 0 is there."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_a_mesh_needs_processes() -> None:
    with pytest.raises(EngineError, match="mesh 'policy' needs torch.distributed: call .*init_process_group first"):
        RankMesh.join(Layout(fsdp=2), "policy")


def test_a_layout_must_fit_the_job(four_ranks: None) -> None:
    with pytest.raises(ConfigError, match="layout f8 needs 8 ranks, and the job has 4 processes; start as many"):
        RankMesh.join(Layout(fsdp=8), "policy")
    with pytest.raises(ConfigError, match="layout f2 needs 2 ranks, and 3 ranks were given"):
        RankMesh.join(Layout(fsdp=2), "policy", ranks=range(3))
    for ranks in ((3, 4), (2, 2), (3, 2)):
        with pytest.raises(ConfigError, match="needs different, rising ranks from 0 to 3; found"):
            RankMesh.join(Layout(fsdp=2), "policy", ranks=ranks)
    with pytest.raises(ConfigError, match="no pipeline stages; found layout f2p2; use pp 1"):
        RankMesh.join(Layout(fsdp=2, pp=2), "policy")


def test_tp_must_divide_heads_and_width() -> None:
    assert family_of("policy", llama(), 2) is FAMILIES["llama"]
    with pytest.raises(
        ConfigError, match="model 'policy': tp 4 does not divide its num_key_value_heads 2; use a smaller tp"
    ):
        family_of("policy", llama(), 4)
    with pytest.raises(ConfigError, match="tp 3 does not divide its num_attention_heads 4, num_key_value_heads 2"):
        family_of("policy", llama(), 3)
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=12, n_layer=1, n_head=3))
    assert family_of("policy", gpt2, 3) is FAMILIES["gpt2"]
    with pytest.raises(ConfigError, match="tp 4 does not divide its num_attention_heads 3"):
        family_of("policy", gpt2, 4)


def test_adapters_are_not_cut_by_tp(four_ranks: None) -> None:
    peft = pytest.importorskip("peft", reason="adapters come from peft, which is not installed")
    options = peft.LoraConfig(r=2, target_modules=["q_proj"])
    module = peft.inject_adapter_in_model(options, llama())
    with pytest.raises(ConfigError, match=r"found a Linear around one \(an adapter\?\); use a layout without tp"):
        cut_layer(module.model.layers[0], FAMILIES["llama"], init_device_mesh("cpu", (4,)))


@pytest.mark.parametrize("steps", [1, 4])
def test_a_group_of_one_adds_up_its_micro_batches(tmp_path: Path, steps: int) -> None:
    """Shards over one rank: the gradient of four micro-batches is that of one, neither the last one's nor twice as much."""
    dist.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        mesh = RankMesh.join(Layout(), "one")
        assert mesh is not None
        case = replace(CASES["llama"], num_rows=8, max_grad_norm=None)
        found, blocks = [], []
        for budget in (400, 400 if steps == 1 else 12):
            part = replace(case, budget=budget)
            host = open_on_mesh("policy", model_of(part), uses_of(part), mesh, seed=0)
            assert host.trainer is not None
            with mock.patch.object(host.trainer, "_run", wraps=host.trainer._run) as run:
                found.append((metrics_of(host.update(job_of(part, 0))), host.weights.export()))
            blocks.append(run.call_count)
        assert blocks[0] == 1 and (blocks[1] == 1 if steps == 1 else blocks[1] >= steps)
        assert found[1][0]["grad_norm"] == pytest.approx(found[0][0]["grad_norm"], rel=1e-5)
        for name, array in found[0][1].items():
            torch.testing.assert_close(torch.tensor(found[1][1][name]), torch.tensor(array), atol=1e-6, rtol=0)
        mesh.close()
    finally:
        dist.destroy_process_group()


def test_an_unknown_family_has_fsdp_only() -> None:
    gemma = Gemma2ForCausalLM(Gemma2Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=8))
    with pytest.raises(
        ConfigError, match="tensor parallelism knows llama, .*; found gemma2; .*use a layout without tp"
    ):
        family_of("policy", gemma, 2)
    assert [path for path, _ in find_layers("policy", gemma)] == ["model.layers.0", "model.layers.1"]


def test_layers_are_found_or_asked_for() -> None:
    plain = nn.Module()
    plain.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    assert [path for path, _ in find_layers("policy", plain)] == ["blocks.0", "blocks.1"]
    with pytest.raises(ConfigError, match="a Linear has no list of layers"):
        find_layers("policy", nn.Linear(2, 2))


# --- modules without weights ------------------------------------------------------------------------------------------


def test_a_module_without_weights_has_its_frequencies() -> None:
    """What is not saved with the weights could not be read: it is made as usual, and parameters take no memory."""
    full = llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0})
    empty = empty_module("policy", full.config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert [name for name, _ in empty.named_parameters()] == [name for name, _ in full.named_parameters()]
    found = dict(empty.named_buffers())
    assert "model.rotary_emb.inv_freq" in found
    for name, buffer in full.named_buffers():
        assert torch.equal(found[name], buffer)


def test_ties_of_an_empty_module_stay_when_it_is_filled(tmp_path: Path) -> None:
    full = llama(tie_word_embeddings=True)
    full.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(safetensors_files(tmp_path)) > 1
    source = Safetensors(safetensors_files(tmp_path), "model")
    made = empty_module("policy", full.config)
    assert made.lm_head.weight is made.model.embed_tokens.weight
    assert missing(made, source) == []
    materialise(made, "", source, torch.device("cpu"), torch.float32)
    assert made.lm_head.weight is made.model.embed_tokens.weight
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(made(input_ids=ids).logits, full.eval()(input_ids=ids).logits)
    source.close()


def test_building_modules_is_as_before_afterwards() -> None:
    before = nn.Module.register_parameter
    with pytest.raises(RuntimeError), parameters_on_meta():
        assert nn.Linear(2, 2).weight.is_meta
        raise RuntimeError
    assert nn.Module.register_parameter is before
    assert not nn.Linear(2, 2).weight.is_meta


def test_weights_that_do_not_fit_are_named() -> None:
    empty = empty_module("policy", llama().config)
    with pytest.raises(EngineError, match="the weights have no 'model.embed_tokens.weight'"):
        materialise(empty, "", StateDict({}), torch.device("cpu"), None)
    wrong = {"model.embed_tokens.weight": torch.zeros(3, 3)}
    with pytest.raises(EngineError, match=r"in shape \(3, 3\), and the model needs \(20, 16\)"):
        materialise(empty, "", StateDict(wrong), torch.device("cpu"), None)


def test_a_folder_without_safetensors_has_none(tmp_path: Path) -> None:
    assert safetensors_files(tmp_path) == []
