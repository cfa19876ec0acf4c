"""Time of a training step with fully sharded weights: compute, communication and copies, as far as they overlap.

[Note: Sharded, tensor-parallel, in stages]
A trainer's G devices are dp · pp · fsdp · tp, the last one fastest. The tp devices of a group, neighbours inside a node, work on
the same tokens, each with its block of every matrix. The fsdp devices with the same block gather it layer by layer. So G/(tp·pp)
ranks have tokens of their own; each gathers 1/tp of the bytes, for tp times as many tokens at once. What is added are exchanges
of activations, two in each layer and pass, which nothing hides: the next product needs them.

With `sequence_parallel` an exchange is a reduce-scatter and later an all-gather, of the same bytes; norms and what is kept of
them are then cut over the tp devices too.

Not modelled: products that run less well because they are smaller, exchanges that overlap with products piece by piece,
sequences that do not fill micro-batches evenly, and parallelism over experts (every device gathers all experts of a layer).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowrl.cost.collectives import Ring
from flowrl.cost.compute import forward_s, train_compute_s
from flowrl.cost.offload import ADAM_FP32, Offload, OffloadConstants, OptimizerState, StateCost, state_cost
from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster, Layout, Mesh


@dataclass(frozen=True, slots=True)
class TrainConstants:
    """Calibrated numbers of a training step."""

    overlap_slowdown: float = 1.13
    """Compute and communication that run together slow each other down by this (Galvatron measured 1.1256)."""
    overlap_from: float = 0.3
    """Communication over compute from which the slowdown counts. Assumed."""
    gathers: int = 2
    """Of the weights per micro-batch: for the forward and the backward pass."""


@dataclass(frozen=True, slots=True)
class TrainStep:
    """Seconds of one training step over all its tokens, term by term."""

    micro_batches: int
    compute_s: float
    communication_s: float
    """All gathers and reductions, hidden or not."""
    to_device_s: float
    to_host_s: float
    first_gather_s: float
    """Before the first layer can start: nothing hides it."""
    optimizer_s: float
    move_s: float
    """State parked elsewhere, there and back."""
    slowdown: float
    exchange_s: float = 0.0
    """Activations between the devices of a tensor-parallel group."""
    bubble_s: float = 0.0
    """A pipeline's stages wait while it fills and drains."""
    send_s: float = 0.0
    """Activations and their gradients from stage to stage."""

    @property
    def overlapped_s(self) -> float:
        """The longest of what runs at the same time, slowed down where it competes. Exchanges hold up compute, and use the links
        that gathers use."""
        longest = max(self.compute_s, self.communication_s) + self.exchange_s
        return self.slowdown * max(longest, self.to_device_s, self.to_host_s)

    @property
    def total_s(self) -> float:
        waits = self.bubble_s + self.send_s + self.first_gather_s
        return self.overlapped_s + waits + self.optimizer_s + self.move_s

    def with_state(self, held: StateCost) -> TrainStep:
        """The same step with training state that lies elsewhere."""
        return replace(
            self,
            to_device_s=self.micro_batches * held.to_device_s,
            to_host_s=self.micro_batches * held.to_host_s,
            optimizer_s=held.optimizer_s,
            move_s=held.move_s,
        )


def can_split(shape: ModelShape, ranks: int, *, repeats_kv: bool = False) -> bool:
    """Whether heads, key-value heads and feed-forward blocks divide over the ranks of a tensor-parallel group.

    `repeats_kv`: key-value heads may be held by several ranks each, as engines do.
    """
    kv = shape.kv_heads
    blocks = [shape.ffn]
    if shape.experts is not None:
        blocks += [shape.experts.ffn, shape.experts.shared_ffn]
    has_heads = shape.heads % ranks == 0 and (kv % ranks == 0 or (repeats_kv and ranks % kv == 0))
    return has_heads and all(block % ranks == 0 for block in blocks)


def is_cut_in_training(shape: ModelShape) -> bool:
    """Whether the torch engine has tensor parallelism for a model that is trained or scores: layers as Llama's (Llama, Mistral,
    Qwen2, Qwen3, SmolLM3), without adapters. Samplers have their own (`can_split`)."""
    is_plain = shape.style == "llama" and shape.experts is None and shape.latent is None and shape.lora is None
    two = ("input_layernorm", "post_attention_layernorm")
    return is_plain and shape.qk_norm != "full" and shape.norms == two and not shape.is_norm_fp32


def train_step(
    shape: ModelShape,
    cluster: Cluster,
    mesh: Mesh,
    lengths: Sequence[int],
    *,
    tokens: int,
    shards: int | None = None,
    tensor_parallel: int = 1,
    sequence_parallel: bool = True,
    pipeline: int = 1,
    recompute: bool = True,
    offload: Offload = Offload.NONE,
    park_weights: bool = False,
    state: OptimizerState = ADAM_FP32,
    constants: TrainConstants | None = None,
    moving: OffloadConstants | None = None,
) -> TrainStep:
    """One optimizer step over sequences of the given lengths.

        m = ceil(T / (G/(tp·pp)·tokens))
        t = max( max(C/(G·F·eta), m·(2·t_ag(2·N/(tp·pp)) + t_rs(4·N/(tp·pp)))) + exchange, m·H2D, m·D2H )·slowdown
            + first gather + optimizer + parking + bubble + sends
        exchange = m·(2·L·passes/pp + 2)·(t_rs + t_ag)(2·h·tokens)          or t_ar, over tp; passes: 2, with recomputation 3
        bubble   = (pp-1)/m·(C/(G·F·eta) + exchange)                       stages of equal parts, one forward one backward
        sends    = 2·(m + pp - 1)·t_p2p(2·h·tokens)

    Args:
        tokens: of one micro-batch, which a tensor-parallel group works on together.
        shards: devices over which each tensor-parallel block is cut; left out, all there are. Fewer: replicas of them, whose fp32
            gradients are reduced inside a replica and then summed over replicas.
        tensor_parallel: neighbouring devices inside a node; heads must divide.
        pipeline: stages; the planner offers none to trainers.

    Raises `ConfigError` when these do not divide the mesh, a node, the heads or the layers.
    """
    keep = constants or TrainConstants()
    layout = _layout(shape, cluster, mesh, shards, tensor_parallel, pipeline, tokens)
    tp, stages, shards = layout.tp, layout.pp, layout.fsdp
    count, each_bytes = _micro_batches(shape, layout, lengths, tokens)
    compute_s = train_compute_s(
        shape,
        cluster,
        mesh.size,
        lengths,
        micro_batches=count,
        tensor_parallel=tp,
        pipeline=stages,
        recompute=recompute,
    )
    inside = Ring.strided(cluster, mesh.first, shards, tp)
    across = Ring.strided(cluster, mesh.first, layout.dp, tp * shards * stages)
    gradient_bytes = 4.0 * shape.trainable_params() / (tp * stages)
    reduce_s = inside.reduce_scatter_s(gradient_bytes) + across.all_reduce_s(gradient_bytes / shards)
    gather_s = inside.all_gather_s(2.0 * shape.params() / (tp * stages))
    communication_s = count * (keep.gathers * gather_s + reduce_s)
    passes = 3 if recompute else 2
    exchange_s = count * _exchange_s(cluster, tp, each_bytes, 2 * shape.layers * passes / stages + 2, sequence_parallel)
    send_s = 0.0
    if stages > 1:
        is_inside = mesh.size // layout.dp <= cluster.devices_per_node
        link = cluster.inside if is_inside else cluster.across
        part = tp if sequence_parallel else 1
        send_s = 2 * (count + stages - 1) * link.time_s(each_bytes / part)
    competes = communication_s >= keep.overlap_from * compute_s and communication_s > 0
    held = state_cost(
        shape,
        cluster,
        shards=shards * tp * stages,
        nodes=len(mesh.nodes(cluster.devices_per_node)),
        offload=offload,
        park_weights=park_weights,
        state=state,
        constants=moving,
    )
    return TrainStep(
        micro_batches=count,
        compute_s=compute_s,
        communication_s=communication_s,
        to_device_s=0.0,
        to_host_s=0.0,
        first_gather_s=_first_gather_s(shape, inside, tp),
        optimizer_s=0.0,
        move_s=0.0,
        slowdown=keep.overlap_slowdown if competes else 1.0,
        exchange_s=exchange_s,
        bubble_s=(stages - 1) / count * (compute_s + exchange_s),
        send_s=send_s,
    ).with_state(held)


def forward_pass_s(
    shape: ModelShape,
    cluster: Cluster,
    mesh: Mesh,
    lengths: Sequence[int],
    *,
    tokens: int,
    shards: int | None = None,
    tensor_parallel: int = 1,
    sequence_parallel: bool = True,
) -> float:
    """A forward pass over sequences with sharded weights, `tokens` at a time; arguments and errors as of `train_step`.

    `max(C_f/(G·F·eta_fwd), m·t_ag(2·N/tp)) + exchange + first gather`, with `m·(2·L + 1)` exchanges.
    """
    layout = _layout(shape, cluster, mesh, shards, tensor_parallel, 1, tokens)
    count, each_bytes = _micro_batches(shape, layout, lengths, tokens)
    ring = Ring.strided(cluster, mesh.first, layout.fsdp, layout.tp)
    gather_s = ring.all_gather_s(2.0 * shape.params() / layout.tp)
    exchange_s = count * _exchange_s(cluster, layout.tp, each_bytes, 2 * shape.layers + 1, sequence_parallel)
    compute_s = forward_s(
        shape, cluster, mesh.size, lengths, micro_batches=count, tensor_parallel=layout.tp, is_sharded=True
    )
    longest = max(compute_s, count * gather_s)
    return longest + exchange_s + _first_gather_s(shape, ring, layout.tp)


def _layout(
    shape: ModelShape, cluster: Cluster, mesh: Mesh, shards: int | None, tp: int, stages: int, tokens: int
) -> Layout:
    """Checked: what divides what."""
    left = mesh.size // (tp * stages) if tp > 0 and stages > 0 else 0
    cut = left if shards is None else shards
    if cut < 1 or mesh.size % (cut * tp * stages) or tokens < 1:
        raise ConfigError(
            f"training needs shards that divide the mesh's {mesh.size} devices, and a token per micro-batch; found {cut} "
            f"shards, tensor_parallel={tp}, pipeline={stages}, {tokens} tokens"
        )
    per_node = cluster.devices_per_node
    crosses = mesh.spans_nodes(per_node) and (per_node % tp or mesh.first % tp)
    if tp > 1 and (crosses or not can_split(shape, tp)):
        raise ConfigError(
            f"tensor parallelism of a trainer stays inside a node and divides heads and feed-forward blocks; found {tp} with "
            f"{cluster.devices_per_node} devices per node, {shape.heads} heads, {shape.kv_heads} key-value heads, {shape.ffn}"
        )
    if stages > shape.layers:
        raise ConfigError(f"each stage of a pipeline needs a layer; found {stages} stages for {shape.layers} layers")
    return Layout(dp=mesh.size // (cut * tp * stages), fsdp=cut, tp=tp, pp=stages)


def _micro_batches(shape: ModelShape, layout: Layout, lengths: Sequence[int], tokens: int) -> tuple[int, float]:
    """How many a rank with tokens of its own works through, and the bytes of one's activations between two layers, bf16."""
    total, ranks = sum(lengths), layout.dp * layout.fsdp
    count = max(1, math.ceil(total / (ranks * tokens)))
    return count, 2.0 * shape.hidden * total / (ranks * count)


def _exchange_s(cluster: Cluster, tp: int, size_bytes: float, times: float, sequence_parallel: bool) -> float:
    """Sums of activations over a tensor-parallel group, `times` of them."""
    if tp == 1:
        return 0.0
    ring = Ring.neighbours(cluster, tp)
    if not sequence_parallel:
        return times * ring.all_reduce_s(size_bytes)
    return times * (ring.reduce_scatter_s(size_bytes) + ring.all_gather_s(size_bytes))


def _first_gather_s(shape: ModelShape, ring: Ring, tp: int) -> float:
    return ring.all_gather_s(2.0 * (shape.root_params() + shape.layer_params(0)) / tp)
