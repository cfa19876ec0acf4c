"""FR-W03: weights are changed, and the new version is neither returned nor used."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import Problem
from flowrl.graph.checks.facts import Facts, problem
from flowrl.graph.kinds import KINDS


def lost_weights(facts: Facts) -> Iterator[Problem]:
    for scope in facts.scopes():
        alive = scope.graph.ancestors(*scope.graph.roots)
        for node in scope.graph:
            if not KINDS[node.kind].changes_model or node.name in alive:
                continue
            model = scope.weights(node.name).model
            if any(KINDS[user.kind].changes_model for user in scope.graph.consumers(node.name)):
                continue  # the last of a chain is reported, not every link
            yield problem(
                "FR-W03",
                node,
                f"makes a new version of '{model}' that '{scope.graph.name}' neither returns nor uses: the change is lost",
                f"return it: {model}_next = fr.{node.kind}({model}, ...); return {model}_next",
            )
