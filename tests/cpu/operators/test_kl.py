"""KL terms: what holds for all inputs, and that the gradients are those of the KL where that is said."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators import losses, rewards
from flowrl_operators._kl import KL_KINDS

OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient": "k2"},
    {"importance": "gradient"},
    {"importance": "gradient", "importance_cap": 1.5, "gradient": "k2"},
    {"importance": "value", "against": None},
]
"""Choices of the gradient that leave the value alone."""

COLUMN = st.lists(st.floats(-60, 0), min_size=3, max_size=3)


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def value_of(term: Any, live: Tensor, reference: Tensor, old: Tensor | None = None) -> Tensor:
    behaviour = None if dict(term.config)["against"] is None else old
    return term.function(live, reference, behaviour, **dict(term.config))[0]


@settings(max_examples=50, deadline=None)
@given(COLUMN, COLUMN, COLUMN, st.sampled_from(KL_KINDS), st.sampled_from(OPTIONS), st.sampled_from([None, 10.0]))
def test_the_choice_of_gradient_keeps_the_value(
    live: list[float], reference: list[float], old: list[float], kind: str, options: dict[str, Any], bound: float | None
) -> None:
    x = tensor(live).requires_grad_()
    plain = value_of(losses.kl(kind, value_clip=bound), x, tensor(reference))
    chosen = value_of(losses.kl(kind, value_clip=bound, **options), x, tensor(reference), tensor(old))
    torch.testing.assert_close(chosen, plain, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(chosen.sum(), x)
    assert gradient.isfinite().all()
    if kind != "k1":
        assert (plain >= 0).all()
    if bound is not None:
        assert (plain.abs() <= bound).all()


@settings(max_examples=20, deadline=None)
@given(COLUMN, st.sampled_from(KL_KINDS))
def test_nothing_is_to_pay_at_the_reference(live: list[float], kind: str) -> None:
    x = tensor(live)
    for options in ({}, {"importance": "value"}, {"importance": "value", "against": None}):
        assert (value_of(losses.kl(kind, **options), x, x.clone(), x.clone()) == 0).all()


@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_in_a_reward_is_the_kl_of_the_loss(kind: str) -> None:
    difference = np.linspace(-3, 3, 13)
    value = value_of(losses.kl(kind), tensor(difference), torch.zeros(13, dtype=torch.float64))
    np.testing.assert_allclose(rewards.kl_estimate(difference, kind), value.numpy(), rtol=1e-12)


@pytest.fixture
def policies() -> tuple[Tensor, Tensor, Tensor]:
    """Logits [V] of the policy, and log-probabilities of the reference and of an older policy that drew the tokens."""
    generator = torch.Generator().manual_seed(3)
    logits, reference, older = torch.randn(3, 7, dtype=torch.float64, generator=generator)
    return logits.requires_grad_(), reference.log_softmax(-1), older.log_softmax(-1)


def exact_gradient(logits: Tensor, reference: Tensor) -> Tensor:
    policy = logits.log_softmax(-1)
    (gradient,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    return gradient


def expected_gradient(term: Any, logits: Tensor, reference: Tensor, sampled_by: Tensor) -> Tensor:
    """Mean gradient over all tokens, each as likely as under the policy that draws them: no sampling noise."""
    value = value_of(term, logits.log_softmax(-1), reference, sampled_by)
    (gradient,) = torch.autograd.grad((sampled_by.exp() * value).sum(), logits)
    return gradient


@pytest.mark.parametrize(
    "term",
    [
        losses.kl("k2"),
        losses.kl("k3", gradient="k2"),
        losses.kl("k1", importance="value", against=None),
        losses.kl("k3", importance="value", against=None),
        losses.kl("k3", importance="value"),
    ],
    ids=str,
)
def test_gradient_of_the_kl_on_tokens_of_the_policy(term: Any, policies: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, reference, _ = policies
    own = logits.log_softmax(-1).detach()
    torch.testing.assert_close(
        expected_gradient(term, logits, reference, own), exact_gradient(logits, reference), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize(
    "term",
    [
        losses.kl("k3", gradient="k2", importance="gradient"),
        losses.kl("k1", importance="value"),
        losses.kl("k3", importance="value"),
    ],
    ids=str,
)
def test_gradient_of_the_kl_on_tokens_of_an_older_policy(term: Any, policies: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, reference, older = policies
    torch.testing.assert_close(
        expected_gradient(term, logits, reference, older), exact_gradient(logits, reference), rtol=1e-9, atol=1e-12
    )


def test_plain_estimators_have_another_gradient(policies: tuple[Tensor, Tensor, Tensor]) -> None:
    """What the options are for: k1 as a loss does nothing on average, k3 pulls by another KL."""
    logits, reference, _ = policies
    own = logits.log_softmax(-1).detach()
    wanted = exact_gradient(logits, reference)
    assert expected_gradient(losses.kl("k1"), logits, reference, own).abs().max() < 1e-12
    assert (expected_gradient(losses.kl("k3"), logits, reference, own) - wanted).abs().max() > 1e-2


def test_the_estimate_on_tokens_of_an_older_policy_is_the_kl(policies: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, reference, older = policies
    policy = logits.log_softmax(-1).detach()
    exact = (policy.exp() * (policy - reference)).sum()
    for kind in ("k1", "k3"):
        value = value_of(losses.kl(kind, importance="value"), policy, reference, older)
        torch.testing.assert_close((older.exp() * value).sum(), exact)


def test_full_kl_is_the_kl_and_its_gradient(policies: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, reference, _ = policies
    value, metrics = losses.full_kl(logits[None], reference[None])
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    torch.testing.assert_close(gradient, exact_gradient(logits, reference))
    assert value.item() == metrics["kl"].item() > 0


def test_an_impossible_token_costs_nothing_in_the_full_kl() -> None:
    logits = tensor([[0.0, 1.0, -torch.inf]]).requires_grad_()
    value, _ = losses.full_kl(logits, tensor([[0.0, 1.0, -torch.inf]]))
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    assert value.item() == 0 and gradient.isfinite().all()


def test_the_older_policy_is_read_from_its_column() -> None:
    columns = {
        "logprobs": tensor([[-1.0, -2.0]]).requires_grad_(),
        "ref_logprobs": tensor([[-1.5, -1.5]]),
        "old_logprobs": tensor([[-2.0, -2.0]]),
    }
    value, _ = fr.apply_loss(losses.kl("k1", importance="value"), columns, torch.ones(1, 2), average="token_sum")
    assert value.item() == pytest.approx(0.5 * torch.e - 0.5)


def test_a_weight_that_is_not_finite_is_no_weight() -> None:
    live = tensor([-1.0]).requires_grad_()
    value = value_of(losses.kl("k3", importance="value"), live, tensor([-2.0]), tensor([-torch.inf]))
    assert value.item() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "k9"}, "found 'k9'"),
        ({"kind": "full"}, "full_kl"),
        ({"importance": "both"}, "found importance='both'"),
        ({"importance_cap": 0.0}, "importance_cap > 0.*found importance_cap=0.0"),
        ({"gradient": "k9"}, "found 'k9'"),
        ({"importance": "value"}, "needs the column 'old_logprobs'"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        losses.kl(tensor([-1.0]).requires_grad_(), tensor([-2.0]), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("cap", "weight"), [(None, 0.0), (10.0, 10.0)])
def test_a_weight_that_the_float_cannot_hold_has_a_finite_gradient(
    dtype: torch.dtype, cap: float | None, weight: float
) -> None:
    live = torch.tensor([-1.0, -1.0], dtype=dtype, requires_grad=True)
    reference, old = torch.tensor([-2.0, -2.0], dtype=dtype), torch.tensor([-1.0, -1e4], dtype=dtype)
    term = losses.kl("k1", importance="value", importance_cap=cap)
    value = term.function(live, reference, old, **dict(term.config))[0]
    assert value.tolist() == [1.0, weight]
    value.sum().backward()
    assert live.grad is not None and live.grad.tolist() == [2.0, weight]
