"""What a set of tasks takes: seconds, and memory over time. One simulator decides feasibility and draws the pictures.

schedule     a deterministic list schedule: starts, ends, makespan, critical path
lower_bound  seconds that no schedule of these tasks goes below
period       seconds per iteration where iterations overlap (Async)
memory       bytes on every device and host over time, the peak and what it consists of
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.mesh import Cluster
from flowrl.plan.tasks import Edge, Hold, Lane, StepKind, Task

__all__ = [
    "Busy", "Edge", "Excess", "Hold", "Lane", "Memory", "Period", "Schedule", "StepKind", "Task", "Usage", "lower_bound",
    "memory", "period", "schedule",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Busy:
    """How long one lane is busy on devices that have the same tasks."""

    devices: tuple[int, ...]
    lane: Lane
    seconds: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """When each task runs."""

    starts: dict[str, float]
    """Seconds since the beginning of the iteration, by task, in the order of starting."""
    ends: dict[str, float]
    makespan_s: float
    busy: tuple[Busy, ...]
    """By devices, then lane."""
    critical_path: tuple[str, ...]
    """Tasks that follow each other without a gap from the beginning to the makespan. Each waits for the one before it: for its
    result (it is in `after`), or for a lane that both need."""

    def busy_s(self, device: int, lane: Lane) -> float:
        """Seconds that a lane of a device is busy."""
        raise NotImplementedError


def schedule(
    tasks: Sequence[Task], *, devices_per_node: int | None = None, order: Sequence[str] | None = None
) -> Schedule:
    """List schedule: at every moment start, of the tasks whose predecessors ended, those whose lanes are free.

    Where tasks compete the one with the longest path to the end goes first (seconds of itself and what must follow), then the
    name. No task is interrupted. The same for every order of `tasks`.

    Args:
        devices_per_node: for the host lane; None, all devices stand in one node.
        order: names of all tasks, first come first; replaces the longest path.

    Raises `ConfigError` for two tasks of one name, a predecessor that is not there, a cycle.
    """
    raise NotImplementedError


def lower_bound(tasks: Sequence[Task], *, devices_per_node: int | None = None) -> float:
    """Seconds that no schedule goes below, whatever its order: at least the longest path and the largest load of a lane.

    Never falls when a task takes longer, or is added.
    """
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Period:
    """Steady state of overlapping iterations."""

    seconds: float
    """From one published version of the weights to the next."""
    staleness: int
    """Versions that the oldest rows of an update lag behind: `ceil(latency / period) - 1`."""
    latency_s: float
    """From the first task of an iteration to its last."""
    busy: tuple[tuple[tuple[int, ...], float], ...]
    """Devices, and the seconds per iteration in which they can take nothing else; the longest first."""

    @property
    def is_bound_by_staleness(self) -> bool:
        """Whether the period is longer than the busiest devices need, because rows would be too stale."""
        raise NotImplementedError


def period(tasks: Sequence[Task], *, max_staleness: int, devices_per_node: int | None = None) -> Period:
    """Seconds per iteration where up to `max_staleness + 1` iterations are under way: `tasks` are those of one.

        period = max(busy time of a device, load of a lane, latency / (max_staleness + 1))

    Busy time of a device: its compute lane, and every reshard and sync (weights cannot be used while they change). With
    `max_staleness` 0 it is the makespan.
    """
    raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory of one device, or of the host of one node, over time."""

    place: str
    """`device` or `host`."""
    index: int
    """Of the device, or of the node."""
    levels: tuple[tuple[float, int], ...]
    """(seconds, bytes): from then on it holds this much."""
    peak_bytes: int
    peak_s: float
    """The first moment of the peak."""
    parts: tuple[tuple[str, int], ...]
    """What the peak consists of, the largest first, then by name."""
    during: tuple[str, ...]
    """Tasks that run on it at that moment, by name."""


@dataclass(frozen=True, slots=True)
class Excess:
    """The place whose memory does not suffice. `str` says it in one line."""

    usage: Usage
    capacity_bytes: int

    def __str__(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of all devices and hosts over one iteration."""

    devices: dict[int, Usage]
    hosts: dict[int, Usage]

    def excess(self, cluster: Cluster) -> Excess | None:
        """None where everything fits; else the place that is most over (need over capacity), a device before a host."""
        raise NotImplementedError


def memory(
    tasks: Sequence[Task],
    found: Schedule,
    *,
    resident: Sequence[Hold] = (),
    devices_per_node: int | None = None,
) -> Memory:
    """Bytes over time: the holds of the tasks, and residents that are there from beginning to end.

    What ends at a moment is gone when what begins there is taken. A hold of no length counts at its moment.

    Raises `ConfigError` for a hold that names no task of the schedule, has no devices, or ends before it begins.
    """
    raise NotImplementedError
