"""Advantages per response: one number for all its tokens."""

from __future__ import annotations

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators.advantages._arrays import (
    centred_in_groups,
    counted,
    deviation,
    groups_of,
    has_spread,
)

SCALES = ("group", "batch", "none")


def _group_norm_locality(*, scale: str, by: str, **_: object) -> fr.Locality:
    if scale not in SCALES:
        raise ConfigError(f"group_norm scale is one of {', '.join(SCALES)}; found {scale!r}")
    return fr.Locality("batch") if scale == "batch" else fr.group(by)


@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality=_group_norm_locality, min_group=2, many_groups=True)
def group_norm(
    reward: fr.SAMPLE.f32,
    group: fr.SAMPLE.str.named_by("by"),
    loss_mask: fr.TOKEN.bool = None,
    *,
    scale: str = "group",
    eps: float = 1e-6,
    unbiased: bool = False,
    by: str = "prompt_id",
):
    """GRPO: A_i = (R_i - mean of the group) / (std + eps).

    From DeepSeekMath (arXiv 2402.03300), whose formula leaves the kind of std open; the population one is taken here.
    verl and TRL divide by n - 1: `unbiased=True`, with eps 1e-6 and 1e-4.

    Args:
        scale: `"group"`: std of the group; `"batch"`: std of all rewards of the step (arXiv 2508.08221); `"none"`:
            centred only, Dr. GRPO (arXiv 2503.20783).
        eps: added to the std.
        unbiased: divide by n - 1 in the std.
        by: the column whose equal values make a group.

    A group of one, and one whose rewards are all equal, gets exactly 0. NaN rewards and rows without a token that trains
    get 0 and are left out of mean and std.
    """
    values = np.asarray(reward, np.float64)
    is_counted = counted(values, loss_mask)
    centred, number, count = centred_in_groups(values, group, is_counted)
    if scale == "none":
        return centred
    if scale == "batch":
        common = deviation(values[is_counted], unbiased=unbiased)
        return centred / (common + eps) if common > 0 else centred
    squares = np.bincount(number, weights=centred**2, minlength=len(count))
    spread = np.sqrt(squares / np.maximum(count - int(unbiased), 1))
    return centred / np.where(spread > 0, spread + eps, 1.0)[number]  # without spread it is all zeros, whatever eps


@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality=lambda *, by: fr.group(by), min_group=2, many_groups=True)
def rloo(
    reward: fr.SAMPLE.f32,
    group: fr.SAMPLE.str.named_by("by"),
    loss_mask: fr.TOKEN.bool = None,
    *,
    by: str = "prompt_id",
):
    """REINFORCE leave-one-out: A_i = R_i - mean of the other rewards of the group.

    From Ahmadian et al. (arXiv 2402.14740). A group of one gets 0 (as in TRL and SkyRL; verl gives R there). NaN rewards
    and rows without a token that trains get 0 and are left out.
    """
    values = np.asarray(reward, np.float64)
    centred, number, count = centred_in_groups(values, group, counted(values, loss_mask))
    return centred * (count / np.maximum(count - 1, 1))[number]


@fr.operator(writes={"advantage": fr.SAMPLE.f32})
def remax(reward: fr.SAMPLE.f32, baseline: fr.SAMPLE.f32):
    """ReMax: A_i = R_i - reward of the greedy response to the same prompt, in column `baseline`.

    From Li et al. (arXiv 2310.10505). A row with NaN on either side gets 0.
    """
    difference = np.asarray(reward, np.float64) - np.asarray(baseline, np.float64)
    return np.where(np.isfinite(difference), difference, 0.0)


@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality="batch")
def batch_norm(
    reward: fr.SAMPLE.f32,
    batch_part: fr.SAMPLE.str.named_by("by") = None,
    loss_mask: fr.TOKEN.bool = None,
    *,
    by: str | None = None,
    eps: float = 1e-6,
    unbiased: bool = False,
):
    """A_i = (R_i - mean) / (std + eps) over the whole step, or over the rows with the same `by` (e.g. each role apart).

    The global normalisation of REINFORCE++ (arXiv 2501.03262) at the level of responses. Rows are left out as in
    `group_norm`.
    """
    values = np.asarray(reward, np.float64)
    is_counted = counted(values, loss_mask)
    advantage = np.zeros(len(values))
    for rows in groups_of(batch_part) if by is not None else [np.arange(len(values))]:
        known = rows[is_counted[rows]]
        if has_spread(values[known]):
            advantage[known] = (values[known] - values[known].mean()) / (
                deviation(values[known], unbiased=unbiased) + eps
            )
    return advantage
