"""FR-W01: an old version of weights is read after a newer one was made, or updated twice, without a declared order.

Weights change in place, and nodes run in the order they were written. The two sides of `fr.after` exclude each other, so
they may both start from one version.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import Problem
from flowrl.graph.checks.facts import Facts, problem
from flowrl.graph.infer import Inference
from flowrl.graph.kinds import KINDS
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.types import WeightsType


def weights_order(facts: Facts) -> Iterator[Problem]:
    for scope in facts.scopes():
        changed_by: dict[str, Node] = {}
        for node in scope.graph:
            for port, source in node.inputs:
                first = changed_by.get(source)
                if first is not None and node.kind != "after" and isinstance(scope.types[source], WeightsType):
                    if not _are_alternatives(scope.graph, first.name, node.name):
                        yield _problem(scope, node, port, source, first)
            if KINDS[node.kind].changes_model:
                changed_by.setdefault(node.source("model"), node)


def _problem(scope: Inference, node: Node, port: str, source: str, first: Node) -> Problem:
    model = scope.weights(source).model
    if port == "model" and KINDS[node.kind].changes_model:
        return problem(
            "FR-W01",
            node,
            f"makes a second next version of '{model}' from the same weights as '{first.name}' at {first.place}",
            f"start from what '{first.name}' returned: {model}_next = fr.{first.kind}(...); fr.{node.kind}({model}_next, ...); "
            "or one update with both losses added",
        )
    return problem(
        "FR-W01",
        node,
        f"reads '{model}' as it was before '{first.name}' at {first.place} changed it",
        f"write this line before '{first.name}', or read the new version: {model}_next = fr.{first.kind}(...)",
    )


def _are_alternatives(graph: Graph, one: str, other: str) -> bool:
    """Whether the two nodes lie on different sides of an `after`."""
    for node in graph:
        if node.kind == "after":
            then, otherwise = graph.ancestors(node.source("then")), graph.ancestors(node.source("otherwise"))
            if (one in then - otherwise and other in otherwise - then) or (
                other in then - otherwise and one in otherwise - then
            ):
                return True
    return False
