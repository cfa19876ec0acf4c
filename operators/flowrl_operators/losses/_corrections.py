"""Weights that correct for rows the trained policy did not sample itself, and masks that leave the farthest out.

They multiply another term, `ppo_clip(0.2) * truncated_importance(2.0)`, and are refused as a part of a sum. None of them has a
gradient. A rejected token gets weight 0 here and stays in the count that an average divides by; `flowrl_operators.masks` takes it
out of the count too.

Notation: o = old_logprobs, q = rollout_logprobs, x = logprobs, l = o - q, r = exp(l). Where the rows have no `old_logprobs`,
o is the live policy. For `unknown` see [Note: A token whose log-ratio is not known] in `flowrl_operators/_drift.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import flowrl as fr
from flowrl_operators._drift import check_importance, check_within, importance, within
from flowrl_operators._options import above_0, at_least_0, checked, required
from flowrl_operators.losses._common import row_mean

if TYPE_CHECKING:
    from flowrl_operators.losses._common import Output


def _check_truncated(*, cap: float | None, floor: float, **options: Any) -> None:
    required(
        "truncated_importance needs 0 <= floor <= cap and cap > 0",
        above_0(cap) and at_least_0(floor) and (cap is None or floor <= cap),
        floor=floor,
        cap=cap,
    )
    check_importance("truncated_importance", **options)


@fr.loss(corrects=True, max_staleness=None, check=_check_truncated)
def truncated_importance(
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    rollout_logprobs: fr.TOKEN.f32,
    segments: Any,
    *,
    cap: float | None = 2.0,
    floor: float = 0.0,
    level: str = "token",
    log_ratio_clip: float | None = 20.0,
    unknown: str = "drop",
) -> Output:
    """A weight to multiply another term with: exp(o - q) held within [floor, cap], without gradient.

    o = old_logprobs (where the rows have none, those of the live policy), q = rollout_logprobs.
    Corrects for rows sampled by other weights or by an engine with other arithmetic than the trainer's: truncated importance
    sampling, TIS (Espeholt et al., arXiv 1802.01561; between sampler and trainer: Yao et al., 2025).

    Args:
        cap: greatest weight; None leaves the ratio as it is (NeMo-RL's default).
        floor: least weight (slime, TRL and OpenRLHF have one).
        level: `"token"`; `"sequence"`: one weight per row, the ratio of the whole response (verl, TRL, SkyRL); `"geometric"`:
            one weight per row, the geometric mean of its tokens' ratios (AReaL).
        log_ratio_clip: log-ratios (of a row: their sum or mean) are held within this on both sides; None: as they are.
        unknown: what a token whose log-ratio is not finite counts as: `"drop"`: weight 0; `"least"`: a ratio of 0, hence
            `floor` (NeMo-RL); `"equal"`: weight 1 (AReaL); `"extreme"`: NaN 1, infinite ones floor or cap (TRL).

    Metrics: `importance`, `importance_capped`.
    """
    import torch

    old = old_logprobs.detach()
    ratio, is_known = importance(
        torch, segments, old, rollout_logprobs, level=level, log_ratio_clip=log_ratio_clip, unknown=unknown
    )
    weight = torch.where(is_known, ratio.clamp(floor, cap), 0.0)  # what is dropped stays 0, whatever the floor
    capped = torch.zeros_like(ratio) if cap is None else (ratio > cap).to(ratio.dtype)
    return weight, {"importance": ratio, "importance_capped": capped}


def _check_masked(*, low: float, high: float | None, **options: Any) -> None:
    is_range = at_least_0(low) and (high is None or low <= high)
    required("masked_importance needs 0 <= low <= high", is_range, low=low, high=high)
    check_importance("masked_importance", **options)


@fr.loss(corrects=True, max_staleness=None, check=_check_masked)
def masked_importance(
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    rollout_logprobs: fr.TOKEN.f32,
    segments: Any,
    *,
    low: float = 0.5,
    high: float | None = 5.0,
    level: str = "token",
    log_ratio_clip: float | None = 20.0,
    unknown: str = "drop",
) -> Output:
    """A weight to multiply another term with: r = exp(o - q) within [low, high] and 0 outside, without gradient.

    o = old_logprobs (where the rows have none, those of the live policy), q = rollout_logprobs.
    Masked importance sampling: a ratio too far from 1 is taken for an error, not for information. IcePop of Ring-1T
    (arXiv 2510.18855) on tokens; on whole responses MIS (Liu et al., "When Speed Kills Stability", 2025).

    Args:
        low, high: the weights that count, the bounds included; `high=None` has no upper one. The defaults are IcePop's
            (prime-rl takes 0.2 and 5).
        level, log_ratio_clip, unknown: as in `truncated_importance`.

    Keep tokens by another statistic than their weight with `truncated_importance(None) * within_drift(...)`.
    Metrics: `importance`, `importance_masked`.
    """
    import torch

    old = old_logprobs.detach()
    ratio, is_known = importance(
        torch, segments, old, rollout_logprobs, level=level, log_ratio_clip=log_ratio_clip, unknown=unknown
    )
    kept = is_known & (ratio >= low) & (ratio <= (torch.inf if high is None else high))
    weight = torch.where(kept, ratio, 0.0)
    return weight, {"importance": ratio, "importance_masked": (~kept).to(ratio.dtype)}


def _check_within_drift(**options: Any) -> None:
    check_within("within_drift", **options)


@fr.loss(on_policy=False, max_staleness=0, weight=True, check=_check_within_drift)
def within_drift(
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    rollout_logprobs: fr.TOKEN.f32,
    segments: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    statistic: str = "ratio",
    direction: str = "from_rollout",
    over: str = "token",
    log_ratio_clip: float | None = 20.0,
    unknown: str = "drop",
) -> Output:
    """1 where sampler and trainer are close, 0 elsewhere, to multiply another term with.

    o = old_logprobs (where the rows have none, those of the live policy), q = rollout_logprobs, l = o - q, r = exp(l).
    Rejection by a statistic of the two log-probabilities: geometric sequence masks, vetoes, the trust regions of
    OpenRLHF's gates, of verl's rejection sampling and of AReaL's.

    Args:
        low, high: the statistic must lie within these, bounds included; None for no bound.
        statistic: `"ratio"` r; or how far apart the two are at the token drawn: estimators of KL(q || o) `"k1"` -l, `"k2"`
            l^2 / 2, `"k3"` r - 1 - l; `"tv"` |exp(o) - exp(q)|; `"binary_kl"` KL(q || o) of "this token or any other".
        direction: `"from_rollout"` KL(q || o) (verl, OpenRLHF); `"from_old"` KL(o || q), with l for -l everywhere (AReaL);
            `"both"`: the greater (verl's KPop, with binary_kl).
        over: `"token"`: each token by itself. A row as a whole: `"sum"` (of ratios: their product), `"mean"` (of ratios: the
            geometric mean), `"max"`, `"each"`: every token of the row must lie within the bounds, so that
            `within_drift(1e-4, over="each")` is a veto: one token below 1e-4 drops its row.
        log_ratio_clip: l is held within this on both sides before it is summed; None takes it as it is.
        unknown: as in `truncated_importance`.

    Metrics: `drift_masked`.
    """
    import torch

    kept = within(
        torch,
        segments,
        old_logprobs.detach(),
        rollout_logprobs,
        statistic=statistic,
        direction=direction,
        over=over,
        low=low,
        high=high,
        log_ratio_clip=log_ratio_clip,
        unknown=unknown,
    ).to(old_logprobs.dtype)
    return kept, {"drift_masked": 1 - kept}


@fr.loss(on_policy=False, max_staleness=0, weight=True)
def off_policy_mask(
    logprobs: fr.TOKEN.f32,
    behaviour_logprobs: fr.TOKEN.f32.named_by("against"),
    advantages: fr.TOKEN.f32.or_broadcast("advantage"),
    segments: Any,
    *,
    threshold: float = 0.1,
    against: str = "rollout_logprobs",
) -> Output:
    """0 for tokens with A < 0 in rows whose mean of (behaviour - x) is above the threshold, 1 elsewhere; multiplies a term.

    Bad responses that the policy has already left behind push it further for nothing. From DeepSeek-V3.2
    (arXiv 2512.02556), there and in TRL against the sampler; slime's OPSM takes `against="old_logprobs"`.

    Args:
        threshold: greatest mean log-ratio (nats per token) of a row with A < 0 that still trains.
        against: the column of log-probabilities the live ones are compared with.

    Metrics: `off_policy_masked`.
    """
    drift = segments.spread(segments.mean(behaviour_logprobs - logprobs.detach()))
    kept = ((advantages >= 0) | (drift <= threshold)).to(logprobs.dtype)
    return kept, {"off_policy_masked": 1 - kept}


def _check_stored(*, by: str, level: str, count_eps: float) -> None:
    checked("level", level, ("token", "geometric"), "stored_importance")
    required("stored_importance needs count_eps >= 0", at_least_0(count_eps), count_eps=count_eps)


@fr.loss(corrects=True, max_staleness=None, check=_check_stored)
def stored_importance(
    weight: fr.TOKEN.f32.named_by("by"),
    segments: Any,
    *,
    by: str = "importance",
    level: str = "token",
    count_eps: float = 0.0,
) -> Output:
    """A stored weight per token to multiply another term with, e.g. that of `importance.importance_weights`.

    For weights that need the whole batch (their mean over it, say): an operator sees all rows of the step, a loss one
    micro-batch.

    Args:
        by: name of the column.
        level: `"token"`, or `"geometric"`: each row's geometric mean, for a loss with one ratio per row (verl's GMPO), to
            which a weight of 0 counts as 1e-10 (that is added to each).
        count_eps: added to the number of tokens in the geometric mean (verl: 1e-8).

    Metrics: `importance`.
    """
    if level == "token":
        return weight, {"importance": weight}
    chosen = segments.spread(row_mean((weight + 1e-10).log(), segments, count_eps).exp())
    return chosen, {"importance": chosen}
