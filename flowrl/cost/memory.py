"""Bytes on a device: of training, and of a sampling engine with its cache."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flowrl.cost.offload import ADAM_FP32, Offload, OffloadConstants, OptimizerState, StateCost, state_cost
from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster

GIB = 2**30


@dataclass(frozen=True, slots=True)
class LogitBytes:
    """Bytes per logit alive at the worst moment of a loss, by the way it is computed. Measured with a memory tracker on
    fake tensors."""

    cross_entropy: float = 14
    """In fp32, gradients included."""
    cross_entropy_freed: float = 12
    """The same, the bf16 logits freed before."""
    logsumexp: float = 8
    """Chosen logit less log-sum-exp, in bf16."""
    log_softmax_no_grad: float = 10
    logsumexp_no_grad: float = 2


@dataclass(frozen=True, slots=True)
class MemoryConstants:
    """Calibrated numbers of the memory formulas."""

    norm_activation: float = 6
    """Bytes per token and unit that a norm keeps for its backward pass: Transformers' code keeps an fp32 copy and a bf16
    factor. A fused kernel keeps its bf16 input only, 2."""
    norm_weight_activation: float = 2
    """Of these, what only the gradient of the norm's own weight needs (twice as much where it is multiplied in fp32): nothing
    of it is kept where adapters are trained and norms are not."""
    input_activation: float = 2
    """The same of the input of attention, and of the feed-forward block."""
    ffn_activation: float = 8
    """The same per unit of the feed-forward block; 4 to 6 where its product is fused."""
    expert_activation: float = 4
    """The same per hidden unit and active expert: what goes into the expert, and what comes out before it is
    weighted (grouped products; a loop over experts keeps 6)."""
    logits: LogitBytes = LogitBytes()
    fragmentation: float = 1.05
    """What the allocator holds over what is asked of it. Assumed."""
    context_bytes: float = 2 * GIB
    """CUDA context and communication buffers. Assumed."""
    engine_bytes: float = 3 * GIB
    """Activations and graphs of a sampling engine. Assumed."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline of equal parts, each micro-batch going forward and backward in turn (1F1B)."""

    index: int = 0
    stages: int = 1
    micro_batches: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.stages or self.micro_batches < 1:
            raise ConfigError(
                f"a pipeline of {self.stages} stages has stages 0 to {self.stages - 1} and at least one micro-batch; found "
                f"stage {self.index}, {self.micro_batches} micro-batches"
            )

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations it holds at once: `min(m, pp - stage)`."""
        return min(self.micro_batches, self.stages - self.index)


@dataclass(frozen=True, slots=True)
class TrainMemory:
    """Bytes on one device while it trains, term by term."""

    state_bytes: float
    gather_bytes: float
    """Gathered bf16 weights: two layers in flight, and embedding and head throughout."""
    gradient_bytes: float
    """Of one layer: bf16 before and fp32 in the reduction."""
    activation_bytes: float
    logit_bytes: float
    idle_bytes: float
    """State that stays on the device in other phases."""
    host_bytes: float
    """On all hosts together."""
    fragmentation: float
    context_bytes: float

    @property
    def total_bytes(self) -> float:
        """All together, with fragmentation and context."""
        state = self.state_bytes + self.gather_bytes + self.gradient_bytes
        return (state + self.activation_bytes + self.logit_bytes) * self.fragmentation + self.context_bytes

    def with_state(self, held: StateCost) -> TrainMemory:
        """The same work with training state that lies elsewhere."""
        return replace(self, state_bytes=held.train_bytes, idle_bytes=held.idle_bytes, host_bytes=held.host_bytes)


def activation_token_bytes(
    shape: ModelShape,
    *,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    constants: MemoryConstants | None = None,
) -> float:
    """Bytes per token that one layer keeps for its backward pass.

        norms         each 6·size + 4; 8·size + 4 where the weight is multiplied in fp32
        inputs        2·h of attention and 2·h of the feed-forward block
        attention     4·a·d + 4·kv·d + 4·a: queries, keys, values, output, log-sum-exp
        feed-forward  8·f; of experts the active and the shared ones, and 4·h for each active one

    For Llama this is `16·h + 4·a·d + 4·kv·d + 4·a + 8·f + 8`. It equals the bytes autograd saves in Transformers' layers of
    Llama (200,840 for Llama-3-8B), Qwen2, Qwen3, Mistral, SmolLM3, Gemma, Gemma 2 and OLMo 2; routing of experts adds little
    (0.5 % in a small Qwen3 model). An estimate, mostly low, for joined matrices, GPT-2, StarCoder2 and latent attention
    (counted as if expanded).

    Tensor parallelism divides what heads and the feed-forward block keep. With sequence parallelism it divides what norms keep
    too; the inputs of products stay whole, as torch keeps what it gathered for them (Megatron gathers it again). Both equal
    what autograd saves of a layer that torch's `parallelize_module` has cut.

    With adapters on every matrix each of them keeps `2·rank` besides. Where some matrices have none, this is an upper estimate:
    what only their own gradients need is not kept.
    """
    keep = constants or MemoryConstants()
    per_norm = keep.norm_activation + (2 if shape.is_norm_fp32 else 0)
    if shape.lora is not None:
        per_norm -= keep.norm_weight_activation * (2 if shape.is_norm_fp32 else 1)
    ffn = keep.ffn_activation * shape.ffn
    routed = 0.0
    if shape.experts is not None:
        working = shape.experts.num_active * shape.experts.ffn + shape.experts.shared_ffn
        ffn = keep.ffn_activation * (max(working, shape.ffn) if shape.experts.dense_layers else working)
        routed = keep.expert_activation * shape.experts.num_active * shape.hidden
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    heads_normed = shape.heads + shape.kv_heads if shape.qk_norm == "head" else 2
    qk_norm = 0.0 if shape.qk_norm == "none" else per_norm * (q + kv) + 4 * heads_normed
    if shape.latent is not None:
        q = shape.heads * shape.latent.qk_dim
        kv = shape.heads * (shape.latent.qk_dim + shape.latent.value_dim) // 2
    inner = 4 * q + 4 * kv + 4 * shape.heads + qk_norm + ffn
    norms = len(shape.norms) * (per_norm * shape.hidden + 4)
    inputs = 2 * keep.input_activation * shape.hidden + routed + _adapter_token_bytes(shape)
    return inner / tensor_parallel + norms / (tensor_parallel if sequence_parallel else 1) + inputs


def _adapter_token_bytes(shape: ModelShape) -> float:
    """What adapters of one layer keep: the small vector between their two matrices, bf16."""
    if shape.lora is None:
        return 0.0
    return 2.0 * shape.lora.rank * sum(weight.kind == "lora_a" for weight in shape.lora_modules()) / shape.layers


def logit_bytes(
    shape: ModelShape,
    tokens: int,
    *,
    loss: str = "cross_entropy",
    chunk: int | None = 1024,
    tensor_parallel: int = 1,
    constants: MemoryConstants | None = None,
) -> float:
    """`c_v·V·min(T, chunk)/tp`; nothing for a score head. `loss` is a field of `LogitBytes`; chunk None: all tokens at once."""
    if shape.head != "lm":
        return 0.0
    per_logit = getattr((constants or MemoryConstants()).logits, loss, None)
    if per_logit is None:
        known = ", ".join(LogitBytes.__dataclass_fields__)
        raise ConfigError(f"a loss is one of {known}; found {loss!r}")
    at_once = tokens if chunk is None else min(tokens, chunk)
    return float(per_logit) * shape.vocab * at_once / tensor_parallel


def train_memory(
    shape: ModelShape,
    cluster: Cluster,
    *,
    shards: int,
    tokens: int,
    recompute: bool = True,
    loss: str = "cross_entropy",
    chunk: int | None = 1024,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    sequence_parallel: bool = False,
    offload: Offload = Offload.NONE,
    park_weights: bool = False,
    state: OptimizerState = ADAM_FP32,
    stage: Stage | None = None,
    constants: MemoryConstants | None = None,
    moving: OffloadConstants | None = None,
) -> TrainMemory:
    """Bytes on one device that trains with fully sharded weights and `tokens` tokens per micro-batch.

        state       total_bytes·N / (S·tp·pp)
        gather      2·(2·layer) + 2·(embedding and head), /tp; of a pipeline's stages the first and the last have those
        gradients   (2 + 4)·layer, /tp; with LoRA of the adapters only
        activations recomputed: 2·h·L·T·m + A_layer·T;  kept: L·A_layer·T·m;  T/cp, L/pp, m micro-batches in flight
        logits      see logit_bytes; on the last stage
        total       (all of these)·fragmentation + context

    `shards` are those of the weights besides tensor and pipeline parallelism; layers are spread evenly over stages. With tensor
    parallelism a group works on the `tokens` together. Of a mixture of experts a device gathers all experts of a layer, as
    parallelism over experts is not modelled.

    Left out: what is kept once and not per layer (the last norm, its output, positions: 8·h per token), and the reduction of
    embedding and head at the end, (2 + 4) bytes each, when activations and logits are gone. Activations and logits are added,
    though with recomputation the logits are gone when the last layer is computed again: an upper estimate.
    """
    keep, at = constants or MemoryConstants(), stage or Stage()
    held = state_cost(
        shape,
        cluster,
        shards=shards * tensor_parallel * at.stages,
        offload=offload,
        park_weights=park_weights,
        state=state,
        constants=moving,
    )
    ends = (at.index == 0, at.is_last and shape.head == "lm")
    root = shape.embedding_params() * (max(ends) if shape.tied else sum(ends))
    gather = (2 * 2 * shape.layer_params() + 2 * root) / tensor_parallel
    trained_layer = shape.layer_params() if shape.lora is None else shape.lora_params() / shape.layers
    gradients = (2 + 4) * trained_layer / tensor_parallel
    here, layers = tokens / context_parallel, math.ceil(shape.layers / at.stages)
    layer = activation_token_bytes(
        shape, tensor_parallel=tensor_parallel, sequence_parallel=sequence_parallel, constants=keep
    )
    if recompute:
        inputs = 2 * shape.hidden * layers * at.in_flight / (tensor_parallel if sequence_parallel else 1)
        activations = (inputs + layer) * here
    else:
        activations = layers * at.in_flight * layer * here
    logits = 0.0
    if at.is_last:
        mine = math.ceil(here)
        logits = logit_bytes(shape, mine, loss=loss, chunk=chunk, tensor_parallel=tensor_parallel, constants=keep)
    return TrainMemory(
        state_bytes=held.train_bytes,
        gather_bytes=gather,
        gradient_bytes=gradients,
        activation_bytes=activations,
        logit_bytes=logits,
        idle_bytes=held.idle_bytes,
        host_bytes=held.host_bytes,
        fragmentation=keep.fragmentation,
        context_bytes=keep.context_bytes,
    )


def engine_weight_bytes(
    shape: ModelShape, *, tensor_parallel: int = 1, pipeline: int = 1, weight_bytes: float = 2
) -> float:
    """Weights of a sampling engine on one device: `2·N / (tp·pp)`."""
    return weight_bytes * shape.params() / (tensor_parallel * pipeline)


def cache_pool_bytes(
    shape: ModelShape,
    cluster: Cluster,
    *,
    utilization: float = 0.9,
    tensor_parallel: int = 1,
    pipeline: int = 1,
    weight_bytes: float = 2,
    constants: MemoryConstants | None = None,
) -> float:
    """Bytes of one device that are left for the cache: `gmu·M - 2·N/(tp·pp) - engine_bytes`. Below 0 the engine does not fit."""
    keep = constants or MemoryConstants()
    weights = engine_weight_bytes(shape, tensor_parallel=tensor_parallel, pipeline=pipeline, weight_bytes=weight_bytes)
    return utilization * cluster.device.memory_bytes - weights - keep.engine_bytes


def cache_capacity_tokens(
    shape: ModelShape,
    cluster: Cluster,
    *,
    utilization: float = 0.9,
    tensor_parallel: int = 1,
    pipeline: int = 1,
    weight_bytes: float = 2,
    constants: MemoryConstants | None = None,
) -> float:
    """Tokens the cache of one replica holds: `pool·tp·pp / kv_token_bytes`; 0 where the engine does not fit."""
    pool = cache_pool_bytes(
        shape,
        cluster,
        utilization=utilization,
        tensor_parallel=tensor_parallel,
        pipeline=pipeline,
        weight_bytes=weight_bytes,
        constants=constants,
    )
    per_token = shape.kv_token_bytes(tensor_parallel=tensor_parallel)
    return max(0.0, pool) * tensor_parallel * pipeline / per_token
