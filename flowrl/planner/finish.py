"""The fastest finished plan: among placements whose copies of parked state the search counts in full, and a plan may hide.

The search ranks by seconds in which each call waits for its copies. Here placements are taken by what they take at least, and
finished one by one, as long as they may be faster than the best finished plan.

    for every placement that is faster without copies than the best plan
        for its options that are faster with the copies that nothing hides     (flowrl.planner.forced), the fastest first
            finish them, in the order that is best with copies and in the one that is best without

Of one placement no more is finished once `MOST_IN_VAIN` plans were not faster: they mostly differ in what is not in the way. All
together are counted in `Effort.finished`. What is found need not be the best; the bound of the plan says how much there may be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from flowrl.planner.fill import SAME, Budget, Fill, Least, Spent, Walk
from flowrl.planner.forced import Forced
from flowrl.planner.free import Free, free_spaces
from flowrl.planner.options import Option
from flowrl.planner.problem import INFINITE, LEAST_CHANGE, Candidate, Problem, num_splits
from flowrl.planner.space import Space
from flowrl.planner.ties import burden
from flowrl.planner.tree import Tree

BRANCHES = 20_000
"""Partial placements and choices of options that are looked at."""
MOST_IN_VAIN = 4
"""Plans of one placement, one after the other."""
MOST_LIGHTER = 2
"""Plans for each role that are finished to see whether it need not be parked."""

Finish = Callable[[Candidate], float]
"""Seconds of the plan of a candidate."""


def finished(
    problem: Problem, known_s: float, beside_s: float, finish: Finish, spaces: Sequence[Free] | None = None
) -> Candidate | None:
    """The placement with the fastest finished plan, if it is clearly faster than one that is known.

    Args:
        known_s: seconds of the best finished plan that is known.
        beside_s: what plans take at least beyond the work of models: operators, rows on their way.
        finish: gives seconds of a finished plan.
        spaces: `free_spaces(problem)`, where they are there already.
    """
    looked = _Looked(problem, known_s, beside_s, finish)
    try:
        for space in free_spaces(problem) if spaces is None else spaces:
            looked.look(space)
    except Spent:
        pass
    return looked.lighter()


class _Looked:
    """What was looked at, and the best of it."""

    def __init__(self, problem: Problem, known_s: float, beside_s: float, finish: Finish) -> None:
        self.problem, self.known_s, self.beside_s, self.finish = problem, known_s, beside_s, finish
        self.left = Budget(problem.effort.finished)
        self.forced: Forced
        self.best: Candidate | None = None

    @property
    def limit_s(self) -> float:
        """Seconds without copies that a placement has to be below."""
        return self.known_s * (1 - LEAST_CHANGE) - self.beside_s

    def look(self, space: Free) -> None:
        """All placements of one part of the cluster that may be faster."""
        if space.free_bound_s() >= self.limit_s or num_splits(len(space.roles)) > BRANCHES:
            return
        budget, real = Budget(BRANCHES), Space(space.problem, self.problem)
        self.forced = Forced(space.problem)
        tree = Tree(space, space.splits, budget, lambda _: self.limit_s)
        for leaf in tree.leaves():
            meshes = space.meshes(leaf.sizes)
            if meshes is not None:
                _Finishing(self, Fill(space, leaf.split, meshes, budget), real).run()

    def take(self, candidate: Candidate) -> bool:
        """Finish it; whether it is the best."""
        self.left.spend()
        seconds = self.finish(candidate)
        if seconds >= self.known_s * (1 - LEAST_CHANGE):
            return False
        self.best, self.known_s = candidate, seconds
        return True

    def lighter(self) -> Candidate | None:
        """The best one. Where state need not be parked after all, it is not."""
        if self.best is None:
            return None
        self.left = Budget(MOST_LIGHTER * len(self.problem.roles))
        problem = self.problem.on(self.best)
        space = Space(problem, self.problem)
        fill = Fill(space, space.split_of(self.best), self.best.meshes, Budget(BRANCHES))
        chosen = {space.index[o.role]: o for one in self.best.combinations for o in one.options}
        try:
            for role, mine in sorted(chosen.items()):
                every = space.every_option(role, self.best.meshes[fill.set_of[role]].size)
                less = [one for one in every if burden(one) < burden(mine) and _unmoved(one) == _unmoved(mine)]
                for option in sorted(less, key=burden):
                    one = _candidate(fill, {**chosen, role: option})
                    if one is not None and self._is_as_fast(one):
                        chosen[role] = option
                        break
        except Spent:
            pass
        return self.best

    def _is_as_fast(self, candidate: Candidate) -> bool:
        self.left.spend()
        seconds = self.finish(candidate)
        if seconds > self.known_s * SAME:
            return False
        self.best, self.known_s = candidate, min(seconds, self.known_s)
        return True


class _Finishing(Walk):
    """Options of one placement, the fastest without copies first."""

    def __init__(self, looked: _Looked, fill: Fill, real: Space) -> None:
        viable = {} if fill.bound_s >= looked.limit_s else fill.viable(looked.limit_s)
        super().__init__(
            fill, {role: tuple(sorted(mine, key=_quick_first)) for role, mine in viable.items()}, looked.limit_s
        )
        self.looked, self.real = looked, real
        self.found: list[tuple[float, int, Candidate]] = []
        """Seconds that they are not below, their numbers, and what may be faster."""
        self._filled: Fill | None = None

    def run(self) -> None:
        """Finish what may be faster."""
        if self.viable:
            self.down(0)
        in_vain = 0
        for least_s, _, candidate in sorted(self.found, key=lambda one: one[:2]):
            if least_s >= self.looked.limit_s or in_vain >= MOST_IN_VAIN:
                return
            in_vain = 0 if self.looked.take(candidate) else in_vain + 1

    def is_pruned(self, bound_s: float, rest: Least) -> bool:
        return bound_s >= self.looked.limit_s

    def complete(self) -> None:
        fill, space = self.fill, self.fill.space
        free = fill.candidate(self.chosen, list(self.seconds), self.looked.limit_s)
        if free is None:
            return
        assert isinstance(space, Free)
        self._filled = self._filled or Fill(self.real, fill.split, fill.meshes, fill.budget)
        mine = _candidate(self._filled, {role: space.real(option) for role, option in self.chosen.items()})
        if mine is None:
            return
        for one in (mine,) if mine.order == free.order else (mine, replace(mine, order=free.order)):
            least_s = self.looked.forced.seconds(one)
            if least_s < self.looked.limit_s:
                self.found.append((least_s, len(self.found), one))


def _candidate(fill: Fill, chosen: dict[int, Option]) -> Candidate | None:
    """The plan of a choice as the search has it: each call with its copies."""
    seconds = [0.0] * len(fill.space.work)
    for role, option in chosen.items():
        for index, call in fill.calls[role]:
            seconds[index] = option.seconds[call]
    return fill.candidate(chosen, seconds, INFINITE)


def _quick_first(option: Option) -> tuple[float, ...]:
    return (sum(option.seconds), option.host_bytes, *option.seconds)


def _unmoved(option: Option) -> tuple[object, ...]:
    """What an option is besides what is moved of it."""
    return (option.layout, tuple(one for one in option.settings if one[0] not in ("offload", "park_weights")))
