"""Sums, means, variances and whitening over a mask."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl_operators import advantages
from tests.golden.pieces._undefined import defined
from tests.golden.runner import Contract, Where
from tests.golden.vectors import Case, matrix, ragged

VERL = {"count_eps": 1e-8}


def given(case: Case) -> tuple[Any, Any]:
    """(values, mask) as rows."""
    return ragged(case.array("values")), ragged(case.array("mask"))


def mean(case: Case) -> dict[str, Any]:
    return {"value": advantages.masked_mean(*given(case), **VERL)}


def mean_axis(case: Case) -> dict[str, Any]:
    return {"value": advantages.masked_mean(*given(case), per="row", **VERL)}


def total(case: Case) -> dict[str, Any]:
    return {"value": advantages.masked_sum(*given(case))}


def variance(case: Case, match: Any) -> Any:
    value = advantages.masked_var(*given(case), unbiased=match["kind"] == "unbiased", **VERL)
    if "raises" in case.outputs:
        return Contract("fewer than two tokens have variance 0", holds=value == 0)
    return {"value": value}


def whiten(case: Case, match: Any) -> Any:
    found = matrix(advantages.whitened(*given(case), unbiased=True, centre=match["keep"] is None, **VERL))
    if "raises" in case.outputs:
        wanted = np.where(case.array("mask") == 1, 0.0 if match["keep"] is None else case.array("values"), 0.0)
        return Contract(
            "fewer than two tokens are whitened to their mean", holds=np.allclose(found, wanted, rtol=1e-7, atol=0)
        )
    return {"value": Where(found, case.array("mask"))}


def normalization(case: Case, _: Any) -> dict[str, Any]:
    p = case.params
    found = advantages.whitened(*given(case), unbiased=p["unbiased"], eps=p["eps"], guard="std")
    return {"value": Where(matrix(found), case.array("mask"))}


def mean_of_all_and_rows(case: Case) -> dict[str, Any]:
    nan = float("nan")
    return {
        "all": advantages.masked_mean(*given(case), empty=nan),
        "rows": advantages.masked_mean(*given(case), per="row", empty=nan),
    }


def normalize(case: Case, _: Any) -> dict[str, Any]:
    per = "row" if case.params.get("dim") == 1 else "batch"
    found = advantages.whitened(*given(case), unbiased=False, eps=case.params["eps"], guard="floor", per=per)
    return {"value": Where(matrix(found), case.array("mask"))}


CONVENTIONS = {
    "verl.masked_mean": mean,
    "verl.masked_mean_axis": mean_axis,
    "verl.masked_sum": total,
    "openrlhf.masked_mean": mean_of_all_and_rows,
}
PATTERNS = [
    (r"verl\.masked_var_(?P<kind>biased|unbiased)", variance),
    (r"verl\.masked_whiten(?P<keep>_keep_mean)?", whiten),
    (r"openrlhf\.masked_normalize(_\w+)?", normalize),
    (r"areal\.masked_normalization(_\w+)?", defined(normalization)),
]
