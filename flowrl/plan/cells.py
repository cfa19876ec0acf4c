"""A set of roles that take turns on one mesh: which combinations of their options fit its memory and are worth looking at.

Between calls every role of the set keeps its static bytes; one at a time uses its dynamic bytes:

    sum of static + largest dynamic + device context <= memory of a device

Sets stand on devices of their own. Once a combination fits, its device memory matters to nobody else, so that of the combinations
only those are kept that no other one beats in seconds, host bytes and numerics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from flowrl.plan.options import Option, beats

Edge = tuple[str, str]
"""A role whose new weights go to another role."""


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
    on_edge = {name for edge in edges for name in edge}
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
        fitting = [one for one in grown if _fits(one, edges, limits, later)]
        partial = _pareto(fitting, lambda one: _partial_costs(one, edges), on_edge)
    made = [_made(one, edges, limits) for one in _pareto(partial, lambda one: _final_costs(one, edges), on_edge)]
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
    """Without combinations that one with the same layouts on edges beats or equals."""
    groups: dict[object, list[tuple[float, ...]]] = {}
    kept: list[tuple[Option, ...]] = []
    ranked = sorted(((costs_of(one), _peak(one), index) for index, one in enumerate(found)), key=lambda item: item)  # what is beaten comes after
    for costs, _, index in ranked:
        one = found[index]
        key = tuple(option.layout for option in one if option.role in on_edge)
        mine = groups.setdefault(key, [])
        if not any(beats(other, costs) for other in mine):
            mine.append(costs)
            kept.append(one)
    return kept


def _partial_costs(one: Sequence[Option], edges: Sequence[Edge]) -> tuple[float, ...]:
    handed = (_handed(one, edge) for edge in edges)
    static = sum(option.static_bytes for option in one)
    return (*_final_costs(one, edges), static, max(option.dynamic_bytes for option in one), *handed)


def _final_costs(one: Sequence[Option], edges: Sequence[Edge]) -> tuple[float, ...]:
    seconds = (time for option in one for time in option.seconds)
    loaded = (float(option.is_on_host) for option in one if any(option.role == edge[0] for edge in edges))
    return (*seconds, sum(option.host_bytes for option in one), float(max(option.numerics for option in one)), *loaded)


def _handed(one: Sequence[Option], edge: Edge) -> float:
    return sum(option.handover_bytes for option in one if option.role in edge)


def _peak(one: Sequence[Option]) -> float:
    return sum(option.static_bytes for option in one) + max(option.dynamic_bytes for option in one)


def _fits(one: Sequence[Option], edges: Sequence[Edge], limits: Limits, later: float) -> bool:
    return _needed(one, edges, limits) + later <= limits.device_bytes


def _needed(one: Sequence[Option], edges: Sequence[Edge], limits: Limits) -> float:
    """Bytes at the worst moment: a call, or new weights going from one role of the set to another."""
    context = limits.context_bytes if any(option.has_context for option in one) else 0.0
    static = sum(option.static_bytes for option in one)
    return context + static + max([max(option.dynamic_bytes for option in one), *(_handed(one, edge) for edge in edges)])


def _made(one: tuple[Option, ...], edges: Sequence[Edge], limits: Limits) -> Combination | None:
    needed = _needed(one, edges, limits)
    if needed > limits.device_bytes:
        return None
    return Combination(one, needed, sum(option.host_bytes for option in one), max(option.numerics for option in one))
