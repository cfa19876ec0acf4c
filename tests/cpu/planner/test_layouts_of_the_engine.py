"""What the planner offers to a trainer or a scorer, the torch engine takes: for every architecture that has a shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn
from transformers import AutoConfig

from flowrl.cost.configs import FAMILIES as SHAPES, known_models
from flowrl.cost.shapes import ModelShape
from flowrl.engines.mesh.plans import FAMILIES, family_of
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.choices import Choices
from flowrl.planner.train_options import layouts

CLUSTERS = ("1xH100-80G", "4xH100-80G", "8xH100-80G", "16xH100-80G")
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


def taken(config: Any, layout: Layout) -> str:
    """Why the engine refuses a layout; "" when it takes it."""
    if layout.pp > 1:
        return "stages"
    try:
        if layout.tp > 1:
            family_of("policy", cast(nn.Module, SimpleNamespace(config=config)), layout.tp)
    except ConfigError as error:
        return str(error)
    return ""


def offered(shape: ModelShape) -> list[Layout]:
    found: list[Layout] = []
    for name in CLUSTERS:
        cluster = Cluster.named(name)
        sizes = [size for size in (1, 2, 4, 8, 16) if size <= cluster.num_devices]
        found += [one for size in sizes for one in layouts(shape, cluster, Mesh(0, size), Choices(), None)]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("kind", sorted(SHAPES))
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_a_small_model_of_every_architecture(kind: str, kv_heads: int) -> None:
    config = AutoConfig.for_model(kind, **{**SMALL, "num_key_value_heads": kv_heads})
    shape = ModelShape.from_config(config)
    found = offered(shape)
    assert Layout(fsdp=8) in found
    for layout in found:
        assert taken(config, layout) == "", layout
    degrees = {layout.tp for layout in found}
    if kind in set(FAMILIES) - {"gpt2"}:  # and nothing of what it can do is withheld
        assert (
            degrees
            == {tp for tp in (1, 2, 4, 8) if not taken(config, Layout(tp=tp))}
            == {tp for tp in (1, 2, 4, 8) if kv_heads % tp == 0}
        )
    else:
        assert degrees == {1}


@pytest.mark.parametrize("name", sorted(known_models()))
def test_models_that_are_known_by_name(name: str) -> None:
    fields = dict(known_models()[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    for layout in offered(ModelShape.of(name)):
        assert taken(config, layout) == "", layout


def test_adapters_are_not_cut_by_tensor_parallelism() -> None:
    shape = ModelShape.from_config(AutoConfig.for_model("llama", **SMALL))
    assert max(layout.tp for layout in offered(shape)) == 4
    assert {layout.tp for layout in offered(shape.with_lora(4))} == {1}
