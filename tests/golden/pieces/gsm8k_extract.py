"""The answer of a GSM8K response."""

from __future__ import annotations

from typing import Any

from flowrl_operators import rewards
from tests.golden.vectors import Case

FIRST = {"which": "first"}
LAST = {"which": "last", "tail": 300}


def extracted(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    method = case.params["method"]
    return {"answers": [rewards.gsm8k_answer(text, method=method, **options) for text in case.inputs["texts"]]}


PATTERNS = [
    (r"verl\.\w+", lambda case, match: extracted(case, LAST)),
    (r"skyrl\.\w+", lambda case, match: extracted(case, FIRST)),
]
