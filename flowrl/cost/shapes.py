"""The parameters of a model: every tensor by name, shape and role, and their sums.

Names and shapes are those of Transformers' own modules (version 5: the experts of a layer are one tensor of three axes).
Buffers are not parameters and are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from flowrl.errors import ConfigError
from flowrl.schema.fields import check_fields, shown

MOST: Mapping[str, int] = {
    "hidden": 10**7,
    "layers": 10_000,
    "heads": 10**5,
    "kv_heads": 10**5,
    "head_dim": 10**5,
    "ffn": 10**8,
    "vocab": 10**9,
}
"""Sizes far beyond any model: what is above is a mistake, and a list of that many layers would not fit into memory."""

HEADS = ("lm", "value", "reward")
QK_NORMS = ("none", "head", "full")
STYLES = ("llama", "fused", "gpt2", "starcoder2")

SPLIT_AXES: Mapping[str, int | None] = {
    "embedding": 0,
    "head": 0,
    "q": 0,
    "k": 0,
    "v": 0,
    "qkv": 0,
    "o": 1,
    "gate": 0,
    "up": 0,
    "gate_up": 0,
    "down": 1,
    "experts_gate_up": 1,
    "experts_down": 2,
    "q_latent": None,
    "kv_latent": None,
    "kv_up": 0,
    "position": None,
    "router": None,
    "norm": None,
    "score": None,
    "lora_a": None,
    "lora_b": None,
}
"""Kind of a parameter -> axis that tensor parallelism splits, for a matrix laid out [out, in]; None: every rank has it all.

`k` and `v` are split into at most `kv_heads` blocks and repeated beyond. `qkv` and `gate_up` are several matrices one
above the other (`Weight.parts`), each split by itself."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter tensor.

    Example:
        Weight("model.layers.0.self_attn.q_proj.weight", (4096, 4096), "q", layer=0)
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    """A key of `SPLIT_AXES`; a bias has the kind of its matrix."""
    layer: int | None = None
    """The layer it belongs to; None for the embedding, the last norm and the head."""
    parts: tuple[int, ...] = ()
    """Sizes of the matrices joined along the outputs, for `qkv`, `gate_up` and `experts_gate_up`."""
    is_transposed: bool = False
    """True for GPT-2, whose matrices are stored [in, out]."""

    @property
    def num_params(self) -> int:
        return math.prod(self.shape)

    @property
    def is_bias(self) -> bool:
        return self.name.endswith(".bias")

    @property
    def split_axis(self) -> int | None:
        """Axis of `shape` that tensor parallelism splits; None when every rank holds the whole."""
        axis = SPLIT_AXES[self.kind]
        if axis is None:
            return None
        if len(self.shape) == 1:
            return 0 if axis == 0 else None  # the bias of a matrix split by columns is whole
        if self.is_transposed:
            return 1 - axis
        return axis


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of the feed-forward block."""

    num_experts: int
    num_active: int
    """Experts a token goes to."""
    ffn: int
    """Hidden size of one expert."""
    shared_ffn: int = 0
    """Hidden size of the block every token goes through besides; 0 when there is none."""
    shared_name: str = "shared_experts"
    has_shared_gate: bool = False
    dense_layers: tuple[int, ...] = ()
    """Layers that keep an ordinary feed-forward block."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.ffn < 1 or self.shared_ffn < 0 or any(layer < 0 for layer in self.dense_layers):
            raise ConfigError(
                f"experts need ffn >= 1, shared_ffn >= 0 and dense_layers counted from 0; found {self.ffn}, {self.shared_ffn}, "
                f"{shown(self.dense_layers)}"
            )
        if not 1 <= self.num_active <= self.num_experts:
            raise ConfigError(
                f"experts need 1 <= num_active <= num_experts; found {self.num_active} of {self.num_experts}"
            )


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention whose keys and values are projected up from one small vector per token (DeepSeek-V2, arXiv 2405.04434)."""

    kv_rank: int
    nope_dim: int
    """Part of a query's and key's head without positions."""
    rope_dim: int
    """Part with rotary positions; its key is shared by all heads."""
    value_dim: int
    q_rank: int | None = None
    """Rank of the queries' projection; None: one full matrix."""

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = (self.kv_rank, self.nope_dim, self.rope_dim, self.value_dim, self.q_rank or 1)
        if min(sizes) < 1 or self.q_rank == 0:
            raise ConfigError(f"latent attention needs sizes of at least 1; found {self}")

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True)
class LoRA:
    """Low-rank adapters on named projections (arXiv 2106.09685): each matrix [out, in] gets [rank, in] and [out, rank]."""

    rank: int
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Each must be a matrix of the model."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rank < 1 or not self.targets:
            raise ConfigError(f"LoRA needs rank >= 1 and a target; found rank {self.rank}, targets {self.targets}")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder-only transformer, from which everything else is counted.

    Example:
        ModelShape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256)   # Llama-3-8B
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Hidden size of a dense feed-forward block."""
    vocab: int
    tied: bool = False
    """The head is the embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias after attention."""
    ffn_bias: bool = False
    qk_norm: str = "none"
    """`head`: one norm over each head; `full`: one over all heads together (OLMo 2)."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Norms of a layer, in Transformers' names."""
    norm_bias: bool = False
    is_norm_fp32: bool = False
    """Norms multiply by their weights in fp32, and keep the factor (Gemma, OLMo 2)."""
    style: str = "llama"
    """How matrices are named and joined: one of `STYLES`."""
    positions: int = 0
    """Rows of a learned position embedding; 0 when positions are computed."""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    window: int | None = None
    """Tokens a layer of `windowed_layers` looks back."""
    windowed_layers: tuple[int, ...] = ()
    context: int = 0
    """Tokens of the longest sequence that the model was made for (`max_position_embeddings`); 0: not known. Nothing is counted
    with it; plans say where sequences are longer."""
    head: str = "lm"
    """`lm`, or one number per token: `value`, `reward`."""
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            if not 1 <= getattr(self, name) <= MOST[name]:
                raise ConfigError(f"a model shape needs {name} from 1 to {MOST[name]:,}; found {getattr(self, name)!r}")
        if not 0 <= self.positions <= MOST["vocab"]:
            raise ConfigError(f"a model shape needs positions from 0 to {MOST['vocab']:,}; found {self.positions}")
        if self.context < 0:
            raise ConfigError(
                f"a model shape needs context of at least 0 tokens, 0 where it is not known; found {self.context}"
            )
        if self.window is not None and self.window < 1:
            raise ConfigError(f"a window is at least 1 token, or None; found {self.window}")
        if self.windowed_layers and self.window is None:
            raise ConfigError("layers with a window need its tokens: window=4096; found windowed_layers and no window")
        named = (*self.windowed_layers, *(() if self.experts is None else self.experts.dense_layers))
        beyond = sorted({layer for layer in named if not 0 <= layer < self.layers})
        if beyond:
            raise ConfigError(f"the model has layers 0 to {self.layers - 1}; found {shown(tuple(beyond))}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads must be a multiple of kv_heads; found {self.heads} and {self.kv_heads}")
        for name, known in (("head", HEADS), ("qk_norm", QK_NORMS), ("style", STYLES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"a model shape's {name} is one of {', '.join(known)}; found {getattr(self, name)!r}")

    @staticmethod
    def from_config(config: Mapping[str, Any] | object) -> ModelShape:
        """The shape that a Hugging Face config (the object, or `config.json` as a dict) describes."""
        from flowrl.cost.configs import shape_of_config

        return shape_of_config(config)

    @staticmethod
    def of(name: str) -> ModelShape:
        """The shape of a known published model, e.g. `Qwen/Qwen2.5-7B`; no network."""
        from flowrl.cost.configs import shape_of_name

        return shape_of_name(name)

    def with_head(self, head: str) -> ModelShape:
        return replace(self, head=head)

    def with_lora(self, rank: int, targets: tuple[str, ...] | None = None) -> ModelShape:
        """The same with adapters. `targets` left out: on all matrices of attention and feed-forward blocks that the model has; a
        mixture's experts are no matrices (a layer's are one tensor of three axes) and get none."""
        return replace(self, lora=LoRA(rank, _usual_targets(self) if targets is None else targets))

    def check_rank(self, rank: int) -> None:
        """Raise `ConfigError` for adapters of a rank above the smallest side of the matrices they would be on: a product of that
        rank has no more than the matrix itself."""
        smallest = min(
            (weight for weight in _weights(self) if weight.kind in USUAL_TARGETS and len(weight.shape) == 2),
            key=lambda weight: min(weight.shape),
            default=None,
        )
        if smallest is not None and rank > min(smallest.shape):
            raise ConfigError(
                f"LoRA of rank {rank:,} is above the smallest matrix that gets adapters, {smallest.name} of "
                f"{' x '.join(map(str, smallest.shape))}; take a rank of at most {min(smallest.shape)}"
            )

    # ------------------------------------------------------------------------------------------------------ tensors

    def modules(self) -> tuple[Weight, ...]:
        """Every parameter of the base model and its head, in Transformers' names; a tied head is not listed twice."""
        return _weights(self)

    def lora_modules(self) -> tuple[Weight, ...]:
        """The adapters, in PEFT's order: for each targeted matrix `lora_A` [rank, in], then `lora_B` [out, rank]."""
        return _adapters(self)

    # ------------------------------------------------------------------------------------------------------- counts

    def params(self) -> int:
        """N: parameters of the base model and its head."""
        return _sums(self)[0]

    def layer_params(self, layer: int | None = None) -> int:
        """Parameters of one layer; without a number, of the largest."""
        per_layer = _sums(self)[1]
        return max(per_layer) if layer is None else per_layer[layer]

    def embedding_params(self) -> int:
        """Parameters of the token embedding, V·h."""
        return self.vocab * self.hidden

    def root_params(self) -> int:
        """Parameters outside the layers, which a sharded model keeps gathered: embedding, last norm and head."""
        return self.params() - sum(_sums(self)[1])

    def active_params(self) -> int:
        """Parameters a token meets: of the routed experts, only `num_active`."""
        return self.params() - self._idle_experts() * self._one_expert()

    def expert_params(self) -> int:
        """Parameters of all routed experts of all layers."""
        return 0 if self.experts is None else self._sparse_layers() * self.experts.num_experts * self._one_expert()

    def matmul_params(self) -> int:
        """N_mm: active parameters less embeddings that are only looked up. Norms and biases stay in (less than 0.01 %)."""
        looked_up = 0 if self.tied and self.head == "lm" else self.embedding_params()
        return self.active_params() - looked_up - self.positions * self.hidden

    def lora_params(self) -> int:
        """Parameters of the adapters."""
        return sum(weight.num_params for weight in _adapters(self))

    def trainable_params(self) -> int:
        """Parameters that get gradients: all; with LoRA, the adapters and a score head."""
        if self.lora is None:
            return self.params()
        return self.lora_params() + sum(weight.num_params for weight in _weights(self) if weight.kind == "score")

    def kv_token_bytes(self, *, element_bytes: float = 2, tensor_parallel: int = 1) -> float:
        """Bytes the cache holds for one token over all ranks of a replica.

        `2·L·kv·d·bytes·max(1, tp/kv)`: key-value heads are repeated when there are more ranks than heads. With latent
        attention `L·(kv_rank + rope_dim)·bytes·tp`: every rank holds the whole vector.
        """
        if self.latent is not None:
            return self.layers * (self.latent.kv_rank + self.latent.rope_dim) * element_bytes * tensor_parallel
        copies = max(1.0, tensor_parallel / self.kv_heads)
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes * copies

    def _one_expert(self) -> int:
        return 0 if self.experts is None else 3 * self.hidden * self.experts.ffn

    def _sparse_layers(self) -> int:
        return 0 if self.experts is None else self.layers - len(self.experts.dense_layers)

    def _idle_experts(self) -> int:
        return (
            0 if self.experts is None else self._sparse_layers() * (self.experts.num_experts - self.experts.num_active)
        )


# ----------------------------------------------------------------------------------------------------- the tensors


@lru_cache(maxsize=256)
def _weights(shape: ModelShape) -> tuple[Weight, ...]:
    return tuple(_listed(shape))


@lru_cache(maxsize=1024)
def _sums(shape: ModelShape) -> tuple[int, tuple[int, ...]]:
    per_layer = [0] * shape.layers
    total = 0
    for weight in _weights(shape):
        total += weight.num_params
        if weight.layer is not None:
            per_layer[weight.layer] += weight.num_params
    return total, tuple(per_layer)


def _listed(shape: ModelShape) -> Iterator[Weight]:
    root, layers = ("transformer", "h") if shape.style == "gpt2" else ("model", "layers")
    embedding, last = ("wte", "ln_f") if shape.style == "gpt2" else ("embed_tokens", "norm")
    yield Weight(f"{root}.{embedding}.weight", (shape.vocab, shape.hidden), "embedding")
    if shape.positions:
        yield Weight(f"{root}.wpe.weight", (shape.positions, shape.hidden), "position")
    for layer in range(shape.layers):
        at = f"{root}.{layers}.{layer}"
        for weight in _layer(shape, layer):
            yield replace(weight, name=f"{at}.{weight.name}", layer=layer)
    yield from _norm(last, shape.hidden, bias=shape.norm_bias, prefix=f"{root}.")
    if shape.head != "lm":
        yield Weight("score.weight", (1, shape.hidden), "score")
        if shape.head == "value":
            yield Weight("score.bias", (1,), "score")
    elif not shape.tied:
        yield Weight("lm_head.weight", (shape.vocab, shape.hidden), "head")


def _layer(shape: ModelShape, layer: int) -> Iterator[Weight]:
    if shape.latent is not None:
        yield from _latent_attention(shape, shape.latent)
    else:
        yield from _attention(shape)
    if shape.experts is not None and layer not in shape.experts.dense_layers:
        yield from _mixture(shape, shape.experts)
    else:
        yield from _feed_forward(shape, shape.ffn, "mlp")
    for name in shape.norms:
        yield from _norm(name, shape.hidden, bias=shape.norm_bias)


def _norm(name: str, size: int, *, bias: bool = False, prefix: str = "") -> Iterator[Weight]:
    yield Weight(f"{prefix}{name}.weight", (size,), "norm")
    if bias:
        yield Weight(f"{prefix}{name}.bias", (size,), "norm")


def _linear(
    name: str,
    outputs: int,
    inputs: int,
    kind: str,
    *,
    bias: bool = False,
    parts: tuple[int, ...] = (),
    swap: bool = False,
) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (inputs, outputs) if swap else (outputs, inputs), kind, None, parts, swap)
    if bias:
        yield Weight(f"{name}.bias", (outputs,), kind, None, parts)


def _attention(shape: ModelShape) -> Iterator[Weight]:
    h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.style == "gpt2":
        yield from _linear("attn.c_attn", q + 2 * kv, h, "qkv", bias=shape.qkv_bias, parts=(q, kv, kv), swap=True)
        yield from _linear("attn.c_proj", h, q, "o", bias=shape.output_bias, swap=True)
        return
    if shape.style == "fused":
        yield from _linear("self_attn.qkv_proj", q + 2 * kv, h, "qkv", bias=shape.qkv_bias, parts=(q, kv, kv))
    else:
        yield from _linear("self_attn.q_proj", q, h, "q", bias=shape.qkv_bias)
        yield from _linear("self_attn.k_proj", kv, h, "k", bias=shape.qkv_bias)
        yield from _linear("self_attn.v_proj", kv, h, "v", bias=shape.qkv_bias)
    yield from _linear("self_attn.o_proj", h, q, "o", bias=shape.output_bias)
    if shape.qk_norm != "none":
        is_full = shape.qk_norm == "full"
        yield from _norm("self_attn.q_norm", q if is_full else shape.head_dim)
        yield from _norm("self_attn.k_norm", kv if is_full else shape.head_dim)


def _latent_attention(shape: ModelShape, latent: LatentAttention) -> Iterator[Weight]:
    h, a, bias = shape.hidden, shape.heads, shape.qkv_bias
    if latent.q_rank is None:
        yield from _linear("self_attn.q_proj", a * latent.qk_dim, h, "q")
    else:
        yield from _linear("self_attn.q_a_proj", latent.q_rank, h, "q_latent", bias=bias)
        yield from _norm("self_attn.q_a_layernorm", latent.q_rank)
        yield from _linear("self_attn.q_b_proj", a * latent.qk_dim, latent.q_rank, "q")
    yield from _linear("self_attn.kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim, h, "kv_latent", bias=bias)
    yield from _norm("self_attn.kv_a_layernorm", latent.kv_rank)
    yield from _linear("self_attn.kv_b_proj", a * (latent.nope_dim + latent.value_dim), latent.kv_rank, "kv_up")
    yield from _linear("self_attn.o_proj", h, a * latent.value_dim, "o", bias=shape.output_bias)


def _feed_forward(shape: ModelShape, ffn: int, at: str) -> Iterator[Weight]:
    h, bias = shape.hidden, shape.ffn_bias
    if shape.style in ("gpt2", "starcoder2"):
        swap = shape.style == "gpt2"
        yield from _linear(f"{at}.c_fc", ffn, h, "up", bias=bias, swap=swap)
        yield from _linear(f"{at}.c_proj", h, ffn, "down", bias=bias, swap=swap)
        return
    if shape.style == "fused":
        yield from _linear(f"{at}.gate_up_proj", 2 * ffn, h, "gate_up", bias=bias, parts=(ffn, ffn))
    else:
        yield from _linear(f"{at}.gate_proj", ffn, h, "gate", bias=bias)
        yield from _linear(f"{at}.up_proj", ffn, h, "up", bias=bias)
    yield from _linear(f"{at}.down_proj", h, ffn, "down", bias=bias)


def _mixture(shape: ModelShape, experts: Experts) -> Iterator[Weight]:
    h, e, f = shape.hidden, experts.num_experts, experts.ffn
    yield Weight("mlp.gate.weight", (e, h), "router")
    yield Weight("mlp.experts.gate_up_proj", (e, 2 * f, h), "experts_gate_up", None, (f, f))
    yield Weight("mlp.experts.down_proj", (e, h, f), "experts_down")
    if experts.shared_ffn:
        yield from _feed_forward(shape, experts.shared_ffn, f"mlp.{experts.shared_name}")
    if experts.has_shared_gate:
        yield Weight(f"mlp.{experts.shared_name}_gate.weight", (1, h), "router")


USUAL_TARGETS = ("q", "k", "v", "qkv", "q_latent", "kv_latent", "kv_up", "o", "gate", "up", "gate_up", "down")
"""Kinds of matrices that get adapters where nobody names any."""


def _usual_targets(shape: ModelShape) -> tuple[str, ...]:
    """Names of the model's matrices of these kinds, in their order."""
    found = {
        weight.name.removesuffix(".weight").rsplit(".", 1)[-1]: None
        for weight in _weights(shape)
        if weight.kind in USUAL_TARGETS and len(weight.shape) == 2
    }
    return tuple(found)


@lru_cache(maxsize=256)
def _adapters(shape: ModelShape) -> tuple[Weight, ...]:
    if shape.lora is None:
        return ()
    found: list[Weight] = []
    hit: set[str] = set()
    for weight in _weights(shape):
        module = weight.name.removesuffix(".weight")
        leaf = module.rsplit(".", 1)[-1]
        if leaf not in shape.lora.targets or len(weight.shape) != 2 or not weight.name.endswith(".weight"):
            continue
        hit.add(leaf)
        outputs, inputs = weight.shape[::-1] if weight.is_transposed else weight.shape
        found.append(Weight(f"{module}.lora_A.weight", (shape.lora.rank, inputs), "lora_a", weight.layer))
        found.append(Weight(f"{module}.lora_B.weight", (outputs, shape.lora.rank), "lora_b", weight.layer))
    missing = [target for target in shape.lora.targets if target not in hit]
    if missing:
        known = sorted(
            {w.name.removesuffix(".weight").rsplit(".", 1)[-1] for w in _weights(shape) if len(w.shape) == 2}
        )
        raise ConfigError(
            f"LoRA targets {', '.join(missing)}, which this model does not have as matrices; it has {', '.join(known)}"
        )
    return tuple(found)
