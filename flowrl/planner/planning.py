"""Plan a flow: from a graph, models, a cluster and a workload to the plan that a runtime executes.

Example:
    plan = fr.plan(grpo(group_size=8), models={"policy": "Qwen/Qwen2.5-7B", "ref": "Qwen/Qwen2.5-7B"}, cluster="8xA100-80G",
                   workload=fr.Workload(128, fr.Lengths.fixed(512), fr.Lengths.lognormal(1024, 0.6, cap=4096)))
    print(plan)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, Never

from flowrl.errors import CheckError, ConfigError, PlanError
from flowrl.graph.checks import find_problems
from flowrl.graph.flows import Flow
from flowrl.graph.nodes import Graph
from flowrl.graph.passes import optimise
from flowrl.graph.schedule import Async, Schedule, Sync
from flowrl.mesh import Cluster
from flowrl.mesh.placement import Placement
from flowrl.planner.chosen import plan_found
from flowrl.planner.offered import check_degrees, check_placement
from flowrl.planner.options import Choices
from flowrl.planner.problem import TIE, Effort, Problem
from flowrl.planner.relax import explain
from flowrl.planner.roles import model_of
from flowrl.planner.schedules import schedule_of
from flowrl.planner.search import search
from flowrl.planner.shapes import shape_of
from flowrl.planner.steps import Plan
from flowrl.planner.workload import Workload
from flowrl.schema.columns import nearest
from flowrl.schema.fields import shown

__all__ = ["plan", "plan_found", "problem_of"]

MOST_NODES = 256
"""Of a cluster for which a plan is made: a search for 125 takes about a minute, for as many as these some minutes."""

MOST_PER_NODE = 128
"""Devices of a node for which a plan is made; the largest that are sold have 72."""

HEADS = {"values": "value", "score": "reward"}
"""Kind of a node to the head that its model needs."""

ARGUMENTS: dict[str, tuple[tuple[type, ...], str]] = {
    "models": ((Mapping,), "a dict from each model of the flow to its name, config or shape"),
    "cluster": ((Cluster, str), 'a Cluster or the name of one ("8xA100-80G")'),
    "workload": ((Workload,), "a Workload"),
    "schedule": ((Sync, Async, str, NoneType), 'Sync(), Async(max_staleness=1) or their text ("sync", "async:1")'),
    "placement": ((Placement, str, NoneType), 'a Placement or its text ("gen:d4t2 | ...")'),
    "choices": ((Choices, NoneType), "Choices"),
    "tie": ((int, float), "a part, 0.02,"),
    "effort": ((Effort, NoneType), "an Effort"),
}
"""Of `plan`: the kinds that each may have, and how they are called in errors."""


def plan(
    flow: Flow | Graph,
    *,
    models: Mapping[str, Any],
    cluster: Cluster | str,
    workload: Workload,
    schedule: Schedule | str | None = None,
    placement: Placement | str | None = None,
    choices: Choices | None = None,
    tie: float = TIE,
    effort: Effort | None = None,
    **configuration: Never,
) -> Plan:
    """The best plan of a flow on a cluster under the cost model. Nothing is loaded and nothing runs.

    Args:
        flow: a flow (its default configuration) or a graph: `grpo(group_size=4)`.
        models: for each model of the flow a name or a path, a config (object or dict), an `fr.Model` or a `ModelShape`.
        cluster: a `Cluster`, the name of one ("8xA100-80G"), or its file ("cluster.toml").
        workload: how many prompts, and how long prompts and responses are.
        schedule: `Sync()`, `Async(max_staleness=k)`, or their text: "sync", "async:1".
        placement: what goes where, whole or in part: "gen:d4t2 | (policy:f8 + ref:f8)", or a `Placement`; "..." is left to the
            planner.
        choices: what the planner may choose from, and its calibrated numbers.
        tie: plans that differ by no more than this part are equal, and the simplest of them is taken; 0: the fastest.
        effort: how far the search goes, counted and never timed, so that equal problems have equal plans on every machine.

    Errors: CheckError with all problems of the flow; ConfigError for an argument of another kind, for models, a cluster or a
    workload that make no sense, and for a placement that names roles the flow does not have or leaves some out, needs more
    devices or other slices than there are, or gives a role a layout that it never has; TextError for a placement that cannot be
    read, with the place in its text; PlanError (FR-P01) when nothing fits, with the memory that is short and what would fit.
    """
    if configuration:
        name = next(iter(configuration))
        value: object = configuration[name]
        raise ConfigError(
            f"plan takes no '{name}'; {nearest(name, ARGUMENTS)}. Configuration of the flow is given to the flow: "
            f"fr.plan(flow({name}={value!r}), ...)"
        )
    problem, graph = problem_of(
        flow,
        models=models,
        cluster=cluster,
        workload=workload,
        schedule=schedule,
        placement=placement,
        choices=choices,
        tie=tie,
        effort=effort,
    )
    found = search(problem)
    if found.best is None:
        raise PlanError(str(explain(problem, graph)))
    return plan_found(found, graph)


def problem_of(
    flow: Flow | Graph,
    *,
    models: Mapping[str, Any],
    cluster: Cluster | str,
    workload: Workload,
    schedule: Schedule | str | None = None,
    placement: Placement | str | None = None,
    choices: Choices | None = None,
    tie: float = TIE,
    effort: Effort | None = None,
) -> tuple[Problem, Graph]:
    """What is to be placed, and the graph after pruning and merging. Arguments and errors as of `plan`."""
    given = {"models": models, "cluster": cluster, "workload": workload, "schedule": schedule, "placement": placement,
             "choices": choices, "tie": tie, "effort": effort}  # fmt: skip
    for name, value in given.items():
        kinds, needed = ARGUMENTS[name]
        if not isinstance(value, kinds):
            raise ConfigError(f"plan needs {needed} as {name}; found {shown(value)} ({type(value).__name__})")
    for name in models:
        if not isinstance(name, str):
            raise ConfigError(f"plan needs models by the names of the flow's inputs; found {shown(name)}")
    graph = flow.graph() if isinstance(flow, Flow) else flow
    if not isinstance(graph, Graph):
        raise ConfigError(f"plan needs a flow (@fr.flow) or a graph; found {type(graph).__name__}")
    schedule = schedule_of(schedule)
    problems = find_problems(graph, schedule=schedule or Sync())
    if problems:
        raise CheckError(graph.name, problems)
    optimised, _ = optimise(graph)
    inputs = {node.name for node in graph.inputs}
    kept = {node.name for node in optimised.inputs if node["kind"] == "weights"}
    heads = _heads(optimised)
    # a model that pruning left without use needs no place; one that the flow does not have is an error further down
    shapes = {
        name: shape_of(source, name, heads.get(name, "lm"))
        for name, source in models.items()
        if name in kept or name not in inputs
    }
    placed = Cluster.of(cluster) if isinstance(cluster, str) else cluster.check_units()
    if placed.nodes > MOST_NODES:
        raise ConfigError(
            f"plans are made for clusters of up to {MOST_NODES} nodes, because the search takes longer with each node; found "
            f"{placed.nodes:,}. Plan for a part of the cluster"
        )
    if placed.devices_per_node > MOST_PER_NODE:
        raise ConfigError(
            f"plans are made for nodes of up to {MOST_PER_NODE} devices, because each number of them is looked at; found "
            f"{placed.devices_per_node:,}. Plan for a part of the cluster"
        )
    problem = Problem.of(
        optimised,
        shapes,
        placed,
        workload,
        schedule=schedule,
        choices=choices,
        placement=placement,
        tie=tie,
        effort=effort,
    )
    check_placement(problem)
    check_degrees(problem)
    return problem, optimised


def _heads(graph: Graph) -> dict[str, str]:
    """Model -> head, for the models that give values or scores."""
    found: dict[str, str] = {}
    for node in graph:
        if node.kind in HEADS:
            found[model_of(graph, node.source("model"))] = HEADS[node.kind]
    return found
