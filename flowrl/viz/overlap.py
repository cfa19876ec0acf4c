"""Iterations of an asynchronous plan beside each other: when each step runs, and what devices hold meanwhile.

[Note: On one mesh iterations follow each other]
A plan says what one iteration does. Several of them together are simulated as `unroll` has them (an iteration begins when the
one `max_staleness + 1` before it is complete), and on top of that as `period` counts them. A mesh ends what it does by itself for
one iteration, and what it sends to others, before it computes or moves anything for the next: state of both at once may not fit.
New weights come between two computations, as nobody can compute with weights that change. So iterations overlap between meshes
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flowrl.planner.figures import overlap_line
from flowrl.planner.problem import LEAST_CHANGE
from flowrl.planner.simulate import Memory, Schedule, memory, schedule, unroll
from flowrl.planner.steps import Plan, Step
from flowrl.planner.tasks import Edge, Hold, Lane, StepKind, Task

EXTRA = 4
"""Iterations that are shown beyond those that overlap at the beginning."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Several iterations, simulated together. A step of iteration i is named "name#i"."""

    plan: Plan
    iterations: int
    """Those that are shown. More are simulated: the last ones have nothing behind them that waits for their end."""
    tasks: tuple[Task, ...]
    schedule: Schedule

    @property
    def steady(self) -> int:
        """An iteration before which others are under way, as in the middle of a run."""
        return min(self.plan.max_staleness + 1, self.iterations - 1)

    @property
    def ends_s(self) -> tuple[float, ...]:
        """When each shown iteration is complete."""
        names = [step.name for step in self.plan.steps]
        return tuple(
            max((self.schedule.ends[f"{name}#{index}"] for name in names), default=0.0)
            for index in range(self.iterations)
        )

    def memory(self, kept: Callable[[Hold], Hold] = lambda hold: hold) -> Memory:
        """What devices and hosts hold. `kept` may change holds, but not their names and times."""
        tasks = [replace(task, holds=tuple(map(kept, task.holds))) for task in self.tasks]
        resident = tuple(map(kept, self._resident()))
        return memory(tasks, self.schedule, resident=resident, devices_per_node=self.plan.cluster.devices_per_node)

    def held_bytes(self) -> dict[str, int]:
        """For each step the most that one of its devices holds while it runs, for all iterations, in the middle of a run."""
        devices = self.memory().devices
        found = {}
        for step in self.plan.steps:
            name = f"{step.name}#{self.steady}"
            start_s, end_s = self.schedule.starts[name], self.schedule.ends[name]
            found[step.name] = max((devices[device].between(start_s, end_s) for device in step.devices), default=0)
        return found

    def _resident(self) -> list[Hold]:
        """What stays between steps, for each iteration. What one leaves to the next is there until that one holds it itself."""
        found: list[Hold] = []
        simulated = len(self.tasks) // len(self.plan.steps) if self.plan.steps else 0
        for hold in self.plan.predicted.resident:
            if not hold.from_task and not hold.until_task:
                found.append(hold)
                continue
            for index in range(simulated):
                begins = f"{hold.from_task}#{index}" if hold.from_task else ""
                begins_edge = hold.from_edge
                if not begins and index:  # from the beginning of an iteration: of its own, which follows the one before
                    begins, begins_edge = self._first(index, hold.devices), Edge.START
                until, until_edge = f"{hold.until_task}#{index}", hold.until_edge
                if not hold.until_task:
                    until, until_edge = self._next(hold, begins), Edge.START
                found.append(
                    replace(hold, from_task=begins, from_edge=begins_edge, until_task=until, until_edge=until_edge)
                )
        return found

    def _first(self, iteration: int, devices: tuple[int, ...]) -> str:
        """The first task of an iteration on devices."""
        mine = [task for task in self.tasks if task.name.endswith(f"#{iteration}") and set(task.devices) & set(devices)]
        return min(mine, key=lambda task: self.schedule.starts[task.name]).name

    def _next(self, hold: Hold, begins: str) -> str:
        """The first task behind `begins` that holds the same by itself; empty where none does: it stays to the end."""
        since_s = (
            self.schedule.ends[begins]
            if begins and hold.from_edge is Edge.END
            else self.schedule.starts.get(begins, 0.0)
        )
        later = [
            task
            for task in self.tasks
            if self.schedule.starts[task.name] >= since_s
            and task.name != begins
            and set(task.devices) & set(hold.devices)
            and any(one.what == hold.what for one in task.holds)
        ]
        return min(later, key=lambda task: (self.schedule.starts[task.name], task.name)).name if later else ""


def spoken(name: str) -> str:
    """ "rollout#2" as "rollout of iteration 2"; other names as they are."""
    step, mark, index = name.rpartition("#")
    return f"{step} of iteration {index}" if mark and index.isdecimal() else name


def why_apart(plan: Plan) -> str:
    """Of an asynchronous plan whose iterations follow each other: that they do, and why. Empty where they overlap."""
    if not plan.max_staleness:
        return ""
    outlook = plan.predicted
    is_alone = outlook.seconds >= outlook.latency_s * (1 - LEAST_CHANGE)
    return overlap_line(plan) or (
        "no iteration begins before the one before it is complete: sync would take about as long" if is_alone else ""
    )


def overlap(plan: Plan, iterations: int | None = None) -> Overlap:
    """Simulate iterations that overlap as far as the plan allows."""
    count = iterations or plan.max_staleness + 1 + EXTRA
    tasks = _in_turn(plan, unroll(plan.tasks, count + plan.max_staleness + 1, max_staleness=plan.max_staleness))
    return Overlap(plan, count, tasks, schedule(tasks, devices_per_node=plan.cluster.devices_per_node))


def _in_turn(plan: Plan, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """See [Note: On one mesh iterations follow each other]."""
    moved = [step for step in plan.steps if step.source is None and set(step.lanes) != {Lane.HOST}]
    own = {step.name: _before_next(step, plan.steps) for step in moved}
    made = []
    for task in tasks:
        name, _, index = task.name.rpartition("#")
        earlier = [f"{one}#{int(index) - 1}" for one in own.get(name, ())] if index != "0" else []
        lanes = task.lanes
        if task.kind in (StepKind.RESHARD, StepKind.SYNC):
            lanes = tuple(dict.fromkeys((*lanes, Lane.COMPUTE)))
        made.append(replace(task, lanes=lanes, after=tuple(dict.fromkeys((*task.after, *earlier)))))
    return tuple(made)


def _before_next(step: Step, steps: Sequence[Step]) -> tuple[str, ...]:
    """What must have ended of an iteration before a computation runs for the next: all that its devices do by
    themselves, and send."""
    mine = set(step.devices)
    return tuple(
        one.name
        for one in steps
        if set(one.lanes) != {Lane.HOST} and mine.issuperset(one.devices if one.source is None else one.source.devices)
    )
