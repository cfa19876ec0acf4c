"""Which parameters tensor parallelism cuts, family by family.

    q k v gate up      by output: every rank has its heads, its part of the width
    o down             by input: ranks add up what they have
    embedding, head    by token: rows of a table, columns of the logits
    everything else    whole on every rank of the group

A layer of a family is a few names in a table. Between blocks hidden states are cut by tokens (`flowrl.engines.mesh.sequence`);
those of GPT-2, and whatever comes before the first and after the last layer, are whole on every rank. Logits are gathered only
for what needs whole rows of the vocabulary: not for log-probabilities and entropies (`flowrl.engines.mesh.vocabulary`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from flowrl.engines.mesh.styles import (
    BY_HEADS,
    BY_INPUT,
    BY_OUTPUT,
    BY_TOKENS,
    CONV_BY_HEADS,
    CONV_BY_INPUT,
    CONV_BY_OUTPUT,
    LOGITS,
    TOKENS,
    WHOLE,
    Style,
)
from flowrl.engines.modules import output_layer, text_config
from flowrl.errors import ConfigError
from flowrl.schema.columns import nearest


@dataclass(frozen=True, slots=True)
class Family:
    """How layers of an architecture are cut."""

    layer: Mapping[str, Style]
    """Module name in a layer -> its style; absent modules are passed over, the others are whole."""
    sequence: tuple[str, str] | None = None
    """Names of a layer's attention and feed-forward modules, before which tokens are gathered; None: they are never cut."""
    divided: tuple[str, ...] = ()
    """Numbers of a layer's modules (`module.attribute`) that are a rank's part there."""


_ROTARY: Mapping[str, Style] = {
    **{f"self_attn.{name}_proj": BY_OUTPUT for name in "qkv"},
    "self_attn.o_proj": BY_INPUT,
    "self_attn.q_norm": BY_HEADS,
    "self_attn.k_norm": BY_HEADS,
    "mlp.gate_proj": BY_OUTPUT,
    "mlp.up_proj": BY_OUTPUT,
    "mlp.down_proj": BY_INPUT,
    "input_layernorm": BY_TOKENS,
    "post_attention_layernorm": BY_TOKENS,
}
_LLAMA = Family(_ROTARY, sequence=("self_attn", "mlp"))

FAMILIES: Mapping[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3"), _LLAMA),
    "gpt2": Family(
        {
            "attn.c_attn": CONV_BY_HEADS,
            "attn.c_proj": CONV_BY_INPUT,
            "mlp.c_fc": CONV_BY_OUTPUT,
            "mlp.c_proj": CONV_BY_INPUT,
        },
        divided=("attn.split_size", "attn.num_heads"),
    ),
}
"""`model_type` of a config -> family. Any other model can be cut by fsdp and copied by dp only."""


def family_of(name: str, module: nn.Module, tp: int) -> Family:
    """The family of a module. Errors: ConfigError for one that is unknown, or whose heads or width tp does not divide."""
    config = text_config(module)
    kind = getattr(config, "model_type", None)
    family = FAMILIES.get(str(kind))
    if family is None:
        raise ConfigError(
            f"model '{name}': tensor parallelism knows {', '.join(FAMILIES)}; found {kind or type(module).__name__}; "
            f"{nearest(str(kind), FAMILIES)}; use a layout without tp (fsdp and dp cut any model)"
        )
    sizes: dict[str, Any] = {"intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size}
    sizes["num_attention_heads"] = config.num_attention_heads
    sizes["num_key_value_heads"] = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    uneven = [f"{field} {size}" for field, size in sizes.items() if size % tp]
    if uneven:
        raise ConfigError(f"model '{name}': tp {tp} does not divide its {', '.join(uneven)}; use a smaller tp")
    return family


def cut_layer(layer: nn.Module, family: Family, mesh: DeviceMesh) -> None:
    """Cut one layer, in place, as its family says."""
    for name, style in family.layer.items():
        module = _find(layer, name)
        if module is not None:
            _apply(module, style, mesh)
    for path in family.divided:
        name, _, attribute = path.rpartition(".")
        module = _find(layer, name)
        if module is not None:
            setattr(module, attribute, getattr(module, attribute) // mesh.size())
    cut_rest(layer, mesh)


def cut_vocabulary(module: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the embedding and the head by tokens where the group divides them, else leave them whole; a tie stays one."""
    ask: Any = getattr(module, "get_input_embeddings", None)
    embedding: Any = ask() if callable(ask) else None
    head = output_layer(module)
    tied = head is not None and embedding is not None and getattr(head, "weight", None) is embedding.weight
    if isinstance(embedding, nn.Embedding):
        _apply(embedding, _by_token(embedding, mesh, TOKENS), mesh)
    if isinstance(head, nn.Linear):
        weight = embedding.weight if tied else None
        _apply(head, _by_token(head, mesh, LOGITS), mesh)
        if weight is not None:
            head.weight = weight


def cut_rest(module: nn.Module, mesh: DeviceMesh) -> None:
    """Modules whose parameters are not cut have and compute them whole."""
    for part in module.modules():
        own = list(part.parameters(recurse=False))
        if own and not any(isinstance(param, DTensor) for param in own):
            _apply(part, WHOLE, mesh)


def _by_token(part: Any, mesh: DeviceMesh, cut: Style) -> Style:
    return cut if part.weight.shape[0] % mesh.size() == 0 else WHOLE


def _apply(module: nn.Module, style: Style, mesh: DeviceMesh) -> None:
    if any(True for _ in module.children()):
        raise ConfigError(
            f"tensor parallelism cuts plain layers; found a {type(module).__name__} around one (an adapter?); use a layout "
            "without tp"
        )
    style.apply(module, mesh)


def _find(module: nn.Module, name: str) -> nn.Module | None:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, nn.Module) else None
