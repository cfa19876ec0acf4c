"""Losses of critics."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from flowrl_operators import losses
from tests.golden.guards import ADDED, guarded, padded_tokens
from tests.golden.padded import loss_and_gradient
from tests.golden.vectors import Case

COLUMNS = {"values": "vpreds", "old_values": "old_values", "returns": "returns"}

AVERAGES: dict[str, dict[str, Any]] = {
    "token-mean": {"average": "token_mean"},
    "token-sum": {"average": "token_sum"},
    "seq-mean-token-mean": {"average": "sequence_mean", "average_eps": ADDED},
    "seq-mean-token-sum": {"average": "sequence_sum"},
}


def clipped(case: Case, **average: Any) -> Any:
    p = case.params
    loss = p.get("scale", 1) * losses.value_clip(p["cliprange_value"], huber=p.get("huber_delta"))
    found = loss_and_gradient(case, loss, COLUMNS, leaf="values", out="grad_vpreds", **average)
    return guarded(case, found, "grad_vpreds")


def verl(case: Case, found: re.Match[str]) -> Any:
    if found["mode"] == "seq-mean-token-sum-norm":
        return clipped(case, average="constant", average_length=case.array("mask").shape[1])
    return clipped(case, **AVERAGES[found["mode"]])


CONVENTIONS: dict[str, Callable[[Case], Any]] = {
    "openrlhf.token": lambda case: clipped(case, average="token_mean"),
    "openrlhf.sample": lambda case: clipped(case, average="sequence_mean", average_eps=ADDED),
    "nemo.mse": lambda case: clipped(case, average="token_mean", factor=padded_tokens(case)),
    # a row without a trained token counts as a row
    "skyrl.sequence_mean": lambda case: clipped(case, average="sequence_mean", average_rows="all"),
}

PATTERNS = [
    (r"verl\.clipped_(?P<mode>[\w-]+)", verl),
    (r"areal\.(mse|huber)", lambda case, found: clipped(case, average="token_mean")),
]

UNANSWERED = dict.fromkeys(("clipfrac", "clip_fraction"), "a figure to log; ours is the metric value_clip_fraction")
