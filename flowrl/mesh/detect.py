"""What this machine has. The only file of the package that imports torch, and only when asked."""

from __future__ import annotations

import os
import re
from dataclasses import replace

from flowrl.errors import ConfigError
from flowrl.mesh.cluster import Cluster
from flowrl.mesh.devices import DEVICES, GIB

# what the driver calls a device, and the name here; the first that matches
_KNOWN = (
    (re.compile(r"A100.*80GB"), "A100-80G"),
    (re.compile(r"A100.*40GB"), "A100-40G"),
    (re.compile(r"H100 80GB HBM3"), "H100-80G"),
    (re.compile(r"H200"), "H200"),
    (re.compile(r"RTX 4090(?! D| Laptop)"), "RTX4090"),
    (re.compile(r"\bL40S\b"), "L40S"),
    (re.compile(r"\bB200\b"), "B200"),
)


def detect() -> Cluster:
    """See `Cluster.detect`."""
    import torch

    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not torch.cuda.is_available():
        return of_cpu(host_bytes)
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return of_gpus([(one.name, one.total_memory) for one in found], host_bytes)


def of_cpu(host_bytes: int) -> Cluster:
    """One process on the CPU, with half of the host's memory as the device's."""
    return Cluster.named("cpu").with_memory(device_bytes=max(1, host_bytes // 2), host_bytes=host_bytes)


def of_gpus(found: list[tuple[str, int]], host_bytes: int) -> Cluster:
    """One node of equal GPUs, from what the driver says: (name, memory in bytes) of each.

    The links are those the device is usually sold with; they are not measured here.
    """
    names = sorted({name for name, _ in found})
    if len(names) != 1:
        raise ConfigError(
            f"a cluster has equal devices; found {', '.join(names)}: hide the others with CUDA_VISIBLE_DEVICES"
        )
    known = next((ours for pattern, ours in _KNOWN if pattern.search(names[0])), None)
    if known is None:
        least = min(memory for _, memory in found)
        raise ConfigError(
            f"no published figures for the device {names[0]!r} ({least / GIB:.1f} GiB); known are {', '.join(DEVICES)}. "
            "Write its figures as a file: Cluster.named('8xH100-80G').to_toml('cluster.toml') is a start"
        )
    product = DEVICES[known]
    device = replace(product.device, memory_bytes=min(memory for _, memory in found))
    host = replace(product.host, memory_bytes=host_bytes)
    return Cluster(1, len(found), device, product.nvlink_bytes_s, product.nic_bytes_s, host)
