"""Exact match of short answers."""

from __future__ import annotations

from typing import Any

from flowrl_operators import rewards
from tests.golden.vectors import Case


def tagged(case: Case) -> dict[str, Any]:
    options = {"pattern": rewards.ANSWER_TAG, "format_score": case.params.get("format_score", 0.0)}
    items = case.inputs["items"]
    found = [rewards.last_match(rewards.ANSWER_TAG, text) for text, _ in items]
    return {
        "scores": [rewards.short_answer(text, accepted, **options) for text, accepted in items],
        "subem": [rewards.short_answer(text, accepted, contains=True, **options) for text, accepted in items],
        "extracted": [None if one is None else one.strip() for one in found],
    }


CONVENTIONS = {"verl.search_r1_em": tagged}
