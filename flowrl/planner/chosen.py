"""The plan of what a search found: of all that it kept, lowered and timed, the simplest of those that tie with the fastest."""

from __future__ import annotations

from dataclasses import replace

from flowrl.cost.offload import Offload
from flowrl.errors import PlanError
from flowrl.graph.nodes import Graph
from flowrl.planner.bound import bound_s
from flowrl.planner.finish import finished
from flowrl.planner.free import free_spaces
from flowrl.planner.lower import plan_of
from flowrl.planner.problem import LEAST_CHANGE, Candidate, Found, Problem, digits, host_bytes
from flowrl.planner.report import Alternative, Searched
from flowrl.planner.steps import Plan
from flowrl.planner.ties import simplicity, why_simpler


def plan_found(found: Found, graph: Graph) -> Plan:
    """The plan of the best that a search has found, with what the search looked at. `graph` is that of `problem_of`.

    The search counts copies of parked state inside the calls that need it; a plan may hide them beside other work. So all that
    the search kept is planned, then what may be faster than the best of it (`flowrl.planner.finish`), and of those that tie with
    the fastest (`Problem.tie`) the simplest is taken.

    Errors: PlanError when nothing was found that fits; `flowrl.planner.relax.explain` says why.
    """
    if found.best is None:
        raise PlanError("FR-P01: no plan fits")
    kept = list({id(one): one for one in (found.best, found.fastest, *found.others) if one is not None}.values())
    timed = [_timed(found.problem, one, graph) for one in kept]
    # without parked state, what a plan takes beyond what the search counts
    beside = [max(0.0, plan.seconds - one.seconds) for plan, one in zip(timed, kept, strict=True) if not _parks(one)]
    spaces = free_spaces(found.problem)
    hidden = finished(
        found.problem,
        min(one.seconds for one in timed),
        min(beside, default=0.0),
        lambda one: _timed(found.problem, one, graph).seconds,
        spaces,
    )
    if hidden is not None:
        kept.append(hidden)
        timed.append(_timed(found.problem, hidden, graph))
    least = min(range(len(timed)), key=lambda index: (timed[index].seconds, timed[index].numerics, index))
    limit_s = timed[least].seconds * (1 + found.problem.tie)
    tied = [index for index, one in enumerate(timed) if one.seconds <= limit_s]
    chosen = min(tied, key=lambda index: (simplicity(found.problem, timed[index]), index))
    plan = plan_of(found.problem.on(kept[chosen]), kept[chosen], graph)
    timed[chosen] = replace(timed[chosen], seconds=plan.predicted.seconds, latency_s=plan.predicted.latency_s)
    listed = [
        timed[index]
        for index, one in enumerate(kept)
        if index != chosen and (index == 0 or one is hidden or one in found.others)
    ]
    ranked = sorted(listed, key=lambda one: (digits(one.seconds), str(one.placement)))
    is_faster = timed[least].seconds < timed[chosen].seconds * (1 - LEAST_CHANGE)
    simpler = why_simpler(found.problem, timed[chosen], timed[least]) if is_faster else ""
    placed = replace(found, best=timed[chosen], others=tuple(ranked), why_simpler=simpler)
    # an engine has the weights of its model, without what the trainer adds to them: the trainer's shape says more
    models = {role.model: role.shape for role in sorted(found.problem.roles, key=lambda role: role.is_trained)}
    shapes = tuple(sorted(models.items()))
    known_s = min(one.seconds for one in timed)
    return replace(plan, models=shapes, searched=_searched(placed, bound_s(found.problem, known_s, spaces=spaces)))


def _timed(problem: Problem, candidate: Candidate, graph: Graph) -> Candidate:
    """With the seconds of its plan."""
    outlook = plan_of(problem.on(candidate), candidate, graph, is_exact=False).predicted
    return replace(candidate, seconds=outlook.seconds, latency_s=outlook.latency_s)


def _parks(candidate: Candidate) -> bool:
    settings = [dict(option.settings) for one in candidate.combinations for option in one.options]
    return any(one.get("offload") == Offload.PARK.value or one.get("park_weights") for one in settings)


def _searched(found: Found, least_s: float) -> Searched:
    return Searched(
        bound_s=least_s,
        placements=found.placements,
        simulated=found.simulated,
        pruned=found.pruned,
        unfit=found.unfit,
        is_exhaustive=found.is_exhaustive,
        seed=found.problem.effort.seed,
        refused=found.refused,
        tie=found.problem.tie,
        headroom=found.problem.choices.headroom,
        why_simpler=found.why_simpler,
        of_per_node=_of_per_node(found),
        alternatives=tuple(
            Alternative(
                str(one.placement),
                one.seconds,
                round(one.peak_bytes),
                round(max(host_bytes(found.problem.on(one).cluster, one.meshes, one.combinations))),
                found.why_not(one),
            )
            for one in found.others
        ),
    )


def _of_per_node(found: Found) -> int:
    """Devices of each node that there are, where the best plan leaves some of them idle; else 0."""
    there = found.problem.cluster.devices_per_node
    return 0 if found.best is None or found.best.per_node == there else there
