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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from flowrl.errors import ConfigError
from flowrl.planner.network import Network, alike, network
from flowrl.planner.tasks import Edge, Hold, Lane, StepKind, Task
from flowrl.planner.usage import Excess, Memory, Usage, memory

__all__ = [
    "Busy", "Edge", "Excess", "Hold", "Lane", "Memory", "Period", "Schedule", "StepKind", "Task", "Usage", "lower_bound",
    "memory", "period", "schedule", "unroll",
]  # fmt: skip

TICKS_S = 10**12


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

    Busy time of a device: its compute lane, and every reshard and sync (weights cannot be used while they change); or, where
    that is longer, its longest chain of these and of offloads and onloads, each waiting for the one before it. The latency is
    the makespan of one iteration alone, in `order` (as `schedule` takes it); with `max_staleness` 0 it is the period.
    A model, not a bound: iterations that overlap may also delay each other. `unroll` and `schedule` tell by how much.
    """
    if max_staleness < 0:
        raise ConfigError(f"max_staleness is a whole number of at least 0; found {max_staleness!r}")
    net = network(tasks, devices_per_node)
    ticks = _ticks(tasks)
    _, ends, _ = _run(net, ticks, _urgency(net, ticks)) if order is None else _walk(net, ticks, order)
    latency = max(ends, default=0)
    busy = _busy(net, ticks, tasks)
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


def _busy(net: Network, ticks: Sequence[int], tasks: Sequence[Task]) -> dict[tuple[int, ...], int]:
    """Ticks for which devices can do nothing else, by devices that have the same tasks."""
    by_name = {task.name: task for task in tasks}
    chained = {StepKind.RESHARD, StepKind.SYNC, StepKind.OFFLOAD, StepKind.ONLOAD}
    found = dict.fromkeys(alike(task.devices for task in tasks), 0)
    for devices in found:
        total, paths = 0, dict[int, int]()
        for place in net.order:
            task = by_name[net.names[place]]
            if devices[0] in task.devices and (Lane.COMPUTE in task.lanes or task.kind in chained):
                paths[place] = ticks[place] + max((paths.get(one, 0) for one in net.before[place]), default=0)
                if Lane.COMPUTE in task.lanes or task.kind in (StepKind.RESHARD, StepKind.SYNC):
                    total += ticks[place]
        found[devices] = max([total, *paths.values()])
    return found


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
