"""Memory of devices and hosts over time: what tasks hold while they run, and what stays between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flowrl.errors import ConfigError
from flowrl.mesh import Cluster
from flowrl.planner.network import alike, node_of
from flowrl.planner.tasks import Edge, Hold, Task

if TYPE_CHECKING:
    from flowrl.planner.simulate import Schedule

GIB = 2**30


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
    """Tasks that run on it at that moment, those that hold most first; without those that hold nothing, unless none does."""

    def at(self, moment_s: float) -> int:
        """Bytes from a moment on."""
        return next((level for since_s, level in reversed(self.levels) if since_s <= moment_s), 0)

    def between(self, start_s: float, end_s: float) -> int:
        """The most bytes from a moment on until before another; at the first if they are the same."""
        return max([self.at(start_s), *(level for moment_s, level in self.levels if start_s < moment_s < end_s)])


@dataclass(frozen=True, slots=True)
class Excess:
    """The place whose memory does not suffice. `str` says it in one line."""

    usage: Usage
    capacity_bytes: int

    def __str__(self) -> str:
        usage = self.usage
        shown = [f"{what} {count / GIB:.1f}" for what, count in usage.parts[:3]]
        if len(usage.parts) > 3:
            shown.append(f"{len(usage.parts) - 3} more {sum(count for _, count in usage.parts[3:]) / GIB:.1f}")
        during = f" during {', '.join(usage.during)}" if usage.during else ""
        return (
            f"memory of {usage.place} {usage.index}{during}: {usage.peak_bytes / GIB:.1f} > {self.capacity_bytes / GIB:.1f} GiB "
            f"({', '.join(shown)})"
        )


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of all devices and hosts that the tasks and residents name, over one iteration."""

    devices: dict[int, Usage]
    hosts: dict[int, Usage]

    def excess(self, cluster: Cluster, room_bytes: int | None = None) -> Excess | None:
        """None where everything fits; else the place that is most over (need over capacity), a device before a host.

        `room_bytes`: of each device; left out, all that it has.
        """
        capacity = cluster.device.memory_bytes if room_bytes is None else room_bytes
        found = [Excess(one, capacity) for one in self.devices.values()]
        found += [Excess(one, cluster.host.memory_bytes) for one in self.hosts.values()]
        over = [one for one in found if one.usage.peak_bytes > one.capacity_bytes]
        return max(over, key=lambda one: one.usage.peak_bytes / one.capacity_bytes, default=None)


@dataclass(frozen=True, slots=True)
class _Interval:
    """A hold with its times. Bytes per device, or on one host."""

    what: str
    num_bytes: int
    start_s: float
    end_s: float

    def is_at(self, moment_s: float) -> bool:
        return self.start_s <= moment_s < self.end_s or self.start_s == moment_s == self.end_s


def memory(
    tasks: Sequence[Task],
    found: Schedule,
    *,
    resident: Sequence[Hold] = (),
    devices_per_node: int | None = None,
) -> Memory:
    """Bytes over time: the holds of the tasks, and residents that are there from beginning to end.

    What ends at a moment is gone when what begins there is taken. A hold of no length counts at its moment, unless it begins
    when a task ends: then there is nothing to bridge.

    Raises `ConfigError` for a hold that names no task of the schedule, has no devices, or ends before it begins.
    """
    on_devices: list[tuple[tuple[int, ...], _Interval]] = []
    on_hosts: defaultdict[int, list[_Interval]] = defaultdict(list)
    owned: list[tuple[Task | None, Hold]] = [(task, hold) for task in tasks for hold in task.holds]
    for owner, hold in [*owned, *((None, hold) for hold in resident)]:
        devices = hold.devices or (owner.devices if owner else ())
        if not devices:
            raise ConfigError(f"hold '{hold.what}' has no devices; give it some")
        start_s, end_s = _times(hold, owner, found)
        if start_s == end_s and hold.from_edge is Edge.END:
            hold = replace(
                hold, device_bytes=0, host_bytes=0
            )  # a wait between two tasks that follow each other at once
        on_devices.append((devices, _Interval(hold.what, int(hold.device_bytes), start_s, end_s)))
        if hold.host_bytes:
            nodes = [node_of(device, devices_per_node) for device in devices]
            for node in sorted(set(nodes)):
                share = -(-int(hold.host_bytes) * nodes.count(node) // len(nodes))
                on_hosts[node].append(_Interval(hold.what, share, start_s, end_s))
    of_devices: dict[int, Usage] = {}
    for group in alike([task.devices for task in tasks] + [devices for devices, _ in on_devices]):
        held = [interval for devices, interval in on_devices if interval.num_bytes and group[0] in devices]
        usage = _usage("device", group[0], held, [task for task in tasks if group[0] in task.devices], found)
        of_devices |= {device: replace(usage, index=device) for device in group}
    of_hosts: dict[int, Usage] = {}
    for node in sorted({node_of(device, devices_per_node) for device in of_devices}):
        here = [task for task in tasks if any(node_of(device, devices_per_node) == node for device in task.devices)]
        of_hosts[node] = _usage("host", node, on_hosts[node], here, found)
    return Memory(dict(sorted(of_devices.items())), of_hosts)


def _times(hold: Hold, task: Task | None, found: Schedule) -> tuple[float, float]:
    def at(name: str, edge: Edge, otherwise_s: float) -> float:
        name = name or (task.name if task else "")
        if not name:
            return otherwise_s
        times = found.starts if edge is Edge.START else found.ends
        if name not in times:
            raise ConfigError(f"hold '{hold.what}' names the task '{name}', which is not in the schedule")
        return times[name]

    start_s = at(hold.from_task, hold.from_edge, 0.0)
    end_s = at(hold.until_task, hold.until_edge, found.makespan_s)
    if end_s < start_s:
        raise ConfigError(
            f"hold '{hold.what}' would end at {end_s:.3f} s, before it begins at {start_s:.3f} s; the task until which it is "
            "held has to come after the one from which it is held"
        )
    return start_s, end_s


def _usage(place: str, index: int, held: Sequence[_Interval], tasks: Sequence[Task], found: Schedule) -> Usage:
    changes: defaultdict[float, int] = defaultdict(int)
    for one in held:
        changes[one.start_s] += one.num_bytes
        changes[one.end_s] -= one.num_bytes
    level, levels = 0, [(0.0, 0)]
    for moment_s in sorted(changes):
        level += changes[moment_s]
        if moment_s == levels[-1][0]:
            levels[-1] = (moment_s, level)
        elif level != levels[-1][1]:
            levels.append((moment_s, level))
    at_once: defaultdict[float, int] = defaultdict(int)
    for one in held:
        if one.start_s == one.end_s:
            at_once[one.start_s] += one.num_bytes
    peaks = dict(levels)
    for moment_s, extra in at_once.items():
        peaks[moment_s] = extra + next(level for since_s, level in reversed(levels) if since_s <= moment_s)
    peak_s = min(peaks, key=lambda moment_s: (-peaks[moment_s], moment_s))
    parts: defaultdict[str, int] = defaultdict(int)
    for one in held:
        if one.is_at(peak_s):
            parts[one.what] += one.num_bytes
    running = {
        task.name: sum(hold.device_bytes if place == "device" else hold.host_bytes for hold in task.holds)
        for task in tasks
        if found.starts[task.name] <= peak_s < found.ends[task.name]
    }
    if any(running.values()):  # rows on their way, say, only happen to be so at that time
        running = {name: count for name, count in running.items() if count}
    return Usage(
        place,
        index,
        tuple(levels),
        peaks[peak_s],
        peak_s,
        tuple(sorted(parts.items(), key=lambda part: (-part[1], part[0]))),
        tuple(sorted(running, key=lambda name: (-running[name], name))),
    )
