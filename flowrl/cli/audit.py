"""`flowrl audit`: what a layout makes of a model, parameter by parameter, and what of it is not really sharded."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from flowrl.cli import OK, PROBLEMS
from flowrl.cli.layouts import layout_of
from flowrl.cost.offload import ADAM_8BIT, ADAM_BF16, ADAM_FP32, ADAM_MASTER, Offload
from flowrl.errors import ConfigError
from flowrl.planner.audit import audit_layout
from flowrl.planner.shapes import shape_of
from flowrl.schema.columns import nearest
from flowrl.schema.fields import shown

MOST_DEVICES = 4096
"""Of a layout: every device is looked at, and more take minutes."""
OPTIMIZERS = {one.name: one for one in (ADAM_FP32, ADAM_MASTER, ADAM_BF16, ADAM_8BIT)}


def audit(args: argparse.Namespace) -> int:
    """Print the table and what was found. Exits with 1 when there are problems."""
    for option in ("--model", "--lora"):
        given = [one for one in args.arguments if one == option or one.startswith(f"{option}=")]
        if len(given) > 1:
            raise ConfigError(f"{option} is given {len(given)} times, and an audit is of one; give it once")
    shape = shape_of(args.model, args.model)
    if args.head != "lm":
        shape = shape.with_head(args.head)
    if args.lora is not None:
        if args.lora < 1:
            raise ConfigError(f"--lora takes the rank of adapters, at least 1; found {shown(args.lora)}")
        shape.check_rank(args.lora)
        shape = shape.with_lora(args.lora)
    if args.optimizer not in OPTIMIZERS:
        raise ConfigError(f"there is no optimizer '{args.optimizer}'; {nearest(args.optimizer, OPTIMIZERS)}")
    found = audit_layout(
        shape,
        layout_of(args.layout, most_devices=MOST_DEVICES, work="an audit is of"),
        wrap=args.wrap,
        is_frozen=args.frozen,
        precision=args.precision,
        offload=Offload(args.offload),
        state=OPTIMIZERS[args.optimizer],
        name=args.model,
    )
    if args.json:
        told = {
            "title": found.title,
            "is_predicted": found.is_predicted,
            "device_bytes": found.device_bytes,
            "host_bytes": found.host_bytes,
            "findings": [asdict(one) for one in found.findings],
            "parts": [asdict(part) for part in found.parts],
        }
        print(json.dumps(told, indent=1))
    else:
        print(found)
    return PROBLEMS if found.problems else OK
