"""`flowrl reshard-explain`: what moves when a model's weights go from one layout to another."""

from __future__ import annotations

import argparse
import json

from flowrl.cli import OK
from flowrl.cli.layouts import layout_of
from flowrl.cost.shapes import ModelShape
from flowrl.engines.reshard.explain import explain
from flowrl.engines.reshard.program import compile_program
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster, Layout
from flowrl.planner.boxes import Holding, even_stages
from flowrl.planner.reshard import reshard
from flowrl.planner.shapes import shape_of

MOST_DEVICES = 512
"""Of a layout: every device is looked at, and more take minutes."""
MIB = 2**20


def reshard_explain(args: argparse.Namespace) -> int:
    """Print bytes by device and by pair, the bound, buckets, and with a cluster predicted seconds."""
    shape = shape_of(args.model, args.model)
    source, target = _layout(args.source), _layout(args.target)
    cluster = None if args.cluster is None else Cluster.of(args.cluster)
    first = source.size if args.apart else 0
    devices = max(source.size, first + target.size)
    if cluster is not None and devices > cluster.num_devices:
        raise ConfigError(
            f"{source} -> {target} needs {devices} devices; cluster {args.cluster} has {cluster.num_devices}"
        )
    if args.bucket_mib < 1:
        raise ConfigError(f"--bucket-mib is at least 1; found {args.bucket_mib}")
    tensors = shape.modules()
    before, after = _holding(shape, source, 0), _holding(shape, target, first)
    per_node = cluster.devices_per_node if cluster is not None else None
    found = reshard(tensors, before, after, devices_per_node=per_node)
    program = compile_program(
        tensors,
        found,
        source_dtype=args.source_dtype,
        bucket_bytes=args.bucket_mib * MIB,
        edge=f"{args.model}: {source} -> {target}",
    )
    told = explain(program, found, tensors, cluster)
    print(json.dumps(told.to_dict(), indent=1) if args.json else told)
    return OK


def _holding(shape: ModelShape, layout: Layout, first: int) -> Holding:
    stages = even_stages(shape.layers, layout.pp) if layout.pp > 1 else ()
    devices = range(first, first + layout.size)
    return Holding(layout, devices, kv_heads=shape.kv_heads, stage_layers=stages, is_tied=shape.tied)


def _layout(text: str) -> Layout:
    return layout_of(text, most_devices=MOST_DEVICES, work="a reshard is explained for")
