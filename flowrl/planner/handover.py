"""Seconds of handing new weights from a trainer to an engine, in closed form: for a search that compares thousands of pairs.

`flowrl.planner.reshard` finds the exact moves. For the layouts that the search makes (rows of every tensor cut over the trainer's
devices, tensor parallelism and copies in the engine) the bytes agree with it to two parts in a thousand; what the closed form
leaves out are rows that do not divide evenly, and engines with more ranks than key-value heads on the trainer's own mesh. Of a
tensor-parallel trainer on the engine's mesh, it counts what stays in place only where both have the same degree: else it is an
upper estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from flowrl.cost.shapes import ModelShape
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.boxes import even_stages
from flowrl.planner.reshard import BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class Side:
    """Where one side's weights lie."""

    mesh: Mesh
    layout: Layout


@lru_cache(maxsize=4096)
def need_bytes(shape: ModelShape, tp: int, element_bytes: int = 2, stages: int = 1) -> float:
    """Weights of one device of an engine: each split matrix over `tp`, keys and values over no more than their heads.

    Of several stages, the one that needs most: its layers, and the embedding or the head.
    """
    layers, ends = 0.0, dict.fromkeys(("first", "last"), 0.0)
    for weight in shape.modules():
        parts = 1 if weight.split_axis is None else min(tp, shape.kv_heads) if weight.kind in ("k", "v") else tp
        if weight.layer is not None:
            layers += weight.num_params / parts
        else:
            ends["first" if weight.kind in ("embedding", "position") else "last"] += weight.num_params / parts
    if stages == 1:
        return element_bytes * (layers + sum(ends.values()))
    if shape.tied:  # the last stage computes logits with the embedding
        ends["last"] += ends["first"]
    return element_bytes * (layers * even_stages(shape.layers, stages)[0] / shape.layers + max(ends.values()))


@lru_cache(maxsize=4096)
def kept_bytes(shape: ModelShape, shards: int, tp: int, element_bytes: int = 2) -> float:
    """Of what a device needs, what it holds already, when its shard of rows lies inside its block of rows."""
    found = 0.0
    for weight in shape.modules():
        # a shard has all columns of its rows; a block of columns needs a part of them
        parts = tp if weight.split_axis not in (None, 0) else 1
        found += weight.num_params / shards / parts
    return element_bytes * found


def received_bytes(shape: ModelShape, source: Side, target: Side) -> float:
    """What each device of the engine receives: what it needs; on the trainer's own mesh, less what it holds."""
    given, taken = source.layout, target.layout
    need = need_bytes(shape, taken.tp, stages=taken.pp)
    if source.mesh != target.mesh or given.tp not in (1, taken.tp) or given.pp > 1:
        return need
    # a trainer's block of the same degree is the engine's own: all of a shard of it lies inside
    kept = kept_bytes(shape, given.fsdp * given.tp, taken.tp if given.tp == 1 else 1)
    return max(0.0, need - kept / taken.pp)


def handover_s(
    shape: ModelShape, cluster: Cluster, source: Side, target: Side, *, is_on_host: bool = False, host_bytes: float = 4
) -> float:
    """Seconds for new weights to reach an engine: wire, starts of buckets, and the copy into the engine's storage.

        on one mesh       recv = need - kept
        apart             recv = need
        from other nodes  2·N·(part of the model that no device of the node holds), once into each node
        wire              the longer of sending and receiving, inside nodes and between them

    `is_on_host`: the source's shards are first loaded, `host_bytes` per element.
    """
    need = need_bytes(shape, target.layout.tp, stages=target.layout.pp)
    received = received_bytes(shape, source, target)
    far, far_sent = far_bytes(shape, cluster, source, target)
    near = max(0.0, received - far)
    if source.mesh != target.mesh:
        near = max(near, received * _beside(cluster, source, target))
    wire = max(near / cluster.inside.bytes_s, max(far, far_sent) / cluster.across.bytes_s)
    shards = source.layout.fsdp * source.layout.tp
    load = host_bytes * shape.params() / shards / cluster.host_link.bytes_s if is_on_host else 0.0
    copy = 2 * need / (cluster.device.hbm_bytes_s * cluster.efficiency.hbm)
    return wire + math.ceil(received / BUCKET_BYTES) * cluster.alpha_s + load + copy


def _beside(cluster: Cluster, source: Side, target: Side) -> float:
    """Devices of the engine for each device of the trainer, on the node where there are most; they send what those receive."""
    per_node = cluster.devices_per_node
    both = set(source.mesh.nodes(per_node)) & set(target.mesh.nodes(per_node))
    return max((_on(target.mesh, node, per_node) / _on(source.mesh, node, per_node) for node in both), default=0.0)


def far_bytes(shape: ModelShape, cluster: Cluster, source: Side, target: Side) -> tuple[float, float]:
    """What each device of the engine receives from other nodes (the busiest node's share, spread over its devices), and what each
    device of the trainer sends to them."""
    per_node = cluster.devices_per_node
    received = sent = 0.0
    for node in target.mesh.nodes(per_node):
        on_node = _on(target.mesh, node, per_node)
        lacking = 1.0 - min(1.0, _on(source.mesh, node, per_node) / (source.layout.fsdp * source.layout.tp))
        devices = target.layout.tp * target.layout.pp
        needed = min(devices, on_node) / devices  # part of the model that the node needs
        coming = 2.0 * shape.params() * lacking * needed
        received, sent = max(received, coming / on_node), sent + coming / source.mesh.size
    return received, sent


def _on(mesh: Mesh, node: int, per_node: int) -> int:
    """Devices of a mesh on a node."""
    return max(0, min(mesh.first + mesh.size, (node + 1) * per_node) - max(mesh.first, node * per_node))
