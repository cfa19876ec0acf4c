"""Overlap of the words of short answers."""

from __future__ import annotations

from typing import Any

from flowrl_operators import rewards
from tests.golden.vectors import Case


def overlap(case: Case) -> dict[str, Any]:
    return {"scores": [list(rewards.word_overlap(said, truth)) for said, truth in case.inputs["pairs"]]}


CONVENTIONS = {"slime.f1": overlap}
