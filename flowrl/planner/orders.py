"""The shortest time of a few tasks that compete for sets of devices: exact, for the search.

A list schedule can become longer when a task becomes shorter (Graham 1969), so it can neither bound nor compare plans safely.
Here every order is tried where the list schedule does not reach the lower bound; with the dozen calls of an iteration that is
quick.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Window:
    """A span of an order, by the tasks that have been done."""

    opens: tuple[int, ...]
    """It is open once all of these are done;"""
    closes: tuple[int, ...] | None = None
    """and until all of these are. None: to the end."""

    def is_open(self, done: int) -> bool:
        """After some tasks, a bit for each."""
        opened = all(done >> task & 1 for task in self.opens)
        return opened and (self.closes is None or not all(done >> task & 1 for task in self.closes))


@dataclass(frozen=True, slots=True)
class Rule:
    """Which tasks may not run in which windows."""

    windows: tuple[Window, ...]
    barred: tuple[frozenset[int], ...]
    """Of each task: sets of open windows, a bit for each, in which it may not run. A window that has nothing to do with the sets
    of a task makes no difference to it."""

    def allows(self, task: int, done: int) -> bool:
        """Whether a task may run next when some are done, a bit for each."""
        barred = self.barred[task]
        return not barred or sum(one.is_open(done) << bit for bit, one in enumerate(self.windows)) not in barred

    def keeps(self, order: Sequence[int]) -> bool:
        """Whether all of an order is allowed."""
        done = 0
        for task in order:
            if not self.allows(task, done):
                return False
            done |= 1 << task
        return True


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

    def shortest(
        self, seconds: Sequence[float], limit_s: float = math.inf, rule: Rule | None = None
    ) -> tuple[float, tuple[int, ...]]:
        """Makespan and order of an optimal schedule; of some schedule, of `limit_s` or more, when none is below `limit_s`.

        In the order every task starts as soon as the tasks before it, and earlier ones of its sets, have ended.

        `rule`: only orders that keep it; infinite and no order when none of them is below `limit_s`.
        """
        tails = self.tails(seconds)
        order = self._listed(seconds, tails)
        makespan = self.replay(seconds, order)
        if rule is not None and not rule.keeps(order):
            makespan, order = math.inf, ()
        bound = self.bound_s(seconds)
        if makespan <= bound * (1 + 1e-12) or bound >= limit_s:
            return makespan, order
        live = None if rule is None else live_of(self.before, rule)
        if live is not None and 0 not in live:
            return math.inf, ()
        walk = _Walk(self, seconds, tails, min(makespan, limit_s), order, bound, rule, live)
        walk.down((), 0, [0.0] * len(seconds), [0.0] * self.num_sets, 0.0)
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


@lru_cache(maxsize=256)
def live_of(before: tuple[tuple[int, ...], ...], rule: Rule) -> frozenset[int]:
    """Sets of done tasks, a bit for each, from which all others can still be done; among them 0 when any order keeps the rule."""
    every = (1 << len(before)) - 1
    known: dict[int, bool] = {every: True}

    def is_live(done: int) -> bool:
        if done not in known:
            known[done] = any(
                not done >> task & 1
                and all(done >> one & 1 for one in earlier)
                and rule.allows(task, done)
                and is_live(done | 1 << task)
                for task, earlier in enumerate(before)
            )
        return known[done]

    # all of them, not those on the first way to the end only
    ahead, seen = [0], {0}
    while ahead:
        done = ahead.pop()
        if not is_live(done):
            continue
        for task, earlier in enumerate(before):
            then = done | 1 << task
            if then not in seen and all(done >> one & 1 for one in earlier) and rule.allows(task, done):
                seen.add(then)
                ahead.append(then)
    return frozenset(done for done, lives in known.items() if lives)


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
    rule: Rule | None = None
    live: frozenset[int] | None = None
    """Sets of done tasks from which an order that keeps the rule goes on."""

    def down(self, done: tuple[int, ...], mask: int, ends: list[float], free: list[float], latest: float) -> None:
        if len(done) == len(self.seconds):
            if latest < self.makespan:
                self.makespan, self.order = latest, done
            return
        for task, earlier in enumerate(self.shape.before):
            if self.makespan <= self.bound * (1 + 1e-12):
                return
            if task in done or any(one not in done for one in earlier):
                continue
            if self.rule is not None and not self._may_come(task, mask):
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
            self.down((*done, task), mask | 1 << task, now_ends, now_free, max(latest, end))

    def _may_come(self, task: int, mask: int) -> bool:
        rule, live = self.rule, self.live
        return rule is None or live is None or (rule.allows(task, mask) and mask | 1 << task in live)

    def _is_free_of(self, task: int, other: int) -> bool:
        return other not in self.shape.before[task] and not set(self.shape.sets[task]) & set(self.shape.sets[other])
