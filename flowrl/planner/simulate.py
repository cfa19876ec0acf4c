"""What a set of tasks takes: seconds, and memory over time. One simulator decides feasibility and draws the pictures.

    schedule     a deterministic list schedule: starts, ends, makespan, critical path
    lower_bound  seconds that no schedule of these tasks goes below
    period       seconds per iteration where iterations overlap (Async)
    unroll       the tasks of several iterations that overlap
    memory       bytes on every device and host over time, the peak and what it consists of

[Note: Ticks]
Durations are rounded to picoseconds and added as whole numbers. So sums do not depend on their order, moments that should be
the same are the same, and the bound never exceeds a makespan by a rounding error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from flowrl.errors import ConfigError
from flowrl.mesh import Cluster
from flowrl.planner.network import Network, alike, network, node_of
from flowrl.planner.tasks import Edge, Hold, Lane, StepKind, Task

__all__ = [
    "Busy", "Edge", "Excess", "Hold", "Lane", "Memory", "Period", "Schedule", "StepKind", "Task", "Usage", "lower_bound",
    "memory", "period", "schedule", "unroll",
]  # fmt: skip

TICKS_S = 10**12
GIB = 2**30


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
        return next((one.seconds for one in self.busy if one.lane is lane and device in one.devices), 0.0)


def schedule(
    tasks: Sequence[Task], *, devices_per_node: int | None = None, order: Sequence[str] | None = None
) -> Schedule:
    """List schedule: at every moment start, of the tasks whose predecessors ended, those whose lanes are free.

    Where tasks compete the one with the longest path to the end goes first (seconds of itself and what must follow), then the
    name. No task is interrupted. The same for every order of `tasks`.

    Args:
        devices_per_node: for the host lane; None, all devices stand in one node.
        order: names of all tasks. Then each starts as soon as its predecessors have ended, and the earlier ones on each of its
            lanes: how a plan is run, where every device walks its own steps. The order in which a schedule starts its tasks
            gives the same schedule.

    Raises `ConfigError` for two tasks of one name, a predecessor that is not there, a cycle, an order that has a task before
    what it waits for.
    """
    net = network(tasks, devices_per_node)
    ticks = _ticks(tasks)
    if order is None:
        starts, ends, started = _run(net, ticks, _urgency(net, ticks))
    else:
        starts, ends, started = _walk(net, ticks, order)
    makespan = max(ends, default=0)
    return Schedule(
        {net.names[place]: starts[place] / TICKS_S for place in started},
        {net.names[place]: ends[place] / TICKS_S for place in started},
        makespan / TICKS_S,
        tuple(
            Busy(devices, lane, sum(ticks[place] for place in users) / TICKS_S)
            for (devices, lane), users in zip(net.resources, net.users, strict=True)
        ),
        tuple(net.names[place] for place in _critical(net, starts, ends, started)),
    )


def _ticks(tasks: Sequence[Task]) -> list[int]:
    """Durations by the order of names."""
    return [round(seconds * TICKS_S) for _, seconds in sorted((task.name, task.seconds) for task in tasks)]


def _urgency(net: Network, ticks: Sequence[int]) -> list[int]:
    """Tasks, the one with the longest path to the end first, then by name."""
    paths = _paths(ticks, net.order[::-1], net.behind)
    return sorted(range(len(ticks)), key=lambda place: (-paths[place] - ticks[place], place))


def _paths(ticks: Sequence[int], order: Iterable[int], nexts: Sequence[tuple[int, ...]]) -> list[int]:
    """The longest way from each task to an end, itself not counted; `order` has the `nexts` of a task before it."""
    paths = [0] * len(ticks)
    for place in order:
        paths[place] = max((paths[one] + ticks[one] for one in nexts[place]), default=0)
    return paths


def _run(net: Network, ticks: Sequence[int], ranks: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Starts and ends by task, and the tasks in the order of starting. `ranks`: tasks, the most urgent first."""
    rank = [0] * len(ticks)
    for index, place in enumerate(ranks):
        rank[place] = index
    waiting = [len(earlier) for earlier in net.before]
    ready = [rank[place] for place, count in enumerate(waiting) if not count]
    ready.sort()
    starts, ends = [0] * len(ticks), [0] * len(ticks)
    is_taken = [False] * len(net.resources)
    started: list[int] = []
    running: list[tuple[int, int]] = []
    now = 0
    while ready or running:
        at = 0
        while at < len(ready):
            place = ranks[ready[at]]
            needs = net.needs[place]
            if any(is_taken[need] for need in needs):
                at += 1
                continue
            starts[place], ends[place] = now, now + ticks[place]
            started.append(place)
            heappush(running, (ends[place], ready.pop(at)))
            for need in needs:
                is_taken[need] = True
            if not ticks[place]:
                break  # it ends at once, and what waits for it may be more urgent than the rest
        now = running[0][0]
        while running and running[0][0] == now:
            place = ranks[heappop(running)[1]]
            for need in net.needs[place]:
                is_taken[need] = False
            for later in net.behind[place]:
                waiting[later] -= 1
                if not waiting[later]:
                    ready.append(rank[later])
        ready.sort()
    return starts, ends, started


def _walk(net: Network, ticks: Sequence[int], order: Sequence[str]) -> tuple[list[int], list[int], list[int]]:
    """As `_run`, in a given order."""
    if sorted(order) != list(net.names):
        raise ConfigError(f"an order names each of the {len(ticks)} tasks once; found {', '.join(order)}")
    places = {name: place for place, name in enumerate(net.names)}
    starts, ends, free = [0] * len(ticks), [0] * len(ticks), [0] * len(net.resources)
    done: set[int] = set()
    for place in map(places.__getitem__, order):
        early = [net.names[one] for one in net.before[place] if one not in done]
        if early:
            raise ConfigError(f"the order has '{net.names[place]}' before '{early[0]}', which it waits for")
        done.add(place)
        starts[place] = max([0, *(ends[one] for one in net.before[place]), *(free[need] for need in net.needs[place])])
        ends[place] = starts[place] + ticks[place]
        for need in net.needs[place]:
            free[need] = ends[place]
    turn = {name: index for index, name in enumerate(order)}
    return starts, ends, sorted(done, key=lambda place: (starts[place], turn[net.names[place]]))


def _critical(net: Network, starts: Sequence[int], ends: Sequence[int], started: Sequence[int]) -> list[int]:
    """A chain without gaps from the beginning to the makespan. Of several tasks that one may have waited for: one whose result
    it needs, the longest, the first by name."""
    if not started:
        return []
    turn = {place: index for index, place in enumerate(started)}
    chain = [min(started, key=lambda place: (-ends[place], starts[place], place))]
    while starts[chain[-1]]:
        last = chain[-1]
        rivals = {one for need in net.needs[last] for one in net.users[need]}
        waited = [
            one
            for one in rivals.union(net.before[last])
            if ends[one] == starts[last] and turn[one] < turn[last]
        ]  # fmt: skip
        chain.append(min(waited, key=lambda one: (one not in net.before[last], starts[one], one)))
    return chain[::-1]


# ------------------------------------------------------------------------------------------------------------ bounds


def lower_bound(tasks: Sequence[Task], *, devices_per_node: int | None = None) -> float:
    """Seconds that no schedule goes below, whatever its order: at least the longest path and the largest load of a lane.

    For each lane, its tasks alone: none starts before its predecessors could have ended, at the earliest, each is followed by
    its longest path, and any may be interrupted. The longest remaining path first is then best (Jackson's preemptive
    schedule), and its end bounds every schedule from below.

    Never falls when a task takes longer, or is added.
    """
    net = network(tasks, devices_per_node)
    ticks = _ticks(tasks)
    heads = _paths(ticks, net.order, net.before)
    tails = _paths(ticks, net.order[::-1], net.behind)
    best = max((heads[place] + ticks[place] + tails[place] for place in range(len(ticks))), default=0)
    for users in set(net.users):
        if len(users) > 1:
            best = max(best, _preemptive([(heads[place], ticks[place], tails[place]) for place in users]))
    return best / TICKS_S


def _preemptive(jobs: list[tuple[int, int, int]]) -> int:
    """End of Jackson's preemptive schedule of (head, duration, tail) on one machine, tails included."""
    jobs.sort()
    waiting: list[tuple[int, int]] = []
    now = best = at = 0
    while at < len(jobs) or waiting:
        if not waiting:
            now = max(now, jobs[at][0])
        while at < len(jobs) and jobs[at][0] <= now:
            heappush(waiting, (-jobs[at][2], jobs[at][1]))
            at += 1
        tail, left = heappop(waiting)
        until = min(now + left, jobs[at][0]) if at < len(jobs) else now + left
        if until - now < left:
            heappush(waiting, (tail, left - (until - now)))
        else:
            best = max(best, until - tail)
        now = until
    return best


@dataclass(frozen=True, slots=True)
class Period:
    """Steady state of overlapping iterations."""

    seconds: float
    """From one published version of the weights to the next."""
    staleness: int
    """Versions that the oldest rows of an update lag behind: `ceil(latency / period) - 1`."""
    latency_s: float
    """Makespan of one iteration alone."""
    busy: tuple[tuple[tuple[int, ...], float], ...]
    """Devices, and the seconds per iteration in which they can do nothing else; the longest first."""
    is_bound_by_staleness: bool
    """Whether the period is longer than the busiest devices need, because rows would be too stale."""


def period(
    tasks: Sequence[Task],
    *,
    max_staleness: int,
    devices_per_node: int | None = None,
    order: Sequence[str] | None = None,
) -> Period:
    """Seconds per iteration where up to `max_staleness + 1` iterations are under way: `tasks` are those of one.

        period = min(latency, max(busy time of a device, load of a lane, latency / (max_staleness + 1)))

    Busy time of a device: its compute lane, and every reshard and sync (weights cannot be used while they change). The latency
    is the makespan of one iteration alone, in `order` (as `schedule` takes it); with `max_staleness` 0 it is the period.
    A model, not a bound: iterations that overlap may also delay each other. `unroll` and `schedule` tell by how much.
    """
    if max_staleness < 0:
        raise ConfigError(f"max_staleness is a whole number of at least 0; found {max_staleness!r}")
    net = network(tasks, devices_per_node)
    ticks = _ticks(tasks)
    _, ends, _ = _run(net, ticks, _urgency(net, ticks)) if order is None else _walk(net, ticks, order)
    latency = max(ends, default=0)
    busy = dict.fromkeys(alike(task.devices for task in tasks), 0)
    for task in tasks:
        if Lane.COMPUTE in task.lanes or task.kind in (StepKind.RESHARD, StepKind.SYNC):
            mine = set(task.devices)
            for devices in busy:
                if devices[0] in mine:
                    busy[devices] += round(task.seconds * TICKS_S)
    loads = [sum(ticks[place] for place in users) for users in net.users]
    needed = min(latency, max([0, *busy.values(), *loads]))
    seconds = max(needed, -(-latency // (max_staleness + 1)))
    return Period(
        seconds / TICKS_S,
        max(0, -(-latency // seconds) - 1) if seconds else 0,
        latency / TICKS_S,
        tuple((devices, load / TICKS_S) for devices, load in sorted(busy.items(), key=lambda one: (-one[1], one[0]))),
        seconds > needed,
    )


def unroll(tasks: Sequence[Task], iterations: int, *, max_staleness: int) -> tuple[Task, ...]:
    """The tasks of several iterations that overlap; those of iteration i are named "name#i".

    An iteration begins when the one `max_staleness + 1` before it is complete. A task waits for itself in the iteration before.
    """
    if iterations < 1 or max_staleness < 0:
        raise ConfigError(
            f"unroll needs at least 1 iteration and a staleness of at least 0; found {iterations}, {max_staleness}"
        )
    inner = {name for task in tasks for name in task.after}
    last = [task.name for task in tasks if task.name not in inner]
    made: list[Task] = []
    for index in range(iterations):
        for task in tasks:
            after = [f"{name}#{index}" for name in task.after]
            if index:
                after.append(f"{task.name}#{index - 1}")
            if not task.after and index > max_staleness:
                after += [f"{name}#{index - max_staleness - 1}" for name in last]
            holds = tuple(
                replace(
                    hold,
                    from_task=hold.from_task and f"{hold.from_task}#{index}",
                    until_task=hold.until_task and f"{hold.until_task}#{index}",
                )
                for hold in task.holds
            )
            made.append(replace(task, name=f"{task.name}#{index}", after=tuple(dict.fromkeys(after)), holds=holds))
    return tuple(made)


# ------------------------------------------------------------------------------------------------------------ memory


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

    def between(self, start_s: float, end_s: float) -> int:
        """The most bytes from a moment on until before another; at the first if they are the same."""
        inside = [level for moment_s, level in self.levels if start_s < moment_s < end_s]
        return max([next((level for moment_s, level in reversed(self.levels) if moment_s <= start_s), 0), *inside])


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

    def excess(self, cluster: Cluster) -> Excess | None:
        """None where everything fits; else the place that is most over (need over capacity), a device before a host."""
        found = [Excess(one, cluster.device.memory_bytes) for one in self.devices.values()]
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

    What ends at a moment is gone when what begins there is taken. A hold of no length counts at its moment.

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
    running = [task.name for task in tasks if found.starts[task.name] <= peak_s < found.ends[task.name]]
    return Usage(
        place,
        index,
        tuple(levels),
        peaks[peak_s],
        peak_s,
        tuple(sorted(parts.items(), key=lambda part: (-part[1], part[0]))),
        tuple(sorted(running)),
    )
