"""What the simulator runs: tasks on devices, what they wait for, and the memory they hold.

A task needs all of its resources for its whole duration. A resource is a lane of a device; the host lane is one per node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from flowrl.errors import ConfigError

ASSUMED = ("seconds", "assumed")
"""Setting of a step whose seconds come from an assumed rate."""


class StepKind(StrEnum):
    """What a step of a plan does. The runtime knows these, never roles."""

    COMPUTE = "compute"
    TRANSFER = "transfer"
    """Rows move to another mesh."""
    RESHARD = "reshard"
    """Weights change their layout."""
    OFFLOAD = "offload"
    ONLOAD = "onload"
    SYNC = "sync"
    """A wait that all devices of the step share."""


class Lane(StrEnum):
    """What of a device a task keeps busy. Tasks on different lanes of a device run at the same time."""

    COMPUTE = "compute"
    NVLINK = "nvlink"
    H2D = "h2d"
    D2H = "d2h"
    NIC = "nic"
    HOST = "host"
    """The CPUs of the node that the device stands in: one resource per node."""


class Edge(StrEnum):
    """The start or the end of a task."""

    START = "start"
    END = "end"


@dataclass(frozen=True, slots=True)
class Hold:
    """Memory taken at one phase boundary and given back at another.

    Example:
        Hold("cache", device_bytes=10 * 2**30)                                # while the task runs that lists it
        Hold("engine weights", device_bytes=4e9, until_task="train", until_edge=Edge.START)
        Hold("parked optimizer", host_bytes=96e9, devices=tuple(range(8)))    # as a resident: all the time

    Bytes are rounded up to whole ones, so that sums do not depend on their order.
    """

    what: str
    device_bytes: int | float = 0
    """On each of its devices."""
    host_bytes: int | float = 0
    """On the hosts of its devices together; each node has the part of its devices."""
    from_task: str = ""
    """Empty: the task that lists the hold; for a resident, the beginning."""
    from_edge: Edge = Edge.START
    until_task: str = ""
    """Empty: the task that lists the hold; for a resident, the end of the iteration."""
    until_edge: Edge = Edge.END
    devices: tuple[int, ...] = ()
    """Empty: those of the task that lists the hold. A resident names its devices."""

    def __post_init__(self) -> None:
        for name in ("device_bytes", "host_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"Hold '{self.what}' needs {name} of at least 0; found {value!r}")
            object.__setattr__(self, name, math.ceil(value))


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work of an iteration.

    Example:
        Task("update.train", StepKind.COMPUTE, devices=tuple(range(8)), lanes=(Lane.COMPUTE,), seconds=97.1,
             after=("reference",), node="update", holds=(Hold("activations", device_bytes=3.5 * 2**30),))
    """

    name: str
    """Unlike that of any other task."""
    kind: StepKind
    devices: tuple[int, ...]
    """Rising. Without any, the task occupies nothing."""
    lanes: tuple[Lane, ...]
    """Kept busy on every device of the task; the first is the one shown."""
    seconds: float
    after: tuple[str, ...] = ()
    """Tasks that end before this one starts."""
    node: str = ""
    """Graph node or role that it is part of."""
    holds: tuple[Hold, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise ConfigError(f"task '{self.name}' needs seconds of at least 0; found {self.seconds!r}")
