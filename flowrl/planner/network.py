"""Tasks as a network: who waits for whom, and which lanes of which devices compete. Durations do not matter here.

[Note: Devices alike]
Devices that occur in the same tasks are one resource: all of them are busy at the same times. A plan on 128 devices so has as
few resources as one on 8.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from flowrl.errors import ConfigError
from flowrl.planner.tasks import Lane, Task
from flowrl.schema.columns import nearest


@dataclass(frozen=True, slots=True)
class Network:
    """Tasks by their place in the order of their names."""

    names: tuple[str, ...]
    before: tuple[tuple[int, ...], ...]
    """Tasks that each one waits for."""
    behind: tuple[tuple[int, ...], ...]
    """Tasks that wait for each one."""
    order: tuple[int, ...]
    """Every task behind those it waits for; else by name."""
    needs: tuple[tuple[int, ...], ...]
    """Resources of each task."""
    resources: tuple[tuple[tuple[int, ...], Lane], ...]
    """Devices alike and a lane; for the host lane, all devices of a node that have tasks on it."""
    users: tuple[tuple[int, ...], ...]
    """Tasks that need each resource."""


def network(tasks: Sequence[Task], devices_per_node: int | None) -> Network:
    """Raises `ConfigError` for two tasks of one name, a predecessor that is not there, a cycle."""
    parts = [(task.name, task.devices, task.lanes, task.after) for task in tasks]
    return _network(tuple(sorted(parts)), devices_per_node)


_Part = tuple[str, tuple[int, ...], tuple[Lane, ...], tuple[str, ...]]


# a search simulates the same tasks with other durations thousands of times
@lru_cache(maxsize=1024)
def _network(parts: tuple[_Part, ...], devices_per_node: int | None) -> Network:
    names = tuple(name for name, *_ in parts)
    places = {name: place for place, name in enumerate(names)}
    if len(places) < len(names):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        raise ConfigError(f"every task has a name of its own; more than once there: {', '.join(twice)}")
    before: list[tuple[int, ...]] = []
    for name, _, _, after in parts:
        missing = [one for one in after if one not in places]
        if missing:
            raise ConfigError(
                f"task '{name}' comes after '{missing[0]}', which is no task; {nearest(missing[0], places)}"
            )
        before.append(tuple(sorted({places[one] for one in after})))
    behind: list[list[int]] = [[] for _ in names]
    for place, earlier in enumerate(before):
        for one in earlier:
            behind[one].append(place)
    needs, resources = _resources(parts, devices_per_node)
    users: list[list[int]] = [[] for _ in resources]
    for place, needed in enumerate(needs):
        for resource in needed:
            users[resource].append(place)
    return Network(
        names,
        tuple(before),
        tuple(map(tuple, behind)),
        _sorted(names, before, behind),
        needs,
        resources,
        tuple(map(tuple, users)),
    )


def _sorted(names: Sequence[str], before: Sequence[tuple[int, ...]], behind: Sequence[list[int]]) -> tuple[int, ...]:
    waiting = [len(earlier) for earlier in before]
    order = [place for place, count in enumerate(waiting) if not count]
    for place in order:  # grows while it is walked
        for later in behind[place]:
            waiting[later] -= 1
            if not waiting[later]:
                order.append(later)
    if len(order) < len(names):
        # walking back from a task that never becomes free ends in a circle
        place = next(place for place, count in enumerate(waiting) if count)
        walked: list[int] = []
        while place not in walked:
            walked.append(place)
            place = next(one for one in before[place] if waiting[one])
        circle = [names[one] for one in reversed(walked[walked.index(place) :])]
        first = circle.index(min(circle))
        circle = circle[first:] + circle[:first]
        raise ConfigError(f"tasks wait for each other in a circle: {' -> '.join([*circle, circle[0]])}")
    return tuple(order)


def alike(groups: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Devices that occur in the same groups, each such set rising; by their first device."""
    member: defaultdict[int, list[int]] = defaultdict(list)
    for index, group in enumerate(dict.fromkeys(groups)):
        for device in group:
            member[device].append(index)
    sets: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for device in sorted(member):
        sets[tuple(member[device])].append(device)
    return tuple(map(tuple, sets.values()))


def _resources(
    parts: Sequence[_Part], devices_per_node: int | None
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[tuple[int, ...], Lane], ...]]:
    """Resources of each task, and all resources."""
    sets = {devices[0]: devices for devices in alike(devices for _, devices, _, _ in parts)}
    on_host: defaultdict[int, set[int]] = defaultdict(set)
    for _, devices, lanes, _ in parts:
        if Lane.HOST in lanes:
            for device in devices:
                on_host[node_of(device, devices_per_node)].add(device)
    wanted: list[set[tuple[tuple[int, ...], Lane]]] = []
    for _, devices, lanes, _ in parts:
        firsts = [sets[device] for device in devices if device in sets]
        mine: set[tuple[tuple[int, ...], Lane]] = set()
        mine |= {(found, lane) for lane in lanes if lane != Lane.HOST for found in firsts}
        if Lane.HOST in lanes:
            nodes = {node_of(device, devices_per_node) for device in devices}
            mine |= {(tuple(sorted(on_host[node])), Lane.HOST) for node in nodes}
        wanted.append(mine)
    resources = tuple(sorted(set().union(*wanted)))
    index = {resource: place for place, resource in enumerate(resources)}
    return tuple(tuple(sorted(index[one] for one in mine)) for mine in wanted), resources


def node_of(device: int, devices_per_node: int | None) -> int:
    return 0 if devices_per_node is None else device // devices_per_node
