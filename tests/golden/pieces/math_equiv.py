"""Whether two answers are the same mathematically.

A pair is (reference, answer). What a percent sign means changed with the parser under math-verify: the recorded one (antlr
4.9.3) could not read it as LaTeX, so the sign was dropped where a number was looked for, and the whole stayed text in a box.
`percent` says it instead of leaving it to the parser.
"""

from __future__ import annotations

from typing import Any

from flowrl.errors import DataError
from flowrl_operators import rewards
from tests.golden.vectors import Case

WRAP = {"boxed": "\\boxed{{{}}}", "dollar": "${}$", "raw": "{}"}
PERCENT = {"boxed": "distinct", "dollar": "number", "raw": "number"}


def judged(case: Case, *, swapped: bool = False) -> dict[str, Any]:
    how = case.params["gold_and_answer_wrapped"]
    options = {"strict": case.params["strict"], "percent": PERCENT[how], "latex": how != "raw", "unreadable": 0.0}
    pairs = [(answer, gold) if swapped else (gold, answer) for gold, answer in case.inputs["pairs"]]
    wrap = WRAP[how].format
    return {"verdict": [rewards.math(wrap(answer), wrap(gold), **options) for gold, answer in pairs]}


def sentence(case: Case, name: str, gold: str, answer: str, **options: Any) -> dict[str, Any]:
    """The answer in a sentence."""

    def judge(reference: str, said: str) -> float | None:
        try:
            return rewards.math(answer.format(said), gold.format(reference), **options)
        except DataError:
            return None

    return {name: [judge(g, a) for g, a in case.inputs["pairs"]]}


def boxed_text(case: Case) -> dict[str, Any]:
    """Character for character, -1 where they differ."""
    texts = [(f"The answer is \\boxed{{{answer}}}", gold) for gold, answer in case.inputs["pairs"]]
    return {"scores": [rewards.exact(text, gold, pattern=rewards.BOXED, wrong=-1.0) for text, gold in texts]}


def units(case: Case) -> dict[str, Any]:
    """None, which leaves a row out, where the reference cannot be read; ours refuses it."""
    return sentence(case, "rewards", "${}$", "The answer is \\boxed{{{}}}", percent="number")


def in_box(case: Case) -> dict[str, Any]:
    return sentence(case, "scores", "\\boxed{{{}}}", "The answer is \\boxed{{{}}}.", percent="distinct", unreadable=0.0)


CONVENTIONS = {
    "math_verify.dollar_units": units,
    "verl.math_verify": in_box,
    "verl.math_dapo_boxed_fallback": boxed_text,
}
PATTERNS = [
    (
        r"math_verify\.(boxed|dollar|raw)(_\w+)?",
        lambda case, match: judged(case, swapped="swapped" in match[0]),
    )
]
