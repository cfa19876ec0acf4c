"""Bytes that autograd keeps of a layer which PyTorch's own tensor parallelism has cut, on a process group of nobody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from flowrl.cost.memory import activation_token_bytes  # noqa: E402
from flowrl.cost.shapes import ModelShape  # noqa: E402
from flowrl.engines.mesh.plans import FAMILIES, cut_layer  # noqa: E402
from flowrl.engines.mesh.sequence import cut_sequence  # noqa: E402
from tests.cpu.cost.test_flops_torch import WIDE  # noqa: E402

RANKS = 4
TOKENS = 64


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Four ranks of which only this one is there: collectives give something of the right shape."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def cut(layer: Any, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    plan: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    out = RowwiseParallel(output_layouts=Shard(1)) if sequence_parallel else RowwiseParallel()
    plan |= {"self_attn.o_proj": out, "mlp.down_proj": out}
    if sequence_parallel:
        plan["input_layernorm"] = plan["post_attention_layernorm"] = SequenceParallel()
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        plan["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    parallelize_module(layer, mesh, plan)


def local(tensor: Any) -> Any:
    """A rank's own part; what an asynchronous collective gives is unwrapped."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(tensor, "elem", tensor)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "smollm3"])
def test_a_cut_layer_keeps_what_autograd_saves(mesh: DeviceMesh, kind: str, sequence_parallel: bool) -> None:
    model = built(kind)
    cut(model.layers[0], mesh, sequence_parallel=sequence_parallel)
    found = kept_by(model, model.layers[0], TOKENS // RANKS if sequence_parallel else TOKENS)
    shape = ModelShape.from_config(model.config)
    assert found == activation_token_bytes(shape, tensor_parallel=RANKS, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral", "smollm3", "qwen3"])
def test_a_layer_that_the_engine_cuts_keeps_as_much(mesh: DeviceMesh, kind: str) -> None:
    """What plans count with is what a trainer on a mesh does."""
    model = built(kind)
    family = FAMILIES[kind]
    assert family.sequence is not None
    cut_sequence(list(model.layers), *family.sequence, mesh)
    for layer in model.layers:
        cut_layer(layer, family, mesh)
    found = kept_by(model, model.layers[1], TOKENS // RANKS)  # neither the first nor the last, which see all tokens
    shape = ModelShape.from_config(model.config)
    assert found == activation_token_bytes(shape, tensor_parallel=RANKS, sequence_parallel=True)
    assert found < 0.8 * activation_token_bytes(shape, tensor_parallel=RANKS)


def built(kind: str) -> Any:
    """A backbone of three layers in bf16."""
    options = WIDE | {"num_key_value_heads": RANKS, "num_hidden_layers": 3}
    config = transformers.AutoConfig.for_model(kind, **options)
    config._attn_implementation = "sdpa"
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).model


def kept_by(model: Any, layer: Any, here: int) -> float:
    """Bytes per token of `TOKENS` that a layer keeps, which gets `here` of them as its input."""
    positions = torch.arange(TOKENS)[None]
    rotary = model.rotary_emb(torch.zeros(1, TOKENS, model.config.hidden_size, dtype=torch.bfloat16), positions)
    hidden = torch.randn(1, here, model.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    sizes: dict[int, int] = {}
    kept: list[Any] = []

    def keep(tensor: Any) -> Any:
        mine = local(tensor)
        kept.append(mine)  # a storage that is freed could give its address to another
        sizes[mine.untyped_storage()._cdata] = mine.untyped_storage().nbytes()
        return tensor

    beside = {local(tensor).untyped_storage()._cdata for tensor in (*model.parameters(), *rotary)}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(hidden, position_embeddings=rotary, position_ids=positions)
    return sum(size for storage, size in sizes.items() if storage not in beside) / TOKENS
