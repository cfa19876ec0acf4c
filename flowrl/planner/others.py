"""Plans of other kinds beside the best one: what they would take, or what they lack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flowrl.planner.fill import Budget, Fill, Spent
from flowrl.planner.options import Option
from flowrl.planner.problem import CLEARLY_LESS, INFINITE, NEAR, Candidate, Effort, num_splits
from flowrl.planner.short import shortage
from flowrl.planner.space import Space, Split
from flowrl.planner.ties import burden
from flowrl.planner.tree import Tree


@dataclass(frozen=True, slots=True)
class Others:
    """Plans of other kinds, the fastest first; and kinds of which nothing fits, a line each."""

    candidates: tuple[Candidate, ...] = ()
    refused: tuple[str, ...] = ()


def others_of(
    space: Space, best: Candidate, fastest: Candidate, effort: Effort, on_all: Candidate | None = None
) -> Others:
    """The fastest plans of other splits; and on the meshes of the best one, with another layout of each role that is sampled
    from or trained, with less of each role offloaded, with nothing offloaded, and with clearly less device memory.

    `on_all`: of a best plan that leaves devices idle, the fastest that was found on all of them.

    Counted in branches together (`Effort.alternative_branches`); what is found when they are used up is what there is.
    """
    if not effort.alternatives:
        return Others()
    mine = space.split_of(best)
    budget = Budget(effort.alternative_branches)
    found = [] if fastest == best else [fastest]
    found += [] if on_all is None or on_all.per_node == best.per_node else [on_all]
    refused: list[str] = []
    for name, takes, is_said in _variants(space, best):
        fill = Fill(space, mine, best.meshes, budget, takes)
        try:
            fill.fastest(INFINITE)
        except Spent:
            break
        finally:
            if fill.best is not None:
                found.append(fill.best)
        if fill.best is None and is_said:
            sets = zip(mine, best.meshes, strict=True)
            why = next(
                filter(None, (shortage(space, one, mesh.size, takes) for one, mesh in sets)), "not all of it fits"
            )
            refused.append(f"{name}: {why}")
    lighter = _lighter_plan(space, mine, best, budget)
    found += [] if lighter is None else [lighter]
    splits, unfit = _other_splits(space, mine, effort, budget)
    known = {best.placement: best.seconds}
    kept: list[Candidate] = []
    for one in sorted([*found, *splits], key=lambda candidate: candidate.seconds):
        if known.get(one.placement) != one.seconds:
            known[one.placement] = one.seconds
            kept.append(one)
    return Others(tuple(kept), (*refused, *unfit))


def _variants(space: Space, best: Candidate) -> list[tuple[str, Callable[[Option], bool], bool]]:
    """What may be asked of the options on the same meshes, and whether it is said when nothing fits then.

    Of a trainer's layouts only those are offered that are worth something (`flowrl.planner.options`), so that one that is
    missing may well fit. Less offload of one role says no more than nothing offloaded.
    """
    found: list[tuple[str, Callable[[Option], bool], bool]] = []
    for mesh, one in zip(best.meshes, best.combinations, strict=True):
        for mine in one.options:
            role = space.roles[space.index[mine.role]]
            layouts = {option.layout for option in space.options(space.index[mine.role], mesh.size)}
            if (role.is_engine or role.is_trained) and len(layouts) > 1:
                found.append((f"another layout of '{role.name}'", _another(mine), role.is_engine))
            if burden(mine):
                found.append((f"less of '{role.name}' offloaded", _lighter(mine), False))
    if any(burden(option) for one in best.combinations for option in one.options):
        found.append(("nothing offloaded", lambda option: burden(option) == 0, True))
    return found


def _lighter_plan(space: Space, mine: Split, best: Candidate, budget: Budget) -> Candidate | None:
    """On the same meshes, with no more of any role offloaded and no other numerics: hardly slower with clearly less device
    memory, each time the fastest with clearly less than the last, as long as there is one."""
    found: Candidate | None = None
    burdens = {option.role: burden(option) for one in best.combinations for option in one.options}

    def takes(option: Option) -> bool:
        return burden(option) <= burdens[option.role] and option.numerics <= best.numerics

    limit_s, held = best.seconds * (1 + NEAR), best.peak_bytes
    while True:
        fill = Fill(space, mine, best.meshes, budget, takes)
        fill.limits = replace(fill.limits, device_bytes=held * (1 - CLEARLY_LESS))
        try:
            one = fill.fastest(limit_s)
        except Spent:
            return fill.best or found
        if one is None:
            return found
        found, held = one, one.peak_bytes


def _lighter(mine: Option) -> Callable[[Option], bool]:
    return lambda option: option.role != mine.role or burden(option) < burden(mine)


def _another(mine: Option) -> Callable[[Option], bool]:
    return lambda option: option.role != mine.role or option.layout != mine.layout


def _other_splits(space: Space, mine: Split, effort: Effort, budget: Budget) -> tuple[list[Candidate], list[str]]:
    """The fastest plans of as many other splits as asked for, and what is short in some where nothing fits."""
    known: dict[Split, Candidate] = {}
    if num_splits(len(space.roles)) > effort.branches:
        return [], []  # too many to list

    def limit_s(split: Split) -> float:
        """What is slower than the last one asked for is not looked for."""
        ranked = sorted(one.seconds for one in known.values())
        last = ranked[effort.alternatives - 1] if len(ranked) >= effort.alternatives else INFINITE
        return min(last, known[split].seconds) if split in known else last

    others = [split for split in space.splits if split != mine]
    tree = Tree(space, others, budget, limit_s)
    try:
        for leaf in tree.leaves():
            meshes = space.meshes(leaf.sizes)
            if meshes is None:
                continue
            fill = Fill(space, leaf.split, meshes, budget)
            try:
                fill.fastest(limit_s(leaf.split))
            finally:
                if fill.best is not None:
                    known[leaf.split] = fill.best
    except Spent:
        return _first(known, effort), []
    unfit = [split for split in others if split not in known and split not in tree.cut]
    return _first(known, effort), [_why(space, split) for split in unfit[: effort.alternatives]]


def _first(known: dict[Split, Candidate], effort: Effort) -> list[Candidate]:
    return sorted(known.values(), key=lambda one: one.seconds)[: effort.alternatives]


def _why(space: Space, split: Split) -> str:
    """What is short when the sets of a split stand apart, each on the most devices that it can have."""
    names = " | ".join(" + ".join(space.roles[role].name for role in mine) for mine in split)
    if len(split) > space.cluster.num_devices:
        return f"{names}: {len(split)} meshes on {space.cluster.num_devices} devices"
    most = max(size for size in space.sizes if size <= space.cluster.num_devices - len(split) + 1)
    why = next(filter(None, (shortage(space, mine, most) for mine in split)), "its sets do not fit at the same time")
    return f"{names}: {why}"
