"""Filters: which rows go on.

rows = fr.refill(attempt, prompts, keep=filters.group_has_signal())     # dynamic sampling: new prompts for dull ones
rows = filters.fresh(rows, most=2)                                      # rows of a buffer that are not too old
"""

from __future__ import annotations

from typing import Any

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators._options import checked, required
from flowrl_operators.advantages import groups_of, has_spread
from flowrl_operators.advantages._groups import ROUNDING, numbered

__all__ = [
    "best_and_worst",
    "deviations",
    "fresh",
    "group_has_signal",
    "group_mean_between",
    "length",
    "scored",
    "staleness",
    "top",
]

UNKNOWN = ("leave_out", "drop", "keep")


def _least_group(*, single: str = "drop", **_: object) -> int:
    return 1 if single == "keep" else 2


@fr.operator(filter=True, locality=fr.group("prompt_id"), min_group=_least_group, many_groups=True)
def group_has_signal(
    reward: fr.SAMPLE.f32,
    prompt_id: fr.PROMPT.str = None,
    *,
    eps: float = 0.0,
    unbiased: bool = False,
    rounding: str = "no_signal",
    over: str = "group",
    single: str = "drop",
    unknown: str = "leave_out",
):
    """Keep groups whose rewards differ: in all others every advantage is 0. std > eps, and not by rounding alone.

    The dynamic sampling of DAPO (arXiv 2503.14476), whose condition is `0 < number right < number of responses`; for rewards
    of any kind that is a deviation above 0.

    Args:
        eps: the deviation must be greater. verl and SkyRL 0, slime 1e-6.
        unbiased: the deviation divides by n - 1 (slime, NeMo-RL) and not by n (verl, SkyRL).
        rounding: `"no_signal"`: rewards that differ by no more than a few float32 steps are equal. `"counts"`: the deviation
            as float64 gives it, so that three times 0.7, whose deviation is 1e-16, is kept at eps 0 (verl, SkyRL).
        over: `"group"`: one decision for all its rows. `"others"`: each row is judged by the deviation of its siblings
            without it, so that of 1, 1, 1, 0 the last goes (NeMo-RL with a leave-one-out baseline).
        single: what happens to a group of one, or, with `over="others"`, to a row with no two siblings: `"drop"`, or
            `"keep"` (verl), for sampling once per prompt.
        unknown: a NaN or infinite reward is left out of the decision (`"leave_out"`), or decides it: its group goes
            (`"drop"`: SkyRL, slime) or stays (`"keep"`: verl).
    """
    required("filters.group_has_signal needs eps >= 0", eps >= 0, eps=eps)
    checked("rounding", rounding, ("no_signal", "counts"), "filters.group_has_signal")
    checked("single", single, ("drop", "keep"), "filters.group_has_signal")
    values = np.asarray(reward, np.float64)
    groups = _Groups.of(values, prompt_id, unknown)
    spread, least, most, count = groups.deviations(over=over, unbiased=unbiased, exactly=rounding == "counts")
    differ = spread > eps
    if rounding == "no_signal":
        differ &= most - least > ROUNDING * np.maximum(np.abs(least), np.abs(most))
    # a group with one reward known is no group of one: its verifier failed on the others
    alone = groups.sizes(over) < 2
    return groups.decided(np.where(alone, single == "keep", differ & (count > 1)), unknown)


@fr.operator(filter=True, locality=fr.group("prompt_id"), many_groups=True)
def group_mean_between(
    reward: fr.SAMPLE.f32,
    prompt_id: fr.PROMPT.str = None,
    *,
    low: float = 0.0,
    high: float = 1.0,
    unknown: str = "leave_out",
):
    """Keep groups whose mean reward lies between two bounds, both excluded: neither solved nor hopeless.

    OpenRLHF's form of dynamic sampling. It asks another question than `group_has_signal`: a group of 0.5s passes, although
    its advantages are all 0, and rewards of -1 and 1 need bounds of their own.

    Args:
        low, high: the mean must be greater than `low` and less than `high`.
        unknown: as in `group_has_signal`; OpenRLHF drops.
    """
    if not low < high:
        raise ConfigError(f"filters.group_mean_between needs low < high; found {low!r} and {high!r}")
    groups = _Groups.of(np.asarray(reward, np.float64), prompt_id, unknown)
    mean = groups.means()
    return groups.decided((mean > low) & (mean < high), unknown)


@fr.operator(filter=True)
def length(
    response_ids: fr.TOKEN.i32,
    prompt_ids=None,
    finish_reason: fr.SAMPLE.str = None,
    *,
    least: int = 1,
    most: int | None = None,
    of: str = "response",
    truncated: str = "keep",
):
    """Keep rows with `least` to `most` tokens.

    Args:
        least, most: both included; None for no upper bound.
        of: what is counted: `"response"`, `"prompt"` or `"all"` of both.
        truncated: `"drop"` the rows that the token limit ended (`finish_reason` is `"length"`), whose reward is of an
            unfinished answer. What the last token is does not matter: a model may have several end tokens.
            To keep their reward in the baseline and only not train on them, mask them out of the loss instead.
    """
    checked("of", of, ("response", "prompt", "all"), "filters.length")
    checked("truncated", truncated, ("keep", "drop"), "filters.length")
    if least < 0 or (most is not None and most < least):
        raise ConfigError(f"filters.length needs 0 <= least <= most; found least={least!r}, most={most!r}")
    count = np.zeros(len(response_ids), np.int64)
    if of != "prompt":
        count = count + response_ids.lengths
    if of != "response":
        count = count + _there("length", "prompt_ids", prompt_ids).lengths
    keep = (count >= least) & (count <= (np.iinfo(np.int64).max if most is None else most))
    if truncated == "drop":
        keep = keep & (np.asarray(_there("length", "finish_reason", finish_reason)) != "length")
    return keep


@fr.operator(filter=True)
def scored(score: fr.SAMPLE.f32.named_by("by"), *, by: str = "reward"):
    """Keep rows whose value is known (finite): those that a reward failed on, which have NaN and a `row_error`, go.

    Advantages leave such rows out of every mean and give them 0, so no policy gradient comes from them. They still count in the
    averages of a loss, and its other terms (KL, entropy) act on their tokens; without the rows, or with `masks.scored`, neither.

    Args:
        by: the column that decides.
    """
    return np.isfinite(np.asarray(score, np.float64))


@fr.operator(filter=True, locality="batch")
def fresh(
    min_policy_version: fr.SAMPLE.i32,
    max_policy_version: fr.SAMPLE.i32 = None,
    trainer_version: fr.SAMPLE.i32 = None,
    *,
    most: int = 0,
):
    """Keep rows that are at most `most` versions old. Staleness = trainer's version - least version that sampled the row.

    The trainer's version is the column `trainer_version` where there is one, else the greatest version that sampled any row
    given here: right wherever the newest rows come from the present weights, as beside a buffer of older ones.

    A group keeps its fresh rows and loses the others, with their rewards. To let the reward of a stale sibling count in the
    baseline, compute the advantage first, or mask it with `masks.stale`.
    """
    return staleness(min_policy_version, max_policy_version, trainer_version) <= versions("filters.fresh", most)


def staleness(
    min_policy_version: np.ndarray, max_policy_version: np.ndarray | None, trainer_version: np.ndarray | None
) -> np.ndarray:
    """[N] versions each row is old; see `fresh`."""
    least = np.asarray(min_policy_version, np.int64)
    greatest = least if max_policy_version is None else np.asarray(max_policy_version, np.int64)
    now = greatest.max(initial=0) if trainer_version is None else np.asarray(trainer_version, np.int64)
    return now - least


@fr.operator(filter=True, locality=fr.group("prompt_id"))
def top(score: fr.SAMPLE.f32.named_by("by"), *, k: int = 1, by: str = "reward", least: float | None = None):
    """Keep the `k` best rows of each group: best-of-n, rejection sampling, RAFT (arXiv 2304.06767), STaR (arXiv 2203.14465).

    Args:
        k: rows kept; of equal ones the earlier.
        by: column that decides. A score that is not finite is never kept.
        least: keep only rows of at least this score, so that a group without a good row gives none.
    """
    if k < 1:
        raise ConfigError(f"filters.top needs k of at least 1; found {k!r}")
    required("filters.top needs a number or None as least", least is None or least == least, least=least)
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

    The pairs of online DPO (arXiv 2402.04792).

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


# ------------------------------------------------------------------------------------------------------------- groups


def deviations(reward: np.ndarray, *, over: str = "group", unbiased: bool = False) -> np.ndarray:
    """[N] the deviation that `group_has_signal` judges each row of one group by; 0 where there are fewer than two rewards."""
    groups = _Groups.of(np.asarray(reward, np.float64), None, "leave_out")
    return groups.per_row(groups.deviations(over=over, unbiased=unbiased)[0])


class _Groups:
    """Rewards by group: G groups of N rows in all. Statistics are per group [G] or, over the others, per row [N]."""

    def __init__(self, values: np.ndarray, number: np.ndarray) -> None:
        self.values, self.number = values, number
        self.count = int(number.max(initial=-1)) + 1
        self.known = np.isfinite(values)

    @classmethod
    def of(cls, values: np.ndarray, keys: np.ndarray | None, unknown: str) -> _Groups:
        checked("unknown", unknown, UNKNOWN, "a filter of groups")
        return cls(values, numbered(keys, len(values)))

    def sums(self, values: np.ndarray) -> np.ndarray:
        """[G] sum over the known rows of each group."""
        return np.bincount(self.number[self.known], weights=values[self.known], minlength=self.count)

    def means(self) -> np.ndarray:
        """[G] mean; NaN where nothing is known."""
        with np.errstate(invalid="ignore"):
            return self.sums(self.values) / self.sums(np.ones(len(self.values)))

    def sizes(self, over: str) -> np.ndarray:
        """Rows, known or not, that a decision is made over."""
        sizes = np.bincount(self.number, minlength=self.count)
        return sizes if over == "group" else sizes[self.number] - 1

    def deviations(
        self, *, over: str, unbiased: bool, exactly: bool = False
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(deviation, least, greatest, number) of the known rewards: per group [G], or of each row's siblings [N].

        `exactly` as `np.std` gives it, rounding and all.
        """
        checked("over", over, ("group", "others"), "filters.group_has_signal")
        if over == "others" or exactly:
            members = groups_of(self.number)
            kept = members if over == "group" else [rows[rows != row] for rows in members for row in rows]
            found = np.asarray([_statistics(self.values[rows[self.known[rows]]], unbiased) for rows in kept])
            spread, least, most, number = found.reshape(-1, 4).T
            if over == "others":  # back from group by group to the order of the rows
                back = np.argsort(np.concatenate(members)) if members else np.zeros(0, np.int64)
                return spread[back], least[back], most[back], number[back]
            return spread, least, most, number
        number = self.sums(np.ones(len(self.values)))
        least, most = np.full(self.count, np.inf), np.full(self.count, -np.inf)
        np.minimum.at(least, self.number[self.known], self.values[self.known])
        np.maximum.at(most, self.number[self.known], self.values[self.known])
        mean = self.sums(self.values) / np.maximum(number, 1)
        squares = self.sums(np.where(self.known, self.values - mean[self.number], 0.0) ** 2)
        some = number > 1
        spread = np.sqrt(squares / np.maximum(number - int(unbiased), 1))
        return np.where(some, spread, 0.0), np.where(some, least, 0.0), np.where(some, most, 0.0), number

    def per_row(self, answer: np.ndarray) -> np.ndarray:
        """[N] from [G]; what is per row already stays."""
        return answer if len(answer) == len(self.values) else answer[self.number]

    def decided(self, keep: np.ndarray, unknown: str) -> np.ndarray:
        """[N] bool: the decision of each row, and what an unknown reward makes of it."""
        mask = self.per_row(keep)
        if unknown == "leave_out":
            return mask
        has_unknown = (np.bincount(self.number[~self.known], minlength=self.count) > 0)[self.number]
        return np.where(has_unknown, unknown == "keep", mask)


def _statistics(values: np.ndarray, unbiased: bool) -> tuple[float, float, float, int]:
    if len(values) < 2:
        return 0.0, 0.0, 0.0, len(values)
    return float(values.std(ddof=int(unbiased))), float(values.min()), float(values.max()), len(values)


def versions(operator: str, most: int) -> int:
    """A number of versions that rows may be old. Errors: ConfigError."""
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise ConfigError(f"{operator} needs most, a number of versions of at least 0; found {most!r}")
    return most


def _there(operator: str, column: str, values: Any) -> Any:
    if values is None:
        raise ConfigError(f"filters.{operator} counts or compares '{column}' with these options, and its rows lack it")
    return values
