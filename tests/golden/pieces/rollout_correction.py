"""Weights and masks from the log-probabilities of sampler and trainer, alone."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from flowrl_operators import masks
from flowrl_operators.importance import importance_weights
from tests.golden.guards import ADDED
from tests.golden.runner import Contract, Where
from tests.golden.vectors import Case, matrix, ragged


def bounds_of(spec: Any) -> tuple[float | None, float]:
    """("0.5_2.0" or 2.0) as (low, high)."""
    low, _, high = str(spec).rpartition("_")
    return (float(low) if low else None), float(high)


def verl_weights(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    low, high = bounds_of(p["rollout_is_threshold"])
    inside = case.array("response_mask") > 0
    weights = matrix(
        importance_weights(
            ragged(case.array("train_log_prob")),
            ragged(case.array("rollout_log_prob")),
            ragged(inside),
            low=low or 0.0,
            high=high,
            outside="truncate" if low is None else "zero",
            level=p["rollout_is"],
            normalise=p["rollout_is_batch_normalize"],
        )
    )
    if "raises" in case.outputs:
        why = "nothing is left to weigh: weights are 0 and training goes on" if inside.any() else "no token: no weight"
        return Contract(why, not weights.any())
    if p["rollout_is_batch_normalize"]:
        weights = weights * mean_over_padded_mean(weights, inside, p["rollout_is"])
    return {"weights": Where(weights, inside), "mask": inside.astype(float)}


def mean_over_padded_mean(weights: np.ndarray, inside: np.ndarray, level: str) -> float:
    # verl's mean divides by count + 1e-8: over all tokens, or within each row before the mean over rows
    count = inside.sum(1) if level == "sequence" else inside.sum(keepdims=True).reshape(-1)
    sums = weights.sum(1) if level == "sequence" else weights.sum(keepdims=True).reshape(-1)
    sums, count = sums[count > 0], count[count > 0]
    return float((sums / count).sum() / max((sums / (count + ADDED)).sum(), np.finfo(float).tiny))


def verl_rejection(case: Case, found: re.Match[str]) -> Any:
    mask = case.array("response_mask")
    if "rollout_log_prob" in case.inputs:
        old, rollout = case.array("train_log_prob"), case.array("rollout_log_prob")
    else:
        old = case.array("log_ratio_train_minus_rollout")
        rollout = np.zeros_like(old)
    options = [option.strip() for option in case.params["rollout_rs"].split(",")]
    specs = str(case.params["rollout_rs_threshold"]).split(",")
    kept = mask > 0
    for option, spec in zip(options, specs * len(options) if len(specs) == 1 else specs, strict=False):
        kept = kept & rejection(old, rollout, mask, option, spec)
    if "raises" in case.outputs:
        return Contract("no token: nothing to reject", holds=not mask.any() and not kept.any())
    return {"mask": kept.astype(float)}


def rejection(old: np.ndarray, rollout: np.ndarray, mask: np.ndarray, option: str, spec: str) -> np.ndarray:
    """[rows, columns] bool: what one of verl's options keeps, e.g. `seq_mean_k1` with `0.9_1.1`."""
    level, _, statistic = option.rpartition("_")
    over = level.removeprefix("seq_")
    low, high = bounds_of(spec)
    direction = "from_rollout"
    if option == "binary_kl":
        over, statistic, direction = "token", "binary_kl", "both"
    if statistic == "k1":  # its bounds are ratios of sampler to trainer; one bound stands for both sides
        low, high = np.log(1 / high if low is None else low), np.log(high)
    kept = masks.drift(
        ragged(old),
        ragged(rollout),
        ragged(mask > 0),
        statistic=statistic,
        direction=direction,
        over=over,
        low=low,
        high=high,
    )
    return matrix(kept)


def trl_ratio(case: Case, found: re.Match[str]) -> Any:
    p = case.params
    level, _, outside = p["mode"].partition("_")
    inside = case.array("mask") > 0
    weights = matrix(
        importance_weights(
            ragged(case.array("train_log_prob")),
            ragged(case.array("rollout_log_prob")),
            ragged(inside),
            low=p["clip_min"] or 0.0,
            high=p["clip_max"],
            outside="truncate" if outside == "truncate" else "zero",
            level=level,
            normalise=False,
            log_ratio_clip=None,
            unknown="extreme",
        )
    )
    if "raises" in case.outputs:
        unbounded = p["clip_min"] is None and p["clip_max"] is None
        return Contract("without bounds weights are the ratios", holds=unbounded and bool(weights[inside].all()))
    if level == "sequence":  # a number per row, which ours has at each of its tokens
        weights, inside = weights.max(1, keepdims=True), inside.any(1, keepdims=True)
    return {"importance_sampling_ratio": Where(weights, inside)}


def second_moment(case: Case) -> Any:
    kept = masks.second_moment(
        ragged(case.array("prox_log_probs")),
        ragged(case.array("old_log_probs")),
        ragged(case.array("mask") > 0),
        threshold=case.params["m2_threshold"],
    )
    return {"mask": matrix(kept).astype(float)}


CONVENTIONS = {"areal.m2po_mask": second_moment}

PATTERNS = [
    (r"verl\.is_(token|sequence)_.*", verl_weights),
    (r"verl\.rs_.*", verl_rejection),
    (r"trl\.vllm_is_(token|sequence)_(truncate|mask)_.*", trl_ratio),
]

UNANSWERED = dict.fromkeys(
    (
        *(f"rollout_corr/rollout_is_{name}" for name in ("max", "min", "mean", "std", "eff_sample_size", "oob_ratio")),
        "rollout_corr/rollout_is_batch_norm_factor",
        *(f"rollout_corr/{name}" for name in ("training_ppl", "kl", "k3_kl", "rollout_ppl", "log_ppl_diff")),
        *(f"rollout_corr/{name}" for name in ("chi2_token", "chi2_seq")),
        "rollout_rs_masked_fraction",
        "rollout_rs_seq_masked_fraction",
    ),
    "a figure to log",
)
