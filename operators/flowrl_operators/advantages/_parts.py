"""Advantages from a reward of several parts, each in a column of its own."""

from __future__ import annotations

from typing import Any

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators._options import checked
from flowrl_operators.advantages._arrays import as_bool, row_sums
from flowrl_operators.advantages._groups import Norm
from flowrl_operators.advantages._responses import rows_that_count, standardised

ORDERS = ("normalize_then_sum", "sum_then_normalize")
OVER = ("samples", "tokens", "none")
MISSING = ("row", "part")


def _locality(*, over: str, by: str, scale: str = "group", baseline: str = "group", **_: object) -> fr.Locality:
    checked("over", over, OVER, "rewards of several parts")
    return fr.group(by) if over == "none" and "batch" not in scale + baseline else fr.Locality("batch")


@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality=_locality, many_groups=True)
def multi_reward(
    group: fr.SAMPLE.str.named_by("by"),
    loss_mask: fr.TOKEN.bool = None,
    *part: fr.SAMPLE.f32.named_by("parts"),
    parts: tuple[str, ...],
    weights: tuple[float, ...] | None = None,
    order: str = "sum_then_normalize",
    baseline: str = "group",
    scale: str = "group",
    eps: float = 1e-6,
    unbiased: bool = False,
    single: str = "zero",
    counts: str = "trained",
    count_ratio: str = "exact",
    missing: str = "row",
    over: str = "none",
    over_unbiased: bool = True,
    over_eps: float = 1e-8,
    over_guard: str = "variance",
    by: str = "prompt_id",
):
    """Advantage of a reward whose parts are columns: their weighted sum is normalised, or each part and then the sum.

    Args:
        parts: the columns, e.g. `parts=("right", "tidy")`.
        weights: one number for each part; None weighs all 1.
        order: `"sum_then_normalize"`: the sum is a reward like any other; `"normalize_then_sum"`: `group_norm` of each part, then
            the sum, so that no part drowns another (GDPO, arXiv 2601.05242).
        baseline, scale, eps, unbiased, single, counts, count_ratio, by: of that `group_norm`.
        missing: what a part that is NaN leaves unknown: the whole `"row"`, or the `"part"` alone, which then adds nothing
            (TRL). A row without any part always gets 0.
        over: normalise the sum once more, over all `"samples"` of the step (TRL, NeMo-RL), over all `"tokens"` that train, so
            that long rows count for more (verl), or not, `"none"`.
        over_unbiased, over_eps, over_guard: how, as in `whitened`.
    """
    norm = Norm(baseline=baseline, scale=scale, eps=eps, unbiased=unbiased, single=single, count_ratio=count_ratio)
    again = {"unbiased": over_unbiased, "eps": over_eps, "guard": over_guard}
    return _combined(group, loss_mask, part, weights, norm, order, counts, missing, over, again)


@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality=_locality, many_groups=True)
def gdpo(
    group: fr.SAMPLE.str.named_by("by"),
    loss_mask: fr.TOKEN.bool = None,
    *part: fr.SAMPLE.f32.named_by("parts"),
    parts: tuple[str, ...],
    weights: tuple[float, ...] | None = None,
    eps: float = 1e-6,
    unbiased: bool = False,
    single: str = "zero",
    counts: str = "trained",
    over: str = "samples",
    over_eps: float = 1e-8,
    by: str = "prompt_id",
):
    """GDPO: each part of the reward is normalised in its group, then their weighted sum over the step.

    From Liu et al. (arXiv 2601.05242). The same as `multi_reward(order="normalize_then_sum", over="samples")`, which has more
    options; verl normalises `over="tokens"`.
    """
    norm = Norm(eps=eps, unbiased=unbiased, single=single)
    again = {"unbiased": unbiased, "eps": over_eps, "guard": "variance"}
    return _combined(group, loss_mask, part, weights, norm, "normalize_then_sum", counts, "row", over, again)


def _combined(
    group: np.ndarray,
    loss_mask: fr.Ragged | None,
    part: tuple[np.ndarray, ...],
    weights: tuple[float, ...] | None,
    norm: Norm,
    order: str,
    counts: str,
    missing: str,
    over: str,
    again: dict[str, Any],
) -> np.ndarray:
    """[N] what `multi_reward` answers; `again`: how the sum is normalised once more."""
    checked("order", order, ORDERS, "multi_reward")
    checked("missing", missing, MISSING, "multi_reward")
    checked("over", over, OVER, "multi_reward")
    each = np.ones(len(part)) if weights is None else np.asarray(weights, np.float64)
    if each.shape != (len(part),):
        raise ConfigError(f"multi_reward needs one weight for each of its {len(part)} parts; found {weights!r}")
    table = np.stack([np.asarray(column, np.float64) for column in part])
    known = np.isfinite(table)
    is_scored = known.all(0) if missing == "row" else known.any(0)
    takes_part = rows_that_count(np.where(is_scored, 0.0, np.nan), loss_mask, counts)
    if order == "sum_then_normalize":
        advantage = norm(each @ np.where(known, table, 0.0), group, takes_part)
    else:
        advantage = np.zeros(table.shape[1])
        for weight, values, is_known in zip(each, table, known, strict=True):
            advantage += weight * norm(values, group, takes_part & is_known)
    if over == "none":
        return advantage
    if over == "tokens" and loss_mask is None:
        raise ConfigError("over='tokens' counts a row once for each token that trains; there is no loss_mask")
    times = 1 if loss_mask is None or over == "samples" else row_sums(as_bool(loss_mask).values, loss_mask.offsets)
    return standardised(advantage, takes_part * times, count_ratio=norm.count_ratio, **again)
