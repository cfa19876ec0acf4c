"""Splits of the roles and sizes of their meshes, the most promising first.

    for every way to split the roles into sets                       (sets stand on devices of their own)
        for every size of each set's mesh                            (buddy slices; the largest set first, at the lowest place)

A node of the tree is a split with the sizes of its first sets. Its bound holds for all that can still become of it:

    cost of the calls, each with the least that any option has       (of a set without a size: on all devices that may be left)
    least devices x seconds of the sets without a size / devices left

The least of a call is first a floor (`flowrl.planner.floors`), and what options have once it matters whether the node is worth
it. Nodes are taken from a heap, so that what is left always has the bound of its first node.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flowrl.planner.fill import Budget
from flowrl.planner.problem import INFINITE
from flowrl.planner.space import Space, Split

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A split with a size for each of its sets."""

    split: Split
    sizes: Sizes
    bound_s: float


class Tree:
    """All placements of some splits.

    Args:
        limit_s: of a split, the seconds that are not worth it any more. May fall while leaves are taken.
    """

    def __init__(
        self, space: Space, splits: Sequence[Split], budget: Budget, limit_s: Callable[[Split], float]
    ) -> None:
        self.space, self.budget, self.limit_s = space, budget, limit_s
        self.pruned = 0
        self.cut: set[Split] = set()
        """Splits of which something was left because of a limit."""
        self._heap: list[tuple[float, int, int, Split, tuple[int, ...], Sizes]] = []
        self._count = 0
        self._known: dict[Split, tuple[tuple[float, int], tuple[int, ...], tuple[float, ...]]] = {}
        for split in splits:
            self._push(split, tuple(range(len(split))), ())

    @property
    def open_s(self) -> float:
        """No leaf that was not taken yet has a lower bound."""
        return self._heap[0][0] if self._heap else INFINITE

    def leaves(self) -> Iterator[Leaf]:
        """Those below their limit, the lowest bound first. Raises `Spent` when the budget ends."""
        while self._heap:
            self.budget.spend()
            bound_s, _, _, split, order, chosen = self._heap[0]
            if bound_s >= self.limit_s(split):
                self._leave(split, bound_s)
                heapq.heappop(self._heap)
                continue
            if self._is_raised(split, order, chosen, bound_s):
                heapq.heappop(self._heap)
                self._push(split, order, chosen)
                continue
            if len(chosen) == len(split):
                sizes = dict(zip(order, chosen, strict=True))
                # on the heap until it has been dealt with: a search that ends meanwhile has not seen it
                yield Leaf(split, tuple(sizes[at] for at in range(len(split))), bound_s)
                self._remove(split, order, chosen)
                continue
            heapq.heappop(self._heap)
            self._grow(split, order, chosen)

    # ----------------------------------------------------------------------------------------------------------- nodes

    def _grow(self, split: Split, order: tuple[int, ...], chosen: Sizes) -> None:
        """Give the next set every size with which the bound may stay below the limit."""
        least, _ = self._least(split)
        if not chosen:  # the set that needs most devices first: it leaves the others the least choice
            order = tuple(sorted(range(len(split)), key=lambda at: (-least[at], at)))
        space, sizes = self.space, self.space.sizes
        at, later = order[len(chosen)], order[len(chosen) + 1 :]
        left = space.cluster.num_devices - sum(chosen)
        most = left - sum(least[one] for one in later)
        asked = space.problem.asked_size(split[at])
        if asked is not None:
            low, high = asked, min(asked, most)
        else:
            limit_s, calls = self.limit_s(split), self._calls(split, order, chosen)

            def bound_s(mine: int, others: int) -> float:
                for role in split[at]:
                    calls[role] = space.upto(role, mine)[0]
                for one in later:
                    for role in split[one]:
                        calls[role] = space.upto(role, others)[0]
                return self._cost(split, calls)

            # fewer devices take longer, and leave more to the others: both bounds are monotone
            lowest = bisect_left(sizes, True, key=lambda size: bound_s(size, max(1, left - 1)) < limit_s)
            if lowest == len(sizes):
                self._leave(split, limit_s)
                return
            low, high = max(sizes[lowest], least[at]), most
            if later and low <= high:
                end = bisect_left(sizes, True, key=lambda size: bound_s(left, max(1, left - size)) >= limit_s)
                high = min(high, sizes[end - 1] if end else 0)
        if low > sizes[0] or high < left:
            self._leave(split, self.limit_s(split))
        for size in (asked,) if asked is not None else reversed(sizes):
            if low <= size <= high:
                self._push(split, order, (*chosen, size))

    def _least(self, split: Split) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Of each set, the fewest devices on which it may be below the limit when the other sets have all of them; and the least
        devices x seconds on that many devices or more."""
        limit_s, space = self.limit_s(split), self.space
        key = (limit_s, space.made)
        if self._known.get(split, (None,))[0] != key:
            every = space.sizes[-1]
            calls = [space.upto(role, every)[0] for role in range(len(space.roles))]
            found: list[int] = []
            areas: list[float] = []
            for mine in split:
                own = list(calls)

                def is_enough(size: int, mine: tuple[int, ...] = mine, own: list[tuple[float, ...]] = own) -> bool:
                    for role in mine:
                        own[role] = space.upto(role, size)[0]
                    return self._cost(split, own) < limit_s

                index = bisect_left(space.sizes, True, key=is_enough)
                found.append(space.sizes[index] if index < len(space.sizes) else every + 1)
                areas.append(sum(space.area_from(role, found[-1]) for role in mine))
            self._known[split] = (key, tuple(found), tuple(areas))
        return self._known[split][1:]

    def _push(self, split: Split, order: tuple[int, ...], chosen: Sizes) -> None:
        bound_s = self._bound(split, order, chosen)
        if bound_s >= self.limit_s(split):
            self._leave(split, bound_s)
            return
        self._count += 1
        heapq.heappush(self._heap, (bound_s, -len(chosen), self._count, split, order, chosen))

    def _leave(self, split: Split, bound_s: float) -> None:
        """What is left has this bound; where that is infinite, nothing of it fits."""
        self.pruned += 1
        if bound_s < INFINITE:
            self.cut.add(split)

    def _remove(self, split: Split, order: tuple[int, ...], chosen: Sizes) -> None:
        if self._heap[0][3:] != (split, order, chosen):
            raise RuntimeError("the heap changed while a leaf was looked at")
        heapq.heappop(self._heap)

    def _is_raised(self, split: Split, order: tuple[int, ...], chosen: Sizes, bound_s: float) -> bool:
        """Put what options have in place of floors, the quick ones to make first; whether that raised the bound."""
        space = self.space
        floored = [
            (space.roles[role].is_engine, role, size)
            for at, size in zip(order, chosen, strict=False)
            for role in split[at]
            if not space.is_made(role, size)
        ]
        for _, role, size in sorted(floored):
            space.options(role, size)
            if self._bound(split, order, chosen) > bound_s:
                return True
        return False

    # ---------------------------------------------------------------------------------------------------------- bounds

    def _bound(self, split: Split, order: tuple[int, ...], chosen: Sizes) -> float:
        space = self.space
        waiting = order[len(chosen) :]
        left = space.cluster.num_devices - sum(chosen)
        most = left - len(waiting) + 1
        if waiting and most < 1:
            return INFINITE
        calls = self._calls(split, order, chosen)
        for at in waiting:
            for role in split[at]:
                calls[role] = space.upto(role, most)[0]
        bound_s = self._cost(split, calls)
        if not waiting:
            return bound_s
        least, areas = self._least(split)
        if sum(least[at] for at in waiting) > left:
            return max(bound_s, self.limit_s(split))
        return max(bound_s, sum(areas[at] for at in waiting) / left)

    def _calls(self, split: Split, order: tuple[int, ...], chosen: Sizes) -> list[tuple[float, ...]]:
        """Seconds of each call of the roles whose set has a size."""
        calls: list[tuple[float, ...]] = [()] * len(self.space.roles)
        for at, size in zip(order, chosen, strict=False):
            for role in split[at]:
                calls[role] = self.space.least(role, size)
        return calls

    def _cost(self, split: Split, calls: Sequence[tuple[float, ...]]) -> float:
        """With seconds of each call of each role, and handovers in no time."""
        seconds = [0.0 if call is None else calls[role][call] for role, call, _ in self.space.work]
        return self.space.cost(self.space.shape(split), seconds)
