"""`flowrl calibrate`: measure this machine, write it as a file, and say what it is."""

from __future__ import annotations

import importlib
from pathlib import Path

from flowrl.cli import OK, PROBLEMS
from flowrl.cost.text import aligned, size_text
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster
from flowrl.schema.files import check_writable, plain

ENGINE = "flowrl.engines.calibrate"
"""Loaded by name: it imports torch."""
SHARED = " (half of the host's memory, shared by its processes: give what they may take)"


def calibrate(out: Path, *, devices: int | None, quick: bool) -> int:
    """Measure, write `out`, print a summary. Something that could not be measured is a problem."""
    if out.name:
        check_writable(out, "--out")
    if out.suffix != ".toml":
        other = f"{plain(out)}; name it {plain(out.with_suffix('.toml'))}" if out.name else "''"
        raise ConfigError(f"--out: a cluster is written as TOML, and read by a name that ends in .toml; found {other}")
    if devices is not None and devices < 1:
        raise ConfigError(f"--devices is how many GPUs are measured, at least 1; found {devices}")
    cluster: Cluster = importlib.import_module(ENGINE).calibrate(devices=devices, quick=quick)
    cluster.to_toml(out)
    print(summary(cluster))
    for note in cluster.notes:
        print(f"note: {note}")
    print(f"written to {out}")
    return PROBLEMS if cluster.notes else OK


def summary(cluster: Cluster) -> str:
    """What was measured, as lines of text."""
    device, part, host = cluster.device, cluster.efficiency, cluster.host
    beside = cluster.overheads
    lines = [
        ("devices", f"{cluster.num_devices} x {device.name}, {size_text(device.memory_bytes)} each"
         f"{SHARED if device.name == 'cpu' else ''}"),
        ("products", f"{device.peak_flops / 1e12:.4g} TFLOP/s peak; {_percent(part.train)} of it in training, "
         f"{_percent(part.forward)} in forward passes, {_percent(part.train_attention or part.train)} in attention, "
         f"{_percent(part.decode_flops)} with few tokens"),
        ("memory", f"{device.hbm_bytes_s / 1e9:.4g} GB/s peak; {_percent(part.hbm)} of it in copies, "
         f"{_percent(part.adam)} in Adam's step, {_percent(part.decode_hbm)} in decode steps"),
        ("beside products", f"training {beside.train_passes:.3g} passes over what layers keep and {beside.train_logit_bytes:.3g} "
         f"bytes a logit; forward {beside.forward_passes:.3g} and {beside.forward_logit_bytes:.3g}; sharding "
         f"{beside.train_shard_bytes:.3g} and {beside.forward_shard_bytes:.3g} bytes a parameter"),
        ("start of a layer", f"{beside.train_layer_s * 1e3:.3g} ms in training, {beside.forward_layer_s * 1e3:.3g} ms forward"),
        ("host", f"{host.pcie_per_device_bytes_s / 1e9:.4g} GB/s to and from each device while all copy; Adam "
         f"{host.cpu_adam_params_s / 1e9:.3g}e9 parameters/s"),
    ]  # fmt: skip
    if cluster.num_devices > 1:
        rate = cluster.inside.bytes_s / 1e9
        lines.append(("links", f"{rate:.4g} GB/s a device, {cluster.alpha_s * 1e6:.3g} us to start a message"))
    return "\n".join(aligned(lines, "ll"))


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"
