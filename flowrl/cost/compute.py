"""Seconds that devices compute: products with matrices, and what is done beside them.

[Note: Products and the rest]
A layer multiplies matrices, at a part of the device's peak, attention multiplies activations, at a smaller part, and between the
products activations are read and written, at a part of the memory's bandwidth. One is done after the other, so their times add;
and no layer is faster than the host starts its kernels. The head and its loss are few large kernels, which no start delays:

    t = max( [C_l/(F·eta) + C_a/(F·eta_a) + k·L·A_layer·T/(B·eta_hbm)] / G + m·k_w·N/(B·eta_hbm),  m·L·start )
        + [C_head/(F·eta) + k_v·V·T/(B·eta_hbm)] / G

k counts passes over the bytes that a layer keeps for its backward pass, k_v bytes per logit, k_w bytes per parameter and
micro-batch (gathered weights are cast and copied, gradients cast, copied and added), m micro-batches on a device. Figures of
training are those with recomputation; without it, k and the starts go down with the products (3 of 4 passes remain, with adapters
2 of 3), so that they follow from what training took and from nothing else. The smaller a
model and a micro-batch, the larger the part of what is not a product: one efficiency cannot stand for all. Cluster figures that
were not measured have all k and start 0, and an efficiency that stands for everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.cost.flops import forward_flops, train_flops
from flowrl.cost.memory import MemoryConstants, activation_token_bytes
from flowrl.cost.shapes import ModelShape
from flowrl.mesh import Cluster


def forward_s(
    shape: ModelShape,
    cluster: Cluster,
    devices: int,
    lengths: Sequence[int],
    *,
    micro_batches: int = 1,
    tensor_parallel: int = 1,
    is_sharded: bool = False,
    with_logits: bool = True,
    constants: MemoryConstants | None = None,
) -> float:
    """A forward pass without gradients over sequences of the given lengths (old or reference log-probabilities, values, rewards),
    spread over `devices`.

    `is_sharded`: weights are gathered for each micro-batch, as a trainer's are. `with_logits` is off where no loss or
    log-probability of the tokens is computed, as when an engine reads a prompt.
    """
    beside, part, tokens = cluster.overheads, cluster.efficiency, sum(lengths)
    forward = forward_flops(shape, lengths)
    per_logit = beside.forward_logit_bytes if with_logits else 0.0
    work = _Work(
        products=forward.total - forward.attention,
        attention=forward.attention,
        head=_head_flops(shape, tokens),
        layer_bytes=_layer_bytes(shape, tokens, beside.forward_passes, constants),
        logit_bytes=_logits(shape, tokens) * per_logit,
    )
    per_param = beside.forward_shard_bytes / tensor_parallel if is_sharded else 0.0
    sharded_bytes = micro_batches * per_param * shape.params()
    starts_s = micro_batches * shape.layers * beside.forward_layer_s
    return work.seconds(cluster, devices, part.forward, part.forward_attention, sharded_bytes, starts_s)


def train_compute_s(
    shape: ModelShape,
    cluster: Cluster,
    devices: int,
    lengths: Sequence[int],
    *,
    micro_batches: int = 1,
    tensor_parallel: int = 1,
    pipeline: int = 1,
    recompute: bool = True,
    constants: MemoryConstants | None = None,
) -> float:
    """Forward and backward passes over sequences of the given lengths, spread over `devices`, with sharded weights.

    Without recomputation one forward pass less is done: of products, and of what is done beside them.
    """
    beside, part, tokens = cluster.overheads, cluster.efficiency, sum(lengths)
    attention = (4 if recompute else 3) * forward_flops(shape, lengths).attention
    kept = 2 if shape.lora is not None else 3
    times = kept + (1 if recompute else 0)
    share = times / (kept + 1)
    passes, start_s = share * beside.train_passes, share * beside.train_layer_s
    work = _Work(
        products=train_flops(shape, lengths, recompute=recompute) - attention,
        attention=attention,
        head=times * _head_flops(shape, tokens),
        layer_bytes=_layer_bytes(shape, tokens, passes, constants),
        logit_bytes=_logits(shape, tokens) * beside.train_logit_bytes,
    )
    sharded_bytes = micro_batches * beside.train_shard_bytes * shape.params() / (tensor_parallel * pipeline)
    starts_s = micro_batches * shape.layers / pipeline * start_s
    return work.seconds(cluster, devices, part.train, part.train_attention, sharded_bytes, starts_s)


@dataclass(frozen=True, slots=True)
class _Work:
    """Of all devices together, in FLOP and bytes."""

    products: float
    """With the head, without attention."""
    attention: float
    head: float
    layer_bytes: float
    logit_bytes: float

    def seconds(
        self,
        cluster: Cluster,
        devices: int,
        part: float,
        attention_part: float,
        sharded_bytes: float,
        starts_s: float,
    ) -> float:
        """`sharded_bytes` are moved by each device."""
        peak = cluster.device.peak_flops
        bandwidth = cluster.device.hbm_bytes_s * cluster.efficiency.hbm
        layers_s = (self.products - self.head) / (peak * part) + self.attention / (peak * (attention_part or part))
        layers_s = (layers_s + self.layer_bytes / bandwidth) / devices + sharded_bytes / bandwidth
        loss_s = (self.head / (peak * part) + self.logit_bytes / bandwidth) / devices
        return max(layers_s, starts_s) + loss_s


def _layer_bytes(shape: ModelShape, tokens: int, passes: float, constants: MemoryConstants | None) -> float:
    return passes * shape.layers * activation_token_bytes(shape, constants=constants) * tokens if passes else 0.0


def _logits(shape: ModelShape, tokens: int) -> float:
    return float(shape.vocab * tokens) if shape.head == "lm" else 0.0


def _head_flops(shape: ModelShape, tokens: int) -> float:
    return 2.0 * shape.hidden * _logits(shape, tokens)
