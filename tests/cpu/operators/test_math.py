"""rewards.math judges as math-verify does, and never falls back."""

import os
import subprocess
import sys

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import ConfigError, DataError, MissingExtra, OperatorError
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch
from flowrl_operators import rewards


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
        run_operator(rewards.math.bind(), rows, workers=0)  # a worker process has it


def test_a_formula_is_evaluated_unless_only_the_last_number_is_judged():
    # a policy that is paid for `math` alone learns to restate the sum instead of solving it
    restated = "To find 8 + 3, we add the two numbers 8 + 3"
    assert rewards.math(restated, "11") == 1.0
    assert rewards.math(restated, "11", pattern=rewards.NUMBER) == 0.0
    assert rewards.math("8 + 3 = 11.", "11", pattern=rewards.NUMBER) == 1.0
    assert rewards.math("no number here", "11", pattern=rewards.NUMBER) == 0.0


@pytest.mark.parametrize(
    ("percent", "half", "fifty", "same"), [("either", 1, 1, 1), ("number", 0, 1, 1), ("distinct", 0, 0, 1)]
)
def test_what_a_percent_sign_means_is_said(percent: str, half: int, fifty: int, same: int) -> None:
    found = [rewards.math(f"${answer}$", "50\\%", percent=percent) for answer in ("0.5", "50", "50\\%")]
    assert found == [half, fifty, same]


def test_a_wrong_answer_may_cost() -> None:
    assert rewards.math("41", "42", wrong=-1.0) == -1.0
    assert rewards.math("none", "42", pattern=rewards.NUMBER, wrong=-1.0) == -1.0
    assert rewards.math("1", " ", unreadable=0.0) == 0.0
    with pytest.raises(ConfigError, match="rewards.math: percent is one of either, number, distinct; found 'half'"):
        rewards.math("1", "1", percent="half")


def test_rows_are_judged_in_worker_processes_as_here() -> None:
    answers = ["\\frac{1}{2}", "2", "  ", "x^2+2x+1"]
    responses = ["0.5", "3", "1", "$(x+1)^2$"]
    columns = {"response": np.asarray(responses, dtype=object), "answer": np.asarray(answers, dtype=object)}
    rows = RowBatch(columns, {"response": fr.SAMPLE.str, "answer": fr.PROMPT.str})
    here, there = (run_operator(rewards.math.bind(), rows, workers=workers) for workers in (0, None))
    np.testing.assert_array_equal(here.rows["reward"], [1.0, 0.0, np.nan, 1.0])
    np.testing.assert_array_equal(there.rows["reward"], here.rows["reward"])
    assert list(there.rows["row_error"]) == list(here.rows["row_error"])
    assert there.rows["row_error"][2].startswith("DataError: math-verify finds no mathematics")


@pytest.mark.parametrize("seed", ["0", "3", "5"])
def test_variables_are_paired_alike_in_every_process(seed: str) -> None:
    # math-verify pairs the variables of two expressions in the order of sets, which differs from process to process
    pairs = [("$a+b$", "$b+a$"), ("$a-b$", "$x-y$"), ("$x-y$", "$b-a$")]
    code = f"from flowrl_operators import rewards; print([rewards.math(a, b, strict=False) for a, b in {pairs!r}])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "[1.0, 1.0, 0.0]", done.stderr
