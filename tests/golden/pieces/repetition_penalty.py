"""What a response loses for repeating itself."""

from __future__ import annotations

from typing import Any

from flowrl_operators import rewards
from tests.golden.vectors import Case


def repetition(case: Case) -> dict[str, Any]:
    p = case.params
    options = {
        "ngram": p.get("ngram_size", p.get("repetition_n_grams")),
        "penalty": p.get("max_penalty", p.get("repetition_max_penalty")),
    }
    if "completion_ids" in case.inputs:
        return {"rewards": [rewards.repetition(ids, **options) for ids in case.inputs["completion_ids"]]}
    texts = case.inputs["texts" if "texts" in case.inputs else "completions"]
    return {"rewards": [rewards.repetition(None, text, unit="word", **options) for text in texts]}


PATTERNS = [(r"(trl|ms_swift)\.\w+", lambda case, match: repetition(case))]
