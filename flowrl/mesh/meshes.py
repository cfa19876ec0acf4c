"""Meshes: neighbouring devices of a cluster with named axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from flowrl.errors import ConfigError
from flowrl.mesh.layout import MOST_DEVICES, Layout


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices `first` to `first + size - 1` of a cluster, counted node by node.

    Example:
        Mesh(first=8, size=8, axes=(("dp", 4), ("tp", 2)))
    """

    first: int
    size: int
    axes: tuple[tuple[str, int], ...] = ()
    """Name and size of each axis, the slowest first; without any, the mesh is one axis "devices"."""

    def __post_init__(self) -> None:
        if self.first < 0 or self.size < 1:
            raise ConfigError(f"a mesh starts at device 0 or later and has a device; found {self.first}, {self.size}")
        if self.first + self.size > MOST_DEVICES:
            raise ConfigError(f"a mesh lies in the first {MOST_DEVICES:,} devices; found {self.first}, {self.size}")
        axes = tuple((str(name), int(size)) for name, size in dict(self.axes).items()) or (("devices", self.size),)
        if len(axes) != len(self.axes or axes):
            raise ConfigError(f"the axes of a mesh need different names; found {[name for name, _ in self.axes]}")
        if min(size for _, size in axes) < 1 or math.prod(size for _, size in axes) != self.size:
            raise ConfigError(f"the axes of a mesh multiply to its {self.size} devices; found {dict(axes)}")
        object.__setattr__(self, "axes", axes)

    @classmethod
    def of(cls, first: int, layout: Layout) -> Mesh:
        """The mesh that a layout covers from a device on."""
        sizes = {"dp": layout.dp, "pp": layout.pp, "fsdp": layout.fsdp, "tp": layout.tp}
        if layout.tp_order == "div":
            sizes = {"tp": sizes.pop("tp"), **sizes}
        return cls(first, layout.size, tuple((name, size) for name, size in sizes.items() if size > 1))

    @property
    def devices(self) -> range:
        return range(self.first, self.first + self.size)

    def coordinate(self, device: int) -> dict[str, int]:
        """Where a device stands along each axis. Raises `ConfigError` for a device of another mesh."""
        if device not in self.devices:
            raise ConfigError(f"{self} does not have device {device}")
        rest, found = device - self.first, {}
        for name, size in reversed(self.axes):
            rest, found[name] = divmod(rest, size)
        return {name: found[name] for name, _ in self.axes}

    def overlaps(self, other: Mesh) -> bool:
        """Whether the two share a device."""
        return self.first < other.first + other.size and other.first < self.first + self.size

    def nodes(self, devices_per_node: int) -> range:
        """The nodes that the mesh touches."""
        return range(self.first // devices_per_node, (self.first + self.size - 1) // devices_per_node + 1)

    def spans_nodes(self, devices_per_node: int) -> bool:
        """Whether its devices are on more than one node."""
        return len(self.nodes(devices_per_node)) > 1

    def is_aligned(self, devices_per_node: int) -> bool:
        """Whether this is a slice: inside a node, a power of two that starts at a multiple of itself, or the whole node; beyond
        a node, whole nodes. Of a node that has no power of two of devices, any neighbours inside it."""
        if self.size % devices_per_node == 0:
            return self.first % devices_per_node == 0
        inside = self.first % devices_per_node
        is_buddy = inside % self.size == 0 or not is_power_of_two(devices_per_node)
        return is_part(self.size, devices_per_node) and is_buddy and inside + self.size <= devices_per_node

    def __str__(self) -> str:
        last = self.first + self.size - 1
        return f"mesh of device {last}" if self.size == 1 else f"mesh of devices {self.first} to {last}"


def is_power_of_two(number: int) -> bool:
    """1, 2, 4, 8 ..."""
    return number > 0 and number & (number - 1) == 0


def is_part(size: int, devices_per_node: int) -> bool:
    """Whether a slice inside a node can have a size: a power of two; in a node of 3, 5, 6, 7, 12 ... devices every size, else
    more devices could be worse than fewer."""
    return 0 < size < devices_per_node and (is_power_of_two(size) or not is_power_of_two(devices_per_node))


def slices(size: int, nodes: int, devices_per_node: int) -> Iterator[Mesh]:
    """Every slice of a size, the first device rising; none when no slice has that size."""
    # by steps, not device by device: a cluster has thousands
    if size > 0 and size % devices_per_node == 0:
        for first in range(0, nodes * devices_per_node - size + 1, devices_per_node):
            yield Mesh(first, size)
    elif is_part(size, devices_per_node):
        step = size if is_power_of_two(devices_per_node) else 1
        for node in range(nodes):
            for inside in range(0, devices_per_node - size + 1, step):
                yield Mesh(node * devices_per_node + inside, size)
