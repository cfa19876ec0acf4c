"""FR-G01: something needs whole groups, and the rows were split before without keeping the groups together."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import Problem
from flowrl.graph.checks.facts import Facts, problem
from flowrl.graph.infer import Inference
from flowrl.graph.nodes import Node
from flowrl.graph.types import RowsType

WITHIN = {"pair_id": ("prompt_id",), "sample_id": ("prompt_id", "pair_id")}
"""Keys whose groups lie inside the groups of others: keeping a prompt's rows together keeps its pairs together."""


def groups(facts: Facts) -> Iterator[Problem]:
    for scope, node in facts.nodes("apply", "update", "refill"):
        for key, what, rows in _needs(scope, node):
            for splitter, kept in rows.splits:
                if kept != key and kept not in WITHIN.get(key, ()):
                    yield _problem(scope, node, key, what, splitter, kept)


def _needs(scope: Inference, node: Node) -> Iterator[tuple[str, str, RowsType]]:
    """(key, what needs it, rows it sees) of everything in a node that must see whole groups."""
    if node.kind == "apply" and node["operator"].locality.key:
        yield node["operator"].locality.key, node["operator"].short_name, scope.rows(node.source("rows"))
    elif node.kind == "update" and (key := node["loss"].group_key()):
        terms = [t.short_name for t in node["loss"].terms() if t.locality.key]
        yield key, terms[0], scope.rows(node.source("rows"))
    elif node.kind == "refill" and node["keep"].locality.key and node.body is not None:
        yield node["keep"].locality.key, node["keep"].short_name, scope.bodies[node.name].rows(node.body.outputs[0])


def _problem(scope: Inference, node: Node, key: str, what: str, splitter: str, kept: str) -> Problem:
    split = scope.graph[splitter] if splitter in scope.graph else None
    at = f" at {split.place}" if split is not None else ""
    call = {"buffer": f'fr.buffer(rows, ..., by="{key}")', "repeat": f'fr.repeat(rows, ..., by="{key}")'}
    fix = call.get(split.kind if split is not None else "", f'by="{key}"')
    how = f"keeps '{kept}' together only" if kept else "takes rows one by one"
    return problem(
        "FR-G01",
        node,
        f"'{what}' needs all rows of equal '{key}' together; '{splitter}'{at} splits them before and {how}",
        f"{fix}, or move '{what}' before it",
    )
