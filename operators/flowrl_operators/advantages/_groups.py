"""What the rewards of a group, or of the whole step, say together; for all groups at once."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from flowrl_operators._options import checked, required

BASELINES = ("group", "others", "batch", "batch_others", "none")
SCALES = ("group", "others", "batch", "none")
SINGLES = ("zero", "reward")
NORM_SINGLES = (*SINGLES, "scaled")
COUNTS = ("trained", "scored")
AROUND = ("mean", "baseline")
FLAT = ("keep", "eps")
COUNT_RATIOS = ("exact", "float32")

ROUNDING = 4 * float(np.finfo(np.float32).eps)
"""Relative difference up to which rewards are equal; see [Note: Rounding is no signal]."""


def numbered(keys: np.ndarray | None, count: int) -> np.ndarray:
    """[N] a number for each row's group, from 0; without keys all rows are one group."""
    if keys is None:
        return np.zeros(count, np.int64)
    keys = np.asarray(keys)
    if keys.dtype.kind in "biu":
        return np.unique(keys, return_inverse=True)[1].reshape(-1)
    seen: defaultdict[object, int] = defaultdict(itertools.count().__next__)
    return np.fromiter(map(seen.__getitem__, keys.tolist()), np.int64, len(keys))


def groups_of(keys: np.ndarray) -> list[np.ndarray]:
    """Row indices of each distinct key, whatever the order of rows."""
    number = numbered(keys, len(keys))
    order = np.argsort(number, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(number[order])) + 1) if len(order) else []


@dataclass(frozen=True, slots=True)
class Groups:
    """Statistics of values per group, over the rows that count. Arrays [G] by group, [N] by row."""

    number: np.ndarray
    """[N] group of each row."""
    is_counted: np.ndarray
    """[N]"""
    count: np.ndarray
    """[G] rows that count."""
    mean: np.ndarray
    """[G] 0 where nothing counts."""
    largest: np.ndarray
    """[G] greatest absolute value."""
    has_signal: np.ndarray
    """[G] whether the values differ by more than rounding."""

    @classmethod
    def of(cls, values: np.ndarray, number: np.ndarray, is_counted: np.ndarray) -> Groups:
        size = int(number.max(initial=-1)) + 1
        known, of = values[is_counted], number[is_counted]
        count = np.bincount(of, minlength=size)
        mean = np.bincount(of, weights=known, minlength=size) / np.maximum(count, 1)
        least, most = np.full(size, np.inf), np.full(size, -np.inf)
        np.minimum.at(least, of, known)
        np.maximum.at(most, of, known)
        empty = count == 0
        least[empty] = most[empty] = 0.0
        largest = np.maximum(np.abs(least), np.abs(most))
        return cls(number, is_counted, count, mean, largest, most - least > ROUNDING * largest)

    def sum(self, values: np.ndarray) -> np.ndarray:
        """[G] sum over the rows that count."""
        return np.bincount(
            self.number[self.is_counted], weights=values[self.is_counted], minlength=len(self.count)
        ).astype(np.float64)

    def centred(self, values: np.ndarray, *, without_own: bool, single: str) -> np.ndarray:
        """[N] values minus the mean of their group, or of its other rows; exactly 0 without signal and for rows that do not
        count. A group of one gets 0, or keeps its value with `single="reward"`."""
        around = self.mean
        if single == "reward":
            around = np.where(self.count == 1, 0.0, around)
        says = self.has_signal | ((self.count == 1) & (single == "reward"))
        with np.errstate(invalid="ignore"):  # rows that do not count may hold NaN
            result = np.where(self.is_counted & says[self.number], values - around[self.number], 0.0)
        if without_own:
            result = result * (self.count / np.maximum(self.count - 1, 1))[self.number]
        return result

    def variance(self, centred: np.ndarray, *, unbiased: bool, count_ratio: str = "exact") -> np.ndarray:
        """[G] mean square of `centred`, times n / (n - 1) if unbiased; 0 where no square differs from rounding."""
        variance = self.sum(centred**2) / np.maximum(self.count, 1)
        return variance * unbiasing(self.count, count_ratio) if unbiased else variance

    def variance_of_others(self, centred: np.ndarray, *, unbiased: bool) -> np.ndarray:
        """[N] variance of the other rows of the group, where `centred` is the distance from the mean of all."""
        rest = np.maximum(self.count - 1, 1)[self.number]
        own = centred**2 * (rest + 1) / rest
        left = self.sum(centred**2)[self.number] - own
        left = np.where(left > rest * (ROUNDING * self.largest[self.number]) ** 2, left, 0.0)
        return left / (np.maximum(rest - 1, 1) if unbiased else rest)


def unbiasing(count: np.ndarray, count_ratio: str = "exact") -> np.ndarray:
    """n / (n - 1), 1 for n = 1."""
    return rounded(count / np.maximum(count - 1, 1), count_ratio)


def rounded(ratio: np.ndarray | float, count_ratio: str) -> np.ndarray:
    """A ratio of counts, `"exact"` or rounded to `"float32"`."""
    checked("count_ratio", count_ratio, COUNT_RATIOS, "a ratio of counts")
    exact = np.asarray(ratio, np.float64)
    return exact.astype(np.float32).astype(np.float64) if count_ratio == "float32" else exact


def has_spread(values: np.ndarray) -> bool:
    """Whether numbers differ by more than a few float32 steps; what differs by less counts as equal."""
    if len(values) < 2:
        return False
    return float(np.ptp(values)) > ROUNDING * float(np.abs(values).max())


@dataclass(frozen=True, slots=True)
class Norm:
    """How rewards are compared with those of their group: the options of `group_norm`."""

    baseline: str = "group"
    scale: str = "group"
    eps: float = 1e-6
    unbiased: bool = False
    single: str = "zero"
    around: str = "mean"
    count_ratio: str = "exact"
    flat: str = "keep"

    def __post_init__(self) -> None:
        checked("baseline", self.baseline, BASELINES, "group_norm")
        checked("scale", self.scale, SCALES, "group_norm")
        checked("single", self.single, NORM_SINGLES, "group_norm")
        checked("flat", self.flat, FLAT, "group_norm")
        checked("around", self.around, AROUND, "group_norm")
        checked("count_ratio", self.count_ratio, COUNT_RATIOS, "group_norm")
        required("group_norm needs eps >= 0", self.eps >= 0, eps=self.eps)

    def __call__(self, values: np.ndarray, keys: np.ndarray | None, is_counted: np.ndarray) -> np.ndarray:
        """[N] (value - baseline) / (std + eps); 0 for rows that do not count."""
        centred, std = self.centred_and_std(np.asarray(values, np.float64), keys, is_counted)
        is_divided = std > 0
        if self.flat == "eps" and self.scale != "none" and self.eps > 0:
            is_divided = np.ones(len(std), bool)
        return centred / np.where(is_divided, std + self.eps, 1.0)

    def centred_and_std(
        self, values: np.ndarray, keys: np.ndarray | None, is_counted: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """[N] value - baseline and [N] what divides it; a std of 0 divides nothing."""
        number = numbered(keys, len(values))
        group = Groups.of(values, number, is_counted)
        batch = group
        if "batch" in self.baseline + self.scale:
            batch = Groups.of(values, np.zeros(len(values), np.int64), is_counted)
        if self.baseline == "none":
            centred = np.where(is_counted, values, 0.0)
        else:
            over = batch if self.baseline.startswith("batch") else group
            single = "zero" if self.single == "zero" else "reward"
            centred = over.centred(values, without_own=self.baseline.endswith("others"), single=single)
        if self.scale == "none":
            return centred, np.zeros(len(values))
        std = self._deviation(values, centred, batch if self.scale == "batch" else group)
        if self.scale != "batch" and (self.unbiased or self.around == "mean"):
            # a group of one has nothing to be divided by, but its own distance from a baseline that is not its mean
            alone = float(np.float32(1.0 + self.eps)) - self.eps if self.single == "scaled" else 0.0
            std = np.where(group.count[number] == 1, alone, std)
        return centred, std

    def _deviation(self, values: np.ndarray, centred: np.ndarray, over: Groups) -> np.ndarray:
        from_mean = over.centred(values, without_own=False, single="zero")
        if self.scale == "others":
            return np.sqrt(over.variance_of_others(from_mean, unbiased=self.unbiased))
        differences = centred if self.around == "baseline" else from_mean
        return np.sqrt(over.variance(differences, unbiased=self.unbiased, count_ratio=self.count_ratio))[over.number]


def group_statistics(
    reward: np.ndarray,
    group: np.ndarray | None,
    *,
    baseline: str = "group",
    scale: str = "group",
    unbiased: bool = False,
    around: str = "mean",
) -> tuple[np.ndarray, np.ndarray]:
    """([N] baseline, [N] std) that `group_norm` uses for each row; NaN rewards have no part in them.

    A group of one is its own baseline; a std is 0 where nothing differs.
    """
    values = np.asarray(reward, np.float64)
    norm = Norm(baseline=baseline, scale=scale, unbiased=unbiased, around=around)
    centred, std = norm.centred_and_std(values, group, np.isfinite(values))
    return values - centred, std
