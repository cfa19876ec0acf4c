"""Seconds of handing new weights from a trainer to an engine, in closed form: for a search that compares thousands of pairs.

`flowrl.plan.reshard` finds the exact moves. For the layouts that the search makes (rows of every tensor cut over the trainer's
devices, tensor parallelism and copies in the engine) the bytes agree with it to two parts in a thousand; what the closed form
leaves out are rows that do not divide evenly, and engines with more ranks than key-value heads on the trainer's own mesh.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from flowrl.cost.shapes import ModelShape
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.plan.reshard import BUCKET_BYTES


@dataclass(frozen=True, slots=True)
class Side:
    """Where one side's weights lie."""

    mesh: Mesh
    layout: Layout


@lru_cache(maxsize=4096)
def need_bytes(shape: ModelShape, tp: int, element_bytes: int = 2) -> float:
    """Weights of one device of an engine: each split matrix over `tp`, keys and values over no more than their heads."""
    found = 0.0
    for weight in shape.modules():
        parts = 1 if weight.split_axis is None else min(tp, shape.kv_heads) if weight.kind in ("k", "v") else tp
        found += weight.num_params / parts
    return element_bytes * found


@lru_cache(maxsize=4096)
def kept_bytes(shape: ModelShape, shards: int, tp: int, element_bytes: int = 2) -> float:
    """Of what a device needs, what it holds already, when its shard of rows lies inside its block of rows."""
    found = 0.0
    for weight in shape.modules():
        # a shard has all columns of its rows; a block of columns needs a part of them
        parts = tp if weight.split_axis not in (None, 0) else 1
        found += weight.num_params / shards / parts
    return element_bytes * found


def handover_s(
    shape: ModelShape, cluster: Cluster, source: Side, target: Side, *, is_on_host: bool = False, host_bytes: float = 4
) -> float:
    """Seconds for new weights to reach an engine: wire, starts of buckets, and the copy into the engine's storage.

        on one mesh     recv = need - kept
        apart           recv = need
        from other nodes  2·N·(part of the model that no device of the node holds), once into each node

    `is_on_host`: the source's shards are first loaded, `host_bytes` per element.
    """
    need = need_bytes(shape, target.layout.tp)
    is_same = source.mesh == target.mesh
    kept = kept_bytes(shape, source.layout.fsdp, target.layout.tp) if is_same else 0.0
    received = max(0.0, need - kept)
    far = far_bytes(shape, cluster, source, target)
    near = max(0.0, received - far)
    wire = max(near / cluster.inside.bytes_s, far / cluster.across.bytes_s)
    load = host_bytes * shape.params() / source.layout.fsdp / cluster.host_link.bytes_s if is_on_host else 0.0
    copy = 2 * need / (cluster.device.hbm_bytes_s * cluster.efficiency.hbm)
    return wire + math.ceil(received / BUCKET_BYTES) * cluster.alpha_s + load + copy


def far_bytes(shape: ModelShape, cluster: Cluster, source: Side, target: Side) -> float:
    """What each device of the engine receives from other nodes: the busiest node's share, spread over its devices."""
    per_node = cluster.devices_per_node
    holding = source.mesh.nodes(per_node)
    worst = 0.0
    for node in target.mesh.nodes(per_node):
        on_node = [d for d in target.mesh.devices if d // per_node == node]
        here = sum(d // per_node == node for d in source.mesh.devices) if node in holding else 0
        lacking = 1.0 - min(1.0, here / source.layout.fsdp)
        copies = min(target.layout.tp, len(on_node)) / target.layout.tp  # part of the model that the node needs
        worst = max(worst, 2.0 * shape.params() * lacking * copies / len(on_node))
    return worst
