"""FR-V01: the schedule or the graph makes log-probabilities or a correction necessary, and the graph lacks them."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import Problem
from flowrl.graph.checks.facts import Facts, nearest_before, problem
from flowrl.graph.infer import Inference
from flowrl.graph.losses import Term, is_live, reads_of, told, uncorrected
from flowrl.graph.nodes import Node


def needed_logprobs(facts: Facts) -> Iterator[Problem]:
    for scope, node in facts.nodes("update"):
        yield from _fixed_before_steps(scope, node)
        yield from _corrected(facts, scope, node)


def _fixed_before_steps(scope: Inference, node: Node) -> Iterator[Problem]:
    """Several steps on the same rows compare with log-probabilities taken before the first of them.

    Taken live at each step, the ratio would be 1 at every step and clipping would never act.
    """
    rows, model = scope.rows(node.source("rows")), scope.weights(node.source("model"))
    for read in reads_of(node["loss"]):
        if is_live(read) or not read.live or read.column in rows.columns:
            continue
        add = f'rows = fr.logprobs({model.model}, rows, out="{read.column}")'
        repeat = nearest_before(scope.graph, node.name, "repeat")
        sampled = rows.sampled_by
        if rows.steps > 1 and repeat is not None:
            yield problem(
                "FR-V01",
                node,
                f"takes {rows.steps} steps over the same rows ('{repeat.name}'), and nothing writes '{read.column}': the loss "
                "would compare the policy with itself at every step, and clipping would never act",
                f"{add} before fr.repeat at {repeat.place}",
            )
        elif (
            sampled is not None
            and sampled.model == model.model
            and sampled.version is not None
            and sampled.version < model.version
        ):
            yield problem(
                "FR-V01",
                node,
                f"updates '{model.model}' for the {model.version + 1}. time on rows that {sampled} sampled, and nothing writes "
                f"'{read.column}': the loss would take the newer policy for the one that sampled",
                f"{add} before '{model.node}' updates '{model.model}'",
            )


def _corrected(facts: Facts, scope: Inference, node: Node) -> Iterator[Problem]:
    """Rows of other versions than the one trained need a loss that corrects for it."""
    rows, model = scope.rows(node.source("rows")), scope.weights(node.source("model"))
    if rows.sampled_by is None or rows.sampled_by.model != model.model:
        return  # FR-M01 speaks about these
    stale = facts.schedule.max_staleness
    for term in uncorrected(node["loss"]):
        if rows.is_mixed and term.max_staleness is not None:
            why = f"the rows mix versions of '{model.model}'{_mixed_by(scope, node)}"
        elif term.max_staleness is not None and stale > term.max_staleness:
            why = f"the schedule lets rows be up to {stale} version{'s' if stale > 1 else ''} old"
        else:
            continue
        yield problem(
            "FR-V01",
            node,
            f"{why}, and '{term.short_name}' takes them for the current policy's",
            f"multiply by a correction, which reads 'rollout_logprobs': loss={_call(term)} * losses.truncated_importance(2.0)",
        )


def _mixed_by(scope: Inference, node: Node) -> str:
    mixer = nearest_before(scope.graph, node.name, "buffer", "concat")
    return f" ('{mixer.name}' at {mixer.place})" if mixer is not None else ""


def _call(term: Term) -> str:
    return f"losses.{term.short_name}({', '.join(f'{name}={value!r}' for name, value in told(term))})"
