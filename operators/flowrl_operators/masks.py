"""Operators that take tokens out of the loss mask, so that they count neither in a loss nor in what it is divided by.

A loss term that multiplies with 0 (`losses.within_drift`) keeps the tokens in the count; these do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators._drift import ArrayRows, check_within, within
from flowrl_operators.filters import staleness, versions

__all__ = ["drift", "scored", "second_moment", "stale"]

LOSS_MASK = {"loss_mask": fr.TOKEN.bool}


@fr.operator(writes=LOSS_MASK, replaces=True, narrows="loss_mask")
def drift(
    old_logprobs: fr.TOKEN.f32,
    rollout_logprobs: fr.TOKEN.f32,
    loss_mask: fr.TOKEN.bool,
    *,
    low: float | None = None,
    high: float | None = None,
    statistic: str = "ratio",
    direction: str = "from_rollout",
    over: str = "token",
    log_ratio_clip: float | None = 20.0,
    unknown: str = "drop",
):
    """Keep the tokens of `loss_mask` at which sampler and trainer are close; l = old_logprobs - rollout_logprobs, r = exp(l).

    Rejection sampling between sampler and trainer ("When Speed Kills Stability", Liu et al., 2025; verl's `rollout_rs`).
    A second one after it judges the rows by the tokens that the first one left; to judge all by the same tokens, write two
    columns (`out=`) and narrow by both.

    Args:
        low, high: the statistic must lie within these, bounds included; None for no bound.
        statistic: `"ratio"` r; or how far apart the two are at the token drawn, with o = old_logprobs, q = rollout_logprobs:
            estimators of KL(q || o) `"k1"` -l, `"k2"` l^2 / 2, `"k3"` r - 1 - l; `"tv"` |exp(o) - exp(q)|; `"binary_kl"`
            KL(q || o) of "this token or any other".
        direction: `"from_rollout"` KL(q || o) (verl, OpenRLHF); `"from_old"` KL(o || q), with l for -l everywhere (AReaL);
            `"both"`: the greater (verl's KPop, with binary_kl).
        over: `"token"`: each token by itself. A row as a whole: `"sum"` (of ratios: their product), `"mean"` (of ratios: the
            geometric mean), `"max"`, `"each"`: every token must lie within (`low=1e-4` alone is a veto: one token below
            it drops the row).
        log_ratio_clip: l is held within this on both sides before it is summed; None takes it as it is.
        unknown: what a token whose l is not finite counts as: `"drop"`: it, or its row, goes; `"equal"`: l = 0;
            `"extreme"`: NaN l = 0 and infinite ones as beyond every bound.
    """
    options: dict[str, Any] = {
        "low": low,
        "high": high,
        "statistic": statistic,
        "direction": direction,
        "over": over,
        "log_ratio_clip": log_ratio_clip,
        "unknown": unknown,
    }
    check_within("masks.drift", **options)
    inside = loss_mask.values.astype(bool)
    rows = ArrayRows(loss_mask.row_index[inside], len(loss_mask))
    kept = np.zeros(len(inside), bool)
    with np.errstate(over="ignore", invalid="ignore"):
        old, rollout = (side.values[inside].astype(np.float64) for side in (old_logprobs, rollout_logprobs))
        kept[inside] = within(np, rows, old, rollout, **options)
    return fr.Ragged.like(kept, loss_mask)


@fr.operator(writes=LOSS_MASK, replaces=True, narrows="loss_mask")
def scored(loss_mask: fr.TOKEN.bool, score: fr.SAMPLE.f32.named_by("by"), *, by: str = "reward"):
    """Take the rows whose value is not known (not finite) out of the loss: a reward failed on them.

    As `filters.scored`, but the rows stay, to be looked at and so that groups keep their size.

    Args:
        by: the column that decides.
    """
    keep = np.isfinite(np.asarray(score, np.float64))
    return fr.Ragged.like(loss_mask.values.astype(bool) & loss_mask.spread(keep), loss_mask)


@fr.operator(writes=LOSS_MASK, replaces=True, locality="batch", narrows="loss_mask")
def second_moment(
    old_logprobs: fr.TOKEN.f32,
    rollout_logprobs: fr.TOKEN.f32,
    loss_mask: fr.TOKEN.bool,
    *,
    threshold: float = 0.04,
):
    """M2PO: drop the tokens with the greatest l^2, l = old_logprobs - rollout_logprobs, until the mean of l^2 is below threshold.

    From Zheng et al., "Prosperity before Collapse" (arXiv 2510.01161), whose threshold is 0.04: the second moment bounds the
    variance of stale rows, and few tokens carry most of it. The mean is over all tokens of the step. The token with the
    least l^2 always stays; tokens of equal l^2 go in the order of the batch, the later first. A token whose l is not finite
    goes.

    Args:
        threshold: bound of the mean of l^2, exclusive.
    """
    if not threshold > 0:
        raise ConfigError(f"masks.second_moment needs threshold > 0; found {threshold!r}")
    inside = np.flatnonzero(loss_mask.values.astype(bool))
    with np.errstate(invalid="ignore"):
        square = (old_logprobs.values[inside].astype(np.float64) - rollout_logprobs.values[inside]) ** 2
    known = np.flatnonzero(np.isfinite(square))
    order = known[np.argsort(square[known], kind="stable")]
    # means of the least 1, 2, 3, ... only rise
    means = np.cumsum(square[order]) / np.arange(1, len(order) + 1)
    count = max(int(np.searchsorted(means, threshold, side="left")), min(1, len(order)))
    kept = np.zeros(len(loss_mask.values), bool)
    kept[inside[order[:count]]] = True
    return fr.Ragged.like(kept, loss_mask)


@fr.operator(writes=LOSS_MASK, replaces=True, locality="batch", narrows="loss_mask")
def stale(
    loss_mask: fr.TOKEN.bool,
    min_policy_version: fr.SAMPLE.i32,
    max_policy_version: fr.SAMPLE.i32 = None,
    trainer_version: fr.SAMPLE.i32 = None,
    *,
    most: int = 0,
):
    """Take the rows that are more than `most` versions old out of the loss; staleness as in `filters.fresh`.

    After the advantage: the reward of a stale sibling then counts in its group's baseline, and its tokens do not train.
    Before it, the row says nothing at all, as with `filters.fresh`.
    """
    keep = staleness(min_policy_version, max_policy_version, trainer_version) <= versions("masks.stale", most)
    return fr.Ragged.like(loss_mask.values.astype(bool) & loss_mask.spread(keep), loss_mask)
