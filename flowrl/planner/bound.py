"""Seconds that no plan of a problem goes below, whatever is moved when.

The search counts copies of parked state inside the calls that need it. A plan that hides them beside other work may so be faster
than the least that the search allows for. Here the calls are without them:

    min over parts of the cluster, splits and sizes of
        the best order of calls, each with the least that any option has; copies of parked state and handovers take no time

Memory counts for each role alone only: what roles share a mesh could all be parked.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.planner.fill import Budget, Spent
from flowrl.planner.free import Free, free_spaces
from flowrl.planner.problem import INFINITE, Problem, num_splits
from flowrl.planner.space import Space
from flowrl.planner.tree import Leaf, Tree


def bound_s(
    problem: Problem, limit_s: float = INFINITE, branches: int = 20_000, spaces: Sequence[Free] | None = None
) -> float:
    """No plan of the search space takes less; at most `limit_s`. Infinite where nothing fits and there is no limit.

    Args:
        limit_s: seconds of a plan that is known. What cannot be below them is not looked at.
        branches: partial placements that are looked at. Where they do not suffice the bound is that of those left: lower, and
            right.
        spaces: `free_spaces(problem)`, where they are there already.
    """
    best = limit_s
    for space in free_spaces(problem) if spaces is None else spaces:
        best = min(best, _bound_s(space, best, branches))
    return best


def _bound_s(space: Space, best: float, branches: int) -> float:
    """Of one part of the cluster; at most `best`."""
    free_s = space.free_bound_s()
    if free_s >= best or num_splits(len(space.roles)) > branches:
        return min(best, free_s)
    tree = Tree(space, space.splits, Budget(branches), lambda _: best)
    try:
        for leaf in tree.leaves():  # the lowest bound first
            if space.meshes(leaf.sizes) is not None:
                best = min(best, _shortest_s(space, leaf))
    except Spent:
        return min(best, tree.open_s)
    return best


def _shortest_s(space: Space, leaf: Leaf) -> float:
    """Of a split with sizes: in the best order, each call with the least that any option has."""
    size_of = {role: size for mine, size in zip(leaf.split, leaf.sizes, strict=True) for role in mine}
    seconds = [0.0 if call is None else space.least(role, size_of[role])[call] for role, call, _ in space.work]
    shape = space.shape(leaf.split)
    return space.cost(shape, seconds, shape.shortest(seconds)[0])
