"""Losses of reward models: pairs of scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flowrl_operators import losses
from tests.golden.pairs import columns_of_pairs, loss_and_gradient, stacked
from tests.golden.runner import Contract
from tests.golden.vectors import Case


def blocks(case: Case) -> Any:
    """One list, or one per side: all chosen, then all rejected."""
    is_split = "chosen_reward" in case.inputs
    scores = stacked(case, "chosen_reward", "reject_reward")[:, 0] if is_split else torch.tensor(case.array("rewards"))
    value, gradient, metrics = _run(case, scores, np.arange(len(scores)), interleaved=False)
    if np.isfinite(value) and not np.isfinite(case.wanted("loss")):
        return Contract("finite however far apart the scores are", bool(np.isfinite(gradient).all()))
    answer: dict[str, Any] = {"loss": value}
    if is_split:
        half = len(scores) // 2
        answer |= {"grad_chosen": gradient[:half], "grad_rejected": gradient[half:]}
    else:
        answer["grad_rewards"] = gradient
    if "accuracy" in case.outputs:
        answer["accuracy"] = metrics["preference_accuracy"]
    return answer


def nemo(case: Case) -> dict[str, Any]:
    """Pair by pair; pairs of sample_mask 0 are left out."""
    rewards = case.array("rewards")
    kept = np.flatnonzero(case.array("sample_mask") if "sample_mask" in case.inputs else np.ones(len(rewards)))
    value, part, metrics = _run(case, torch.tensor(rewards[kept]), kept, interleaved=True)
    gradient = np.zeros(len(rewards))
    gradient[kept] = part
    return {"loss": value, "grad_rewards": gradient, "accuracy": metrics["preference_accuracy"]}


def _run(
    case: Case, scores: torch.Tensor, kept: np.ndarray, *, interleaved: bool
) -> tuple[float, np.ndarray, dict[str, float]]:
    columns = {"scores": scores, **columns_of_pairs(len(scores), interleaved=interleaved)}
    margin_by = None
    if case.inputs.get("margin") is not None:
        margin_by = "margin"
        margin = torch.tensor(case.array("margin"))
        columns["margin"] = margin.repeat_interleave(2)[kept] if interleaved else margin.repeat(2)
    center = case.params.get("center_rewards_coefficient") or 0.0
    loss = losses.bradley_terry(center=center, margin_by=margin_by)
    return loss_and_gradient(loss, columns, torch.ones(len(scores), 1), "scores")


CONVENTIONS = {"nemo.preference": nemo}

PATTERNS = [
    (r"trl\.pairwise\w*", lambda case, found: blocks(case)),
    (r"openrlhf\.(pairwise\w*|log_exp)", lambda case, found: blocks(case)),
]
