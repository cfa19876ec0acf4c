"""How far the trainer's log-probabilities are from those of the sampler: one arithmetic for losses (torch) and operators (NumPy).

Notation: o = old_logprobs, q = rollout_logprobs, l = o - q the log-ratio of a token, r = exp(l).

[Note: A token whose log-ratio is not known]
Where a log-ratio is NaN or infinite (a sampler that reported no log-probability, or one of minus infinity for the token it
drew) `unknown` says what the token counts as. `"drop"`: nothing, its weight is 0, and that of its row where a whole row is
judged. `"least"`: a ratio of 0, and so the least weight that is allowed. `"equal"`: as if both had the same log-probability
(weight 1). `"extreme"`: NaN as equal, an infinite one as beyond every bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from flowrl.errors import ConfigError
from flowrl_operators._kl import kl_estimate
from flowrl_operators._options import above_0, checked, required

STATISTICS = ("ratio", "k1", "k2", "k3", "tv", "binary_kl")
DIRECTIONS = ("from_rollout", "from_old", "both")
OVER = ("token", "sum", "mean", "max", "each")
LEVELS = ("token", "sequence", "geometric")
UNKNOWN = ("drop", "least", "equal", "extreme")

LEAST_PROBABILITY = 1e-6
"""Probabilities are held within this of 0 and 1 in the binary KL, whose logarithms stay finite then."""


class Rows(Protocol):
    """Row boundaries of packed tokens; `flowrl.engines.segments.Segments` for tensors, `ArrayRows` for arrays."""

    def sum(self, x: Any, /) -> Any: ...
    def mean(self, x: Any, /) -> Any: ...
    def max(self, x: Any, /) -> Any: ...
    def min(self, x: Any, /) -> Any: ...
    def spread(self, x: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class ArrayRows:
    """Which of T packed tokens belongs to which of N rows, for NumPy."""

    row_index: np.ndarray
    num_rows: int

    def sum(self, x: np.ndarray) -> np.ndarray:
        return np.bincount(self.row_index, weights=x, minlength=self.num_rows)

    def mean(self, x: np.ndarray) -> np.ndarray:
        return self.sum(x) / np.maximum(np.bincount(self.row_index, minlength=self.num_rows), 1)

    def max(self, x: np.ndarray) -> np.ndarray:
        result = np.full(self.num_rows, -np.inf)
        np.maximum.at(result, self.row_index, x)
        return result

    def min(self, x: np.ndarray) -> np.ndarray:
        return -self.max(-x)

    def spread(self, x: np.ndarray) -> np.ndarray:
        return x[self.row_index]


def check_importance(where: str, *, level: str, log_ratio_clip: float | None, unknown: str) -> None:
    """Refuse options of `importance` that make no sense. Errors: ConfigError."""
    checked("level", level, LEVELS, where)
    checked("unknown", unknown, UNKNOWN, where)
    required(f"{where} needs log_ratio_clip > 0 or None", above_0(log_ratio_clip), log_ratio_clip=log_ratio_clip)


def check_within(
    where: str,
    *,
    low: float | None,
    high: float | None,
    statistic: str,
    direction: str,
    over: str,
    log_ratio_clip: float | None,
    unknown: str,
) -> None:
    """Refuse options of `within` that make no sense. Errors: ConfigError."""
    checked("statistic", statistic, STATISTICS, where)
    checked("direction", direction, DIRECTIONS, where)
    checked("over", over, OVER, where)
    checked("unknown", unknown, UNKNOWN, where)
    if statistic == "ratio" and direction != "from_rollout":
        raise ConfigError(
            f"{where}: a ratio has no direction; for statistic='ratio' leave it out; found direction={direction!r}"
        )
    is_bounded = (low is not None or high is not None) and (low is None or high is None or low <= high)
    required(f"{where} needs low, high or both, low <= high", is_bounded, low=low, high=high)
    if statistic == "ratio":
        required(f"{where}: the ratio of two probabilities is above 0", above_0(high), high=high)
    required(f"{where} needs log_ratio_clip > 0 or None", above_0(log_ratio_clip), log_ratio_clip=log_ratio_clip)


def importance(
    xp: Any, rows: Rows, old: Any, rollout: Any, *, level: str, log_ratio_clip: float | None, unknown: str
) -> tuple[Any, Any]:
    """(exp(l) of each token [T], of its row's sum (`level="sequence"`) or of its row's mean (`"geometric"`); which of them
    are known). An unknown one is 0.

    Args:
        xp: the module the values belong to, `torch` or `numpy`.
    """
    log_ratio, is_unknown = _known(xp, old, rollout, unknown)
    if level != "token":
        log_ratio = rows.spread(rows.sum(log_ratio) if level == "sequence" else rows.mean(log_ratio))
        is_unknown = rows.spread(rows.sum(xp.where(is_unknown, 1.0, 0.0))) > 0
    ratio = xp.exp(_held(log_ratio, log_ratio_clip))
    # beyond what the float can hold (only without log_ratio_clip), or infinities that cancel: not known either
    lost = xp.isnan(ratio) if unknown == "extreme" else ~xp.isfinite(ratio)
    is_unknown = is_unknown | lost
    return xp.where(is_unknown, 0.0, ratio), ~is_unknown | (unknown == "least")


def within(
    xp: Any,
    rows: Rows,
    old: Any,
    rollout: Any,
    *,
    statistic: str,
    direction: str,
    over: str,
    low: float | None,
    high: float | None,
    log_ratio_clip: float | None,
    unknown: str,
) -> Any:
    """[T] bool: the tokens whose statistic, or whose row's, lies in [low, high]."""
    least, most = _bounds(statistic, low, high)
    log_ratio, is_unknown = _known(xp, old, rollout, unknown)
    held = _held(log_ratio, log_ratio_clip)
    if direction == "from_old":
        values = _statistic(xp, -held, rollout, old, statistic)
    else:
        values = _statistic(xp, held, old, rollout, statistic)
    if direction == "both":
        values = xp.maximum(values, _statistic(xp, -held, rollout, old, statistic))
    if over not in ("token", "each"):
        values = rows.spread(getattr(rows, over)(values))
    kept = (values >= least) & (values <= most) & ~is_unknown  # NaN is nowhere between
    if over == "token":
        return kept
    every = rows.spread(rows.min(xp.where(kept if over == "each" else ~is_unknown, 1.0, 0.0))) > 0
    return every & kept


def _statistic(xp: Any, log_ratio: Any, old: Any, rollout: Any, statistic: str) -> Any:
    """[T] the divergence of rollout from old at each token; for `"ratio"` its logarithm."""
    match statistic:
        case "ratio":
            return log_ratio  # its sum is the logarithm of the product, its mean that of the geometric mean
        case "k1" | "k2" | "k3":
            return kl_estimate(xp, -log_ratio, statistic)
        case "tv":
            value = abs(xp.exp(old) - xp.exp(rollout))
        case _:
            value = _binary_kl(xp, rollout, old)
    return xp.where(xp.isnan(value), 0.0, value)


def _binary_kl(xp: Any, first: Any, second: Any) -> Any:
    p = xp.exp(first).clip(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    q = xp.exp(second).clip(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    return p * xp.log(p / q) + (1 - p) * xp.log((1 - p) / (1 - q))


def _known(xp: Any, old: Any, rollout: Any, unknown: str) -> tuple[Any, Any]:
    """(log-ratio without the values that are not known, which tokens count as unknown); see the note above."""
    log_ratio = old - rollout
    strange = xp.isnan(log_ratio) if unknown == "extreme" else ~xp.isfinite(log_ratio)
    counts_as = -xp.inf if unknown == "least" else 0.0
    return xp.where(strange, counts_as, log_ratio), strange if unknown == "drop" else xp.zeros_like(strange)


def _bounds(statistic: str, low: float | None, high: float | None) -> tuple[float, float]:
    if statistic != "ratio":
        return -np.inf if low is None else low, np.inf if high is None else high
    return -np.inf if low is None or low <= 0 else float(np.log(low)), np.inf if high is None else float(np.log(high))


def _held(values: Any, bound: float | None) -> Any:
    return values if bound is None else values.clip(-bound, bound)
