"""Seconds that a plan with parked state is not below, whichever gaps its state stays in: quicker than to finish it.

Between two calls on one mesh, what the second one uses and the first one does not is copied in, unless it is there beside the
first one; and what the first one wrote and the second one does not use is copied out, unless it stays beside the second one. What
has no room there is copied while the mesh waits:

    gap(i, j) >= (state of j alone  -  the most of it that fits beside i)  /  host link
    gap(i, j) >= (state that i wrote, of i alone  -  the most of it that fits beside j)  /  host link

    iteration >= the longest path through calls and gaps
    iteration >= calls and gaps of each mesh, with the gap from its last call to its first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from flowrl.mesh import Mesh
from flowrl.planner.holds import Held, State, held, moves_s
from flowrl.planner.options import Option
from flowrl.planner.problem import Candidate, Problem, shape_of, work_of

MOST_STATES = 8
"""Of a call, for which every part of them is looked at."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A call, as far as memory goes."""

    task: int
    node: str
    states: tuple[State, ...]
    """That it uses."""
    left_bytes: float
    """Beside the call and these."""


class Forced:
    """Of one problem, on one part of its cluster."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.work = work_of(problem.roles)
        self.index = {role.name: index for index, role in enumerate(problem.roles)}
        self._held: dict[tuple[str, int, Option], Held] = {}

    def seconds(self, candidate: Candidate) -> float:
        """No plan of a candidate, with its order, takes less."""
        problem, order = self.problem, candidate.order
        split = [[self.index[option.role] for option in one.options] for one in candidate.combinations]
        shape = shape_of(self.work, problem.roles, split)
        seconds = list(candidate.work_s)
        for at, (role, call, _) in enumerate(self.work):
            if call is None:
                seconds[at] = 0.0  # the plan counts what it waits for otherwise
            else:
                mine = problem.roles[role]
                seconds[at] = max(
                    0.0, seconds[at] - moves_s(problem, mine, candidate.option(mine.name), mine.calls[call])
                )
        delays: dict[tuple[int, int], float] = {}
        busy = shape.loads(seconds)
        for at, (mesh, one) in enumerate(zip(candidate.meshes, candidate.combinations, strict=True)):
            slots = self._slots(
                mesh,
                one.options,
                [task for task in order if self.work[task][1] is not None and shape.sets[task] == (at,)],
            )
            around = [*pairwise(slots), (slots[-1], slots[0])] if len(slots) > 1 else []
            for first, second in around:
                wait = self._gap_s(first, second)
                busy[at] += wait
                if second is not slots[0]:
                    delays[first.task, second.task] = wait
        return self._cost(order, shape.before, shape.sets, seconds, delays, busy)

    def _cost(
        self,
        order: Sequence[int],
        before: Sequence[Sequence[int]],
        sets: Sequence[Sequence[int]],
        seconds: Sequence[float],
        delays: dict[tuple[int, int], float],
        busy: Sequence[float],
    ) -> float:
        ends: dict[int, float] = {}
        free: dict[int, float] = {}
        waits: dict[int, list[tuple[int, float]]] = {}
        for (first, second), wait in delays.items():
            waits.setdefault(second, []).append((first, wait))
        for task in order:
            start = max(
                [ends[one] for one in before[task]]
                + [free.get(one, 0.0) for one in sets[task]]
                + [ends[first] + wait for first, wait in waits.get(task, ())],
                default=0.0,
            )
            ends[task] = start + seconds[task]
            free.update(dict.fromkeys(sets[task], ends[task]))
        return max(max(ends.values()) / (self.problem.schedule.max_staleness + 1), *busy)

    # ------------------------------------------------------------------------------------------------------------ gaps

    def _slots(self, mesh: Mesh, options: Sequence[Option], tasks: Sequence[int]) -> list[_Slot]:
        resting = sum(sum(self._of(mesh, option).at_rest.values()) for option in options)
        if any(option.has_context for option in options):
            resting += self.problem.choices.memory.context_bytes
        by_role = {option.role: option for option in options}
        found: list[_Slot] = []
        for task in tasks:
            role, call, _ = self.work[task]
            assert call is not None
            name, own = self.problem.roles[role].name, self.problem.roles[role].calls[call]
            mine = self._of(mesh, by_role[name])
            states = tuple(one for one in mine.states if own.node in one.calls)
            used = sum(mine.during(own.work).values()) + sum(one.device_bytes for one in states)
            found.append(_Slot(task, own.node, states, self.problem.room_bytes - resting - used))
        return found

    def _gap_s(self, first: _Slot, second: _Slot) -> float:
        """Copies in and out have a lane each."""
        coming = [one for one in second.states if one not in first.states]
        leaving = [one for one in first.states if one not in second.states and first.node in one.writers]
        forced = max(_forced_bytes(coming, first.left_bytes), _forced_bytes(leaving, second.left_bytes))
        return forced / self.problem.cluster.host_link.bytes_s

    def _of(self, mesh: Mesh, option: Option) -> Held:
        key = (option.role, mesh.size, option)
        if key not in self._held:
            self._held[key] = held(self.problem, self.problem.roles[self.index[option.role]], mesh, option)
        return self._held[key]


def _forced_bytes(states: Sequence[State], room_bytes: float) -> float:
    """The least that has to be copied of states, when those that fit in a room need not be."""
    if len(states) > MOST_STATES:
        return 0.0
    forced = sum(one.moved_bytes for one in states)
    for count in range(1, len(states) + 1):
        for some in combinations(states, count):
            if sum(one.device_bytes for one in some) <= room_bytes:
                forced = min(forced, sum(one.moved_bytes for one in states if one not in some))
    return forced
