"""Filters: groups without signal in each convention, lengths, and rows too old."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch
from flowrl.testing import operator_cases
from flowrl_operators import filters

NAN = float("nan")
THIRD = 0.7  # three of them have a deviation of 1.1e-16


def signal(*rewards: float, **options: object) -> list[bool]:
    found = filters.group_has_signal(np.asarray(rewards, np.float32 if "f32" in options else np.float64), **options)
    return found.tolist()


@pytest.mark.parametrize(
    ("rewards", "options", "keep"),
    [
        ((0, 1), {}, True),
        ((THIRD,) * 3, {}, False),
        ((THIRD,) * 3, {"rounding": "counts"}, True),
        ((0, 1e-7, 0), {}, True),
        ((0, 1e-7, 0), {"eps": 1e-6}, False),
        # std is 0.471 over n and 0.577 over n - 1
        ((0, 0, 1), {"eps": 0.5}, False),
        ((0, 0, 1), {"eps": 0.5, "unbiased": True}, True),
        ((5,), {}, False),
        ((5,), {"single": "keep"}, True),
        # a verifier failed on all but one: that is no group of one
        ((5, NAN), {"single": "keep"}, False),
        ((0, 1, NAN), {"unknown": "drop"}, False),
        ((1, 1, NAN), {"unknown": "keep"}, True),
        ((0, 1, float("inf")), {}, True),
        ((NAN, NAN), {}, False),
    ],
)
def test_signal_of_a_group(rewards: tuple[float, ...], options: dict[str, object], keep: bool) -> None:
    assert signal(*rewards, **options) == [keep] * len(rewards)


def test_each_row_may_be_judged_by_its_siblings() -> None:
    assert signal(1, 1, 1, 0, over="others") == [True, True, True, False]
    assert signal(1, 0, over="others") == [False, False]
    assert signal(1, 0, over="others", single="keep") == [True, True]
    found = filters.deviations(np.asarray([1.0, 1.0, 1.0, 0.0]), over="others", unbiased=True)
    np.testing.assert_allclose(found, [3**-0.5] * 3 + [0])


@pytest.mark.parametrize("option", ["rounding", "single", "over", "unknown"])
def test_unknown_options_are_refused_with_the_known_ones(option: str) -> None:
    with pytest.raises(ConfigError, match="found 'x'"):
        signal(0, 1, **{option: "x"})


rewards = st.lists(st.sampled_from([0.0, 1.0, 0.5, THIRD, NAN]), min_size=1, max_size=12)


@given(rewards, st.data(), st.sampled_from(["group", "others"]), st.sampled_from(["no_signal", "counts"]))
def test_many_groups_at_once_are_each_alone(values: list[float], data: st.DataObject, over: str, rounding: str) -> None:
    keys = data.draw(st.lists(st.sampled_from("abc"), min_size=len(values), max_size=len(values)))
    options = {"over": over, "rounding": rounding, "unbiased": True}
    reward = np.asarray(values)
    found = filters.group_has_signal(reward, np.asarray(keys, object), **options)
    for key in set(keys):
        mine = np.asarray(keys) == key
        assert found[mine].tolist() == filters.group_has_signal(reward[mine], **options).tolist()


def test_rows_of_a_flow_are_grouped_by_prompt() -> None:
    reward = [0.0, 1.0, 1.0, 1.0, 0.0]
    types = {"prompt_id": fr.PROMPT.str, "reward": fr.SAMPLE.f32}
    rows = RowBatch({"prompt_id": np.asarray(list("abbab"), object), "reward": reward}, types)
    assert run_operator(filters.group_has_signal.bind(), rows).mask.tolist() == [True] * 5  # type: ignore[union-attr]
    rows = RowBatch({"prompt_id": np.asarray(list("abbaa"), object), "reward": reward}, types)
    mask = run_operator(filters.group_has_signal.bind(), rows).mask
    assert mask is not None
    assert mask.tolist() == [True, False, False, True, True]
    assert filters.group_has_signal.bind().min_group == 2
    assert filters.group_has_signal.bind(single="keep").min_group == 1


def test_mean_between_excludes_its_bounds() -> None:
    between = filters.group_mean_between
    assert between(np.asarray([0.5, 0.5])).tolist() == [True, True]
    assert between(np.asarray([1.0, 1.0])).tolist() == [False, False]
    assert between(np.asarray([0.0, 1.0, 1.0, 1.0, 1.0]), low=0.2, high=0.8).tolist() == [False] * 5
    assert between(np.asarray([0.0, 1.0, NAN])).tolist() == [True] * 3
    assert between(np.asarray([0.0, 1.0, NAN]), unknown="drop").tolist() == [False] * 3
    assert between(np.asarray([NAN])).tolist() == [False]
    with pytest.raises(ConfigError, match="low < high"):
        between(np.asarray([0.0]), low=1.0)


IDS = fr.Ragged.of([[1, 2, 3], [], [4]], np.int32)
PROMPTS = fr.Ragged.of([[1], [2, 3], [4, 5, 6, 7]], np.int32)
ENDS = np.asarray(["length", "stop", "stop"], object)


def test_length_counts_what_it_is_told_to() -> None:
    assert filters.length(IDS).tolist() == [True, False, True]
    assert filters.length(IDS, least=0, most=2).tolist() == [False, True, True]
    assert filters.length(IDS, PROMPTS, of="prompt", most=2).tolist() == [True, True, False]
    assert filters.length(IDS, PROMPTS, of="all", least=3, most=4).tolist() == [True, False, False]
    assert filters.length(IDS, None, ENDS, least=0, truncated="drop").tolist() == [False, True, True]


def test_length_says_what_it_lacks() -> None:
    with pytest.raises(ConfigError, match="'prompt_ids'"):
        filters.length(IDS, of="all")
    with pytest.raises(ConfigError, match="'finish_reason'"):
        filters.length(IDS, truncated="drop")
    with pytest.raises(ConfigError, match="least <= most"):
        filters.length(IDS, least=4, most=3)


def test_fresh_counts_from_the_trainers_version() -> None:
    least, greatest = np.asarray([3, 5, 4], np.int32), np.asarray([5, 5, 4], np.int32)
    assert filters.fresh(least, greatest).tolist() == [False, True, False]
    assert filters.fresh(least, greatest, most=1).tolist() == [False, True, True]
    assert filters.fresh(least, greatest, np.full(3, 7), most=2).tolist() == [False, True, False]
    with pytest.raises(ConfigError, match="most"):
        filters.fresh(least, most=-1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 9))
def test_fresh_keeps_more_the_more_is_allowed(versions: list[int], most: int) -> None:
    least = np.asarray(versions, np.int32)
    few, many = filters.fresh(least, most=most), filters.fresh(least, most=most + 1)
    assert (few <= many).all()
    assert Counter(few.tolist())[True] >= versions.count(max(versions))


CASES = [
    *operator_cases(
        filters.group_has_signal,
        config=[{}, {"over": "others", "unbiased": True}, {"rounding": "counts", "single": "keep", "unknown": "keep"}],
    ),
    *operator_cases(filters.group_mean_between),
    *operator_cases(filters.length, config=[{}, {"of": "all", "most": 4, "truncated": "drop"}]),
    *operator_cases(filters.fresh, config=[{}, {"most": 2}]),
    *operator_cases(filters.top, config=[{}, {"k": 2, "least": 0.5}]),
    *operator_cases(filters.best_and_worst),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance(case) -> None:  # type: ignore[no-untyped-def]
    case.check()
