"""What every check looks at: a graph, the types of its edges, and what is known of schedule and models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flowrl.errors import Problem
from flowrl.graph.infer import Inference
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.schedule import Schedule, Sync


@dataclass(frozen=True)
class Facts:
    """Everything known about a graph before it runs."""

    inference: Inference
    schedule: Schedule = field(default_factory=Sync)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """For each input whose model's tokenizer is known, its fingerprint."""

    def scopes(self) -> Iterator[Inference]:
        """The graph and the sub-graphs of its nodes, each with its types."""
        todo = [self.inference]
        while todo:
            scope = todo.pop(0)
            yield scope
            todo.extend(scope.bodies.values())

    def nodes(self, *kinds: str) -> Iterator[tuple[Inference, Node]]:
        """Every node of the given kinds (all when none is named) with the scope it is in."""
        for scope in self.scopes():
            for node in scope.graph:
                if not kinds or node.kind in kinds:
                    yield scope, node


def problem(code: str, node: Node, found: str, fix: str) -> Problem:
    """A problem at the place where a node was written."""
    return Problem(code, node.name, str(node.place), node.place.text, found, fix)


def nearest_before(graph: Graph, name: str, *kinds: str) -> Node | None:
    """The last node of one of the kinds among those that node `name` depends on."""
    before = graph.ancestors(name)
    return next((node for node in reversed(graph.nodes) if node.name in before and node.kind in kinds), None)
