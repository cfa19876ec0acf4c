"""Which groups of responses teach something."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

import flowrl as fr
from flowrl_operators import filters
from tests.golden.runner import Contract
from tests.golden.vectors import Case, to_array

UNANSWERED: dict[str, str] = {}


def _groups(case: Case) -> list[np.ndarray]:
    return [to_array(group).reshape(-1) for group in case.inputs["group_scores"]]


def _whole(operator: fr.Operator, **options: Any) -> Callable[..., Any]:
    def answer(case: Case, match: re.Match[str]) -> Any:
        return {"keep": [bool(operator(group, **options).all()) for group in _groups(case)]}

    return answer


def _above(case: Case, match: re.Match[str]) -> Any:
    eps = float(case.params.get("eps", case.params.get("threshold", match["eps"])))
    # slime's deviation divides by n - 1
    return _whole(filters.group_has_signal, eps=eps, unbiased=True, rounding="counts", unknown="drop")(case, match)


def _between(case: Case, match: re.Match[str]) -> Any:
    low, high = case.params["dynamic_filtering_range"]
    return _whole(filters.group_mean_between, low=float(low), high=float(high), unknown="drop")(case, match)


def _each_row(case: Case, match: re.Match[str]) -> Any:
    over = "others" if case.params["use_leave_one_out_baseline"] else "group"
    groups = _groups(case)
    keep = [filters.group_has_signal(group, unbiased=True, over=over) for group in groups]
    recorded = [to_array(row).astype(bool) for row in case.outputs["keep_rows"]]
    if any(np.ptp(g) == 0 and theirs.any() for g, theirs in zip(groups, recorded, strict=True)):
        same = all(
            np.array_equal(ours, theirs) if np.ptp(g) else not ours.any()
            for g, ours, theirs in zip(groups, keep, recorded, strict=True)
        )
        return Contract("equal rewards are no signal, whatever float32 rounding makes of their deviation", same)
    std = [filters.deviations(group, unbiased=True, over=over) for group in groups]
    return {"std": _rows(std), "keep_rows": _rows(keep)}


def _rows(rows: list[np.ndarray]) -> list[list[float]]:
    return [row.astype(float).tolist() for row in rows]


PATTERNS = [
    (r"verl\.std_eq_0_dropped", _whole(filters.group_has_signal, rounding="counts", single="keep", unknown="keep")),
    (r"skyrl\.std_gt_0", _whole(filters.group_has_signal, rounding="counts", unknown="drop")),
    (r"slime\.std_gt_(?P<eps>[\d.e-]+)", _above),
    (r"openrlhf\.mean_in_open_range", _between),
    (r"nemo\.std_nonzero_\w+", _each_row),
]
