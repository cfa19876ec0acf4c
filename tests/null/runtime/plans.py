"""Plans written by hand, so that the runtime is tested without the planner's search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import flowrl as fr
from flowrl.graph.drift import code_in
from flowrl.graph.kinds import KINDS
from flowrl.graph.passes import optimise
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.steps import Plan, Predicted, Step
from flowrl.planner.tasks import Lane, StepKind

ONE = Mesh(0, 1)


def calls(graph: fr.Graph, prefix: str = "") -> Iterator[str]:
    """Nodes that run a model, as plans call them."""
    for node in graph:
        if node.body is not None:
            yield from calls(node.body, f"{prefix}{node.name}.")
        elif KINDS[node.kind].uses_model:
            yield prefix + node.name


def compute(node: str, seconds: float = 0.5, *, mesh: Mesh = ONE, **settings: Any) -> Step:
    return Step(
        node, node, StepKind.COMPUTE, mesh, (Lane.COMPUTE,), Predicted(seconds), layout=Layout(dp=mesh.size),
        settings=tuple(settings.items()),
    )  # fmt: skip


def move(kind: StepKind, name: str, node: str, *reads: str) -> Step:
    return Step(name, node, kind, ONE, (Lane.COMPUTE,), Predicted(0.001), reads=reads)


def plan_of(flow: fr.Flow | fr.Graph, steps: Sequence[Step | str] | None = None, **fields: Any) -> Plan:
    """A plan of these steps in this order; a name stands for its compute step. Nodes of models without a step come first, as the
    flow has them, unless no step is wanted: []."""
    graph, _ = optimise(flow if isinstance(flow, fr.Graph) else flow.graph())
    given_steps = [compute(one) if isinstance(one, str) else one for one in steps or ()]
    named = {step.node for step in given_steps if step.kind is StepKind.COMPUTE}
    others = [] if steps == [] else [compute(one) for one in calls(graph) if one not in named]
    made = [*others, *given_steps]
    given = {"operator_hashes": code_in(graph), "cluster": Cluster.named("8xA100-80G"), **fields}
    cluster = given.pop("cluster")
    return Plan.of(graph.name, graph.hash, cluster, made, order=[step.name for step in made], **given)


def numbers(run: fr.Run) -> list[dict[str, str]]:
    """A run's metrics without times, exactly."""
    return [
        {name: repr(value) for name, value in step.items() if not name.startswith("time/") and name != "tokens_per_s"}
        for step in run.metrics
    ]
