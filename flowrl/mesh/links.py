"""Links between devices, and times measured on them."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from flowrl.errors import ConfigError
from flowrl.mesh.devices import require_positive
from flowrl.mesh.layout import MOST_DEVICES
from flowrl.schema.columns import nearest
from flowrl.schema.fields import check_fields

MOST_BYTES_S = 1e14
"""Of a link: more than a hundred times what the fastest one has. What is above was written in another unit."""
MOST_S = 86_400.0
"""Of one message."""
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "p2p", "to_host", "to_device")


@dataclass(frozen=True, slots=True)
class Link:
    """What one device sends to another with.

    Example:
        Link("nvlink", bytes_s=240e9, latency_s=8e-6)     # 80 % of the published 300e9
    """

    name: str
    bytes_s: float
    """One direction, per device, as reached (peak times efficiency)."""
    latency_s: float

    def __post_init__(self) -> None:
        require_positive(self, "bytes_s")
        require_positive(self, "latency_s", zero=True)

    def time_s(self, size_bytes: float) -> float:
        """Seconds for one message: `latency_s + size_bytes / bytes_s`; nothing takes no time."""
        return self.latency_s + size_bytes / self.bytes_s if size_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one operation at several sizes, as measured.

    Tables of collectives go before the closed forms (`Cluster.measured_s`). Those of `p2p`, `to_host` and `to_device` are kept
    for people: handovers and copies are counted with the rates of the cluster and its host. A calibration takes that of the host
    from the largest size of the slower way.

    Example:
        Measured("all_gather", ranks=2, nodes=1, sizes_bytes=(1e6, 1e9), times_s=(3e-5, 2.1e-3))
    """

    operation: str
    """`all_gather`, `reduce_scatter`, `all_reduce`, `broadcast`, `all_to_all`, `p2p`, `to_host`, `to_device`."""
    ranks: int
    nodes: int
    sizes_bytes: tuple[float, ...]
    """Rising. Counted as the formulas count: the full tensor for collectives."""
    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        if self.operation not in OPERATIONS:
            raise ConfigError(f"Measured has no operation '{self.operation}'; {nearest(self.operation, OPERATIONS)}")
        if self.ranks < 1 or self.nodes < 1:
            raise ConfigError(
                f"Measured '{self.operation}' needs ranks and nodes of at least 1; found {self.ranks}, {self.nodes}"
            )
        if not self.nodes <= self.ranks <= MOST_DEVICES:
            raise ConfigError(
                f"Measured '{self.operation}' needs ranks from {self.nodes}, one on each of its nodes, to {MOST_DEVICES:,}; "
                f"found {self.ranks}"
            )
        if not self.sizes_bytes or len(self.sizes_bytes) != len(self.times_s):
            raise ConfigError(
                f"Measured '{self.operation}' needs one time for each size and at least one; found "
                f"{len(self.sizes_bytes)} sizes and {len(self.times_s)} times"
            )
        if any(not a < b for a, b in pairwise(self.sizes_bytes)) or not self.sizes_bytes[0] > 0:
            raise ConfigError(f"Measured '{self.operation}' needs rising sizes above 0; found {self.sizes_bytes}")
        if not all(math.isfinite(time) and time > 0 for time in self.times_s):
            raise ConfigError(f"Measured '{self.operation}' needs times above 0; found {self.times_s}")
        for size, time in zip(self.sizes_bytes, self.times_s, strict=True):
            if size > MOST_BYTES_S * time or time > MOST_S:
                raise ConfigError(
                    f"Measured '{self.operation}' has {size:g} bytes in {time:g} s, and no machine takes that: sizes are bytes, "
                    f"times seconds, up to {MOST_BYTES_S:g} bytes/s and {MOST_S:g} s"
                )

    def time_s(self, size_bytes: float) -> float:
        """Seconds at a size. Between points: straight in log(size) and log(time). Below the first: its time. Above the last:
        its rate."""
        sizes, times = self.sizes_bytes, self.times_s
        if size_bytes <= 0:
            return 0.0
        if size_bytes <= sizes[0]:
            return times[0]
        if size_bytes >= sizes[-1]:
            return times[-1] * size_bytes / sizes[-1]
        right = bisect_left(sizes, size_bytes)
        left = right - 1
        part = math.log(size_bytes / sizes[left]) / math.log(sizes[right] / sizes[left])
        return float(times[left] * (times[right] / times[left]) ** part)
