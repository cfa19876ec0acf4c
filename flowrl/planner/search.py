"""The best placement of a flow's roles on a cluster.

    fastest     the least seconds of all placements and options              (flowrl.planner.tree, flowrl.planner.fill)
    simplest    of what is not slower by more than `Problem.tie`             (flowrl.planner.ties)
    others      the fastest of other kinds, and why they lost                (flowrl.planner.others)

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
    space: Space = field(init=False)
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        self.space = Space(self.problem)
        self.budget = Budget(self.problem.effort.branches)

    def run(self) -> Found:
        self._fastest()
        self._simplest()
        problem, effort = self.problem, self.problem.effort
        beside = Others()
        if self.best is not None and self.fastest is not None:
            beside = others_of(self.space, self.best, self.fastest, effort)
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

    def _fastest(self) -> None:
        space, effort = self.space, self.problem.effort
        if num_splits(len(space.roles)) > effort.branches:
            self.is_exhaustive, self.bound_s = False, space.free_bound_s()
        else:
            tree: Tree | None = None
            try:
                self._greedy()
                tree = Tree(space, space.splits, self.budget, lambda _: self._limit())
                for leaf in tree.leaves():
                    self._look(leaf)
            except Spent:
                self.is_exhaustive, self.bound_s = False, space.free_bound_s() if tree is None else tree.open_s
            self.pruned += 0 if tree is None else tree.pruned
        if not self.is_exhaustive:
            self.fastest = anneal(space, self.fastest, effort)
        self.bound_s = min(self.bound_s, self._fastest_s())

    def _greedy(self) -> None:
        """A first plan, so that bounds have something to be compared with: all roles on all devices."""
        together = (tuple(range(len(self.space.roles))),)
        if self.problem.allows(together):
            size = self.problem.asked_size(together[0]) or self.space.sizes[-1]
            self._look(Leaf(together, (size,), 0.0))

    def _look(self, leaf: Leaf) -> None:
        fill = self._fill(leaf, self.budget)
        if fill is None or fill.bound_s >= self._limit():
            self.unfit += fill is None or fill.bound_s == INFINITE
            return
        self.placements += 1
        try:
            fill.fastest(self._limit())
        finally:
            self.fastest = fill.best or self.fastest
            self.simulated += fill.simulated
            self.unfit += not fill.fits

    def _fill(self, leaf: Leaf, budget: Budget) -> Fill | None:
        meshes = self.space.meshes(leaf.sizes)
        return None if meshes is None else Fill(self.space, leaf.split, meshes, budget)

    # -------------------------------------------------------------------------------------------------------- simplest

    def _simplest(self) -> None:
        """Of the plans that tie with the fastest, the simplest. Ranks of numerics and numbers of meshes rise, so that the first
        class with a plan has it."""
        self.best = self.fastest
        if self.fastest is None or num_splits(len(self.space.roles)) > self.problem.effort.branches:
            return
        budget = Budget(self.problem.effort.branches)
        limit_s = self.fastest.seconds * max(SAME, 1 + self.problem.tie)
        for numerics in range(self.fastest.numerics + 1):
            for count in range(1, len(self.space.roles) + 1):
                rank = simplicity(self.problem, self.fastest)
                if rank[:2] < (numerics, count):
                    return
                below: Simplicity | None = rank if rank[:2] == (numerics, count) else None
                found = self._simplest_of(count, limit_s, numerics, below, budget)
                if found is not None:
                    self.best = found
                    return
                if below is not None:
                    return

    def _simplest_of(
        self, count: int, limit_s: float, numerics: int, below: Simplicity | None, budget: Budget
    ) -> Candidate | None:
        best: Candidate | None = None
        splits = [split for split in self.space.splits if len(split) == count]
        tree = Tree(self.space, splits, budget, lambda _: limit_s * SAME)
        try:
            for leaf in tree.leaves():
                fill = self._fill(leaf, budget)
                found = None if fill is None else fill.simplest(limit_s, numerics, below)
                if found is not None:
                    best, below = found, simplicity(self.problem, found)
        except Spent:
            self.is_exhaustive = False
        return best
