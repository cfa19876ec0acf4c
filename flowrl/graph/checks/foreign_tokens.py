"""FR-M01: a loss that is right only on tokens the policy sampled would train on others."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import Problem
from flowrl.graph.checks.facts import Facts, nearest_before, problem
from flowrl.graph.infer import Inference
from flowrl.graph.losses import Term
from flowrl.graph.nodes import Node


def foreign_tokens(facts: Facts) -> Iterator[Problem]:
    for scope, node in facts.nodes("update"):
        terms = [term for term in node["loss"].terms() if term.on_policy]
        if terms:
            yield from _sampled_by_it(scope, node, terms[0])
            yield from _masked(scope, node, terms[0])


def _sampled_by_it(scope: Inference, node: Node, term: Term) -> Iterator[Problem]:
    """The model that is updated must have sampled the rows."""
    rows, model = scope.rows(node.source("rows")), scope.weights(node.source("model"))
    sampled = rows.sampled_by
    if sampled is not None and sampled.model == model.model:
        return
    if sampled is not None:
        who = f"'{sampled.model}' sampled these rows"
    elif rows.is_input:
        who = f"these rows come from the data set '{rows.rowset}'"
    else:
        who = f"no single model sampled the rows of '{rows.rowset}'"
    yield problem(
        "FR-M01",
        node,
        f"'{term.short_name}' is right only on tokens that '{model.model}' sampled; {who}",
        f"rows = fr.rollout({model.model}, prompts, n=8) for this update, or a loss for given text, e.g. loss=losses.sft()",
    )


def _masked(scope: Inference, node: Node, term: Term) -> Iterator[Problem]:
    """Tokens that an environment wrote stay out: the mask is the rollout's own, or a part of it."""
    rows = scope.rows(node.source("rows"))
    mask = node.get("mask", "loss_mask")
    info = rows.columns.get(mask)
    if not rows.has_foreign_tokens or info is None or info.is_copy_of == "loss_mask":
        return
    rollout = nearest_before(scope.graph, node.name, "rollout")
    where = (
        f" (environment of '{rollout.name}' at {rollout.place})"
        if rollout is not None and rollout.get("environment")
        else ""
    )
    narrowed = f'rows = rows.with_columns({mask if mask.isidentifier() else "mask"}=rows["loss_mask"] & rows["{mask}"])'
    yield problem(
        "FR-M01",
        node,
        f"trains '{term.short_name}' where '{mask}' is true ('{info.writer}' writes it), which may hold tokens of tools"
        f"{where} that the policy never sampled",
        f'mask="loss_mask", the rollout\'s own; or narrow it: {narrowed}' if mask != "loss_mask"
        else 'narrow the rollout\'s own mask: rows.with_columns(loss_mask=rows["loss_mask"] & rows["keep"])',
    )  # fmt: skip
