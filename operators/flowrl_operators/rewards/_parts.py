"""Rewards made of named parts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators._options import checked

MISSING = ("nan", "zero")


@fr.operator(writes={"reward": fr.SAMPLE.f32}, replaces=True)
def total(*part: fr.SAMPLE.f32.named_by("weights"), weights: Mapping[str, float], missing: str = "nan"):
    """`reward` as the weighted sum of named columns; the parts stay as columns, each with metrics of its own.

    Example:
        rows = rewards.math(rows, out="math_reward")
        rows = rewards.tags(rows, out="tags_reward")
        rows = fr.score(preference, rows, out="preference_reward")  # a reward model is a part like any other
        rows = rewards.total(rows, {"math_reward": 1.0, "tags_reward": 0.2, "preference_reward": 0.5})

    `rewards.math(rows) + 0.2 * rewards.tags(rows)` is the same for parts that all write `reward`; its `row_error` names the part
    that failed.

    Args:
        weights: column to weight. A part of weight 0 counts nothing, NaN or not: it is there for the logs.
        missing: what a part that is NaN (its operator failed on the row) means: `"nan"`: the row has no reward, so its
            advantage is 0 (`filters.scored` and `masks.scored` leave it out); `"zero"`: that part adds nothing and the others
            count. A row that lacks every part stays NaN.
    """
    checked("missing", missing, MISSING, "rewards.total")
    if len(part) != len(weights):
        raise ConfigError(f"rewards.total needs a column for each of {', '.join(weights)}; found {len(part)} columns")
    summed: np.ndarray | None = None
    known: np.ndarray | None = None
    for values, (name, weight) in zip(part, weights.items(), strict=True):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not np.isfinite(weight):
            raise ConfigError(f"the weight of '{name}' in rewards.total is a finite number; found {weight!r}")
        column = np.asarray(values, np.float64)
        summed = np.zeros(column.shape) if summed is None else summed
        known = np.zeros(column.shape, bool) if known is None else known
        if not weight:
            continue
        is_there = ~np.isnan(column)
        known |= is_there
        summed += weight * (np.where(is_there, column, 0.0) if missing == "zero" else column)
    assert summed is not None and known is not None  # weights that name no column were refused
    return np.where(known, summed, np.nan) if any(weights.values()) else summed
