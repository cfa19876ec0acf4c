"""Clusters: nodes of equal devices, the links between them, and what was measured on them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, cast

from flowrl.errors import ConfigError
from flowrl.mesh.devices import ALIASES, DEVICES, Device, Efficiency, Host, Overheads, Product, require_positive
from flowrl.mesh.layout import MOST_DEVICES
from flowrl.mesh.links import Link, Measured
from flowrl.mesh.meshes import Mesh, slices
from flowrl.schema.columns import nearest
from flowrl.schema.fields import MOST_DIGITS, check_fields, check_keys, fits, hints_of, shown
from flowrl.schema.files import read_toml, write_file

_NAME = re.compile(r"(?:([0-9]+)x)?(.+)")
DEVICES_PER_NODE = 8
_BYTES = (2**20, "bytes", "24 GiB are 25769803776")
_BYTES_S = (1e5, "bytes/s", "25 GB/s are 25e9")
LEAST: Mapping[str, Mapping[str, tuple[float, str, str]]] = {
    "cluster": {"nvlink_bytes_s": _BYTES_S, "nic_bytes_s": _BYTES_S},
    "device": {
        "memory_bytes": _BYTES,
        "peak_flops": (1e8, "FLOP/s", "165 TFLOP/s are 165e12"),
        "hbm_bytes_s": _BYTES_S,
    },
    "host": {
        "memory_bytes": _BYTES,
        "pcie_bytes_s": _BYTES_S,
        "nvme_bytes_s": _BYTES_S,
        "cpu_adam_params_s": (1e3, "parameters/s", "2 billion a second are 2e9"),
    },
}
"""Figures below which another unit was meant: (limit, unit, how it is written). No machine that trains a model has less."""
MOST_ALPHA_S = 1.0
"""Start of a message. What is above was written in another unit."""
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes with the same devices.

    Example:
        Cluster.named("16xH100-80G")       # two nodes of eight
    """

    nodes: int
    devices_per_node: int
    device: Device
    nvlink_bytes_s: float
    """Between two devices of a node: per device, one direction, published."""
    nic_bytes_s: float
    """Between nodes: per device, one direction, published."""
    host: Host
    efficiency: Efficiency = field(default_factory=Efficiency)
    alpha_s: float = 8e-6
    """Start of a message between devices. Assumed until measured."""
    measured: tuple[Measured, ...] = ()
    """Measured times; where there are some they go before the formulas."""
    overheads: Overheads = field(default_factory=Overheads)
    calibrated_at: str = ""
    """When it was measured, as 2026-01-31 or with a time; "" for a cluster with published and assumed figures."""
    notes: tuple[str, ...] = ()
    """What could not be measured, and what stands in its place."""

    def __post_init__(self) -> None:
        require_positive(self, "nodes", "devices_per_node", "nvlink_bytes_s", "nic_bytes_s")
        require_positive(self, "alpha_s", zero=True)
        check_fields(self, "device", "host", "efficiency", "measured", "overheads", "calibrated_at", "notes")
        for name in ("nodes", "devices_per_node"):
            if not isinstance(getattr(self, name), int):
                raise ConfigError(f"Cluster needs a whole number for {name}; found {getattr(self, name)!r}")
        if self.num_devices > MOST_DEVICES:
            raise ConfigError(f"a cluster has {MOST_DEVICES:,} devices at most; found {shown(self.num_devices)}")
        keys = [(one.operation, one.ranks, one.nodes) for one in self.measured]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if self.calibrated_at:
            try:
                datetime.fromisoformat(self.calibrated_at)
            except ValueError:
                raise ConfigError(
                    f"calibrated_at is a date such as 2026-01-31 or empty; found {self.calibrated_at!r}"
                ) from None
        if twice:
            raise ConfigError(f"operation, ranks and nodes are measured twice: {twice}; keep one table of each")

    @classmethod
    def named(cls, name: str) -> Cluster:
        """A cluster with published figures: "8xA100-80G", "16xH100-80G", "2xH200", "cpu", in any case.

        More than eight devices are whole nodes of eight. Host memory and efficiencies are assumed: `dataclasses.replace` them,
        or read a measured cluster from a file.
        """
        if not isinstance(name, str):
            raise ConfigError(f"a cluster is named by text such as 8xA100-80G; found {shown(name)}")
        match = _NAME.fullmatch(name)
        if match and len(match[1] or "") > MOST_DIGITS:
            raise ConfigError(f"a cluster has {MOST_DEVICES:,} devices at most; found {shown(name)}")
        count, kind = (int(match[1] or 1), match[2]) if match else (1, name)
        product = _product_named(kind)
        if product is None and name.endswith(".toml"):
            raise ConfigError(f"no device is named {name!r}; if it is a file, Cluster.from_toml({name!r}) reads it")
        if product is None:
            known = nearest(kind[:99], [*DEVICES, *ALIASES])
            raise ConfigError(f"no device is named {shown(kind)}; {known} A name is <count>x<device>, as 8xA100-80G")
        if count < 1 or (count > DEVICES_PER_NODE and count % DEVICES_PER_NODE):
            raise ConfigError(
                f"a named cluster has 1 to {DEVICES_PER_NODE} devices or whole nodes of {DEVICES_PER_NODE}; found {count}. "
                "Write other nodes as a file or as Cluster(...)"
            )
        per_node = min(count, DEVICES_PER_NODE)
        return cls(
            count // per_node, per_node, product.device, product.nvlink_bytes_s, product.nic_bytes_s, product.host
        )

    @classmethod
    def of(cls, text: str) -> Cluster:
        """What a person writes for a cluster: FILE.toml (`from_toml`), else a name (`named`)."""
        return cls.from_toml(text) if text.endswith(".toml") else cls.named(text)

    @classmethod
    def detect(cls) -> Cluster:
        """The devices of this machine as one node, with published figures where the device is known. Imports torch.

        Raises `ConfigError` for a GPU that has no published figures here; write it as a file then.
        """
        from flowrl.mesh.detect import detect

        return detect()

    # ------------------------------------------------------------------------------------------------------ devices

    def check_units(self) -> Cluster:
        """The cluster itself. Raises `ConfigError` for figures that must be in another unit: `peak_flops = 165`."""
        for owner, least in LEAST.items():
            holder = self if owner == "cluster" else getattr(self, owner)
            for name, (limit, unit, example) in least.items():
                value = getattr(holder, name)
                if 0 < value < limit:
                    raise ConfigError(f"{owner}.{name} is in {unit}, and {value!r} is too little for that: {example}")
        if self.alpha_s > MOST_ALPHA_S:
            raise ConfigError(
                f"cluster.alpha_s is in seconds, and {self.alpha_s!r} is too much for that: 8 us are 8e-6"
            )
        return self

    @property
    def is_published(self) -> bool:
        """Whether peaks and links are the published ones of a named device; memory may be another one."""
        product = _product_named(self.device.name)
        if product is None:
            return False
        device = replace(product.device, memory_bytes=self.device.memory_bytes)
        host = replace(product.host, memory_bytes=self.host.memory_bytes, nvme_bytes_s=self.host.nvme_bytes_s)
        links = (product.nvlink_bytes_s, product.nic_bytes_s)
        return (device, host, links) == (self.device, self.host, (self.nvlink_bytes_s, self.nic_bytes_s))

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def whole(self) -> Mesh:
        """The mesh of all devices."""
        return Mesh(0, self.num_devices)

    def node_of(self, device: int) -> int:
        """Node of a device. Raises `ConfigError` when the cluster has no such device."""
        if not 0 <= device < self.num_devices:
            raise ConfigError(f"the cluster has devices 0 to {self.num_devices - 1}; found {device}")
        return device // self.devices_per_node

    def slices(self, size: int) -> tuple[Mesh, ...]:
        """The buddy slices of a size, the first device rising."""
        return tuple(slices(size, self.nodes, self.devices_per_node))

    # -------------------------------------------------------------------------------------------------------- links

    @property
    def inside(self) -> Link:
        """Between devices of a node: peak times efficiency."""
        return Link("nvlink", self.nvlink_bytes_s * self.efficiency.nvlink, self.alpha_s)

    @property
    def across(self) -> Link:
        """Between devices of different nodes, for one device: peak times efficiency."""
        return Link("nic", self.nic_bytes_s * self.efficiency.nic, self.alpha_s)

    @property
    def host_link(self) -> Link:
        """Between a device and its host, while all devices of the node copy: peak times efficiency."""
        return Link("pcie", self.host.pcie_per_device_bytes_s * self.efficiency.pcie, self.alpha_s)

    def bus_bytes_s(self, mesh: Mesh) -> float:
        """Bandwidth that a ring over the mesh has at each device, bytes per second.

        `eta_nvl * B_nvl` inside a node; across nodes `min(that, g * B_nic * eta_nic)`, g the devices of the mesh on a node (one
        ring per network card).
        """
        if not mesh.spans_nodes(self.devices_per_node):
            return self.inside.bytes_s
        on_node = min(
            sum(device // self.devices_per_node == node for device in mesh.devices)
            for node in mesh.nodes(self.devices_per_node)
        )
        return min(self.inside.bytes_s, on_node * self.across.bytes_s)

    def measured_s(self, operation: str, ranks: int, nodes: int, size_bytes: float) -> float | None:
        """Measured seconds of an operation, or None where this operation was not measured on as many ranks and nodes."""
        for one in self.measured:
            if (one.operation, one.ranks, one.nodes) == (operation, ranks, nodes):
                return one.time_s(size_bytes)
        return None

    # -------------------------------------------------------------------------------------------------------- files

    @classmethod
    def from_toml(cls, path: str | Path) -> Cluster:
        """Read what `to_toml` writes. Fields with a default may be left out.

        Raises `ConfigError` for a file that is not there or not TOML, an unknown key, a missing one or one of another type.
        """
        found = read_toml(path, "the cluster file")
        try:
            return _cluster_from(found).check_units()
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_toml(self, path: str | Path | None = None) -> str:
        """The cluster as TOML text, written to `path` if given. Reading it back gives an equal cluster."""
        values = asdict(self)
        tables = {key: values.pop(key) for key in ("device", "host", "efficiency", "overheads")}
        measured = values.pop("measured")
        blocks = [_lines(values)]
        blocks += [f"[{key}]\n{_lines(table)}" for key, table in tables.items()]
        blocks += [f"[[measured]]\n{_lines(one)}" for one in measured]
        text = "\n".join(blocks)
        if path is not None:
            write_file(path, text)
        return text

    def with_memory(self, *, device_bytes: int | None = None, host_bytes: int | None = None) -> Cluster:
        """The same cluster with other memory per device or per node."""
        device = self.device if device_bytes is None else replace(self.device, memory_bytes=device_bytes)
        host = self.host if host_bytes is None else replace(self.host, memory_bytes=host_bytes)
        return replace(self, device=device, host=host)


def _product_named(name: str) -> Product | None:
    wanted = name.lower()
    key = next((key for key in (*DEVICES, *ALIASES) if key.lower() == wanted), name)
    return DEVICES.get(ALIASES.get(key, key))


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {_value(value)}\n" for key, value in table.items())


def _value(value: Any) -> str:
    if isinstance(value, str):
        # what JSON-like escapes leave out: TOML forbids raw control characters in a string
        return '"' + "".join(f"\\u{ord(c):04x}" if c in '"\\\x7f' or c < " " else c for c in value) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(one) for one in value) + "]"
    return repr(value)


def _make(kind: type[_Made], table: Any, where: str) -> _Made:
    """A dataclass from a TOML table: unknown and missing keys are errors."""
    if not isinstance(table, dict):
        raise ConfigError(f"'{where}' is a table; found {table!r}")
    check_keys(kind, table, where)
    declared = {one.name: one.type for one in fields(cast(Any, kind))}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    for key, value in given.items():
        if not fits(hints_of(cast(Any, kind))[key], value):
            raise ConfigError(f"'{where}.{key}' is {declared[key]}; found {shown(table[key])}")
    return kind(**given)


def _cluster_from(found: dict[str, Any]) -> Cluster:
    table = dict(found)
    for key, kind in (("device", Device), ("host", Host), ("efficiency", Efficiency), ("overheads", Overheads)):
        if key in table:
            table[key] = _make(cast(type[object], kind), table[key], key)
    measured = table.pop("measured", [])
    if not isinstance(measured, list):
        raise ConfigError("'measured' is a list of tables, each headed [[measured]]")
    cluster = _make(Cluster, table, "cluster")
    return replace(cluster, measured=tuple(_make(Measured, one, f"measured[{i}]") for i, one in enumerate(measured)))
