"""Edits of graphs: a part of one, or one with other names. The graph given stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowrl.errors import ConfigError
from flowrl.graph.nodes import Graph
from flowrl.graph.written import written_by
from flowrl.schema.columns import nearest


def slice_until(graph: Graph, until: str) -> Graph:
    """The part of a graph that computes node `until`, which becomes its only output.

    Args:
        until: a node's name, or a column's: then the last node that writes it.

    Effects (logs, evaluations) stay where all they depend on is in the part.

    Errors: ConfigError with the nearest node and column names.
    """
    target = until if until in graph else _last_writer(graph, until)
    kept = graph.ancestors(target)
    effects = []
    for name in graph.effects:
        # an effect is no ancestor of anything, so it is kept when nothing but itself would be added
        if graph.ancestors(name) - {name} <= kept and name != target:
            effects.append(name)
            kept |= {name}
    nodes = tuple(node for node in graph if node.name in kept)
    return Graph(graph.name, nodes, (target,), tuple(effects))


def _last_writer(graph: Graph, column: str) -> str:
    writers = [node.name for node in graph if column in written_by(node)]
    if not writers:
        known = [*(node.name for node in graph), *(c for node in graph for c in written_by(node))]
        raise ConfigError(f"flow '{graph.name}' has no node and no column '{column}'; {nearest(column, known)}")
    return writers[-1]


def rename(graph: Graph, names: Mapping[str, str]) -> Graph:
    """A graph with nodes renamed, e.g. `{"policy": "actor"}`; sub-graphs follow, and random streams follow the names.

    Errors: ConfigError for a name that no node has (with the nearest), and for two nodes that would share a name.
    """
    known = [node.name for node in graph]
    for old in names:
        if old not in graph:
            raise ConfigError(f"flow '{graph.name}' has no node '{old}' to rename; {nearest(old, known)}")
    owner: dict[str, str] = {}
    for old in known:
        new = names.get(old, old)
        if not new:
            raise ConfigError(f"node '{old}' cannot be renamed to an empty name")
        if new in owner:
            raise ConfigError(
                f"nodes '{owner[new]}' and '{old}' would both be called '{new}'; give one of them another name"
            )
        owner[new] = old
    nodes = []
    for node in graph:
        made = node.renamed(names)
        if node.body is not None:
            made = replace(
                made, body=_captured(node.body, names, {source for port, source in node.inputs if port != "rows"})
            )
        nodes.append(made)
    outputs = tuple(names.get(name, name) for name in graph.outputs)
    return Graph(graph.name, tuple(nodes), outputs, tuple(names.get(name, name) for name in graph.effects))


def _captured(body: Graph, names: Mapping[str, str], captured: set[str]) -> Graph:
    """A sub-graph reads nodes around it by their names, so its inputs are renamed with them."""
    inner = {old: new for old, new in names.items() if old in captured and old in body}
    for old, new in inner.items():
        if new in body and new not in inner:
            raise ConfigError(f"'{old}' cannot be called '{new}': the sub-graph '{body.name}' has a node of that name")
    return rename(body, inner) if inner else body
