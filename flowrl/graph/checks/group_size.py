"""FR-G02: statistics of a group over fewer rows than they make sense for."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import Problem
from flowrl.graph.checks.facts import Facts, nearest_before, problem
from flowrl.graph.infer import Inference
from flowrl.graph.nodes import Node
from flowrl.graph.operators import OperatorCall


def group_size(facts: Facts) -> Iterator[Problem]:
    for scope, node in facts.nodes("apply"):
        yield from _large_enough(scope, node, node["operator"], node.source("rows"))
    for scope, node in facts.nodes("refill"):
        if node.body is not None:
            yield from _large_enough(scope.bodies[node.name], node, node["keep"], node.body.outputs[0])


def _large_enough(scope: Inference, node: Node, operator: OperatorCall, source: str) -> Iterator[Problem]:
    size = scope.rows(source).group_size
    if operator.locality.key != "prompt_id" or size is None or size >= operator.min_group:
        return
    rollout = nearest_before(scope.graph, source, "rollout")
    call = (
        f"fr.rollout({rollout.source('model')}, {rollout.source('rows')}, n={operator.min_group})"
        if rollout
        else "more responses per prompt"
    )
    at = f" at {rollout.place}" if rollout else ""
    yield problem(
        "FR-G02",
        node,
        f"'{operator.short_name}' compares at least {operator.min_group} responses of a prompt; there "
        f"{'is' if size == 1 else 'are'} {size}",
        f"{call}{at}, or an operator that looks at the whole batch",
    )
