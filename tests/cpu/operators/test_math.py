"""rewards.math judges as math-verify does, and never falls back."""

import sys

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import DataError, MissingExtra, OperatorError
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch
from flowrl_operators import rewards
from tests.golden.vectors import Case, cases


@cases("math_equiv__math_verify.dollar", "math_equiv__math_verify.boxed")
def test_math_verify_verdicts(file: str, case: Case) -> None:
    wrap = "\\boxed{{{}}}" if file.endswith("boxed") else "${}$"
    wrong = []
    for (gold, answer), verdict in zip(case.inputs["pairs"], case.outputs["verdict"], strict=True):
        if "%" in gold:
            continue  # what a percent sign means depends on the version of the parser generator underneath
        found = rewards.math(f"So it is {wrap.format(answer)}", wrap.format(gold))
        if found != float(verdict):
            wrong.append((gold, answer, verdict, found))
    assert wrong == []


@pytest.mark.parametrize(
    ("response", "answer", "wanted"),
    [
        ("First 3, so the answer is \\boxed{\\frac{1}{2}}.", "0.5", 1.0),
        ("The answer is 42", "42", 1.0),
        ("The answer is 41", "42", 0.0),
        ("I do not know", "42", 0.0),
        ("", "42", 0.0),
        ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}", 1.0),
        ("$x = 5$", "5", 1.0),
    ],
)
def test_math(response: str, answer: str, wanted: float) -> None:
    assert rewards.math(response, answer) == wanted


def test_an_answer_without_mathematics_is_an_error_and_not_a_wrong_answer() -> None:
    with pytest.raises(DataError, match="no mathematics in the reference answer '  '"):
        rewards.math("1", "  ")


def test_without_math_verify_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(MissingExtra, match=r"pip install 'flowrl-operators\[math\]'"):
        rewards.math("1", "1")


def test_a_run_without_math_verify_ends_and_does_not_flag_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    columns = {name: np.asarray(["1", "2"], dtype=object) for name in ("response", "answer")}
    rows = RowBatch(columns, {"response": fr.SAMPLE.str, "answer": fr.PROMPT.str})
    with pytest.raises(OperatorError, match="needs math-verify"):
        run_operator(rewards.math.bind(), rows)


def test_a_formula_is_evaluated_unless_only_the_last_number_is_judged():
    # a policy that is paid for `math` alone learns to restate the sum instead of solving it
    restated = "To find 8 + 3, we add the two numbers 8 + 3"
    assert rewards.math(restated, "11") == 1.0
    assert rewards.math(restated, "11", pattern=rewards.NUMBER) == 0.0
    assert rewards.math("8 + 3 = 11.", "11", pattern=rewards.NUMBER) == 1.0
    assert rewards.math("no number here", "11", pattern=rewards.NUMBER) == 0.0
