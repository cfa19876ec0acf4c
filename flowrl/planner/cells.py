"""A set of roles that take turns on one mesh: which combinations of their options fit its memory and are worth looking at.

Between calls every role of the set keeps its static bytes; one at a time uses its dynamic bytes:

    sum of static + largest dynamic + device context <= memory of a device

While new weights wait for their engine, they are there too, together with what the roles that may work meanwhile use.

Sets stand on devices of their own. Once a combination fits, its device memory matters to nobody else, so that of the combinations
only those are kept that no other one beats in seconds, host bytes and numerics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from flowrl.planner.options import Option


@dataclass(frozen=True, slots=True)
class Edge:
    """New weights go from one role to another."""

    giver: str
    taker: str
    beside: frozenset[str] = frozenset()
    """Roles that may work while the weights wait: after the update, and before the taker uses them."""

    def handed_bytes(self, options: Iterable[Option]) -> float:
        """What holds the weights on a device of the set meanwhile."""
        return sum(option.handover_bytes for option in options if option.role in (self.giver, self.taker))

    def beside_bytes(self, options: Iterable[Option]) -> float:
        """What those beside use at most."""
        return max((option.dynamic_bytes for option in options if option.role in self.beside), default=0.0)


@dataclass(frozen=True, slots=True)
class Combination:
    """An option for each role of a set."""

    options: tuple[Option, ...]
    """In the order of the roles."""
    peak_bytes: float
    """The most on one of its devices."""
    host_bytes: float
    """On all hosts of the mesh together."""
    numerics: int

    @property
    def seconds(self) -> float:
        """For which the mesh is busy."""
        return sum(sum(option.seconds) for option in self.options)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device holds, and what its context takes of it."""

    device_bytes: float
    context_bytes: float


def combine(
    options: Sequence[Sequence[Option]], edges: Sequence[Edge], limits: Limits, *, prune: bool = True
) -> tuple[Combination, ...]:
    """The combinations that fit and that no other one beats, the fastest first; with `prune=False` all that fit.

    `options` are those of each role. Layouts count for roles on an edge only: what a reshard moves depends on them.
    """
    if not all(options):
        return ()
    if not prune:
        every = (_made(one, edges, limits) for one in product(*options))
        return _ranked(one for one in every if one is not None)
    on_edge = {name for edge in edges for name in (edge.giver, edge.taker)}
    quick = _fastest(options, on_edge)
    if quick is not None:
        made = [_made(one, edges, limits) for one in quick]
        if all(one is not None for one in made):
            return _ranked(one for one in made if one is not None)
    partial: list[tuple[Option, ...]] = [()]
    least = [min(option.static_bytes for option in mine) for mine in options]
    for index, mine in enumerate(options):
        later = sum(least[index + 1 :])
        grown = [(*one, option) for one in partial for option in mine]
        fitting = [one for one in grown if _needed(one, edges, limits) + later <= limits.device_bytes]
        costs = _final_costs if index == len(options) - 1 else _partial_costs
        partial = _pareto(fitting, functools.partial(costs, edges=edges), on_edge)
    made = [_made(one, edges, limits) for one in partial]
    return _ranked(one for one in made if one is not None)


def _ranked(found: Iterable[Combination]) -> tuple[Combination, ...]:
    return tuple(sorted(found, key=lambda one: (one.seconds, one.numerics, one.peak_bytes, one.host_bytes)))


def _fastest(options: Sequence[Sequence[Option]], on_edge: set[str]) -> list[tuple[Option, ...]] | None:
    """The combinations of options that nothing beats once memory is no matter, when each role has such an option."""
    chosen: list[list[Option]] = []
    for mine in options:
        groups: dict[object, list[Option]] = {}
        for option in mine:
            groups.setdefault(option.layout if option.role in on_edge else None, []).append(option)
        firsts: list[Option] = []
        for group in groups.values():
            ends = [_end_costs(option) for option in group]
            lowest = tuple(map(min, zip(*ends, strict=True)))
            best = [option for option, end in zip(group, ends, strict=True) if end == lowest]
            if not best:
                return None
            firsts.append(min(best, key=lambda option: (option.static_bytes, option.dynamic_bytes)))
        chosen.append(firsts)
    return list(product(*chosen))


def _end_costs(option: Option) -> tuple[float, ...]:
    return (*option.seconds, option.host_bytes, option.numerics, option.is_on_host)


def _pareto(
    found: Sequence[tuple[Option, ...]], costs_of: Callable[[tuple[Option, ...]], tuple[float, ...]], on_edge: set[str]
) -> list[tuple[Option, ...]]:
    """Without combinations that one with the same layouts on edges beats or equals.

    Of equals, the one with the lower peak stays.
    """
    groups: dict[object, list[int]] = {}
    for index, one in enumerate(found):
        groups.setdefault(tuple(option.layout for option in one if option.role in on_edge), []).append(index)
    kept: list[int] = []
    for mine in groups.values():
        ranked = sorted((*costs_of(found[index]), _peak(found[index]), index) for index in mine)
        rows = np.array([row[:-2] for row in ranked])
        left = np.arange(len(rows))
        while left.size:  # what is beaten comes after what beats it
            first, left = left[0], left[1:]
            kept.append(int(ranked[first][-1]))
            left = left[(rows[left] < rows[first]).any(axis=1)]
    return [found[index] for index in sorted(kept)]


def _partial_costs(one: Sequence[Option], edges: Sequence[Edge]) -> tuple[float, ...]:
    handed = [value for edge in edges for value in (edge.handed_bytes(one), edge.beside_bytes(one))]
    static = sum(option.static_bytes for option in one)
    return (*_final_costs(one, edges), static, max(option.dynamic_bytes for option in one), *handed)


def _final_costs(one: Sequence[Option], edges: Sequence[Edge]) -> tuple[float, ...]:
    seconds = (time for option in one for time in option.seconds)
    loaded = (float(option.is_on_host) for option in one if any(option.role == edge.giver for edge in edges))
    return (*seconds, sum(option.host_bytes for option in one), float(max(option.numerics for option in one)), *loaded)


def _peak(one: Sequence[Option]) -> float:
    return sum(option.static_bytes for option in one) + max(option.dynamic_bytes for option in one)


def _needed(one: Sequence[Option], edges: Sequence[Edge], limits: Limits) -> float:
    """Bytes at the worst moment: a call, or new weights going from one role of the set to another."""
    context = limits.context_bytes if any(option.has_context for option in one) else 0.0
    static = sum(option.static_bytes for option in one)
    waiting = (edge.handed_bytes(one) + edge.beside_bytes(one) for edge in edges)
    return context + static + max([max(option.dynamic_bytes for option in one), *waiting])


def _made(one: tuple[Option, ...], edges: Sequence[Edge], limits: Limits) -> Combination | None:
    needed = _needed(one, edges, limits)
    if needed > limits.device_bytes:
        return None
    return Combination(one, needed, sum(option.host_bytes for option in one), max(option.numerics for option in one))
