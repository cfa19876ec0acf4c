"""Time of communication between ranks: measured where a cluster has measurements, else in closed form."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from flowrl.errors import ConfigError
from flowrl.mesh import Cluster, Mesh

_Sizes = TypeVar("_Sizes", float, np.ndarray)


@dataclass(frozen=True, slots=True)
class Ring:
    """Ranks that communicate with each other.

    Example:
        Ring(Cluster.named("16xA100-80G"), ranks=16, nodes=2)

    Sizes are of the full tensor: what every rank holds after an all-gather or an all-reduce, and before a reduce-scatter.
    One rank communicates with nobody and takes no time; neither do 0 bytes.
    """

    cluster: Cluster
    ranks: int
    nodes: int = 1
    fewest: int = 0
    """Ranks on the node that has least of them; left out, they are evenly spread."""

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks < self.nodes:
            raise ConfigError(
                f"a ring needs a rank on each of its nodes, at least one; found {self.ranks} on {self.nodes}"
            )
        if not self.fewest:
            object.__setattr__(self, "fewest", self.ranks // self.nodes)

    @staticmethod
    def of(cluster: Cluster, mesh: Mesh) -> Ring:
        """All devices of a mesh."""
        per_node = cluster.devices_per_node
        nodes = mesh.nodes(per_node)
        ends = (min(mesh.size, per_node - mesh.first % per_node), (mesh.first + mesh.size - 1) % per_node + 1)
        return Ring(cluster, mesh.size, len(nodes), mesh.size if len(nodes) == 1 else min(ends))

    @staticmethod
    def neighbours(cluster: Cluster, ranks: int) -> Ring:
        """Devices that follow each other, from the first of a node."""
        return Ring.of(cluster, Mesh(0, ranks))

    @staticmethod
    def strided(cluster: Cluster, first: int, ranks: int, step: int) -> Ring:
        """Devices `first`, `first + step`, ...: those with the same place in each of the groups of `step` devices.

        The other `step - 1` such rings work at the same time, each through the network cards of its own devices.
        """
        on_node = Counter((first + index * step) // cluster.devices_per_node for index in range(ranks))
        return Ring(cluster, ranks, len(on_node), min(on_node.values()))

    @property
    def bus_bytes_s(self) -> float:
        """Bytes per second of each rank: `eta_nvl·B_nvl`; over nodes no more than `g·B_nic·eta_nic`, g ranks per node (one ring
        through each network card)."""
        inside = self.cluster.inside.bytes_s
        if self.nodes == 1:
            return inside
        return min(inside, self.fewest * self.cluster.across.bytes_s)

    def all_gather_s(self, size_bytes: float) -> float:
        """`(n-1)/n · size/B + alpha·(1 + (n-1)/4)`."""
        return self._time("all_gather", size_bytes, self._gather(size_bytes))

    def reduce_scatter_s(self, size_bytes: float) -> float:
        """As an all-gather."""
        return self._time("reduce_scatter", size_bytes, self._gather(size_bytes))

    def all_reduce_s(self, size_bytes: float) -> float:
        """`2·(n-1)/n · size/B + 2·alpha`: the bytes of a reduce-scatter and an all-gather.

        The small messages of a decode step use one-shot and tree algorithms, so the start does not grow with n.
        """
        return self._time("all_reduce", size_bytes, self._reduce(size_bytes))

    def all_reduces_s(self, sizes_bytes: np.ndarray) -> np.ndarray:
        """Seconds of an all-reduce of each of several sizes."""
        if self.cluster.measured:
            return np.array([self.all_reduce_s(float(size)) for size in sizes_bytes])
        if self.ranks == 1:
            return np.zeros(len(sizes_bytes))
        return np.where(sizes_bytes > 0, self._reduce(sizes_bytes), 0.0)

    def broadcast_s(self, size_bytes: float) -> float:
        """`size/B + alpha·n`: pipelined along the ranks, so the bytes pass once."""
        return self._time("broadcast", size_bytes, size_bytes / self.bus_bytes_s + self.cluster.alpha_s * self.ranks)

    def all_to_all_s(self, local_bytes: float) -> float:
        """`(n-1)/n · local/B + alpha`, `local` what one rank holds before. Over nodes each rank has its own network card only.

        What goes to ranks of other nodes goes through the card, beside the rest.
        """
        ranks, inside = self.ranks, self.cluster.inside.bytes_s
        seconds = (self.fewest - 1) / ranks * local_bytes / inside
        if self.nodes > 1:
            seconds = max(seconds, (ranks - self.fewest) / ranks * local_bytes / self.cluster.across.bytes_s)
        return self._time("all_to_all", local_bytes, seconds + self.cluster.alpha_s)

    @property
    def _part(self) -> float:
        return (self.ranks - 1) / self.ranks

    def _gather(self, size_bytes: float) -> float:
        return self._part * size_bytes / self.bus_bytes_s + self.cluster.alpha_s * (1 + (self.ranks - 1) / 4)

    def _reduce(self, size_bytes: _Sizes) -> _Sizes:
        return 2 * self._part * size_bytes / self.bus_bytes_s + 2 * self.cluster.alpha_s

    def _time(self, operation: str, size_bytes: float, closed_s: float) -> float:
        if self.ranks == 1 or size_bytes <= 0:
            return 0.0
        measured = self.cluster.measured_s(operation, self.ranks, self.nodes, size_bytes)
        return closed_s if measured is None else measured
