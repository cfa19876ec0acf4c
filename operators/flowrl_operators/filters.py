"""Filters: which rows go on."""

from __future__ import annotations

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators.advantages import has_spread


@fr.operator(filter=True, locality=fr.group("prompt_id"), min_group=2)
def group_has_signal(reward: fr.SAMPLE.f32, *, eps: float = 0.0):
    """Keep groups whose rewards differ: all others have advantage 0 and teach nothing.

    The dynamic sampling of DAPO (arXiv 2503.14476), for rewards of any kind: std > eps and more than float32 rounding. NaN
    rewards are left out of the decision; a group of one has no signal.
    """
    known = np.asarray(reward, np.float64)
    known = known[np.isfinite(known)]
    keep = has_spread(known) and float(known.std()) > eps
    return np.full(len(reward), keep)


@fr.operator(filter=True, locality=fr.group("prompt_id"))
def top(score: fr.SAMPLE.f32.named_by("by"), *, k: int = 1, by: str = "reward", least: float | None = None):
    """Keep the `k` best rows of each group: rejection sampling, RAFT (arXiv 2304.06767), STaR (arXiv 2203.14465).

    Args:
        k: rows kept; of equal ones the earlier.
        by: column that decides. A score that is not finite is never kept.
        least: keep only rows of at least this score, so that a group without a good row gives none.
    """
    if k < 1:
        raise ConfigError(f"filters.top needs k of at least 1; found {k!r}")
    values = np.asarray(score, np.float64)
    is_good = np.isfinite(values) if least is None else np.isfinite(values) & (values >= least)
    order = np.argsort(np.where(is_good, -values, np.inf), kind="stable")[:k]
    mask = np.zeros(len(values), bool)
    mask[order] = True
    return mask & is_good


@fr.operator(
    filter=True,
    writes={"pair_id": fr.SAMPLE.str, "chosen": fr.SAMPLE.bool},
    locality=fr.group("prompt_id"),
    min_group=2,
)
def best_and_worst(score: fr.SAMPLE.f32.named_by("by"), prompt_id: fr.PROMPT.str, *, by: str = "reward"):
    """Keep the best and the worst row of each group as a preference pair: `pair_id` (the prompt's id) and `chosen`.

    Groups whose scores are all equal give no pair. NaN scores are left out.
    """
    values = np.asarray(score, np.float64)
    mask = np.zeros(len(values), bool)
    chosen = np.zeros(len(values), bool)
    known = np.flatnonzero(np.isfinite(values))
    if has_spread(values[known]):
        best, worst = known[values[known].argmax()], known[values[known].argmin()]
        mask[[best, worst]] = True
        chosen[best] = True
    return fr.Keep(mask, {"pair_id": np.asarray(prompt_id, dtype=object), "chosen": chosen})
