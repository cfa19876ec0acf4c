"""Importance weights as a column, for what needs all rows of a step."""

from __future__ import annotations

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators._drift import ArrayRows, check_importance, importance
from flowrl_operators._options import checked

__all__ = ["importance_weights"]


def _locality(*, normalise: bool, **_: object) -> fr.Locality:
    return fr.Locality("batch" if normalise else "row")


@fr.operator(writes={"importance": fr.TOKEN.f32}, locality=_locality)
def importance_weights(
    old_logprobs: fr.TOKEN.f32,
    rollout_logprobs: fr.TOKEN.f32,
    loss_mask: fr.TOKEN.bool,
    *,
    low: float = 0.0,
    high: float | None = 2.0,
    outside: str = "truncate",
    level: str = "token",
    normalise: bool = True,
    log_ratio_clip: float | None = 20.0,
    unknown: str = "drop",
):
    """Weight exp(old_logprobs - rollout_logprobs) of each token that trains; 0 at the others.

    `losses.stored_importance()` multiplies a loss with it. The same weights without `normalise` need no column:
    `losses.truncated_importance`, `losses.masked_importance`.

    Args:
        low, high: least and greatest weight; `high=None` has no upper one.
        outside: `"truncate"`: weights beyond a bound become the bound (arXiv 1802.01561); `"zero"`: they become 0
            (IcePop, arXiv 2510.18855).
        level: `"token"`, `"sequence"` (the ratio of the whole response) or `"geometric"` (the mean log-ratio of its tokens).
        normalise: divide by the mean weight of the step, over tokens or, where a row has one weight, over rows that have a
            token: self-normalised importance sampling (Hesterberg, 1995; verl's `rollout_is_batch_normalize`).
        log_ratio_clip: log-ratios (of a row: their sum or mean) are held within this on both sides; None: as they are.
        unknown: what a token whose log-ratio is not finite counts as: `"drop"` weight 0, `"least"` a ratio of 0, `"equal"`
            weight 1, `"extreme"`: NaN weight 1 and infinite ones beyond the bounds.

    Where all weights are 0 they stay 0. Errors: ConfigError for bounds the wrong way round or an unknown option.
    """
    most = np.inf if high is None else high
    checked("outside", outside, ("truncate", "zero"), "importance_weights")
    if not 0 <= low <= most or not most > 0:
        raise ConfigError(f"importance_weights needs 0 <= low <= high and high > 0; found low={low!r}, high={high!r}")
    check_importance("importance_weights", level=level, log_ratio_clip=log_ratio_clip, unknown=unknown)
    inside = loss_mask.values.astype(bool)
    rows = ArrayRows(loss_mask.row_index[inside], len(loss_mask))
    old = old_logprobs.values[inside].astype(np.float64)
    rollout = rollout_logprobs.values[inside].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        ratio, is_known = importance(
            np, rows, old, rollout, level=level, log_ratio_clip=log_ratio_clip, unknown=unknown
        )
    if outside == "truncate":
        weight = np.where(is_known, np.clip(ratio, low, most), 0.0)
    else:
        weight = np.where(is_known & (ratio >= low) & (ratio <= most), ratio, 0.0)
    if normalise:
        mean = _mean(weight, rows, level)
        weight = weight / mean if mean > 0 else weight
    result = np.zeros(len(inside))
    result[inside] = weight
    return fr.Ragged.like(result, loss_mask)


def _mean(weight: np.ndarray, rows: ArrayRows, level: str) -> float:
    if level == "token":
        return float(weight.mean()) if len(weight) else 0.0
    has_any = np.bincount(rows.row_index, minlength=rows.num_rows) > 0
    return float(rows.mean(weight)[has_any].mean()) if has_any.any() else 0.0
