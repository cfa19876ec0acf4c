"""Plan a flow: from a graph, models, a cluster and a workload to the plan that a runtime executes.

Example:
    plan = fr.plan(grpo(group_size=8), models={"policy": "Qwen/Qwen2.5-7B", "ref": "Qwen/Qwen2.5-7B"}, cluster="8xA100-80G",
                   workload=fr.Workload(128, fr.Lengths.fixed(512), fr.Lengths.lognormal(1024, 0.6, cap=4096)))
    print(plan)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flowrl.errors import CheckError, ConfigError, PlanError
from flowrl.graph.checks import find_problems
from flowrl.graph.flows import Flow
from flowrl.graph.nodes import Graph
from flowrl.graph.passes import optimise
from flowrl.graph.schedule import Schedule, Sync
from flowrl.mesh import Cluster
from flowrl.mesh.placement import Placement
from flowrl.planner.bound import bound_s
from flowrl.planner.lower import plan_of
from flowrl.planner.offered import check_placement
from flowrl.planner.options import Choices
from flowrl.planner.problem import LEAST_CHANGE, Found, Problem, digits, host_bytes
from flowrl.planner.relax import explain
from flowrl.planner.report import Alternative, Searched
from flowrl.planner.search import search
from flowrl.planner.shapes import shape_of
from flowrl.planner.steps import Plan
from flowrl.planner.ties import simplicity, why_simpler
from flowrl.planner.workload import Workload

HEADS = {"values": "value", "score": "reward"}
"""Kind of a node to the head that its model needs."""


def plan(
    flow: Flow | Graph,
    *,
    models: Mapping[str, Any],
    cluster: Cluster | str,
    workload: Workload,
    schedule: Schedule | None = None,
    placement: Placement | str | None = None,
    choices: Choices | None = None,
) -> Plan:
    """The best plan of a flow on a cluster under the cost model. Nothing is loaded and nothing runs.

    Args:
        flow: a flow (its default configuration) or a graph: `grpo(group_size=4)`.
        models: for each model of the flow a name or a path, a config (object or dict), an `fr.Model` or a `ModelShape`.
        cluster: a `Cluster`, or the name of one: "8xA100-80G".
        workload: how many prompts, and how long prompts and responses are.
        schedule: `Sync()` or `Async(max_staleness=k)`.
        placement: what goes where, whole or in part: "gen:d4t2 | (policy:f8 + ref:f8)"; "..." is left to the planner.
        choices: what the planner may choose from, and its calibrated numbers.

    Errors: CheckError with all problems of the flow; ConfigError for models, a cluster or a placement that make no sense;
    PlanError (FR-P01) when nothing fits, with the memory that is short and what would fit.
    """
    problem, graph = problem_of(
        flow, models=models, cluster=cluster, workload=workload, schedule=schedule, placement=placement, choices=choices
    )
    found = search(problem)
    if found.best is None:
        raise PlanError(str(explain(problem)))
    return plan_found(found, graph)


def plan_found(found: Found, graph: Graph) -> Plan:
    """The plan of the best that a search has found, with what the search looked at. `graph` is that of `problem_of`.

    The search counts copies of parked state inside the calls that need it; a plan may hide them beside other work. So all that
    the search kept is planned, and of those that then tie with the fastest (`Problem.tie`) the simplest is taken.

    Errors: PlanError when nothing was found that fits; `flowrl.planner.relax.explain` says why.
    """
    if found.best is None:
        raise PlanError("FR-P01: no plan fits")
    kept = list({id(one): one for one in (found.best, found.fastest, *found.others) if one is not None}.values())
    outlooks = [plan_of(found.problem, one, graph, is_exact=False).predicted for one in kept]
    timed = [
        replace(one, seconds=outlook.seconds, latency_s=outlook.latency_s)
        for one, outlook in zip(kept, outlooks, strict=True)
    ]
    least = min(range(len(timed)), key=lambda index: (timed[index].seconds, timed[index].numerics, index))
    limit_s = timed[least].seconds * (1 + found.problem.tie)
    tied = [index for index, one in enumerate(timed) if one.seconds <= limit_s]
    chosen = min(tied, key=lambda index: (simplicity(found.problem, timed[index]), index))
    plan = plan_of(found.problem, kept[chosen], graph)
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
        why_simpler=found.why_simpler,
        alternatives=tuple(
            Alternative(
                str(one.placement),
                one.seconds,
                round(one.peak_bytes),
                round(max(host_bytes(found.problem.cluster, one.meshes, one.combinations))),
                found.why_not(one),
            )
            for one in found.others
        ),
    )


def problem_of(
    flow: Flow | Graph,
    *,
    models: Mapping[str, Any],
    cluster: Cluster | str,
    workload: Workload,
    schedule: Schedule | None = None,
    placement: Placement | str | None = None,
    choices: Choices | None = None,
) -> tuple[Problem, Graph]:
    """What is to be placed, and the graph after pruning and merging. Arguments and errors as of `plan`."""
    graph = flow.graph() if isinstance(flow, Flow) else flow
    if not isinstance(graph, Graph):
        raise ConfigError(f"plan needs a flow (@fr.flow) or a graph; found {type(graph).__name__}")
    problems = find_problems(graph, schedule=schedule or Sync())
    if problems:
        raise CheckError(graph.name, problems)
    optimised, _ = optimise(graph)
    given = {node.name for node in graph.inputs}
    kept = {node.name for node in optimised.inputs if node["kind"] == "weights"}
    heads = _heads(optimised)
    # a model that pruning left without use needs no place; one that the flow does not have is an error further down
    shapes = {
        name: shape_of(source, name, heads.get(name, "lm"))
        for name, source in models.items()
        if name in kept or name not in given
    }
    placed = Cluster.named(cluster) if isinstance(cluster, str) else cluster
    problem = Problem.of(optimised, shapes, placed, workload, schedule=schedule, choices=choices, placement=placement)
    check_placement(problem)
    return problem, optimised


def _heads(graph: Graph) -> dict[str, str]:
    """Model -> head, for the models that give values or scores."""
    found: dict[str, str] = {}
    for node in graph:
        if node.kind in HEADS:
            name = node.source("model")
            while graph[name].kind != "input":
                name = graph[name].inputs[0][1]
            found[name] = HEADS[node.kind]
    return found
