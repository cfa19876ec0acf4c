"""Time of a training step with fully sharded weights: compute, communication and copies, as far as they overlap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.cost.collectives import Ring
from flowrl.cost.compute import forward_s, train_compute_s
from flowrl.cost.offload import ADAM_FP32, Offload, OffloadConstants, OptimizerState, state_cost
from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster, Mesh


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

    @property
    def overlapped_s(self) -> float:
        """The longest of what runs at the same time, slowed down where it competes."""
        return self.slowdown * max(self.compute_s, self.communication_s, self.to_device_s, self.to_host_s)

    @property
    def total_s(self) -> float:
        return self.overlapped_s + self.first_gather_s + self.optimizer_s + self.move_s


def score_s(shape: ModelShape, cluster: Cluster, devices: int, lengths: Sequence[int]) -> float:
    """A forward pass over sequences (old or reference log-probabilities, values, rewards): `C_f/(G·F·eta_fwd)` and traffic."""
    return forward_s(shape, cluster, devices, lengths)


def train_step(
    shape: ModelShape,
    cluster: Cluster,
    mesh: Mesh,
    lengths: Sequence[int],
    *,
    tokens: int,
    shards: int | None = None,
    recompute: bool = True,
    offload: Offload = Offload.NONE,
    park_weights: bool = False,
    state: OptimizerState = ADAM_FP32,
    constants: TrainConstants | None = None,
    moving: OffloadConstants | None = None,
) -> TrainStep:
    """One optimizer step over sequences of the given lengths.

        m = ceil(T / (G·tokens))
        t = max(C/(G·F·eta), m·(2·t_ag(2·N) + t_rs(4·N)), m·H2D, m·D2H)·slowdown + first gather + optimizer + parking

    Args:
        tokens: of one micro-batch on one device.
        shards: devices over which weights are cut; left out, all of the mesh. Fewer: replicas of them, whose fp32 gradients are
            reduced inside a replica and then summed over replicas.

    Raises `ConfigError` when `shards` does not divide the mesh.
    """
    keep = constants or TrainConstants()
    cut = mesh.size if shards is None else shards
    if cut < 1 or mesh.size % cut or tokens < 1:
        raise ConfigError(
            f"training needs shards that divide the mesh's {mesh.size} devices, and a token per micro-batch; found {cut} "
            f"shards, {tokens} tokens"
        )
    count = max(1, math.ceil(sum(lengths) / (mesh.size * tokens)))
    compute_s = train_compute_s(shape, cluster, mesh.size, lengths, recompute=recompute)
    inside, across = _rings(cluster, mesh, cut)
    gradient_bytes = 4.0 * shape.trainable_params()
    reduce_s = inside.reduce_scatter_s(gradient_bytes) + across.all_reduce_s(gradient_bytes / cut)
    communication_s = count * (keep.gathers * inside.all_gather_s(2.0 * shape.params()) + reduce_s)
    nodes = len(mesh.nodes(cluster.devices_per_node))
    held = state_cost(
        shape,
        cluster,
        shards=cut,
        nodes=nodes,
        offload=offload,
        park_weights=park_weights,
        state=state,
        constants=moving,
    )
    competes = communication_s >= keep.overlap_from * compute_s and communication_s > 0
    return TrainStep(
        micro_batches=count,
        compute_s=compute_s,
        communication_s=communication_s,
        to_device_s=count * held.to_device_s,
        to_host_s=count * held.to_host_s,
        first_gather_s=inside.all_gather_s(2.0 * (shape.root_params() + shape.layer_params(0))),
        optimizer_s=held.optimizer_s,
        move_s=held.move_s,
        slowdown=keep.overlap_slowdown if competes else 1.0,
    )


def _rings(cluster: Cluster, mesh: Mesh, shards: int) -> tuple[Ring, Ring]:
    """The devices of one replica, and those that hold the same shard in each replica."""
    replicas = mesh.size // shards
    inside = Ring.of(cluster, Mesh(mesh.first, shards))
    nodes = len(mesh.nodes(cluster.devices_per_node))
    apart = replicas if nodes >= replicas else nodes
    return inside, Ring(cluster, replicas, apart)
