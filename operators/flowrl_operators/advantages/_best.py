"""Advantages for the best of several responses."""

from __future__ import annotations

import math

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators._options import checked, required
from flowrl_operators.advantages._arrays import accumulate
from flowrl_operators.advantages._groups import Groups, numbered
from flowrl_operators.advantages._responses import rows_that_count


@fr.operator(
    writes={"advantage": fr.SAMPLE.f32}, locality=lambda *, by, **_: fr.group(by), min_group=2, many_groups=True
)
def pass_at_k(
    reward: fr.SAMPLE.f32,
    group: fr.SAMPLE.str.named_by("by"),
    loss_mask: fr.TOKEN.bool = None,
    *,
    k: int | None = None,
    scale: str = "none",
    eps: float = 1e-6,
    unbiased: bool = True,
    counts: str = "trained",
    by: str = "prompt_id",
):
    """pass@k: the advantage for the greatest reward among k responses: what a response adds to the greatest of k - 1 others.

    A_i = mean over all sets S of k - 1 other rows of max(R_i - max of S, 0). With k the size of the group only the best
    response gets something, its distance from the second best: Tang et al. (arXiv 2503.19595), as in verl. Smaller k:
    the leave-one-out estimator of Walder and Karkhanis (arXiv 2505.15201). Rewards 3, 1, 0 give 2, 0, 0; with k=2 they
    give 2.5, 0.5, 0.

    Args:
        k: how many tries are allowed; None takes the whole group, as does a k greater than the group.
        scale: `"group"` divides by std + eps of the group's rewards; `"none"` does not.
        unbiased: the std divides by n - 1.
        counts, by: as in `group_norm`.

    A group of one gets 0 (verl raises).
    """
    checked("scale", scale, ("group", "none"), "pass_at_k")
    required("pass_at_k needs eps >= 0", eps >= 0, eps=eps)
    if k is not None and k < 2:
        raise ConfigError(f"pass_at_k needs k >= 2 (for k = 1 there is rloo); found {k!r}")
    values = np.asarray(reward, np.float64)
    groups = Groups.of(values, numbered(group, len(values)), rows_that_count(values, loss_mask, counts))
    known = np.where(groups.is_counted, values, 0.0)
    gain = _gain_over_others(known, groups, k)
    if scale == "none":
        return gain
    variance = groups.variance(groups.centred(values, without_own=False, single="zero"), unbiased=unbiased)
    std = np.sqrt(variance)[groups.number]
    return gain / np.where(std > 0, std + eps, 1.0)


def _gain_over_others(values: np.ndarray, groups: Groups, k: int | None) -> np.ndarray:
    # the greatest first within each group; one with j smaller ones is the greatest of a set of k - 1 in C(j, k - 2) sets
    rows = np.flatnonzero(groups.is_counted & groups.has_signal[groups.number])
    rows = rows[np.lexsort((-values[rows], groups.number[rows]))]
    result = np.zeros(len(values))
    if not len(rows):
        return result
    of = groups.number[rows]
    offsets = np.concatenate(([0], np.flatnonzero(np.diff(of)) + 1, [len(rows)]))
    size = groups.count[of]
    smaller = np.repeat(offsets[1:], np.diff(offsets)) - np.arange(len(rows)) - 1
    share = _share_of_sets(smaller, size if k is None else np.minimum(k, size), size)
    value = values[rows] - groups.mean[of]
    sets, beaten = accumulate(share, offsets, 1.0), accumulate(share * value, offsets, 1.0)
    result[rows] = np.maximum(value * (sets - share) - (beaten - share * value), 0.0)
    return result


def _share_of_sets(smaller: np.ndarray, tries: np.ndarray, size: np.ndarray) -> np.ndarray:
    # C(smaller, tries - 2) / C(size - 1, tries - 1), reckoned once for each triple there is
    width = int(size.max()) + 1
    triples, inverse = np.unique((smaller * width + tries) * width + size, return_inverse=True)
    share = [
        math.comb(j, t - 2) / math.comb(n - 1, t - 1)
        for j, t, n in zip(triples // width**2, triples // width % width, triples % width, strict=True)
    ]
    return np.asarray(share)[inverse.reshape(-1)]
