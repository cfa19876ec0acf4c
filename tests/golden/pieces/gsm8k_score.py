"""The reward of a GSM8K response."""

from __future__ import annotations

from typing import Any

from flowrl_operators import rewards
from tests.golden.pieces.gsm8k_extract import FIRST, LAST
from tests.golden.vectors import Case


def scored(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    p = case.params
    options = {**options, "method": p["method"], "compare": "text", "format_score": p["format_score"] / p["score"]}
    return {"scores": [p["score"] * rewards.gsm8k(text, truth, **options) for text, truth in case.inputs["pairs"]]}


PATTERNS = [
    (r"verl\.\w+", lambda case, match: scored(case, LAST)),
    (r"skyrl\.\w+", lambda case, match: scored(case, FIRST)),
]
