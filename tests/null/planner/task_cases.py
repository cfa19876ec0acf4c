"""Small sets of tasks for the tests of the simulator, and slow ways to compute the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

from hypothesis import strategies as st

from flowrl.planner.simulate import Edge, Hold, Lane, Schedule, StepKind, Task

DEVICES_PER_NODE = 2
GROUPS = ((0,), (1,), (0, 1), (2, 3), (0, 1, 2, 3), (1, 3), ())
SECONDS = st.one_of(st.integers(0, 5).map(float), st.sampled_from([0.1, 0.2, 0.3, 1e-6, 0.7]))


def compute(
    name: str, seconds: float, *after: str, devices: Sequence[int] = (0,), holds: tuple[Hold, ...] = ()
) -> Task:
    return Task(name, StepKind.COMPUTE, tuple(devices), (Lane.COMPUTE,), seconds, after, holds=holds)


def move(name: str, lane: Lane, seconds: float, *after: str, devices: Sequence[int] = (0,)) -> Task:
    return Task(name, StepKind.TRANSFER, tuple(devices), (lane,), seconds, after)


@st.composite
def task_sets(draw: Any, most: int = 7) -> tuple[Task, ...]:
    names = draw(st.permutations("abcdefghij"[: draw(st.integers(1, most))]))
    made: list[Task] = []
    for index, name in enumerate(names):
        after = draw(st.lists(st.sampled_from(names[:index]), max_size=2, unique=True)) if index else []
        lanes = draw(st.lists(st.sampled_from([*list(Lane)[:3], Lane.HOST]), min_size=1, max_size=2, unique=True))
        devices = draw(st.sampled_from(GROUPS))
        kind = draw(st.sampled_from(StepKind))
        made.append(Task(name, kind, devices, tuple(lanes), draw(SECONDS), tuple(after)))
    return tuple(draw(st.permutations(made)))


def resources(task: Task) -> set[tuple[object, Lane]]:
    """What a task occupies, device by device."""
    return {(d // DEVICES_PER_NODE if lane is Lane.HOST else d, lane) for d in task.devices for lane in task.lanes}


def optimum(tasks: Sequence[Task]) -> float:
    """The shortest makespan of all: every order, each task as early as what is already placed allows."""
    best = float("inf")
    for order in permutations(tasks):
        ends: dict[str, float] = {}
        placed: list[tuple[float, float, set[tuple[object, Lane]]]] = []
        for task in order:
            if not all(name in ends for name in task.after):
                break
            needs = resources(task)
            start = max((ends[name] for name in task.after), default=0.0)
            # the last end first: no hole is filled, another order does that
            start = max([start, *(end for _, end, taken in placed if taken & needs)])
            ends[task.name] = start + task.seconds
            placed.append((start, ends[task.name], needs))
        else:
            best = min(best, max(ends.values(), default=0.0))
    return best


def held(holds: Sequence[tuple[Task | None, Hold]], found: Schedule, device: int, moment: float) -> int:
    """Bytes on a device at a moment, hold by hold."""
    total = 0
    for task, hold in holds:
        own = task.name if task else ""
        first, last = hold.from_task or own, hold.until_task or own
        begin = 0.0 if not first else (found.starts if hold.from_edge is Edge.START else found.ends)[first]
        end = found.makespan_s if not last else (found.starts if hold.until_edge is Edge.START else found.ends)[last]
        if device in (hold.devices or (task.devices if task else ())) and (
            begin <= moment < end or (begin == moment == end and hold.from_edge is Edge.START)
        ):
            total += int(hold.device_bytes)
    return total
