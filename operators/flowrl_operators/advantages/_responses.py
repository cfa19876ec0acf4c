"""Advantages per response: one number for all its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators._options import checked, required
from flowrl_operators.advantages._arrays import (
    any_in_row,
    as_bool,
    check_deviation,
    counted,
    held_within,
    inverse_deviation,
    reward_to_go,
    row_sums,
)
from flowrl_operators.advantages._groups import (
    BASELINES,
    COUNTS,
    SCALES,
    SINGLES,
    Groups,
    Norm,
    numbered,
    rounded,
    unbiasing,
)


def rows_that_count(reward: np.ndarray, loss_mask: fr.Ragged | None, counts: str) -> np.ndarray:
    """[N] rows that have a part in statistics: scored and with a token that trains, or all that are scored."""
    checked("counts", counts, COUNTS, "rows of a group")
    return counted(np.asarray(reward, np.float64), loss_mask if counts == "trained" else None)


def _group_norm_locality(*, baseline: str, scale: str, by: str, **_: object) -> fr.Locality:
    checked("baseline", baseline, BASELINES, "group_norm")
    checked("scale", scale, SCALES, "group_norm")
    return fr.Locality("batch") if "batch" in baseline + scale else fr.group(by)


def _group_locality(*, by: str, **_: object) -> fr.Locality:
    return fr.group(by)


def _smallest_group(*, single: str = "zero", baseline: str = "group", **_: object) -> int:
    return 2 if single == "zero" and baseline in ("group", "others") else 1


@fr.operator(
    writes={"advantage": fr.SAMPLE.f32}, locality=_group_norm_locality, min_group=_smallest_group, many_groups=True
)
def group_norm(
    reward: fr.SAMPLE.f32,
    group: fr.SAMPLE.str.named_by("by"),
    loss_mask: fr.TOKEN.bool = None,
    *,
    baseline: str = "group",
    scale: str = "group",
    eps: float = 1e-6,
    unbiased: bool = False,
    single: str = "zero",
    counts: str = "trained",
    around: str = "mean",
    flat: str = "keep",
    count_ratio: str = "exact",
    by: str = "prompt_id",
):
    """GRPO: A_i = (R_i - baseline) / (std + eps), by default with mean and std of the group.

    From DeepSeekMath (arXiv 2402.03300), whose formula leaves the kind of std open; the population one is taken here.
    verl, TRL, NeMo-RL, SkyRL, ROLL and slime divide by n - 1: `unbiased=True`; eps is 1e-6 there, 1e-4 in TRL, 1e-5 in AReaL,
    1e-9 in OpenRLHF.

    Example: rewards 1, 0, 0, 1 give 1, -1, -1, 1; with `unbiased=True` 0.866, -0.866, -0.866, 0.866.

    Args:
        baseline: `"group"`: mean of the group; `"others"`: mean of its other rows (leave one out; NeMo-RL's default);
            `"batch"`, `"batch_others"`: of all rows of the step (REINFORCE++, ROLL, AReaL); `"none"`: nothing.
        scale: `"group"`: std of the group; `"others"`: std of its other rows (NeMo-RL with leave-one-out); `"batch"`: std of all
            rewards of the step (arXiv 2508.08221); `"none"`: not divided, Dr. GRPO (arXiv 2503.20783).
        eps: added to the std.
        flat: where the std is 0 and the baseline is not the group's own, so that there is something to divide: `"keep"` it as
            it is (NeMo-RL), or divide it by `"eps"` alone (ROLL).
        unbiased: divide by n - 1 in the std.
        single: what a group of one gets: `"zero"`, its `"reward"`, or its reward `"scaled"`, over 1 + eps, a sum that is
            rounded to float32 (verl, SkyRL).
        counts: which rows have a part in mean and std: `"trained"`: those with a reward and a token that trains;
            `"scored"`: all with a reward (every other system).
        around: the std is taken around the `"mean"`, or around the `"baseline"` that was subtracted (AReaL); around a baseline
            that is not its mean a group of one has one too, unless `unbiased`.
        count_ratio: n / (n - 1) is `"exact"`, or rounded to `"float32"` as torch divides counts, which moves the answer by up
            to 3e-8 (TRL).
        by: the column whose equal values make a group.

    A group of one, and one whose rewards are all equal, gets exactly 0. NaN rewards get 0 and are left out of mean and std.
    """
    norm = Norm(
        baseline=baseline, scale=scale, eps=eps, unbiased=unbiased, single=single, around=around, flat=flat,
        count_ratio=count_ratio,
    )  # fmt: skip
    return norm(reward, group, rows_that_count(reward, loss_mask, counts))


@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality=_group_locality, min_group=_smallest_group, many_groups=True)
def rloo(
    reward: fr.SAMPLE.f32,
    group: fr.SAMPLE.str.named_by("by"),
    loss_mask: fr.TOKEN.bool = None,
    *,
    single: str = "zero",
    counts: str = "trained",
    reward_clip: tuple[float, float] | None = None,
    by: str = "prompt_id",
):
    """REINFORCE leave-one-out: A_i = R_i - mean of the other rewards of the group.

    From Ahmadian et al. (arXiv 2402.14740). Rewards 1, 0, 0, 1 give 2/3, -2/3, -2/3, 2/3.

    Args:
        single: what a group of one gets: `"zero"` (TRL, SkyRL, verl's vectorised form) or its `"reward"` (verl).
        counts: as in `group_norm`.
        reward_clip: (least, greatest) reward; beyond it is held there before anything else (TRL).
        by: the column whose equal values make a group.
    """
    values = np.asarray(reward, np.float64)
    values = held_within(values, reward_clip, "reward_clip")
    is_counted = rows_that_count(values, loss_mask, counts)
    return Norm(baseline="others", scale="none", single=single)(values, group, is_counted)


@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality="batch")
def batch_norm(
    reward: fr.SAMPLE.f32.named_by("of"),
    batch_part: fr.SAMPLE.str.named_by("by") = None,
    loss_mask: fr.TOKEN.bool = None,
    *,
    by: str | None = None,
    eps: float = 1e-6,
    unbiased: bool = False,
    counts: str = "trained",
    count_ratio: str = "exact",
    of: str = "reward",
):
    """Batch-level: A_i = (R_i - mean) / (std + eps) over the whole step, or over rows of the same `by` (each role apart, say).

    The global normalisation of REINFORCE++ (arXiv 2501.03262) at the level of responses. Rows are left out as in
    `group_norm`.

    Args:
        by: the column whose equal values are normalised together; None takes all rows.
        eps, unbiased, counts, count_ratio: as in `group_norm`.
        of: the column to normalise; `of="advantage", replace=True` does so with what another operator wrote (RLOO in TRL).
    """
    is_counted = rows_that_count(reward, loss_mask, counts)
    norm = Norm(eps=eps, unbiased=unbiased, count_ratio=count_ratio)
    return norm(reward, None if by is None else batch_part, is_counted)


def _remax_writes(*, per: str) -> dict[str, Any]:
    checked("per", per, ("sample", "token"), "remax")
    if per == "sample":
        return {"advantage": fr.SAMPLE.f32}
    return {"advantages": fr.TOKEN.f32, "returns": fr.TOKEN.f32}


@fr.operator(writes=_remax_writes)
def remax(
    reward: fr.SAMPLE.f32,
    baseline: fr.SAMPLE.f32,
    loss_mask: fr.TOKEN.bool = None,
    token_rewards: fr.TOKEN.f32 = None,
    *,
    per: str = "sample",
):
    """ReMax: A_i = R_i - reward of the greedy response to the same prompt, in column `baseline`.

    From Li et al. (arXiv 2310.10505). A row with NaN on either side gets 0.

    Args:
        per: `"sample"`: one advantage for the response; `"token"`: `advantages` and `returns`, the sum of `token_rewards` from
            each token on, minus the baseline (verl).
    """
    checked("per", per, ("sample", "token"), "remax")
    expected = np.asarray(baseline, np.float64)
    if per == "sample":
        difference = np.asarray(reward, np.float64) - expected
        return np.where(np.isfinite(difference), difference, 0.0)
    if loss_mask is None or token_rewards is None:
        raise ConfigError("remax(per='token') sums token_rewards over loss_mask; one of the columns is not there")
    mask = as_bool(loss_mask)
    is_known = np.isfinite(expected) & ~any_in_row(mask.values & ~np.isfinite(token_rewards.values), mask.offsets)
    mask = fr.Ragged.like(mask.values & mask.spread(is_known), mask)
    returns = reward_to_go(token_rewards, mask)
    advantages = np.where(mask.values, returns.values - mask.spread(expected), 0.0)
    return {"advantages": fr.Ragged.like(advantages, mask), "returns": returns}


@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality=_group_locality, min_group=_smallest_group, many_groups=True)
def opo(
    reward: fr.SAMPLE.f32,
    group: fr.SAMPLE.str.named_by("by"),
    loss_mask: fr.TOKEN.bool,
    *,
    single: str = "zero",
    counts: str = "trained",
    by: str = "prompt_id",
):
    """OPO: A_i = R_i - sum_j n_j R_j / sum_j n_j, the mean weighted by the number of tokens that train.

    From Hao et al. (arXiv 2505.23585): the baseline of least variance, as far as a gradient's size goes with length.

    Args:
        single: what a group of one gets: `"zero"` or its `"reward"` (verl).
        counts: whether rows without a token that trains make a group more than one (`"scored"`, verl) or not (`"trained"`);
            they weigh nothing either way.
    """
    checked("single", single, SINGLES, "opo")
    values = np.asarray(reward, np.float64)
    groups = Groups.of(values, numbered(group, len(values)), rows_that_count(values, loss_mask, counts))
    length = row_sums(as_bool(loss_mask).values, loss_mask.offsets).astype(np.float64)
    known = np.where(groups.is_counted, values, 0.0)
    weighted = groups.sum(known * length) / np.maximum(groups.sum(length), 1.0)
    says = groups.has_signal | ((groups.count == 1) & (single == "reward"))
    expected = np.where(groups.count > 1, weighted, 0.0)[groups.number]
    return np.where(groups.is_counted & says[groups.number], known - expected, 0.0)


@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality="batch")
def gpg(
    reward: fr.SAMPLE.f32,
    group: fr.SAMPLE.str.named_by("by"),
    loss_mask: fr.TOKEN.bool = None,
    *,
    valid: str = "signal",
    divisor: float = 1.0,
    single: str = "zero",
    counts: str = "trained",
    count_ratio: str = "exact",
    by: str = "prompt_id",
):
    """GPG: A_i = alpha (R_i - mean of the group) / divisor, alpha = all rows / valid rows.

    From Chu et al. (arXiv 2504.02546): groups whose rewards are all equal have no gradient, and alpha makes up for them.

    Args:
        valid: rows that alpha counts: `"signal"`: those of groups whose rewards differ (the paper); `"nonzero"`: those whose
            reward is not 0 (verl).
        divisor: the paper's F_norm.
        single: what a group of one gets: `"zero"` or its `"reward"` (verl).
        count_ratio: alpha is `"exact"`, or rounded to `"float32"` as torch divides counts (verl).
        counts, by: as in `group_norm`.
    """
    checked("valid", valid, ("signal", "nonzero"), "gpg")
    checked("single", single, SINGLES, "gpg")
    required("gpg needs divisor > 0", divisor > 0, divisor=divisor)
    values = np.asarray(reward, np.float64)
    groups = Groups.of(values, numbered(group, len(values)), rows_that_count(values, loss_mask, counts))
    centred = groups.centred(values, without_own=False, single=single)
    is_valid = groups.has_signal[groups.number] if valid == "signal" else values != 0
    share = rounded(1 / max(np.count_nonzero(is_valid & groups.is_counted), 1), count_ratio)
    return centred * rounded(np.count_nonzero(groups.is_counted) * share, count_ratio) / divisor


@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality=_group_locality, min_group=_smallest_group, many_groups=True)
def maxrl(
    reward: fr.SAMPLE.f32,
    group: fr.SAMPLE.str.named_by("by"),
    loss_mask: fr.TOKEN.bool = None,
    *,
    eps: float = 0.0,
    negative: str = "zero",
    single: str = "zero",
    counts: str = "trained",
    by: str = "prompt_id",
):
    """MaxRL: A_i = (R_i - mean of the group) / (mean + eps), for rewards >= 0.

    From "Maximum likelihood reinforcement learning" (arXiv 2602.02710): with rewards 0 and 1 this weighs a prompt by the
    inverse of its pass rate, as the likelihood of a right answer would.

    Args:
        negative: what a group with a mean <= 0, for which the formula makes no sense, gets: `"zero"` (prime-rl), or `"divide"`:
            divided all the same, which turns its signs round (SkyRL, with eps 1e-6).
        single: what a group of one gets: `"zero"` or its `"reward"` (SkyRL).
        counts, by: as in `group_norm`.
    """
    checked("negative", negative, ("zero", "divide"), "maxrl")
    checked("single", single, SINGLES, "maxrl")
    required("maxrl needs eps >= 0", eps >= 0, eps=eps)
    values = np.asarray(reward, np.float64)
    groups = Groups.of(values, numbered(group, len(values)), rows_that_count(values, loss_mask, counts))
    centred = groups.centred(values, without_own=False, single=single)
    is_used = (groups.mean > 0) | (negative == "divide") | (groups.count == 1)
    below = np.where(groups.count == 1, 1.0, groups.mean + eps)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(is_used & (below != 0), 1.0 / below, 0.0)
    return centred * factor[groups.number]


@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality="batch")
def reinforce_pp_baseline(
    reward: fr.SAMPLE.f32,
    group: fr.SAMPLE.str.named_by("by"),
    loss_mask: fr.TOKEN.bool,
    *,
    unbiased: bool = False,
    eps: float = 1e-8,
    guard: str = "floor",
    single: str = "zero",
    counts: str = "trained",
    count_eps: float = 0.0,
    by: str = "prompt_id",
):
    """REINFORCE++-baseline: R_i - mean of the group, whitened over all tokens that train (a row counts once per token).

    From Hu (arXiv 2501.03262). With a KL penalty: `group_norm(scale="none")`, then `rewards.kl_shaped(of="advantage")`,
    then `reinforce_pp`.

    Args:
        unbiased: the variance divides by n - 1 (verl, slime), not by n (the authors' OpenRLHF, NeMo-RL).
        eps, guard, count_eps: as in `whitened`.
        single: what a group of one gets before it is whitened: `"zero"` (OpenRLHF, NeMo-RL) or its `"reward"` (verl).
        counts, by: as in `group_norm`.
    """
    is_counted = rows_that_count(reward, loss_mask, counts)
    centred = Norm(scale="none", single=single)(reward, group, is_counted)
    tokens = row_sums(as_bool(loss_mask).values, loss_mask.offsets)
    return standardised(centred, is_counted * tokens, unbiased=unbiased, eps=eps, guard=guard, count_eps=count_eps)


def standardised(
    values: np.ndarray,
    weights: np.ndarray,
    *,
    unbiased: bool,
    eps: float,
    guard: str,
    count_eps: float = 0.0,
    count_ratio: str = "exact",
) -> np.ndarray:
    """[N] (value - mean) / std where each row counts `weights` times; 0 for weight 0 and for fewer than two in all."""
    check_deviation(eps, guard, count_eps)
    total = float(weights.sum())
    if total < 2:
        return np.zeros(len(values))
    mean = float((weights * values).sum()) / (total + count_eps)
    variance = float((weights * (values - mean) ** 2).sum()) / (total + count_eps)
    correction = float(unbiasing(np.asarray(total), count_ratio)) if unbiased else 1.0
    return np.where(
        weights > 0, (values - mean) * inverse_deviation(np.asarray(variance * correction), eps, guard), 0.0
    )
