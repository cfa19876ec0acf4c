"""Seconds that devices compute: products with matrices, and what passes through memory beside them.

[Note: Products and traffic]
A layer multiplies matrices, at a part of the device's peak, and between the products it reads and writes activations, at a
part of the memory's bandwidth. Both are done one after the other, so their times add:

    t = C / (G·F·eta) + (k·L·A_layer + k_v·V)·T / (G·B_hbm·eta_hbm)

k counts passes over the bytes that a layer keeps for its backward pass, k_v bytes per logit. In a model of 0.5e9 parameters
the second term is as large as the first, in one of 7e9 a quarter of it: one efficiency cannot stand for both. Cluster figures
that were not measured have k = k_v = 0, and an efficiency that stands for everything.
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
    with_logits: bool = True,
    constants: MemoryConstants | None = None,
) -> float:
    """A forward pass without gradients over sequences of the given lengths, spread over `devices`.

    `with_logits` is off where no loss or log-probability of the tokens is computed, as when an engine reads a prompt.
    """
    traffic = cluster.traffic
    per_logit = traffic.forward_logit if with_logits else 0.0
    moved = _moved_bytes(shape, sum(lengths), traffic.forward, per_logit, constants)
    return _seconds(cluster, devices, forward_flops(shape, lengths).total, cluster.efficiency.forward, moved)


def train_compute_s(
    shape: ModelShape,
    cluster: Cluster,
    devices: int,
    lengths: Sequence[int],
    *,
    recompute: bool = True,
    constants: MemoryConstants | None = None,
) -> float:
    """Forward and backward passes over sequences of the given lengths, spread over `devices`.

    Traffic without recomputation is that with it less one forward pass.
    """
    traffic = cluster.traffic
    passes = traffic.train if recompute else max(0.0, traffic.train - traffic.forward)
    moved = _moved_bytes(shape, sum(lengths), passes, traffic.train_logit, constants)
    flops = train_flops(shape, lengths, recompute=recompute)
    return _seconds(cluster, devices, flops, cluster.efficiency.train, moved)


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
