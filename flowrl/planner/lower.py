"""From a placement to a plan: steps with their meshes, their order and the memory they hold, pass by pass."""

from __future__ import annotations

from flowrl.errors import PlanError
from flowrl.graph.drift import code_in
from flowrl.graph.nodes import Graph
from flowrl.planner.draft import Draft
from flowrl.planner.passes.calls import calls
from flowrl.planner.passes.check import run
from flowrl.planner.passes.offload import offload
from flowrl.planner.passes.operators import operators
from flowrl.planner.passes.transfers import transfers
from flowrl.planner.passes.weights import weights
from flowrl.planner.problem import Candidate, Problem
from flowrl.planner.steps import Plan

PASSES = (calls, weights, operators, transfers, offload)
"""In this order: where parked state goes is decided last, when all else that takes time is there."""


def plan_of(problem: Problem, candidate: Candidate, graph: Graph, *, is_exact: bool = True) -> Plan:
    """The plan of a candidate.

    `is_exact`: count handovers box by box. False is quicker with many devices, and the seconds differ by some milliseconds.

    Errors: PlanError when the simulator finds more memory in use than there is at some moment. The search looks at the same
    bytes, so that this is a mistake in the planner.
    """
    draft = lowered(problem, candidate, graph, is_exact=is_exact)
    plan = Plan.of(
        graph.name,
        graph.hash,
        problem.cluster,
        draft.steps,
        resident=draft.resident,
        operator_hashes=code_in(graph),
        max_staleness=problem.schedule.max_staleness,
        meshes=tuple((chr(ord("A") + index), mesh) for index, mesh in enumerate(candidate.meshes)),
        workload=problem.workload,
    )
    excess = plan.simulated()[1].excess(problem.cluster, problem.room_bytes)
    if excess is not None:
        raise PlanError(f"the plan of flow '{graph.name}' as {candidate.placement} would not fit: {excess}")
    return plan


def lowered(problem: Problem, candidate: Candidate, graph: Graph, *, is_exact: bool = True) -> Draft:
    """All passes, each with its check."""
    return run(PASSES, Draft(problem, candidate, graph, is_exact))
