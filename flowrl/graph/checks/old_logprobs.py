"""FR-V03: `old_logprobs` of another model or version than the one the loss compares with.

The ratio of a clipped objective is the updated policy against the one that its pass over the rows began with (or that
sampled them). Log-probabilities of another model, of some other version, of versions mixed by a buffer, or taken again
between the mini-batches make it the ratio of something else, without any error at run time.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import Problem
from flowrl.graph.checks.facts import Facts, nearest_before, problem
from flowrl.graph.infer import Inference
from flowrl.graph.losses import is_live, reads_of
from flowrl.graph.nodes import Node
from flowrl.graph.types import ColumnInfo
from flowrl.schema.columns import Provenance


def old_logprobs(facts: Facts) -> Iterator[Problem]:
    for scope, node in facts.nodes("update"):
        rows = scope.rows(node.source("rows"))
        for read in reads_of(node["loss"]):
            info = rows.columns.get(read.column)
            if info is None or is_live(read) or not (read.column == "old_logprobs" or read.live == "logprobs"):
                continue
            yield from _of_this_policy(scope, node, read.column, info)


def _of_this_policy(scope: Inference, node: Node, column: str, info: ColumnInfo) -> Iterator[Problem]:
    rows, model = scope.rows(node.source("rows")), scope.weights(node.source("model"))
    repeat = nearest_before(scope.graph, node.name, "repeat")
    again = f'fr.logprobs({model.model}, rows, out="{column}")'
    was = info.provenance
    if was is None:
        return  # an operator or a data set wrote it; nothing is known
    if was.model != model.model:
        yield problem(
            "FR-V03",
            node,
            f"'{column}' is of '{was.model}' ('{info.writer}'), and the loss compares '{model.model}' with its own past",
            f"rows = {again}; another model's belong in a column of another name",
        )
    elif was.version is None:
        yield problem(
            "FR-V03",
            node,
            f"'{column}' comes out of a buffer and is of several versions of '{model.model}'; the loss takes it for the current",
            f"rows = {again} after fr.buffer instead of before it",
        )
    elif was not in _right_versions(scope, node):
        yield problem(
            "FR-V03",
            node,
            f"'{column}' is of {was} ('{info.writer}'), and the update starts from {model.provenance}",
            f"compute it with the weights that are updated: rows = {again} right before this line",
        )
    elif repeat is not None and _is_taken_after_repeat(scope, info.writer):
        yield problem(
            "FR-V03",
            node,
            f"'{column}' is computed after '{repeat.name}', so every mini-batch would compare the policy with itself "
            f"({rows.steps} steps)",
            f"move rows = {again} before fr.repeat at {repeat.place}",
        )


def _right_versions(scope: Inference, node: Node) -> tuple[Provenance | None, ...]:
    """The version the update starts from, and the one that sampled: both give an honest ratio."""
    return scope.weights(node.source("model")).provenance, scope.rows(node.source("rows")).sampled_by


def _is_taken_after_repeat(scope: Inference, writer: str) -> bool:
    return writer in scope.graph and scope.graph[writer].kind == "logprobs" and scope.rows(writer).steps > 1
