"""Whether a response has the form that was asked for."""

from __future__ import annotations

from typing import Any

from flowrl_operators import rewards
from tests.golden.vectors import Case

THINK_FIRST = r"<think>(?!.*<think>).*?</think>.*"
"""`rewards.THINK` allows white space before the tag."""
THINK_AND_ANSWER = r"<think>.*?</think>\s*<answer>.*?</answer>"


def matches(case: Case, pattern: str) -> dict[str, Any]:
    return {"rewards": [rewards.format(text, pattern=pattern) for text in case.inputs["texts"]]}


CONVENTIONS = {
    "trl.think_format": lambda case: matches(case, THINK_FIRST),
    "ms_swift.format": lambda case: matches(case, THINK_AND_ANSWER),
}
