"""Which parameters tensor parallelism cuts, family by family.

    q k v gate up      by output: every rank has its heads, its part of the width
    o down             by input: ranks add up what they have
    embedding, head    by token: rows of a table, columns of the logits
    everything else    whole on every rank of the group

Between layers hidden states are whole on every rank, so a layer of a family is a few names in a table. The logits are
gathered, in the slices of `Forward`, so that losses see whole rows of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from flowrl.engines.modules import output_layer, text_config
from flowrl.errors import ConfigError
from flowrl.schema.columns import nearest


class Styled(ParallelStyle):
    """Parameters laid out by name, a plain tensor in, a plain tensor out."""

    def __init__(
        self, params: Mapping[str, Placement], entry: Placement, leave: Placement, *, local: Placement | None = None
    ) -> None:
        """Args: layout of parameters (others: whole); of the input; of the output; of the output as it is computed, where
        that differs and is turned into `leave`."""
        super().__init__()
        self.params = dict(params)
        self.entry = entry
        self.leave = leave
        self.computed = local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._cut, self._enter, self._exit)  # type: ignore[arg-type]

    def _cut(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            if isinstance(param, DTensor):
                continue
            placed = distribute_tensor(param.data, mesh, [self.params.get(key, Replicate())], src_data_rank=None)
            module.register_parameter(key, nn.Parameter(placed, requires_grad=param.requires_grad))

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        first = inputs[0]
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, mesh, [self.entry], run_check=False)
        return (first, *inputs[1:])

    def _exit(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        if self.computed is not None:
            output = output.redistribute(placements=[self.leave])
        return output.to_local()


def whole() -> ParallelStyle:
    """Every rank of the group has and computes all of it."""
    return Styled({}, Replicate(), Replicate())


def by_heads() -> ParallelStyle:
    """Parameters whole, the input [B, L, heads, D] cut by heads: gradients are added over the group."""
    return Styled({}, Shard(2), Shard(2))


def conv_by_output() -> ParallelStyle:
    """A Conv1D of GPT-2, weight [in, out]."""
    return Styled({"weight": Shard(1), "bias": Shard(0)}, Replicate(), Shard(-1))


def conv_by_input() -> ParallelStyle:
    return Styled({"weight": Shard(0)}, Shard(-1), Replicate(), local=Shard(-1))


def by_output() -> ParallelStyle:
    return ColwiseParallel()


def by_input() -> ParallelStyle:
    return RowwiseParallel()


@dataclass(frozen=True, slots=True)
class Family:
    """How layers of an architecture are cut."""

    layer: Mapping[str, Callable[[], ParallelStyle]]
    """Module name in a layer -> its style; absent modules are passed over, the others are whole."""
    cuts_heads: bool
    """Whether attention is cut, so that heads must divide."""
    cuts_vocabulary: bool = True


_ROTARY: Mapping[str, Callable[[], ParallelStyle]] = {
    **{f"self_attn.{name}_proj": by_output for name in "qkv"},
    "self_attn.o_proj": by_input,
    "self_attn.q_norm": by_heads,
    "self_attn.k_norm": by_heads,
    "mlp.gate_proj": by_output,
    "mlp.up_proj": by_output,
    "mlp.down_proj": by_input,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(_ROTARY, cuts_heads=True),
    "mistral": Family(_ROTARY, cuts_heads=True),
    "qwen2": Family(_ROTARY, cuts_heads=True),
    "qwen3": Family(_ROTARY, cuts_heads=True),
    "smollm3": Family(_ROTARY, cuts_heads=True),
    # q, k and v of GPT-2 are one matrix, which a plain cut would tear apart: attention is whole
    "gpt2": Family({"mlp.c_fc": conv_by_output, "mlp.c_proj": conv_by_input}, cuts_heads=False),
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
    if family.cuts_heads:
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
            _apply(module, style(), mesh)
    cut_rest(layer, mesh)


def cut_vocabulary(module: nn.Module, family: Family, mesh: DeviceMesh) -> None:
    """Cut the embedding and the head by tokens where the group divides them, else leave them whole; a tie stays one."""
    ask: Any = getattr(module, "get_input_embeddings", None)
    embedding: Any = ask() if callable(ask) else None
    head = output_layer(module)
    tied = head is not None and embedding is not None and getattr(head, "weight", None) is embedding.weight
    if isinstance(embedding, nn.Embedding):
        _apply(embedding, _by_token(embedding, family, mesh, RowwiseParallel(input_layouts=Replicate())), mesh)
        # the output is a view of a DTensor's; FSDP2 hangs its hooks on outputs and warns of views
        embedding.register_forward_hook(lambda module, inputs, output: output.clone())
    if isinstance(head, nn.Linear):
        weight = embedding.weight if tied else None
        _apply(head, _by_token(head, family, mesh, ColwiseParallel(output_layouts=Replicate())), mesh)
        if weight is not None:
            head.weight = weight


def cut_rest(module: nn.Module, mesh: DeviceMesh) -> None:
    """Modules whose parameters are not cut have and compute them whole."""
    for part in module.modules():
        own = list(part.parameters(recurse=False))
        if own and not any(isinstance(param, DTensor) for param in own):
            _apply(part, whole(), mesh)


def _by_token(part: Any, family: Family, mesh: DeviceMesh, cut: ParallelStyle) -> ParallelStyle:
    return cut if family.cuts_vocabulary and part.weight.shape[0] % mesh.size() == 0 else whole()


def _apply(module: nn.Module, style: ParallelStyle, mesh: DeviceMesh) -> None:
    if any(True for _ in module.children()):
        raise ConfigError(
            f"tensor parallelism cuts plain layers; found a {type(module).__name__} around one (an adapter?); use a layout "
            "without tp"
        )
    style.src_data_rank = None  # every rank has the same values: nothing is sent
    style._apply(module, mesh)


def _find(module: nn.Module, name: str) -> nn.Module | None:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, nn.Module) else None
