"""FR-W02: token ids made with one model's tokenizer are given to a model with another one."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import Problem
from flowrl.graph.checks.facts import Facts, problem
from flowrl.graph.infer import Inference
from flowrl.graph.kinds import KINDS
from flowrl.graph.nodes import Node


def tokenizers(facts: Facts) -> Iterator[Problem]:
    known = facts.fingerprints
    for scope, node in facts.nodes():
        if not KINDS[node.kind].uses_model or node.kind == "refill":
            continue
        rows = scope.rows(node.source("rows"))
        if node.kind == "rollout" and (rows.is_input or "prompt_ids" not in rows.columns):
            continue  # its prompts are text, which it encodes itself
        model = scope.weights(node.source("model")).model
        maker = rows.token_model or _encoder(scope, node)
        if known.get(maker) and known.get(model) and known[maker] != known[model]:
            yield problem(
                "FR-W02",
                node,
                f"gives token ids of '{maker}' (rows of '{rows.tokens}') to '{model}', whose tokenizer is another one: the same "
                "id is another text there",
                f"hand over text: fr.rollout({model}, fr.prompts_from(rows, your_prompt), temperature=0.0) and an operator that "
                f"reads the answer; or take a '{model}' with the tokenizer of '{maker}'",
            )


def _encoder(scope: Inference, node: Node) -> str:
    """The model that encodes a data set's text: the first one on the way that reads its tokens. Empty when none did."""
    found = ""
    while node.kind != "input" and node.sources("rows"):
        node = scope.graph[node.sources("rows")[0]]
        if KINDS[node.kind].is_forward:
            found = scope.weights(node.source("model")).model
    return found
