"""Pass: leave out what nobody needs: columns that are read by nobody, nodes that lead nowhere, models without work.

A coefficient of 0 makes a loss term vanish while the flow is traced; then nobody reads the reference's log-probabilities,
their node is idle, and the reference model is never loaded.
"""

from __future__ import annotations

from dataclasses import replace

from flowrl.graph.infer import infer
from flowrl.graph.kinds import KINDS
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.passes.needs import Needs, needs_of
from flowrl.graph.passes.note import Note

KEPT_INPUT = "prompts"
"""The input of a sub-graph that stands for its prompts; it stays whether or not the sub-graph reads it."""


def prune(graph: Graph) -> tuple[Graph, tuple[Note, ...]]:
    """The graph without idle nodes, without nodes that nothing depends on, and without inputs that nobody uses."""
    notes: list[Note] = []
    pruned = _prune(needs_of(infer(graph)), notes, is_body=False)
    return pruned, tuple(notes)


def _prune(needs: Needs, notes: list[Note], *, is_body: bool) -> Graph:
    graph = needs.scope.graph
    instead: dict[str, str] = {}
    nodes: list[Node] = []
    for node in graph:
        if needs.is_idle(node):
            source = node.sources("rows")[0]
            instead[node.name] = instead.get(source, source)
            notes.append(Note("prune", node.name, _idle_text(node)))
        else:
            nodes.append(_narrowed(node, needs, notes).renamed({**instead, node.name: node.name}))
    rest = Graph(
        graph.name,
        tuple(nodes),
        tuple(instead.get(n, n) for n in graph.outputs),
        tuple(instead.get(n, n) for n in graph.effects),
    )
    alive = rest.ancestors(*rest.roots)
    for node in rest:
        if node.name not in alive and not (is_body and node.name == KEPT_INPUT):
            notes.append(Note("prune", node.name, _dead_text(node, is_body)))
    kept = tuple(n for n in rest if n.name in alive or (is_body and n.name == KEPT_INPUT))
    return replace(rest, nodes=kept)


def _narrowed(node: Node, needs: Needs, notes: list[Note]) -> Node:
    """The node without the parts of it that nobody needs."""
    asked = needs.rows.get(node.name, frozenset())
    if node.name in needs.bodies:
        body = _prune(needs.bodies[node.name], notes, is_body=True)
        inputs = tuple((port, source) for port, source in node.inputs if port == "rows" or source in body)
        return replace(node, body=body, inputs=inputs)
    if node.name not in needs.rows:
        return node
    if node.kind == "select":
        columns = tuple(name for name in node["columns"] if name in asked)
        return node.with_params(
            columns=columns, renamed=tuple((new, old) for new, old in node["renamed"] if new in asked)
        )
    if node.kind in ("with_columns", "copy"):
        return node.with_params(columns=tuple((name, value) for name, value in node["columns"] if name in asked))
    return node


def _idle_text(node: Node) -> str:
    out = node.get("out")
    what = f"'{out}'" if isinstance(out, str) and node.kind != "top_logprobs" else f"what '{node.name}' writes"
    return f"{what} is read by nobody: not computed"


def _dead_text(node: Node, is_body: bool) -> str:
    if node.kind == "input":
        if is_body:
            return f"'{node.name}' is not used inside the sub-graph"
        return f"'{node.name}' is not loaded" if node["kind"] == "weights" else f"'{node.name}' is not read"
    if KINDS[node.kind].changes_model:
        return f"'{node.name}' makes weights that nobody uses: not run"
    return f"'{node.name}' leads to nothing that the flow returns: not run"
