"""The best placement of a flow's roles on a cluster.

    fastest     the least seconds of all placements and options              (flowrl.planner.tree, flowrl.planner.fill)
    simplest    of what is not slower by more than `Problem.tie`             (flowrl.planner.ties)
    others      the fastest of other kinds, and why they lost                (flowrl.planner.others)

Plans for fewer devices of each node are looked at too, where these have slices of their own (`flowrl.planner.problem.parts`): so
more devices are never worse than fewer.

Of each placement only likely options are looked at first (`flowrl.planner.options.likely`), and all of them once a limit is known
from all placements.

All of it is exhaustive, with bounds that no completion of a branch can go below, so that what is found is the best of all plans
under the model. Where the branches are too many (`Effort.branches`), the rest of them is left to a seeded random search
(`flowrl.planner.anneal`); the bound then is that of the branches that were not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flowrl.planner.anneal import anneal
from flowrl.planner.fill import SAME, Budget, Fill, Spent
from flowrl.planner.others import Others, others_of
from flowrl.planner.problem import INFINITE, Candidate, Found, Problem, num_splits
from flowrl.planner.space import Space
from flowrl.planner.ties import Simplicity, simplicity, why_simpler
from flowrl.planner.tree import Leaf, Tree


def search(problem: Problem) -> Found:
    """The best plan of a problem. The same for every order of its roles; two calls give equal answers."""
    return _Search(problem).run()


@dataclass
class _Search:
    problem: Problem
    fastest: Candidate | None = None
    best: Candidate | None = None
    bound_s: float = INFINITE
    placements: int = 0
    simulated: int = 0
    pruned: int = 0
    unfit: int = 0
    is_exhaustive: bool = True
    spaces: tuple[Space, ...] = field(init=False)
    """Of the whole cluster, then of its parts."""
    budget: Budget = field(init=False)
    later: list[tuple[float, int, Space, Leaf]] = field(default_factory=list)
    """Placements of which only few options were looked at: the least that they take, and their numbers."""

    def __post_init__(self) -> None:
        self.spaces = tuple(Space(part, self.problem) for part in self.problem.parts)
        self.budget = Budget(self.problem.effort.branches)

    def run(self) -> Found:
        on_all: Candidate | None = None
        for space in self.spaces:
            self._fastest(space)
            on_all = on_all or (self.fastest if space is self.spaces[0] else None)
        self._rest()
        self.bound_s = min(self.bound_s, self._fastest_s())
        self._simplest()
        problem, effort = self.problem, self.problem.effort
        beside = Others()
        if self.best is not None and self.fastest is not None:
            beside = others_of(self._home(self.best), self.best, self.fastest, effort, on_all)
        return Found(
            problem,
            self.best,
            self.fastest,
            beside.candidates,
            beside.refused,
            self.bound_s,
            self.placements,
            self.simulated,
            self.pruned,
            self.unfit,
            self.is_exhaustive,
            why_simpler(problem, self.best, self.fastest) if self.best and self.fastest else "",
        )

    # --------------------------------------------------------------------------------------------------------- fastest

    def _limit(self) -> float:
        """What a plan has to be below to be faster, by more than the order of a sum can make it."""
        return self._fastest_s() / SAME

    def _fastest_s(self) -> float:
        return INFINITE if self.fastest is None else self.fastest.seconds

    def _fastest(self, space: Space) -> None:
        """Of one part of the cluster, what is faster than all before."""
        effort, is_whole = self.problem.effort, space is self.spaces[0]
        is_seen, bound_s = True, INFINITE
        if not is_whole and space.free_bound_s() >= self._limit():
            self.pruned += 1
        elif num_splits(len(space.roles)) > effort.branches:
            is_seen, bound_s = False, space.free_bound_s()
        else:
            tree: Tree | None = None
            try:
                self._greedy(space)
                tree = Tree(space, space.splits, self.budget, lambda _: self._limit())
                for leaf in tree.leaves():
                    self._look(space, leaf)
            except Spent:
                is_seen, bound_s = False, space.free_bound_s() if tree is None else tree.open_s
            self.pruned += 0 if tree is None else tree.pruned
        if not is_seen:
            self._search_at_random()
        self.bound_s = min(self.bound_s, bound_s)

    def _greedy(self, space: Space) -> None:
        """A first plan, so that bounds have something to be compared with: all roles on all devices."""
        together = (tuple(range(len(space.roles))),)
        if space.problem.allows(together):
            size = space.problem.asked_size(together[0]) or space.sizes[-1]
            self._look(space, Leaf(together, (size,), 0.0))

    def _look(self, space: Space, leaf: Leaf) -> None:
        fill = self._fill(space, leaf, self.budget)
        if fill is None or fill.bound_s >= self._limit():
            self.unfit += fill is None or fill.bound_s == INFINITE
            return
        self.placements += 1
        is_whole = False
        try:
            is_whole = not fill.soon(self._limit())
        finally:
            self.fastest = fill.best or self.fastest
            self.simulated += fill.simulated
            if is_whole:
                self.unfit += not fill.fits
            else:
                self.later.append((fill.bound_s, len(self.later), space, leaf))

    def _rest(self) -> None:
        """All options of the placements of which only few were looked at, where a plan may still be faster."""
        for at, (bound_s, _, space, leaf) in enumerate(ranked := sorted(self.later, key=lambda one: one[:2])):
            if bound_s >= self._limit():
                self.pruned += len(ranked) - at
                return
            fill = self._fill(space, leaf, self.budget)
            assert fill is not None
            try:
                fill.fastest(self._limit())
            except Spent:
                self.bound_s = min(self.bound_s, bound_s)
                self.fastest = fill.best or self.fastest
                self._search_at_random()
                return
            self.fastest = fill.best or self.fastest
            self.simulated += fill.simulated
            self.unfit += not fill.fits

    def _search_at_random(self) -> None:
        """In place of what is left, once."""
        if self.is_exhaustive:
            self.is_exhaustive = False
            self.fastest = anneal(self._home(self.fastest), self.fastest, self.problem.effort)

    def _home(self, candidate: Candidate | None) -> Space:
        """Where a plan stands; without one, the whole cluster."""
        per_node = self.problem.cluster.devices_per_node if candidate is None else candidate.per_node
        return next(space for space in self.spaces if space.cluster.devices_per_node == per_node)

    def _fill(self, space: Space, leaf: Leaf, budget: Budget) -> Fill | None:
        meshes = space.meshes(leaf.sizes)
        return None if meshes is None else Fill(space, leaf.split, meshes, budget)

    # -------------------------------------------------------------------------------------------------------- simplest

    def _simplest(self) -> None:
        """Of the plans that tie with the fastest, the simplest. Ranks of numerics, idle devices and numbers of meshes rise, so
        that the first class with a plan has it."""
        self.best = self.fastest
        if self.fastest is None or num_splits(len(self.problem.roles)) > self.problem.effort.branches:
            return
        budget = Budget(self.problem.effort.branches)
        limit_s = self.fastest.seconds * max(SAME, 1 + self.problem.tie)
        rank = simplicity(self.problem, self.fastest)
        for numerics in range(self.fastest.numerics + 1):
            for space in self.spaces:
                if space.free_bound_s() >= limit_s * SAME:
                    continue
                for count in range(1, len(space.roles) + 1):
                    mine = (numerics, space.idle, count)
                    if rank[:3] < mine:
                        return
                    below: Simplicity | None = rank if rank[:3] == mine else None
                    found = self._simplest_of(space, count, limit_s, numerics, below, budget)
                    if found is not None:
                        self.best = found
                        return
                    if below is not None:
                        return

    def _simplest_of(
        self, space: Space, count: int, limit_s: float, numerics: int, below: Simplicity | None, budget: Budget
    ) -> Candidate | None:
        best: Candidate | None = None
        splits = [split for split in space.splits if len(split) == count]
        tree = Tree(space, splits, budget, lambda _: limit_s * SAME)
        try:
            for leaf in tree.leaves():
                fill = self._fill(space, leaf, budget)
                found = None if fill is None else fill.simplest(limit_s, numerics, below)
                if found is not None:
                    best, below = found, simplicity(self.problem, found)
        except Spent:
            self.is_exhaustive = False
        return best
