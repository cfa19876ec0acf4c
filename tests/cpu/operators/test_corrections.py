"""Weights and masks between sampler and trainer: what holds for all inputs, and what the vectors of other systems do not hold."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flowrl as fr
from flowrl.engines.segments import Segments
from flowrl.errors import ConfigError
from flowrl.graph.losses import tolerated_staleness, uncorrected
from flowrl_operators import losses, masks
from flowrl_operators._drift import DIRECTIONS, LEVELS, OVER, STATISTICS, UNKNOWN
from flowrl_operators.importance import importance_weights

LOGPROB = st.one_of(st.floats(-50, 0), st.sampled_from([-math.inf, math.nan, 0.0, -1e30]))


@st.composite
def batches(draw: Any, logprob: Any = LOGPROB) -> tuple[Tensor, Tensor, Segments]:
    """(old, rollout, rows) of a few packed tokens; some rows have none."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    total = sum(lengths)
    old = torch.tensor(draw(st.lists(st.floats(-50, 0), min_size=total, max_size=total)), dtype=torch.float64)
    rollout = torch.tensor(draw(st.lists(logprob, min_size=total, max_size=total)), dtype=torch.float64)
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return old, rollout, Segments.of(index, len(lengths))


def corrections(unknown: str) -> list[Any]:
    """Every correction in every level and statistic, as functions of (old, rollout, rows)."""
    terms = [losses.truncated_importance(2.0, floor=0.1, level=level, unknown=unknown) for level in LEVELS]
    terms += [losses.masked_importance(0.5, 2.0, level=level, unknown=unknown) for level in LEVELS]
    for statistic in STATISTICS:
        for over in OVER:
            for direction in DIRECTIONS if statistic != "ratio" else DIRECTIONS[:1]:
                terms.append(
                    losses.within_drift(high=1.5, statistic=statistic, over=over, direction=direction, unknown=unknown)
                )
    return [lambda *given, term=term: term.function(*given, **dict(term.config))[0] for term in terms]


@settings(max_examples=40, deadline=None)
@given(batches(), st.sampled_from(UNKNOWN))
def test_weights_are_finite_whatever_the_sampler_reported(batch: tuple[Tensor, Tensor, Segments], unknown: str) -> None:
    old, rollout, rows = batch
    old.requires_grad_()
    for correction in corrections(unknown):
        weight = correction(old, rollout, rows)
        assert weight.shape == old.shape and weight.dtype == old.dtype
        assert not weight.requires_grad
        assert weight.isfinite().all() and (weight >= 0).all() and (weight <= 2).all()


@settings(max_examples=20, deadline=None)
@given(batches())
def test_equal_policies_need_no_correction(batch: tuple[Tensor, Tensor, Segments]) -> None:
    old, _, rows = batch
    for correction in corrections("drop"):
        assert (correction(old, old.clone(), rows) == 1).all()


@settings(max_examples=20, deadline=None)
@given(batches(st.floats(-50, 0)), st.sampled_from(STATISTICS), st.sampled_from(OVER))
def test_the_mask_of_the_table_is_the_mask_of_the_loss(
    batch: tuple[Tensor, Tensor, Segments], statistic: str, over: str
) -> None:
    old, rollout, rows = batch
    lengths = rows.lengths.numpy()
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    ragged = [fr.Ragged(values.numpy(), offsets) for values in (old, rollout, torch.ones(len(old), dtype=torch.bool))]
    kept = masks.drift(*ragged, low=-1.0, high=0.7, statistic=statistic, over=over)
    weight, _ = losses.within_drift.function(old, rollout, rows, low=-1.0, high=0.7, statistic=statistic, over=over)
    np.testing.assert_array_equal(kept.values, weight.numpy() == 1)


@settings(max_examples=20, deadline=None)
@given(batches(), st.sampled_from(LEVELS), st.sampled_from(UNKNOWN))
def test_the_weights_of_the_table_are_the_weights_of_the_loss(
    batch: tuple[Tensor, Tensor, Segments], level: str, unknown: str
) -> None:
    old, rollout, rows = batch
    offsets = np.concatenate(([0], np.cumsum(rows.lengths.numpy())))
    ragged = [fr.Ragged(values.numpy(), offsets) for values in (old, rollout, torch.ones(len(old), dtype=torch.bool))]
    options: dict[str, Any] = {"level": level, "unknown": unknown}
    stored = importance_weights(*ragged, low=0.5, high=3.0, normalise=False, **options)
    weight, _ = losses.truncated_importance.function(old, rollout, rows, cap=3.0, floor=0.5, **options)
    np.testing.assert_allclose(stored.values, weight.numpy(), rtol=1e-12)


def tokens(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


ROWS = Segments.of(torch.tensor([0, 0, 1]), 3)


@pytest.mark.parametrize(("level", "first"), [("token", [math.e, math.e**-3]), ("sequence", [math.e**-2] * 2)])
def test_levels(level: str, first: list[float]) -> None:
    weight, _ = losses.truncated_importance(
        tokens(0.0, -3.0, -1.0).requires_grad_(), tokens(-1.0, 0.0, -1.0), ROWS, cap=None, level=level
    )
    torch.testing.assert_close(weight, tokens(*first, 1.0))


def test_geometric_level_is_the_mean_log_ratio() -> None:
    weight, _ = losses.truncated_importance(
        tokens(0.0, -3.0, -1.0).requires_grad_(), tokens(-1.0, 0.0, -1.0), ROWS, cap=None, level="geometric"
    )
    torch.testing.assert_close(weight, tokens(math.exp(-1), math.exp(-1), 1.0))


def test_what_an_unknown_log_probability_counts_as() -> None:
    old = tokens(-1.0, -1.0, -1.0).requires_grad_()
    rollout = tokens(math.nan, -1.5, -math.inf)
    found = {
        unknown: losses.truncated_importance(old, rollout, ROWS, cap=2.0, floor=0.5, unknown=unknown)[0].tolist()
        for unknown in UNKNOWN
    }
    known = math.exp(0.5)
    assert found["drop"] == pytest.approx([0.0, known, 0.0])
    assert found["least"] == pytest.approx([0.5, known, 0.5])
    assert found["equal"] == pytest.approx([1.0, known, 1.0])
    assert found["extreme"] == pytest.approx([1.0, known, 2.0])


def test_one_unknown_token_drops_its_row_where_rows_are_judged() -> None:
    old = tokens(-1.0, -1.0, -1.0).requires_grad_()
    weight, _ = losses.truncated_importance(old, tokens(math.nan, -1.0, -1.0), ROWS, level="sequence")
    assert weight.tolist() == [0.0, 0.0, 1.0]


def test_a_veto_drops_the_row_of_one_token() -> None:
    old, rollout = tokens(-12.0, -1.0, -1.0).requires_grad_(), tokens(-1.0, -1.0, -1.0)
    kept, metrics = losses.within_drift(old, rollout, ROWS, low=1e-4, over="each")
    assert kept.tolist() == [0.0, 0.0, 1.0]
    assert metrics["drift_masked"].tolist() == [1.0, 1.0, 0.0]


def test_a_live_policy_stands_in_for_old_log_probabilities() -> None:
    columns = {"logprobs": tokens(-1.0, -2.0)[None].requires_grad_(), "rollout_logprobs": tokens(-1.5, -1.5)[None]}
    loss = losses.sft() * losses.truncated_importance(None)
    value, _ = fr.apply_loss(loss, columns, torch.ones(1, 2), average="token_sum")
    (gradient,) = torch.autograd.grad(value, columns["logprobs"])
    torch.testing.assert_close(gradient, -tokens(0.5, -0.5).exp()[None])


@pytest.mark.parametrize("against", ["old_logprobs", "rollout_logprobs"])
def test_bad_rows_the_policy_has_left_do_not_train(against: str) -> None:
    columns = {
        "logprobs": tokens(-1.0, -1.0, -3.0, -3.0, -3.0, -3.0).reshape(3, 2).requires_grad_(),
        against: torch.full((3, 2), -1.0, dtype=torch.float64),
        "advantage": tokens(-1.0, -1.0, 1.0),
    }
    loss = losses.reinforce() * losses.off_policy_mask(0.5, against=against)
    value, metrics = fr.apply_loss(loss, columns, torch.ones(3, 2), average="token_sum")
    (gradient,) = torch.autograd.grad(value, columns["logprobs"])
    assert gradient.tolist() == [[1.0, 1.0], [0.0, 0.0], [-1.0, -1.0]]
    assert metrics["off_policy_masked"] == pytest.approx(1 / 3)


def test_rejection_by_weight_keeps_the_count_and_rejection_by_mask_does_not() -> None:
    old, rollout = torch.tensor([[-1.0, -9.0]]), torch.tensor([[-1.0, -1.0]])
    ragged = [fr.Ragged(x.numpy().reshape(-1), np.array([0, 2])) for x in (old, rollout, torch.ones(1, 2))]
    kept = torch.from_numpy(masks.drift(*ragged, low=0.5).values).reshape(1, 2)
    columns = {"logprobs": old.clone().requires_grad_(), "old_logprobs": old, "rollout_logprobs": rollout}
    weighed, _ = fr.apply_loss(losses.sft() * losses.within_drift(0.5), columns, torch.ones(1, 2))
    masked, _ = fr.apply_loss(losses.sft(), columns, kept)
    assert (weighed.item(), masked.item()) == (0.5, 1.0)


def test_masks_leave_staleness_and_correction_to_others() -> None:
    masked = losses.within_drift(0.5, 2.0) * losses.ppo_clip(0.2)
    assert tolerated_staleness(masked) == 0
    assert [term.short_name for term in uncorrected(masked)] == ["ppo_clip"]
    corrected = masked * losses.masked_importance()
    assert tolerated_staleness(corrected) is None and uncorrected(corrected) == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda *on: losses.truncated_importance(*on, cap=1.0, floor=2.0), "floor <= cap"),
        (lambda *on: losses.truncated_importance(*on, level="word"), "level is one of token"),
        (lambda *on: losses.truncated_importance(*on, unknown="?"), "unknown is one of drop"),
        (lambda *on: losses.truncated_importance(*on, log_ratio_clip=-1.0), "log_ratio_clip > 0 or None; found .*-1.0"),
        (lambda *on: losses.masked_importance(*on, low=3.0, high=2.0), "low <= high"),
        (lambda *on: losses.within_drift(*on), "needs low, high or both"),
        (lambda *on: losses.within_drift(*on, high=-1.0), "above 0; found high=-1.0"),
        (lambda *on: losses.within_drift(*on, high=1.0, statistic="k9"), "statistic is one of ratio"),
        (lambda *on: losses.within_drift(*on, high=1.0, over="row"), "over is one of token"),
        (lambda *on: losses.within_drift(*on, high=1.0, direction="both"), "a ratio has no direction"),
    ],
)
def test_options_that_make_no_sense(make: Any, message: str) -> None:
    for on in ((), (tokens(-1.0, -1.0, -1.0), tokens(-1.0, -1.0, -1.0), ROWS)):  # a term, and the plain function
        with pytest.raises(ConfigError, match=message):
            make(*on)


@pytest.mark.parametrize(
    "weight",
    [
        losses.truncated_importance(),
        losses.masked_importance(),
        losses.within_drift(0.5),
        losses.off_policy_mask(),
        losses.stored_importance(),
        losses.top_entropy(),
    ],
)
def test_a_weight_that_is_added_is_refused(weight: fr.Loss) -> None:
    columns = {
        name: torch.zeros(1, 2) for name in ("logprobs", "advantages", "rollout_logprobs", "importance", "entropy")
    }
    loss = losses.ppo_clip(0.2)
    for wrong in (loss + weight, loss - 0.5 * weight, loss * weight + weight * weight, weight):
        with pytest.raises(ConfigError, match=rf"'{weight.short_name}' .*write ppo_clip\(...\) \* {weight.short_name}"):
            fr.apply_loss(wrong, columns, torch.ones(1, 2))
    value, _ = fr.apply_loss(loss * weight + 2 * weight * loss, columns, torch.ones(1, 2))
    assert value.isfinite()


def test_the_defaults_of_masked_importance_are_icepops() -> None:
    ratios = tokens(0.49, 0.5, 5.0, 5.01)
    segments = Segments.of(torch.tensor([0, 0, 0, 0]), 1)
    weight, _ = losses.masked_importance(ratios.double().log(), torch.zeros(4), segments, log_ratio_clip=None)
    assert (weight > 0).tolist() == [False, True, True, False]


def test_a_stored_weight_of_a_row_is_its_geometric_mean() -> None:
    weight = tokens(0.5, 2.0, 3.0)
    found, _ = losses.stored_importance.function(weight, ROWS, level="geometric")
    torch.testing.assert_close(found, tokens(1.0, 1.0, 3.0))
    padded, _ = losses.stored_importance.function(weight, ROWS, level="geometric", count_eps=1.0)
    torch.testing.assert_close(padded[2], tokens(3.0)[0].sqrt())  # log 3 over 1 + 1
    assert losses.stored_importance.function(weight, ROWS)[0].tolist() == weight.tolist()
    with pytest.raises(ConfigError, match="level is one of token, geometric"):
        losses.stored_importance(level="sequence")
