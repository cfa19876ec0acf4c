"""Rewards that follow a cosine of the length."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl_operators import rewards
from tests.golden.pieces.overlong_penalty import lengths
from tests.golden.vectors import Case


def cosine(case: Case, correct: tuple[float, float], wrong: tuple[float, float], clamp: bool) -> dict[str, Any]:
    ids = lengths(case)
    right = np.full(len(ids), float(case.inputs["correct"]))
    options = {"max_length": case.params["max_len"], "correct": correct, "wrong": wrong, "exceeded": None}
    return {"rewards": rewards.cosine(right, ids, clamp=clamp, **options)}


def by_size(case: Case) -> dict[str, Any]:
    """Bounds by size: a right response starts at the greater, a wrong one at the smaller."""
    p = case.params
    correct, wrong = (p["max_value_correct"], p["min_value_correct"]), (p["min_value_wrong"], p["max_value_wrong"])
    return cosine(case, correct, wrong, clamp=True)


def by_length(case: Case) -> dict[str, Any]:
    """Bounds by length: at the shortest, at the longest."""
    p = case.params
    correct = (p["min_len_value_correct"], p["max_len_value_correct"])
    return cosine(case, correct, (p["min_len_value_wrong"], p["max_len_value_wrong"]), clamp=False)


CONVENTIONS = {"trl.cosine_scaled": by_size, "ms_swift.cosine": by_length}
