"""The shortest time of a few tasks that compete for sets of devices: exact, for the search.

A list schedule can become longer when a task becomes shorter (Graham 1969), so it can neither bound nor compare plans safely.
Here every order is tried where the list schedule does not reach the lower bound; with the dozen calls of a step this is quick.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Shape:
    """What waits for what, and which sets each task occupies; seconds come later.

    Example:
        Shape(sets=((0,), (1,), (0, 1)), before=((), (0,), (1,)), num_sets=2)
    """

    sets: tuple[tuple[int, ...], ...]
    """Of each task: the sets of devices it needs, all of them for all of its time."""
    before: tuple[tuple[int, ...], ...]
    """Of each task: tasks of lower index that end before it starts."""
    num_sets: int
    members: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    """Of each set: its tasks."""

    def __post_init__(self) -> None:
        members = (tuple(t for t, sets in enumerate(self.sets) if one in sets) for one in range(self.num_sets))
        object.__setattr__(self, "members", tuple(members))

    def loads(self, seconds: Sequence[float]) -> list[float]:
        """Seconds for which each set is occupied."""
        found = [0.0] * self.num_sets
        for sets, time in zip(self.sets, seconds, strict=True):
            for one in sets:
                found[one] += time
        return found

    def tails(self, seconds: Sequence[float]) -> list[float]:
        """Of each task: its seconds and those of the longest chain behind it."""
        found = list(seconds)
        for task in range(len(found) - 1, -1, -1):
            behind = found[task]
            for earlier in self.before[task]:
                # comparisons instead of `max`: a search comes here a million times
                if seconds[earlier] + behind > found[earlier]:
                    found[earlier] = seconds[earlier] + behind
        return found

    def bound_s(self, seconds: Sequence[float]) -> float:
        """No order takes less: the longest chain, or the most occupied set between what must come before and after.

        Never falls when a task takes longer.
        """
        tails, heads = self.tails(seconds), self._heads(seconds)
        found = max(tails, default=0.0)
        for mine in self.members:
            if mine:
                load, first, last = 0.0, math.inf, math.inf
                for task in mine:
                    time = seconds[task]
                    load += time
                    if heads[task] < first:
                        first = heads[task]
                    if tails[task] - time < last:
                        last = tails[task] - time
                if first + load + last > found:
                    found = first + load + last
        return found

    def _heads(self, seconds: Sequence[float]) -> list[float]:
        """Of each task: the longest chain before it."""
        found = [0.0] * len(self.before)
        for task, earlier in enumerate(self.before):
            head = 0.0
            for one in earlier:
                if found[one] + seconds[one] > head:
                    head = found[one] + seconds[one]
            found[task] = head
        return found

    def shortest(self, seconds: Sequence[float], limit_s: float = math.inf) -> tuple[float, tuple[int, ...]]:
        """Makespan and order of an optimal schedule; of some schedule, of `limit_s` or more, when none is below `limit_s`.

        In the order every task starts as soon as the tasks before it, and earlier ones of its sets, have ended.
        """
        tails = self.tails(seconds)
        order = self._listed(seconds, tails)
        makespan = self.replay(seconds, order)
        bound = self.bound_s(seconds)
        if makespan <= bound * (1 + 1e-12) or bound >= limit_s:
            return makespan, order
        walk = _Walk(self, seconds, tails, min(makespan, limit_s), order, bound)
        walk.down((), [0.0] * len(seconds), [0.0] * self.num_sets, 0.0)
        return (walk.makespan if walk.order != order else makespan), walk.order

    def _listed(self, seconds: Sequence[float], tails: Sequence[float]) -> tuple[int, ...]:
        """The order of a list schedule: of the tasks that can start first, the one with the longest chain behind it."""
        ends: dict[int, float] = {}
        free = [0.0] * self.num_sets
        while len(ends) < len(seconds):
            ready = [t for t, earlier in enumerate(self.before) if t not in ends and all(e in ends for e in earlier)]
            starts = {
                t: max([0.0, *(ends[e] for e in self.before[t]), *(free[s] for s in self.sets[t])]) for t in ready
            }
            task = min(ready, key=lambda t: (starts[t], -tails[t], t))
            ends[task] = starts[task] + seconds[task]
            for one in self.sets[task]:
                free[one] = ends[task]
        return tuple(ends)

    def replay(self, seconds: Sequence[float], order: Sequence[int]) -> float:
        """Makespan of an order."""
        ends = [0.0] * len(seconds)
        free = [0.0] * self.num_sets
        for task in order:
            start = 0.0
            for earlier in self.before[task]:
                start = max(start, ends[earlier])
            for one in self.sets[task]:
                start = max(start, free[one])
            ends[task] = start + seconds[task]
            for one in self.sets[task]:
                free[one] = ends[task]
        return max(ends, default=0.0)

    def neighbours(self, order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Of each task: what it waits for when the order is kept: `before`, and the last earlier task of each of its sets."""
        found: list[tuple[int, ...]] = [()] * len(order)
        last: dict[int, int] = {}
        for task in order:
            found[task] = tuple(sorted({*self.before[task], *(last[one] for one in self.sets[task] if one in last)}))
            last.update(dict.fromkeys(self.sets[task], task))
        return tuple(found)


@dataclass
class _Walk:
    """Branch and bound over orders."""

    shape: Shape
    seconds: Sequence[float]
    tails: Sequence[float]
    makespan: float
    """Only what is shorter is looked for."""
    order: tuple[int, ...]
    bound: float
    """At which it stops."""

    def down(self, done: tuple[int, ...], ends: list[float], free: list[float], latest: float) -> None:
        if len(done) == len(self.seconds):
            if latest < self.makespan:
                self.makespan, self.order = latest, done
            return
        for task, earlier in enumerate(self.shape.before):
            if self.makespan <= self.bound * (1 + 1e-12):
                return
            if task in done or any(one not in done for one in earlier):
                continue
            start = max([0.0, *(ends[one] for one in earlier), *(free[one] for one in self.shape.sets[task])])
            if start + self.tails[task] >= self.makespan:
                continue
            # two tasks that share nothing may be listed in either order: list the lower index first
            if done and task < done[-1] and self._is_free_of(task, done[-1]):
                continue
            end = start + self.seconds[task]
            now_ends, now_free = list(ends), list(free)
            now_ends[task] = end
            for one in self.shape.sets[task]:
                now_free[one] = end
            self.down((*done, task), now_ends, now_free, max(latest, end))

    def _is_free_of(self, task: int, other: int) -> bool:
        return other not in self.shape.before[task] and not set(self.shape.sets[task]) & set(self.shape.sets[other])
