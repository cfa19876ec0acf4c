"""Loss terms beyond the vectors: what they leave alone, what they refuse, what they report."""

import pytest
import torch

from flowrl.engines.segments import Segments
from flowrl.errors import ConfigError, DataError
from flowrl.graph.losses import tolerated_staleness, uncorrected
from flowrl_operators import losses


def tokens(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_on_policy_clip_is_the_policy_gradient() -> None:
    live, advantage = tokens(-1.0, -2.0).requires_grad_(), tokens(0.5, -2.0)
    loss, metrics = losses.ppo_clip(live, live.detach(), advantage)
    (gradient,) = torch.autograd.grad(loss.sum(), live)
    torch.testing.assert_close(gradient, -advantage)
    assert metrics["clip_fraction"].sum() == 0


def test_clip_stops_the_gradient_where_the_ratio_has_moved_enough() -> None:
    live, old = tokens(0.0, 0.0, 0.0, 0.0).requires_grad_(), tokens(-0.5, 0.5, -0.5, 0.5)
    loss, metrics = losses.ppo_clip(live, old, tokens(1.0, 1.0, -1.0, -1.0), clip=0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), live)
    # up with a good token and down with a bad one are clipped; the ways back are not
    assert (gradient != 0).tolist() == [False, True, True, False]
    assert metrics["clip_fraction"].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_clip_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="dual > 1; found clip=0.2, high=None, dual=0.5"):
        losses.ppo_clip(tokens(0.0), tokens(0.0), tokens(1.0).requires_grad_(), dual=0.5)


def test_importance_has_no_gradient_and_is_finite() -> None:
    live = tokens(-0.1, -90.0, -0.1).requires_grad_()
    segments = Segments.of(torch.tensor([0, 0, 1]), 2)
    for level in ("token", "sequence"):
        weight, _ = losses.truncated_importance(live, tokens(-60.0, -0.1, -0.2), segments, cap=2.0, level=level)
        assert not weight.requires_grad
        assert weight.isfinite().all()
        assert weight.max() <= 2.0


def test_sequence_weight_is_the_ratio_of_the_whole_row() -> None:
    segments = Segments.of(torch.tensor([0, 0, 1]), 3)
    old = tokens(-1.0, -1.0, -1.0).requires_grad_()
    weight, _ = losses.truncated_importance(old, tokens(-1.1, -1.2, -0.9), segments, cap=9.0, level="sequence")
    torch.testing.assert_close(weight, tokens(0.3, 0.3, -0.1).exp())


def test_a_product_with_the_correction_is_corrected_and_tolerates_any_staleness() -> None:
    corrected = losses.ppo_clip(0.2) * losses.truncated_importance(2.0)
    assert uncorrected(corrected) == ()
    assert tolerated_staleness(corrected) is None
    assert tolerated_staleness(losses.ppo_clip(0.2) + 0.1 * losses.kl()) == 0
    assert [term.short_name for term in uncorrected(losses.ppo_clip(0.2) + losses.kl())] == ["ppo_clip"]


def test_k3_stays_positive_and_finite_far_from_the_reference() -> None:
    live = tokens(-500.0, 0.0, -1.0).requires_grad_()
    value, _ = losses.kl(live, tokens(0.0, -500.0, -1.0), kind="k3")
    (gradient,) = torch.autograd.grad(value.sum(), live)
    assert value.isfinite().all() and (value >= 0).all()
    assert gradient.isfinite().all()


def test_kl_refuses_an_unknown_estimator() -> None:
    with pytest.raises(ConfigError, match="found 'k9'"):
        losses.kl(tokens(0.0).requires_grad_(), tokens(0.0), kind="k9")


def pairs(order: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[str]]:
    """Rows 0, 1 are one pair, rows 2, 3 another; each row one token; in the given order."""
    index = torch.tensor(order)
    live, reference = tokens(-1.0, -2.0, -3.0, -1.5)[index], tokens(-1.2, -1.8, -2.0, -2.5)[index]
    chosen = torch.tensor([True, False, False, True])[index]
    return live.requires_grad_(), reference, chosen, ["qqpp"[i] for i in order]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 0, 2, 1], [2, 1, 0, 3]])
def test_dpo_finds_pairs_in_any_order_of_rows(order: list[int]) -> None:
    segments = Segments.of(torch.arange(4), 4)
    loss, metrics = losses.dpo(*pairs(order), segments, beta=1.0)
    wanted = torch.nn.functional.softplus(-tokens(0.4, 0.4, 2.0, 2.0))[torch.tensor(order)]
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(metrics["preference_margin"], tokens(0.4, 0.4, 2.0, 2.0)[torch.tensor(order)])


def test_dpo_counts_an_empty_response_as_zero() -> None:
    live = tokens(-1.0).requires_grad_()
    segments = Segments.of(torch.tensor([1]), 2)
    loss, _ = losses.dpo(live, tokens(-2.0), torch.tensor([False, True]), ["p", "p"], segments, beta=1.0)
    torch.testing.assert_close(loss, torch.nn.functional.softplus(tokens(-1.0, -1.0)))


def test_a_pair_torn_apart_is_an_error() -> None:
    live, reference, chosen, pair_id = pairs([0, 1, 2])
    with pytest.raises(DataError, match="1 of 2 pairs have one row, the first is 'p'"):
        losses.dpo(live, reference, chosen, pair_id, Segments.of(torch.arange(3), 3))


def test_two_rows_chosen_of_one_pair_are_an_error() -> None:
    scores = tokens(0.0, 1.0, 2.0, 3.0).requires_grad_()
    with pytest.raises(DataError, match="pair 'p' has two chosen ones"):
        losses.bradley_terry(scores, torch.tensor([True, True, False, False]), ["p"] * 4)


def test_bradley_terry_margin_is_what_the_chosen_must_lead_by() -> None:
    scores = tokens(2.0, 1.0).requires_grad_()
    loss, metrics = losses.bradley_terry(scores, torch.tensor([True, False]), ["p", "p"], margin=1.0)
    torch.testing.assert_close(loss, tokens(2.0, 2.0).log())
    assert metrics["preference_margin"].tolist() == [1.0, 1.0]


@pytest.fixture
def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, dtype=torch.float64, generator=generator).requires_grad_()
    return logits, torch.randn(5, 11, dtype=torch.float64, generator=generator).log_softmax(-1)


def full_kl(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    ours = logits.log_softmax(-1)
    return (ours.exp() * (ours - teacher)).sum(-1)


@pytest.mark.parametrize("outside", ["bucket", "renormalise", "ignore"])
def test_reverse_kl_over_the_whole_vocabulary_is_the_kl(outside: str, distributions) -> None:  # type: ignore[no-untyped-def]
    logits, teacher = distributions
    top, ids = teacher.topk(11, -1)
    value, _ = losses.reverse_kl(logits, ids, top, outside=outside)
    torch.testing.assert_close(value, full_kl(logits, teacher))


def test_the_bucket_bounds_the_kl_from_below_and_vanishes_only_at_the_teacher(distributions) -> None:  # type: ignore[no-untyped-def]
    logits, teacher = distributions
    top, ids = teacher.topk(4, -1)
    value, metrics = losses.reverse_kl(logits, ids, top)
    assert (value > 0).all() and (value <= full_kl(logits, teacher)).all()
    assert ((metrics["inside_mass"] > 0) & (metrics["inside_mass"] < 1)).all()
    agreed, _ = losses.reverse_kl(teacher.clone().requires_grad_(), ids, top)
    torch.testing.assert_close(agreed, torch.zeros_like(agreed))


def test_leaving_the_teachers_tokens_is_punished_by_the_bucket_only() -> None:
    teacher = torch.tensor([[0.5, 0.499, 0.001]], dtype=torch.float64).log()
    top, ids = teacher.topk(2, -1)
    away = torch.tensor([[0.0, 0.0, 12.0]], dtype=torch.float64).requires_grad_()
    assert losses.reverse_kl(away, ids, top)[0].item() > 5
    assert abs(losses.reverse_kl(away, ids, top, outside="ignore")[0].item()) < 1e-2
