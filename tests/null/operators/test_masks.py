"""Operators that take tokens out of the loss, and weights that need the whole step."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators import advantages, losses, masks
from flowrl_operators.importance import importance_weights


def column(*rows: list[float], dtype: type = np.float32) -> fr.Ragged:
    return fr.Ragged.of(list(rows), dtype=dtype)


OLD = column([-1.0, -1.0], [-1.0, -3.0], [-1.0])
ROLLOUT = column([-1.0, -1.5], [-1.0, -1.0], [math.nan])
MASK = column([1, 1], [1, 1], [1], dtype=bool)


def test_tokens_beyond_the_bounds_leave_the_mask() -> None:
    kept = masks.drift(OLD, ROLLOUT, MASK, low=0.5, high=2.0)
    assert kept.to_list() == [[True, True], [True, False], [False]]


def test_a_row_leaves_as_a_whole() -> None:
    assert masks.drift(OLD, ROLLOUT, MASK, low=0.5, over="each").to_list() == [[True] * 2, [False] * 2, [False]]
    assert masks.drift(OLD, ROLLOUT, MASK, high=1.2, over="mean", unknown="equal").to_list() == [
        [False] * 2,
        [True] * 2,
        [True],
    ]


def test_tokens_outside_the_mask_stay_outside_and_say_nothing() -> None:
    mask = column([1, 0], [1, 0], [0], dtype=bool)
    kept = masks.drift(OLD, ROLLOUT, mask, low=0.9, high=1.1, over="mean")
    assert kept.to_list() == [[True, False], [True, False], [False]]


def test_no_rows_and_no_tokens() -> None:
    empty, none = column(), column([], [])
    for given_column in (empty, none):
        mask = given_column.astype(bool)
        for over in ("token", "mean", "each"):
            assert len(masks.drift(given_column, given_column, mask, high=2.0, over=over)) == len(mask)
        assert not masks.second_moment(given_column, given_column, mask).values.any()
        assert not importance_weights(given_column, given_column, mask).values.any()


def test_columns_and_locality() -> None:
    drift = masks.drift.bind(high=2.0)
    assert [c.name for c in drift.writes] == ["loss_mask"] and drift.replaces and str(drift.locality) == "row"
    assert [c.name for c in masks.drift.bind(high=2.0, out="close").writes] == ["close"]
    assert str(masks.second_moment.bind().locality) == "batch"
    assert str(importance_weights.bind().locality) == "batch"
    assert str(importance_weights.bind(normalise=False).locality) == "row"


@settings(max_examples=50)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=20), st.floats(0.001, 2))
def test_second_moment_is_below_the_threshold_with_one_token_more_it_is_not(
    ratios: list[float], threshold: float
) -> None:
    old = column(ratios, dtype=np.float64)
    everywhere = fr.Ragged.like(np.ones(len(ratios), bool), old)
    kept = masks.second_moment(old, old * 0, everywhere, threshold=threshold).values
    square = np.asarray(ratios) ** 2
    assert kept.any()
    if kept.sum() > 1:
        assert square[kept].mean() < threshold + 1e-9
    if not kept.all():
        assert square[kept].max() <= square[~kept].min()
        assert np.append(square[kept], square[~kept].min()).mean() >= threshold - 1e-9


def test_second_moment_drops_what_is_not_known() -> None:
    assert masks.second_moment(OLD, ROLLOUT, MASK, threshold=9.0).to_list() == [[True] * 2, [True] * 2, [False]]


def test_normalised_weights_have_mean_one() -> None:
    weights = importance_weights(OLD, ROLLOUT, MASK, high=1.2)
    assert weights.values.mean() == pytest.approx(1.0)
    by_row = importance_weights(OLD, ROLLOUT, MASK, high=5.0, level="sequence")
    assert np.mean([row[0] for row in by_row]) == pytest.approx(1.0)


def test_weights_that_are_all_zero_stay_zero() -> None:
    weights = importance_weights(OLD, OLD - 3.0, MASK, high=2.0, outside="zero")
    assert not weights.values.any()


@pytest.mark.parametrize(
    "options", [{"low": 3.0}, {"high": 0.0}, {"outside": "drop"}, {"level": "word"}, {"unknown": "?"}]
)
def test_options_that_make_no_sense(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        importance_weights(OLD, ROLLOUT, MASK, **options)


def test_masks_refuse_what_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="needs low, high or both"):
        masks.drift(OLD, ROLLOUT, MASK)
    with pytest.raises(ConfigError, match="threshold > 0"):
        masks.second_moment(OLD, ROLLOUT, MASK, threshold=0.0)


@fr.reward
def length(response):
    return float(len(response))


@fr.flow
def corrected(prompts, policy):
    rows = fr.rollout(policy, prompts, n=4)
    rows = advantages.group_norm(length(rows))
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    rows = masks.second_moment(rows, out="close")
    rows = rows.with_columns(loss_mask=rows["loss_mask"] & rows["close"])
    rows = importance_weights(masks.drift(rows, low=0.5, high=2.0))
    loss = losses.ppo_clip(0.2) * losses.stored_importance() * losses.off_policy_mask(0.1, against="old_logprobs")
    return fr.update(policy, rows, loss=loss)


def test_masks_and_weights_in_a_flow() -> None:
    prompts = [{"prompt_id": str(i), "prompt": f"{i}+1="} for i in range(4)]
    model = fr.Model({f"{i}+1=": ["1", "two", "three"] for i in range(4)}, optimizer=fr.AdamW(lr=1e-3))
    done = fr.run_local(
        corrected.graph(), steps=2, engine="null", out=None, progress="off", batch=4, max_tokens=12, prompts=prompts, policy=model
    )  # fmt: skip
    assert done.status == "finished" and len(done.metrics) == 2
