"""Pass: compute equal things once.

Two nodes with the same inputs and parameters that are functions of them become one. Two forwards of one version of a model
over the same tokens become one forward and a copy of its column, whatever the two columns are called.
"""

from __future__ import annotations

from dataclasses import replace

from flowrl.graph.infer import Inference, infer
from flowrl.graph.kinds import KINDS
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.passes.note import Note
from flowrl.graph.written import written_by


def merge(graph: Graph) -> tuple[Graph, tuple[Note, ...]]:
    """The graph with equal pure nodes and equal forwards merged."""
    notes: list[Note] = []
    return _merge(infer(graph), notes), tuple(notes)


def _merge(scope: Inference, notes: list[Note]) -> Graph:
    graph = scope.graph
    instead: dict[str, str] = {}
    seen: dict[object, str] = {}
    forwards: dict[object, list[Node]] = {}
    nodes: list[Node] = []
    for original in graph:
        node = original.renamed({**instead, original.name: original.name})
        if node.name in scope.bodies:
            node = replace(node, body=_merge(scope.bodies[node.name], notes))
        kind = KINDS[node.kind]
        if kind.is_pure or kind.is_forward:
            key = (node.kind, node.inputs, node.params, node.body)
            same = seen.setdefault(key, node.name)
            if same != node.name and node.name not in graph.roots:
                instead[node.name] = same
                notes.append(Note("merge", node.name, f"'{node.name}' is the same as '{same}': computed once"))
                continue
        if kind.is_forward:
            node = _copied(scope, node, forwards, instead, notes)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _copied(
    scope: Inference, node: Node, forwards: dict[object, list[Node]], instead: dict[str, str], notes: list[Note]
) -> Node:
    """`node` itself, or the copy of an equal forward's column that its rows carry already."""
    rows = scope.rows(scope.graph[node.name].source("rows"))
    read = ("prompt_ids", "response_ids", "temperature")
    written = tuple(instead.get(w, w) for w in (rows.columns[c].writer if c in rows.columns else "" for c in read))
    params = tuple((name, value) for name, value in node.params if name != "out")
    # the same weights, the same rows with the same tokens at the same temperature, the same settings
    key = (node.kind, node.source("model"), rows.rowset, rows.tokens, written, params)
    for first in forwards.get(key, ()):
        old, new = written_by(first), written_by(node)
        is_there = all(
            c in rows.columns and instead.get(rows.columns[c].writer, rows.columns[c].writer) == first.name for c in old
        )
        if is_there and old != new:
            notes.append(Note("merge", node.name, f"'{node.name}' equals '{first.name}': copied, not computed again"))
            columns = tuple(zip(new, old, strict=True))
            return Node(node.name, "copy", (("rows", node.source("rows")),), (("columns", columns),), None, node.place)
    forwards.setdefault(key, []).append(node)
    return node
