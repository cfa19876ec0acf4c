"""Pass: parked state gets steps of its own. In every gap between two uses it stays on the devices, or leaves and comes back.

What is chosen is the choice with the least predicted seconds, then the fewest bytes moved: every choice that fits is looked at,
on all meshes together (beyond `MOST_GAPS` gaps one mesh after the other, twice, and gap by gap on a mesh that has more). The
choice in which everything leaves in every gap, one thing after the other, is what the search counted; it is always among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from flowrl.planner.draft import Draft
from flowrl.planner.moving import Moving, Timing
from flowrl.planner.parking import Choice, Parking
from flowrl.planner.simulate import period, schedule
from flowrl.planner.steps import Step
from flowrl.planner.tasks import Task

MOST_GAPS = 10
"""For which every choice is looked at."""

Rated = tuple[tuple[float, float], Choice, Timing]
"""Seconds and bytes moved; of each gap whether the state stays; when copies run."""


def offload(draft: Draft) -> Draft:
    """Steps that move parked state, and what it holds."""
    if not draft.parked:
        return draft
    parking = Parking(draft)
    chooser = Chooser(parking)
    _, choice, timing = chooser.best()
    return chooser.moving.apply(choice, timing)


class Chooser:
    """What each choice takes, and the best one."""

    def __init__(self, parking: Parking) -> None:
        self.parking, self.moving = parking, Moving(parking)
        draft = parking.draft
        self.per_node = draft.problem.cluster.devices_per_node
        self.staleness = draft.problem.schedule.max_staleness
        self.few = _representatives(draft)
        self.base = {step.name: self._task(step) for step in draft.steps}

    def _task(self, step: Step) -> Task:
        task = step.task
        return replace(task, devices=tuple(one for one in task.devices if one in self.few), holds=())

    def best(self) -> Rated:
        """The best choice."""
        parking = self.parking
        goes = (False,) * len(parking.open)
        floor_s = self._seconds({}, [])
        found = self.rated(goes)
        if len(goes) > MOST_GAPS:
            return self._by_mesh(found, floor_s)
        for choice in sorted(self.choices(), key=lambda one: (parking.moved_bytes(one), one)):
            found = min(found, self.rated(choice))
            if found[0][0] <= floor_s and found[1] == choice:
                break  # nothing is faster, and what follows moves more
        return found

    def choices(self) -> list[Choice]:
        """All that fit."""
        return [one for one in product((True, False), repeat=len(self.parking.open)) if self.parking.fits(one)]

    def rated(self, choice: Choice) -> Rated:
        """A choice, with the timing that is fastest."""
        return min((self.cost(choice, timing), choice, timing) for timing in Timing)

    def cost(self, choice: Choice, timing: Timing) -> tuple[float, float]:
        """Seconds, and bytes moved."""
        waits, moves = self.moving.moves(choice, timing)
        return self._seconds(waits, moves), self.parking.moved_bytes(choice)

    def _by_mesh(self, found: Rated, floor_s: float) -> Rated:
        for _ in range(2):
            for group in self._groups():
                for stays in product((True, False), repeat=len(group)):
                    choice = list(found[1])
                    for index, one in zip(group, stays, strict=True):
                        choice[index] = one
                    if self.parking.fits(tuple(choice)):
                        found = min(found, self.rated(tuple(choice)))
                if found[0] <= (floor_s, 0.0):
                    return found
        return found

    def _groups(self) -> list[list[int]]:
        """Gaps that are looked at together, by their places in `Parking.open`."""
        groups: list[list[int]] = []
        for first in self.parking.on:
            states = self.parking.states
            mine = [index for index, gap in enumerate(self.parking.open) if states[gap.parked].mesh.first == first]
            groups += [mine] if len(mine) <= MOST_GAPS else [[one] for one in mine]
        return groups

    def _seconds(self, waits: dict[str, list[str]], moves: Sequence[Step]) -> float:
        tasks = [
            replace(task, after=(*task.after, *waits[name])) if name in waits else task
            for name, task in self.base.items()
        ]
        tasks += [self._task(step) for step in moves]
        if self.staleness:
            return period(tasks, max_staleness=self.staleness, devices_per_node=self.per_node).seconds
        return schedule(tasks, devices_per_node=self.per_node).makespan_s


def _representatives(draft: Draft) -> frozenset[int]:
    """One device for each node of each mesh: the others of it do the same."""
    per_node = draft.problem.cluster.devices_per_node
    return frozenset(
        max(mesh.first, node * per_node) for mesh in draft.candidate.meshes for node in mesh.nodes(per_node)
    )
