"""Seconds that devices compute: products with matrices, and what is done beside them.

[Note: Products and the rest]
A layer multiplies matrices, at a part of the device's peak, and between the products it reads and writes activations, at a
part of the memory's bandwidth. One is done after the other, so their times add; and no layer is faster than the host starts its
kernels:

    t = max( C / (G·F·eta) + (k·L·A_layer + k_v·V)·T / (G·B_hbm·eta_hbm),  m·L·start )

k counts passes over the bytes that a layer keeps for its backward pass, k_v bytes per logit, m micro-batches. The smaller a
model, the larger the part of the second term and the third: one efficiency cannot stand for all models. Cluster figures that
were not measured have k = k_v = start = 0, and an efficiency that stands for everything.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    with_logits: bool = True,
    constants: MemoryConstants | None = None,
) -> float:
    """A forward pass without gradients over sequences of the given lengths, spread over `devices`.

    `with_logits` is off where no loss or log-probability of the tokens is computed, as when an engine reads a prompt.
    """
    beside = cluster.overheads
    per_logit = beside.forward_logit_bytes if with_logits else 0.0
    moved = _moved_bytes(shape, sum(lengths), beside.forward_passes, per_logit, constants)
    busy_s = _seconds(cluster, devices, forward_flops(shape, lengths).total, cluster.efficiency.forward, moved)
    return max(busy_s, micro_batches * shape.layers * beside.forward_layer_s)


def train_compute_s(
    shape: ModelShape,
    cluster: Cluster,
    devices: int,
    lengths: Sequence[int],
    *,
    micro_batches: int = 1,
    recompute: bool = True,
    constants: MemoryConstants | None = None,
) -> float:
    """Forward and backward passes over sequences of the given lengths, spread over `devices`.

    What is done beside products is without recomputation what it is with it, less one forward pass.
    """
    beside = cluster.overheads
    passes, start_s = beside.train_passes, beside.train_layer_s
    if not recompute:
        passes = max(0.0, passes - beside.forward_passes)
        start_s = max(0.0, start_s - beside.forward_layer_s)
    moved = _moved_bytes(shape, sum(lengths), passes, beside.train_logit_bytes, constants)
    flops = train_flops(shape, lengths, recompute=recompute)
    busy_s = _seconds(cluster, devices, flops, cluster.efficiency.train, moved)
    return max(busy_s, micro_batches * shape.layers * start_s)


def _moved_bytes(
    shape: ModelShape, tokens: int, passes: float, per_logit: float, constants: MemoryConstants | None
) -> float:
    logits = shape.vocab if shape.head == "lm" else 0
    kept = activation_token_bytes(shape, constants=constants) if passes else 0.0
    return (passes * shape.layers * kept + per_logit * logits) * tokens


def _seconds(cluster: Cluster, devices: int, flops: float, part: float, moved_bytes: float) -> float:
    device = cluster.device
    products = flops / (device.peak_flops * part)
    return (products + moved_bytes / (device.hbm_bytes_s * cluster.efficiency.hbm)) / devices
