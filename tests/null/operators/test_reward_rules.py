"""Rewards that look at one response, and what changes a reward: GSM8K, choice, short answers, tags, length, parts."""

import math

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import ConfigError, DataError
from flowrl.graph.infer import infer
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch
from flowrl_operators import rewards

NAN = float("nan")


def ids(*lengths: int) -> fr.Ragged:
    return fr.Ragged.of([[0] * n for n in lengths], dtype=np.int32)


# --- finding an answer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed 7", "7"),
        (r"\fbox{x}", "x"),
        (r"\boxed{}", ""),
        (r"\boxed{1", None),
        ("no box", None),
    ],
)
def test_the_last_box_is_found_with_its_braces(text: str, found: str | None) -> None:
    assert rewards.boxed(text) == found


def test_a_box_that_never_closes_takes_no_time() -> None:
    assert rewards.boxed(r"\boxed{" + "{a" * 20_000) is None


def test_exact_takes_a_box_and_may_punish() -> None:
    assert rewards.exact(r"\boxed{A}", "A", pattern=rewards.BOXED) == 1.0
    assert rewards.exact(r"\boxed{B}", "A", pattern=rewards.BOXED, wrong=-1.0) == -1.0
    assert rewards.exact("A", "A", pattern=rewards.BOXED, wrong=-1.0) == -1.0


def test_regex_searches_or_matches_all() -> None:
    assert rewards.regex("a 1 b", pattern=r"\d") == 1.0
    assert rewards.regex("a 1 b", pattern=r"\d", whole=True) == 0.0
    assert rewards.regex("YES", pattern="yes", ignore_case=True) == 1.0


@pytest.mark.parametrize("reward", [rewards.regex, rewards.format, rewards.exact, rewards.f1])
def test_a_pattern_that_is_none_is_an_error_of_the_configuration(reward: fr.Operator) -> None:
    texts = ("a",) if reward in (rewards.regex, rewards.format) else ("a", "b")
    with pytest.raises(ConfigError, match=r"'\(' is no regular expression: missing \)"):
        reward(*texts, pattern="(")


# --- GSM8K -----------------------------------------------------------------------------------------------------------------


def test_gsm8k_compares_numbers_unless_told_to_compare_text() -> None:
    assert rewards.gsm8k("#### 5.", "5") == 1.0
    assert rewards.gsm8k("#### 5.", "5", compare="text", format_score=0.1) == 0.1
    assert rewards.gsm8k("it is 1,234", "1234", method="flexible") == 1.0
    assert rewards.gsm8k("it is 1,234", "1234", method="flexible", compare="text") == 0.0
    assert rewards.gsm8k("#### 1.2.3", "1.2.3") == 1.0  # no number: compared as text


def test_gsm8k_reads_the_data_sets_own_answers() -> None:
    assert rewards.gsm8k("#### 72", "He has 70+2=<<70+2=72>>72.\n#### 72") == 1.0
    assert rewards.gsm8k("#### 71", "He has 72.\n#### 72") == 0.0


def test_gsm8k_without_an_answer_is_zero_and_not_the_format_score() -> None:
    assert rewards.gsm8k("72", "72", format_score=0.1) == 0.0


def test_gsm8k_looks_at_the_end_only_when_told() -> None:
    text = "#### 7" + " " * 400
    assert rewards.gsm8k_answer(text) == "7"
    assert rewards.gsm8k_answer(text, tail=300) is None


@pytest.mark.parametrize("wrong", [{"method": "loose"}, {"which": "middle"}, {"compare": "float"}])
def test_gsm8k_refuses_unknown_options(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong.values()))):
        rewards.gsm8k("#### 1", "1", **wrong)


# --- multiple choice ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B)", "B"),
        ("The answer is B.", "B"),
        ("A is wrong, so the answer is C", "C"),
        ("Answer: **D**", "D"),
        ("answer: A\nNo, wait. Answer: B", "B"),
        (r"The answer is A, I mean \boxed{\text{C}}", "C"),
        (r"\boxed{(d)}", "D"),
        ("B", "B"),
        ("I choose option E", "E"),
        ("(A) is too small, (B) fits.", "B"),
        ("C.", "C"),
        ("**D**", "D"),
        ("A dog is an animal", None),
        ("The answer is Because", None),
        ("", None),
    ],
)
def test_the_chosen_letter(text: str, letter: str | None) -> None:
    assert rewards.choice_letter(text) == letter


@pytest.mark.parametrize("text", ["\n", "answer \n", "_\n", "answer is ", "*"])
def test_a_letter_is_looked_for_in_one_pass(text: str) -> None:
    """With the row's time limit of 30 s for a judge: it took hours where each line end started the search anew."""
    rows = RowBatch(
        {"response": [text * 300_000], "answer": ["A"]}, {"response": fr.SAMPLE.str, "answer": fr.PROMPT.str}
    )
    done = run_operator(rewards.choice(), rows)
    assert done.rows["reward"].tolist() == [0.0] and not done.failed


@pytest.mark.parametrize(
    ("text", "letter"), [("B\n\nfoo", "B"), ("***\n\n _B_ \n\n*", "B"), ("answer\nis \n: (C", "C"), ("*B\nC*", "C")]
)
def test_a_letter_on_a_line_of_its_own(text: str, letter: str) -> None:
    assert rewards.choice_letter(text) == letter


def test_choice_pays_for_form_and_refuses_odd_answers() -> None:
    assert rewards.choice("Answer: B", "(B)") == 1.0
    assert rewards.choice("Answer: C", "B", format_score=0.1) == 0.1
    assert rewards.choice("no idea", "B", format_score=0.1) == 0.0
    with pytest.raises(DataError, match="one of the letters ABCDE as answer; found 'F'"):
        rewards.choice("Answer: B", "F")


# --- answers of a few words --------------------------------------------------------------------------------------------------


def test_f1_counts_words_and_takes_the_best_answer() -> None:
    assert rewards.f1("the cat sat", "cat sat down") == pytest.approx(0.8)
    assert rewards.f1("Paris", "London|paris!", separator="|") == 1.0
    assert rewards.f1("yes indeed", "yes") == 0.0
    assert rewards.f1("yes indeed", "yes", closed=()) == pytest.approx(2 / 3)
    assert rewards.f1("no tag", "tag", pattern=rewards.ANSWER_TAG) == 0.0
    assert rewards.f1("", "") == 0.0  # no word in common


def test_short_answers_are_compared_normalised() -> None:
    assert rewards.short_answer("<answer>The  Paris!</answer>", "paris", pattern=rewards.ANSWER_TAG) == 1.0
    assert rewards.short_answer("New York City", "new york", contains=True) == 1.0
    assert rewards.short_answer("New York City", "new york", format_score=0.2) == 0.2


# --- form --------------------------------------------------------------------------------------------------------------------

GOOD = "<think>a</think>\n<answer>b</answer>"


@pytest.mark.parametrize(
    ("text", "all_", "share"),
    [
        (GOOD, 1.0, 1.0),
        ("x " + GOOD, 0.0, 1.0),
        (GOOD + " x", 0.0, 1.0),
        ("<answer>b</answer><think>a</think>", 0.0, 1.0),
        ("<think>a</think>", 0.0, 0.5),
        (GOOD + "</answer>", 0.0, 0.75),
        ("", 0.0, 0.0),
    ],
)
def test_tags(text: str, all_: float, share: float) -> None:
    assert rewards.tags(text) == all_
    assert rewards.tags(text, count="share") == share


def test_tags_see_what_the_template_began() -> None:
    assert rewards.tags(GOOD.removeprefix("<think>"), prefilled="<think>") == 1.0


# --- length ------------------------------------------------------------------------------------------------------------------


def test_overlong_without_a_cap_goes_on() -> None:
    found = rewards.overlong(np.zeros(3), ids(100, 120, 140), soft=100, hard=120, cap=False)
    assert found.tolist() == [0.0, -1.0, -2.0]
    with pytest.raises(ConfigError, match="needs soft < hard"):
        rewards.overlong(np.zeros(1), ids(1), soft=5, hard=5, cap=False)


def test_stop_properly_touches_cut_responses_only() -> None:
    reasons = np.asarray(["length", "stop", "length"], dtype=object)
    reward = np.asarray([1.0, 1.0, NAN])
    np.testing.assert_array_equal(rewards.stop_properly(reward, reasons, factor=0.5), [0.5, 1.0, NAN])
    np.testing.assert_array_equal(rewards.stop_properly(reward, reasons, value=-1.0), [-1.0, 1.0, NAN])
    for wrong in ({}, {"factor": 1.0, "value": 1.0}, {"factor": -0.5}):
        with pytest.raises(ConfigError, match="stop_properly"):
            rewards.stop_properly(reward, reasons, **wrong)


def test_cosine_follows_the_paper_and_keeps_nan() -> None:
    reward = np.asarray([1.0, 1.0, 0.0, 0.0, NAN, 1.0])
    found = rewards.cosine(reward, ids(0, 50, 0, 50, 1, 100), max_length=100)
    np.testing.assert_allclose(found, [2.0, 1.5, -10.0, -5.0, NAN, -10.0])
    with pytest.raises(ConfigError, match="max_length of rewards.cosine is at least 1; found 0"):
        rewards.cosine(reward, ids(0, 50, 0, 50, 1, 100), max_length=0)


def test_brevity_pays_right_answers_and_never_wrong_ones() -> None:
    assert rewards.brevity(np.asarray([1.0, 1.0, 0.0, 0.0]), ids(0, 10, 0, 10)).tolist() == [1.5, 0.5, 0.0, -0.5]
    assert rewards.brevity(np.asarray([1.0, 0.0]), ids(7, 7)).tolist() == [1.0, 0.0]


def test_repetition_of_tokens_and_words() -> None:
    assert rewards.repetition([5, 5, 5, 5, 5, 5], ngram=2) == -0.8
    assert rewards.repetition([1, 2], ngram=3) == 0.0
    assert rewards.repetition(None, "Go go GO go", ngram=1, unit="word") == -0.75
    with pytest.raises(ConfigError, match="reads the column 'response'"):
        rewards.repetition([1], unit="word")


# --- parts -------------------------------------------------------------------------------------------------------------------


def table() -> RowBatch:
    columns = {"a": np.asarray([1.0, NAN, NAN]), "b": np.asarray([1.0, 1.0, NAN]), "c": np.asarray([NAN, 5.0, 5.0])}
    return RowBatch(columns, dict.fromkeys(columns, fr.SAMPLE.f32))


@pytest.mark.parametrize(("missing", "wanted"), [("nan", [1.5, NAN, NAN]), ("zero", [1.5, 0.5, NAN])])
def test_total_says_what_a_missing_part_means(missing: str, wanted: list[float]) -> None:
    call = rewards.total.bind({"a": 1.0, "b": 0.5, "c": 0.0}, missing=missing)
    np.testing.assert_array_equal(run_operator(call, table()).rows["reward"], wanted)


def test_total_of_weights_that_are_all_zero_is_zero() -> None:
    assert run_operator(rewards.total.bind({"a": 0.0, "b": 0}), table()).rows["reward"].tolist() == [0.0] * 3


@pytest.mark.parametrize("weight", [math.inf, NAN, True, "1"])
def test_total_refuses_odd_weights(weight: object) -> None:
    with pytest.raises(ConfigError, match="the weight of 'a' in rewards.total is a finite number"):
        rewards.total(np.ones(1), weights={"a": weight})


def test_total_is_a_line_of_a_flow_and_parts_keep_their_names() -> None:
    @fr.flow
    def graded(prompts, policy):  # type: ignore[no-untyped-def]
        rows = fr.rollout(policy, prompts)
        rows = rewards.exact(rows, out="right")
        rows = rewards.tags(rows, out="form")
        return rewards.total(rows, {"right": 1.0, "form": 0.2})

    assert infer(graded.graph()).all_problems() == []
    run = fr.run_local(
        graded, engine="null", prompts=[{"prompt": "1+1=", "answer": "2"}], policy="null", out=None, progress="off"
    )
    assert {"right/mean", "form/mean", "reward/mean"} <= run.metrics[-1].keys()


def test_a_part_that_no_operator_writes_is_found_before_the_run() -> None:
    @fr.flow
    def graded(prompts, policy):  # type: ignore[no-untyped-def]
        return rewards.total(rewards.exact(fr.rollout(policy, prompts), out="right"), {"rihgt": 1.0})

    assert [problem.code for problem in infer(graded.graph()).all_problems()] == ["FR-C01"]


def test_out_is_for_operators_that_write_one_column() -> None:
    with pytest.raises(ConfigError, match="needs the name of a column in 'out'; found 3"):
        rewards.exact.bind(out=3)

    @fr.operator(writes={"x": fr.SAMPLE.f32, "y": fr.SAMPLE.f32})
    def two(reward: fr.SAMPLE.f32):  # type: ignore[no-untyped-def]
        return {"x": reward, "y": reward}

    with pytest.raises(ConfigError, match="writes x, y; 'out' names the column"):
        two.bind(out="z")
