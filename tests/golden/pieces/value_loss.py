"""Losses of critics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrl_operators import losses
from tests.golden.guards import ADDED, guarded, padded_tokens
from tests.golden.padded import loss_and_gradient
from tests.golden.vectors import Case

COLUMNS = {"values": "vpreds", "old_values": "old_values", "returns": "returns"}

AVERAGES = {"token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum": "sequence_sum"}


def clipped(case: Case, average: str, *, factor: float = 1.0, **options: Any) -> Any:
    p = case.params
    loss = p.get("scale", 1) * losses.value_clip(p["cliprange_value"], huber=p.get("huber_delta"))
    if average == "sequence_mean":
        options = {"average_eps": ADDED, **options}
    found = loss_and_gradient(
        case, loss, COLUMNS, leaf="values", out="grad_vpreds", factor=factor, average=average, **options
    )
    return guarded(case, found, "grad_vpreds")


CONVENTIONS: dict[str, Callable[[Case], Any]] = {
    # a row without a trained token counts as a row
    "skyrl.sequence_mean": lambda case: clipped(case, "sequence_mean", average_rows="all", average_eps=0.0),
}

PATTERNS = [
    (r"verl\.clipped_(?P<mode>[\w-]+)", lambda case, found: clipped(case, AVERAGES[found["mode"]])),
    (r"openrlhf\.token", lambda case, found: clipped(case, "token_mean")),
    (r"openrlhf\.sample", lambda case, found: clipped(case, "sequence_mean")),
    (r"nemo\.mse", lambda case, found: clipped(case, "token_mean", factor=padded_tokens(case))),
    (r"areal\.(mse|huber)", lambda case, found: clipped(case, "token_mean")),
]

UNANSWERED = dict.fromkeys(("clipfrac", "clip_fraction"), "a figure to log; ours is the metric value_clip_fraction")
