"""The plan of what a search found: of all that it kept, lowered and timed, the simplest of those that tie with the fastest."""

from __future__ import annotations

from dataclasses import replace

from flowrl.errors import PlanError
from flowrl.graph.nodes import Graph
from flowrl.planner.bound import bound_s
from flowrl.planner.lower import plan_of
from flowrl.planner.problem import LEAST_CHANGE, Found, digits, host_bytes
from flowrl.planner.report import Alternative, Searched
from flowrl.planner.steps import Plan
from flowrl.planner.ties import simplicity, why_simpler


def plan_found(found: Found, graph: Graph) -> Plan:
    """The plan of the best that a search has found, with what the search looked at. `graph` is that of `problem_of`.

    The search counts copies of parked state inside the calls that need it; a plan may hide them beside other work. So all that
    the search kept is planned, and of those that then tie with the fastest (`Problem.tie`) the simplest is taken.

    Errors: PlanError when nothing was found that fits; `flowrl.planner.relax.explain` says why.
    """
    if found.best is None:
        raise PlanError("FR-P01: no plan fits")
    kept = list({id(one): one for one in (found.best, found.fastest, *found.others) if one is not None}.values())
    outlooks = [plan_of(found.problem.on(one), one, graph, is_exact=False).predicted for one in kept]
    timed = [
        replace(one, seconds=outlook.seconds, latency_s=outlook.latency_s)
        for one, outlook in zip(kept, outlooks, strict=True)
    ]
    least = min(range(len(timed)), key=lambda index: (timed[index].seconds, timed[index].numerics, index))
    limit_s = timed[least].seconds * (1 + found.problem.tie)
    tied = [index for index, one in enumerate(timed) if one.seconds <= limit_s]
    chosen = min(tied, key=lambda index: (simplicity(found.problem, timed[index]), index))
    plan = plan_of(found.problem.on(kept[chosen]), kept[chosen], graph)
    timed[chosen] = replace(timed[chosen], seconds=plan.predicted.seconds, latency_s=plan.predicted.latency_s)
    listed = [one for index, one in enumerate(timed) if index != chosen and (kept[index] in found.others or index == 0)]
    ranked = sorted(listed, key=lambda one: (digits(one.seconds), str(one.placement)))
    is_faster = timed[least].seconds < timed[chosen].seconds * (1 - LEAST_CHANGE)
    simpler = why_simpler(found.problem, timed[chosen], timed[least]) if is_faster else ""
    placed = replace(found, best=timed[chosen], others=tuple(ranked), why_simpler=simpler)
    # an engine has the weights of its model, without what the trainer adds to them: the trainer's shape says more
    models = {role.model: role.shape for role in sorted(found.problem.roles, key=lambda role: role.is_trained)}
    shapes = tuple(sorted(models.items()))
    known_s = min(one.seconds for one in timed)
    return replace(plan, models=shapes, searched=_searched(placed, bound_s(found.problem, known_s)))


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
