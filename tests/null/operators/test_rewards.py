"""Rewards, filters and the estimate of pass@k."""

from itertools import combinations

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch
from flowrl_operators import evaluate, filters, rewards

NAN = float("nan")


def floats(*values: float) -> np.ndarray:
    return np.asarray(values, np.float64)


def test_exact_compares_text() -> None:
    assert rewards.exact(" 42\n", "42") == 1.0
    assert rewards.exact("the answer is 42", "42") == 0.0
    assert rewards.exact(" 42", "42", strip=False) == 0.0
    assert rewards.exact("Paris", "paris", ignore_case=True) == 1.0


def test_exact_takes_the_last_match_of_a_pattern() -> None:
    pattern = r"<answer>(.*?)</answer>"
    assert rewards.exact("<answer>1</answer> no, <answer> 2 </answer>", "2", pattern=pattern) == 1.0
    assert rewards.exact("2", "2", pattern=pattern) == 0.0
    assert rewards.exact("x 1 y 2", "2", pattern=r"\d") == 1.0


# text, and what TRL's think_format_reward says of it
THINKS = [
    ("<think>a</think>b", 1),
    ("<think>\nx\n</think>\n", 1),
    ("a<think>b</think>", 0),
    ("<think>a", 0),
    ("<think>a<think>b</think>c", 0),
    ("<think></think>", 1),
    ("", 0),
    ("<think>a</think>b</think>c", 1),
]


@pytest.mark.parametrize(("text", "wanted"), THINKS)
def test_format_asks_for_one_thinking_part(text: str, wanted: int) -> None:
    assert rewards.format(text) == wanted


def test_format_sees_what_the_template_began() -> None:
    assert rewards.format("x</think>4") == 0.0
    assert rewards.format("x</think>4", prefilled="<think>\n") == 1.0


def overlong(*lengths: int, **config: object) -> list[float]:
    ids = fr.Ragged.of([[0] * n for n in lengths], dtype=np.int32)
    return rewards.overlong.function(np.ones(len(lengths)), ids, **config).tolist()


def test_overlong_adds_to_the_reward() -> None:
    assert overlong(80, 90, 100, 101, soft=80, hard=100) == [1.0, 0.5, 0.0, 0.0]
    assert overlong(80, 90, 100, soft=80, hard=100, weight=0.5) == [1.0, 0.75, 0.5]
    assert overlong(16384, 18432, 20480, soft=16384) == [1.0, 0.5, 0.0]  # the paper's numbers
    assert overlong(50, 51, soft=50, hard=50) == [1.0, 0.0]


def test_overlong_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="0 <= soft <= hard; found soft=5, hard=4"):
        overlong(1, soft=5, hard=4)


def test_overlong_may_replace_the_reward_and_says_so() -> None:
    @fr.flow
    def graded(prompts, policy):  # type: ignore[no-untyped-def]
        return rewards.overlong(rewards.exact(fr.rollout(policy, prompts)), soft=8)

    from flowrl.graph.infer import infer

    assert infer(graded.graph()).all_problems() == []


def shaped(
    reward: float, policy: list[float], reference: list[float], mask: list[int], **config: object
) -> list[float]:
    columns = [fr.Ragged.of([c], dtype=np.float64) for c in (policy, reference)]
    found = rewards.kl_shaped.function(floats(reward), *columns, fr.Ragged.of([mask], dtype=bool), **config)
    return found[0].tolist()


def test_only_tokens_that_train_pay_and_the_last_is_paid() -> None:
    found = shaped(1.0, [-1.0, NAN, -2.0, 9.0], [-1.5, 0.0, -1.0, NAN], [1, 0, 1, 0], coefficient=0.1)
    assert found == pytest.approx([-0.05, 0.0, 1.1, 0.0])


def test_a_row_without_tokens_is_paid_nothing() -> None:
    assert shaped(1.0, [-1.0], [-2.0], [0], coefficient=0.1) == [0.0]


def test_k3_does_not_overflow() -> None:
    assert np.isfinite(shaped(0.0, [-2000.0], [0.0], [1], coefficient=1.0, kind="k3")).all()


def test_an_unknown_estimator_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="k1, k2, k3, abs; found 'k4'"):
        shaped(0.0, [0.0], [0.0], [1], coefficient=1.0, kind="k4")


# --- filters ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "keep"),
    [
        ([0, 1, 1], True),
        ([0.7] * 16, False),
        ([1, NAN, 1], False),
        ([1, NAN, 0], True),
        ([1], False),
        ([NAN, NAN], False),
    ],
)
def test_group_has_signal(group: list[float], keep: bool) -> None:
    assert filters.group_has_signal.function(floats(*group)).tolist() == [keep] * len(group)


def test_top_keeps_the_best_and_the_earlier_of_equals() -> None:
    assert filters.top.function(floats(0, 1, NAN, 1), k=1).tolist() == [False, True, False, False]
    assert filters.top.function(floats(0, 1, NAN, 1), k=3).tolist() == [True, True, False, True]
    assert filters.top.function(floats(float("inf"), 1), k=1).tolist() == [False, True]
    assert filters.top.function(floats(NAN, NAN), k=1).tolist() == [False, False]
    assert filters.top.function(floats(0, 1), k=2, least=1.0).tolist() == [False, True]


def table(rewards: list[float], groups: str) -> RowBatch:
    types = {"prompt_id": fr.PROMPT.str, "reward": fr.SAMPLE.f32}
    return RowBatch({"prompt_id": np.asarray(list(groups), dtype=object), "reward": np.asarray(rewards)}, types)


def test_best_and_worst_make_one_pair_per_group() -> None:
    applied = run_operator(filters.best_and_worst.bind(), table([0.5, 1, 1, 0, NAN, 1, 0.2], "abababa"))
    assert applied.mask is not None
    assert applied.mask.sum() == 4
    kept = [
        (applied.rows["pair_id"][i], bool(applied.rows["chosen"][i]), round(float(applied.rows["reward"][i]), 3))
        for i in np.flatnonzero(applied.mask)
    ]
    assert sorted(kept) == [("a", False, 0.2), ("a", True, 1.0), ("b", False, 0.0), ("b", True, 1.0)]


def test_a_group_of_equals_makes_no_pair() -> None:
    applied = run_operator(filters.best_and_worst.bind(), table([0.7, 0.7, 1, NAN], "aabb"))
    assert applied.mask is not None
    assert not applied.mask.any()


# --- pass@k -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(n: int) -> None:
    for right in range(n + 1):
        outcome = [1.0] * right + [0.0] * (n - right)
        for k in range(1, n + 1):
            draws = [max(draw) for draw in combinations(outcome, k)]
            found = evaluate.pass_rates.function(floats(*outcome), k=(k,))
            assert found[f"pass@{k}"] == pytest.approx([sum(draws) / len(draws)] * n, abs=1e-6)


def test_a_missing_reward_is_a_wrong_answer() -> None:
    assert evaluate.pass_rates.function(floats(NAN, 1.0), k=(1,))["pass@1"].tolist() == [0.5, 0.5]


def test_pass_at_k_needs_k_responses() -> None:
    with pytest.raises(ConfigError, match="at least 8 responses per prompt; found a group of 2"):
        evaluate.pass_rates.function(floats(0, 1), k=(1, 8))


def test_pass_at_writes_a_column_per_k() -> None:
    assert [column.name for column in evaluate.pass_rates.bind(k=(1, 8)).writes] == ["pass@1", "pass@8"]
