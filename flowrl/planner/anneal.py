"""A seeded random search over placements, for problems with more branches than can be looked at."""

from __future__ import annotations

import math
import random
from contextlib import suppress

from flowrl.planner.fill import Budget, Fill, Spent
from flowrl.planner.problem import INFINITE, Candidate, Effort
from flowrl.planner.space import Space, Split

Spot = tuple[tuple[int, int], ...]
"""Of each role: the number of its set, and the devices of that set."""

HOT, COLD = 0.1, 0.001
"""By which part a plan may be slower and still be taken, one time in e, at the beginning and at the end. Assumed."""
FILL_BRANCHES = 2_000
"""Choices of options that are looked at for one placement. Assumed."""


def anneal(space: Space, start: Candidate | None, effort: Effort) -> Candidate | None:
    """The fastest plan that `effort.moves` random moves find, and never one slower than `start`.

    A move puts a role elsewhere, gives a set another size, or changes the sizes of two. The options of each placement are chosen
    by branch and bound. The same seed gives the same plan.
    """
    return _Annealing(space, start, effort).run()


class _Annealing:
    def __init__(self, space: Space, start: Candidate | None, effort: Effort) -> None:
        self.space, self.effort = space, effort
        self.best = start
        self.random = random.Random(effort.seed)
        self.seen: dict[tuple[Split, tuple[int, ...]], float] = {}

    def run(self) -> Candidate | None:
        sets, sizes = self._start()
        now_s = self._seconds(sets, sizes)
        for step in range(self.effort.moves):
            heat = HOT * (COLD / HOT) ** (step / max(1, self.effort.moves - 1))
            new_sets, new_sizes = self._moved(sets, sizes)
            found_s = self._seconds(new_sets, new_sizes)
            if found_s <= now_s or self.random.random() < math.exp(-(found_s / now_s - 1) / heat):
                sets, sizes, now_s = new_sets, new_sizes, found_s
        return self.best

    def _start(self) -> tuple[list[list[int]], list[int]]:
        """The best plan so far; without one, all roles on all devices."""
        if self.best is None:
            return [list(range(len(self.space.roles)))], [self.space.sizes[-1]]
        index = self.space.index
        sets = [[index[option.role] for option in one.options] for one in self.best.combinations]
        return sets, [mesh.size for mesh in self.best.meshes]

    def _moved(self, sets: list[list[int]], sizes: list[int]) -> tuple[list[list[int]], list[int]]:
        pick, every = self.random, self.space.sizes
        sets, sizes = [list(mine) for mine in sets], list(sizes)
        what = pick.randrange(3)
        if what == 0:
            role = pick.randrange(len(self.space.roles))
            source = next(at for at, mine in enumerate(sets) if role in mine)
            target = pick.randrange(len(sets) + 1)
            if target == len(sets):  # a set of its own, on half of the devices
                sets.append([])
                half = max(one for one in every if one <= max(1, sizes[source] // 2))
                sizes[source] = half
                sizes.append(half)
            sets[source].remove(role)
            sets[target].append(role)
        elif what == 1 or len(sets) == 1:
            at = pick.randrange(len(sets))
            sizes[at] = self._neighbour(sizes[at])
        else:
            one, other = pick.sample(range(len(sets)), 2)
            sizes[one], sizes[other] = self._neighbour(sizes[one], 1), self._neighbour(sizes[other], -1)
        kept = [at for at, mine in enumerate(sets) if mine]
        sets, sizes = [sorted(sets[at]) for at in kept], [sizes[at] for at in kept]
        order = sorted(range(len(sets)), key=lambda at: sets[at])
        return [sets[at] for at in order], [sizes[at] for at in order]

    def _neighbour(self, size: int, way: int = 0) -> int:
        every = self.space.sizes
        at = every.index(size) + (way or self.random.choice((-1, 1))) * self.random.choice((1, 1, 2, 4))
        return every[min(max(at, 0), len(every) - 1)]

    def _seconds(self, sets: list[list[int]], sizes: list[int]) -> float:
        """Of the best plan of a placement; infinite where nothing fits or is allowed."""
        split = tuple(map(tuple, sets))
        key = (split, tuple(sizes))
        if key not in self.seen:
            self.seen[key] = self._plan_s(split, tuple(sizes))
        return self.seen[key]

    def _plan_s(self, split: Split, sizes: tuple[int, ...]) -> float:
        problem = self.space.problem
        asked = [problem.asked_size(mine) for mine in split]
        sizes = tuple(size if one is None else one for size, one in zip(sizes, asked, strict=True))
        meshes = self.space.meshes(sizes) if problem.allows(split) else None
        if meshes is None:
            return INFINITE
        fill = Fill(self.space, split, meshes, Budget(FILL_BRANCHES))
        with suppress(Spent):
            fill.fastest(INFINITE)
        if fill.best is None:
            return INFINITE
        if self.best is None or fill.best.seconds < self.best.seconds:
            self.best = fill.best
        return fill.best.seconds
