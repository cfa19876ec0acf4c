"""Devices and hosts with their published figures, and how much of them a job reaches.

Peaks are what the vendor prints for dense bf16 and for one direction. `Efficiency` says how much of a peak is reached; its
defaults are assumptions until a cluster has been measured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from flowrl.errors import ConfigError
from flowrl.schema.fields import check_fields, is_number, shown

GIB = 2**30
LEAST_EFFICIENCY = 1e-6
"""A device that reaches less of its peak is none; what is counted with such a part overflows."""


def require_positive(owner: object, *names: str, zero: bool = False) -> None:
    """Raise `ConfigError` unless each field is a finite number above 0 (with `zero`, of at least 0)."""
    for name in names:
        value: Any = getattr(owner, name)
        if not is_number(value) or value < 0 or (value == 0 and not zero):
            least = "of at least 0" if zero else "above 0"
            raise ConfigError(f"{type(owner).__name__} needs a finite number {least} for {name}; found {shown(value)}")


def _make_whole(owner: object, *names: str) -> None:
    """Make a whole number of each field that is written as a float: 1.5e11. Files of clusters and plans take no others there.

    Raises `ConfigError` for one with a fraction.
    """
    for name in names:
        value: Any = getattr(owner, name)
        if isinstance(value, float):
            if not value.is_integer():
                raise ConfigError(
                    f"{type(owner).__name__} needs a whole number for {name}; found {shown(value)}: int({shown(value)})"
                )
            object.__setattr__(owner, name, int(value))


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one process's share of a CPU.

    Example:
        Device("A100-80G", memory_bytes=80 * 2**30, peak_flops=312e12, hbm_bytes_s=2.039e12)
    """

    name: str
    memory_bytes: int
    peak_flops: float
    """FLOP per second, bf16, dense."""
    hbm_bytes_s: float
    """Bytes per second between the device and its own memory, reads and writes together."""

    def __post_init__(self) -> None:
        require_positive(self, "memory_bytes", "peak_flops", "hbm_bytes_s")
        _make_whole(self, "memory_bytes")
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How much of each peak is reached, as a fraction. Every default is assumed; a measured cluster replaces them."""

    train: float = 0.40
    """Of `peak_flops`, forward and backward, counting recomputed work."""
    forward: float = 0.50
    """Of `peak_flops`, forward only."""
    hbm: float = 0.70
    """Of `hbm_bytes_s`, in copies and what is like them."""
    adam: float = 0.70
    """Of `hbm_bytes_s`, in the optimizer's step on the device."""
    train_attention: float = 0.0
    """The same, in attention's own products, which grow with the square of a sequence; 0: as `train`."""
    forward_attention: float = 0.0
    """The same, forward only; 0: as `forward`."""
    decode_flops: float = 0.60
    """Of `peak_flops`, when decoding is bound by arithmetic."""
    decode_hbm: float = 0.70
    """Of `hbm_bytes_s`, when decoding is bound by reading weights and cache."""
    nvlink: float = 0.80
    nic: float = 0.85
    pcie: float = 1.0
    """Of `pcie_bytes_s`, which is already what pinned copies reach."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            require_positive(self, name, zero=name.endswith("_attention"))
            value = getattr(self, name)
            if value > 1 or 0 < value < LEAST_EFFICIENCY:
                raise ConfigError(f"Efficiency.{name} is a fraction of a peak, above 0 to 1; found {value!r}")


@dataclass(frozen=True, slots=True)
class Overheads:
    """What a layer and a loss cost beside their products with matrices: bytes that pass through memory, and starts of kernels.

    All are 0 by default, and `Efficiency.train` and `.forward` then stand for everything. A measured cluster has them apart,
    because a small model spends more of its time on them than a large one ("Products and the rest" in `flowrl/cost/compute.py`).
    """

    train_passes: float = 0.0
    """Forward, recomputed forward and backward: bytes moved for each byte that a layer keeps of a token for its backward pass."""
    forward_passes: float = 0.0
    """The same of a forward pass alone."""
    train_logit_bytes: float = 0.0
    """Moved for each logit of a loss in chunks: forward, recomputed and backward."""
    forward_logit_bytes: float = 0.0
    train_shard_bytes: float = 0.0
    """Moved by each device for each parameter and micro-batch where weights are sharded: what is gathered is cast and copied, and
    gradients are cast, copied and added."""
    forward_shard_bytes: float = 0.0
    """The same of a forward pass alone, which gathers once and reduces nothing."""
    train_layer_s: float = 0.0
    """Least time of a layer and micro-batch, however few its tokens: the host starts kernels one after the other."""
    forward_layer_s: float = 0.0

    def __post_init__(self) -> None:
        require_positive(self, *(field.name for field in fields(self)), zero=True)


@dataclass(frozen=True, slots=True)
class Host:
    """The memory and CPU of one node, and its way to the devices."""

    memory_bytes: int
    pcie_bytes_s: float
    """Pinned copies, one direction, over one uplink."""
    pcie_shared_by: int = 1
    """Devices behind one uplink; each gets its part when all copy at once."""
    cpu_adam_params_s: float = 2e9
    """Parameters per second of Adam on the CPUs of one node. Reported rates differ sevenfold: measure it."""
    nvme_bytes_s: float = 0.0
    """To disk, one direction, per node. Kept for people: no plan offloads to disk yet, so no prediction depends on it."""

    def __post_init__(self) -> None:
        require_positive(self, "memory_bytes", "pcie_bytes_s", "pcie_shared_by", "cpu_adam_params_s")
        require_positive(self, "nvme_bytes_s", zero=True)
        _make_whole(self, "memory_bytes", "pcie_shared_by")
        check_fields(self)

    @property
    def pcie_per_device_bytes_s(self) -> float:
        """Bytes per second of one device, one direction, while all devices copy."""
        return self.pcie_bytes_s / self.pcie_shared_by


@dataclass(frozen=True, slots=True)
class Product:
    """A device together with the links and the host it is usually sold with."""

    device: Device
    nvlink_bytes_s: float
    nic_bytes_s: float
    host: Host


def _product(
    name: str, memory_gib: float, peak_flops: float, hbm: float, nvlink: float, nic: float, host: Host
) -> Product:
    return Product(Device(name, round(memory_gib * GIB), peak_flops, hbm), nvlink, nic, host)


# Published peaks, from the vendor's data sheets: dense bf16 with fp32 sums (half of what is printed with sparsity), bytes of the
# device's own memory and of its links, one direction. Device memory is about what the driver reports, which is less than what is
# printed where a part goes to error correction. Host memory is what common nodes have, not what each has: give your own. Two
# A100s share one x16 uplink.
#
# RTX 4090 and L40S have no NVLink: between devices lies PCIe 4.0 x16 (32 GB/s printed), and a 4090's driver copies by way of the
# host, which halves it. Nobody sells nodes of them with a network of their own: 100 Gb/s for all eight of a node are assumed.
DEVICES: dict[str, Product] = {
    "A100-40G": _product("A100-40G", 40, 312e12, 1.555e12, 300e9, 25e9, Host(1024 * GIB, 25e9, pcie_shared_by=2)),
    "A100-80G": _product("A100-80G", 80, 312e12, 2.039e12, 300e9, 25e9, Host(1024 * GIB, 25e9, pcie_shared_by=2)),
    "H100-80G": _product("H100-80G", 80, 989e12, 3.35e12, 450e9, 50e9, Host(2048 * GIB, 55e9)),
    "H200": _product("H200", 139, 989e12, 4.8e12, 450e9, 50e9, Host(2048 * GIB, 54e9)),
    # "NVIDIA Ada GPU Architecture", appendix: 165.2 TFLOP/s, 1008 GB/s, 24 GB
    "RTX4090": _product("RTX4090", 23.5, 165.2e12, 1.008e12, 16e9, 1.5e9, Host(256 * GIB, 25e9)),
    # "NVIDIA L40S": 362.05 TFLOP/s, 864 GB/s, 48 GB with error correction, PCIe 4.0 x16
    "L40S": _product("L40S", 44, 362.05e12, 0.864e12, 32e9, 1.5e9, Host(512 * GIB, 25e9)),
    # "NVIDIA HGX": eight have 36 PFLOP/s of bf16 with sparsity, 180 GB and 8 TB/s each, NVLink 1.8 TB/s both directions
    "B200": _product("B200", 178, 2.25e15, 8e12, 900e9, 50e9, Host(2048 * GIB, 55e9)),
    "cpu": _product("cpu", 8, 1e11, 2e10, 1e10, 1e9, Host(16 * GIB, 1e10, cpu_adam_params_s=2.5e8)),
}
ALIASES = {
    "A100": "A100-80G",
    "A100-SXM-80G": "A100-80G",
    "H100": "H100-80G",
    "H100-SXM-80G": "H100-80G",
    "H200-141G": "H200",
    "4090": "RTX4090",
    "RTX-4090": "RTX4090",
    "L40S-48G": "L40S",
    "B200-180G": "B200",
}
