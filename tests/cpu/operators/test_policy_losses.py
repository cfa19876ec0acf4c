"""Policy losses beyond the golden files: what their options share, what they refuse, what the papers promise."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flowrl as fr
from flowrl.engines.segments import Segments
from flowrl.errors import ConfigError
from flowrl_operators import losses

COUNTS = [3, 1, 4]


def batch(seed: int = 0, *, by_row: bool = True) -> tuple[Tensor, Tensor, Tensor, Segments]:
    """(log-probabilities with gradient, old ones, advantages, rows) of eight tokens in three rows."""
    generator = torch.Generator().manual_seed(seed)
    segments = Segments.of(torch.repeat_interleave(torch.arange(3), torch.tensor(COUNTS)), 3)

    def random(size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64, generator=generator)

    old = -random(8).abs() - 0.2
    live = (old + 0.4 * random(8)).clamp(max=-1e-3).requires_grad_()
    return live, old, segments.spread(random(3)) if by_row else random(8), segments


def gradient(loss: Tensor, live: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss.sum(), live)
    return found


ON_POLICY: dict[str, Callable[..., Any]] = {
    "reinforce": lambda x, o, a, s: losses.reinforce(x, a),
    "ppo_clip": lambda x, o, a, s: losses.ppo_clip(x, o, a),
    "cispo": lambda x, o, a, s: losses.cispo(x, o, a),
    "topr": lambda x, o, a, s: losses.topr(x, o, a, a),
    "sapo": lambda x, o, a, s: losses.sapo(x, o, a),
    "dro": lambda x, o, a, s: losses.dro(x, o, a),
    "vespo": lambda x, o, a, s: losses.vespo(x, o, a, s),
    "dppo": lambda x, o, a, s: losses.dppo(x, o, a),
    "kl_cov": lambda x, o, a, s: losses.kl_cov(x, o, a),
    "clip_cov": lambda x, o, a, s: losses.clip_cov(x, o, a, share=0.0),
    "geometric_token": lambda x, o, a, s: losses.ppo_clip(x, o, a, s, level="geometric_token"),
}


@pytest.mark.parametrize("name", ON_POLICY)
def test_on_policy_each_is_the_policy_gradient(name: str) -> None:
    live, _, advantages, segments = batch(by_row=False)
    output = ON_POLICY[name](live, live.detach(), advantages, segments)
    torch.testing.assert_close(gradient(output[0] if isinstance(output, tuple) else output, live), -advantages)


def test_on_policy_gmpo_and_gspo_are_the_row_mean_of_it() -> None:
    live, _, advantages, segments = batch()
    wanted = -advantages / segments.spread(segments.lengths)
    torch.testing.assert_close(gradient(losses.gmpo(live, live.detach(), advantages, segments)[0], live), wanted)
    gspo = losses.ppo_clip(live, live.detach(), advantages, segments, level="geometric")[0]
    torch.testing.assert_close(gradient(segments.mean(gspo), live), wanted)


def test_gspo_and_gspo_token_agree_in_value_and_on_row_advantages_in_gradient() -> None:
    for by_row in (True, False):
        live, old, advantages, segments = batch(by_row=by_row)
        options: dict[str, Any] = {"clip": 0.5, "log_ratio_clip": None}
        whole = losses.ppo_clip(live, old, advantages, segments, level="geometric", **options)[0]
        token = losses.ppo_clip(live, old, advantages, segments, level="geometric_token", **options)[0]
        torch.testing.assert_close(whole, token)
        same = torch.allclose(gradient(segments.mean(whole), live), gradient(segments.mean(token), live))
        assert same == by_row


def test_the_ratio_of_a_sequence_is_the_product_of_its_tokens() -> None:
    live, old, advantages, segments = batch()
    for level, power in (("sequence", torch.ones(3)), ("geometric", 1 / torch.tensor(COUNTS))):
        metrics = losses.ppo_clip(live, old, advantages, segments, level=level)[1]
        of_row = segments.sum((live - old).detach()) * power.double()
        torch.testing.assert_close(metrics["ratio"], segments.spread(of_row.exp()))


def test_two_sided_clipping_is_the_dual_clip() -> None:
    """min(min(r, delta) A, clip(r) A) with delta above the clip's upper bound, as INTELLECT-2 writes it."""
    live, old, advantages, _ = batch(3, by_row=False)
    old = old - torch.tensor([0.0, 2.0, 0.0, 2.0, 3.0, -2.0, 0.0, 1.0])
    ratio = (live - old).exp()
    wanted = -torch.minimum(ratio.clamp(max=1.5) * advantages, ratio.clamp(0.8, 1.2) * advantages)
    found, metrics = losses.ppo_clip(live, old, advantages, dual=1.5)
    assert metrics["dual_clip_fraction"].any()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(gradient(found, live), gradient(wanted, live))


def test_clip_fractions_add_up() -> None:
    live, old, advantages, _ = batch(5, by_row=False)
    metrics = losses.ppo_clip(live, old, advantages, clip=0.05)[1]
    low, high = metrics["clip_low_fraction"], metrics["clip_high_fraction"]
    assert low.any() and high.any()
    torch.testing.assert_close(low + high, metrics["clip_fraction"])


def test_cispo_keeps_the_gradient_of_every_token_unless_told_to_drop_it() -> None:
    live, old, advantages, _ = batch(5, by_row=False)
    kept, metrics = losses.cispo(live, old, advantages, high=0.1, low=0.1)
    slope = gradient(kept, live)
    # whatever the ratio, its slope is not part of the gradient
    torch.testing.assert_close(slope, -(live - old).exp().detach().clamp(0.9, 1.1) * advantages)
    assert slope.all() and metrics["pushed_fraction"].any()
    dropped, _ = losses.cispo(live, old, advantages, high=0.1, low=0.1, drop=True)
    assert torch.equal(gradient(dropped, live) == 0, metrics["pushed_fraction"] == 1)


def test_topr_learns_from_good_rows_as_they_are() -> None:
    live, old, advantages, _ = batch()
    rewards = torch.tensor([1.0, 1, 1, 0, -1, -1, -1, -1], dtype=torch.float64)
    found = gradient(losses.topr(live, old, advantages, rewards, positive=2.0, negative=0.5)[0], live)
    ratio = (live - old).exp().detach()
    wanted = torch.where(rewards > 0, 2.0, 0.5 * ratio.clamp(0, 1)) * -advantages
    torch.testing.assert_close(found, wanted)


def test_the_weight_of_vespo_is_1_on_policy_and_falls_on_both_sides() -> None:
    segments = Segments.of(torch.arange(5), 5)
    live = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0], dtype=torch.float64, requires_grad=True)
    for sign in (1.0, -1.0):
        metrics = losses.vespo(live, torch.zeros_like(live), sign * torch.ones_like(live), segments)[1]
        weight = metrics["sequence_weight"]
        assert weight[2] == 1 and (weight[:2] < 1).all() and (weight[3:] < 0.9).all() and weight[4] < 1e-6


@pytest.mark.parametrize("divergence", ["tv", "binary_kl"])
def test_dppo_leaves_out_what_moved_far_where_it_is_pushed_on(divergence: str) -> None:
    p_old = torch.tensor([0.5, 0.5, 0.5, 0.5, 1e-4, 0.5], dtype=torch.float64)
    p_new = torch.tensor([0.9, 0.9, 0.1, 0.1, 1e-2, 0.55], dtype=torch.float64)
    live = p_new.log().requires_grad_()
    advantages = torch.tensor([1.0, -1, 1, -1, 1, 1], dtype=torch.float64)
    options: dict[str, Any] = {"divergence": divergence, "low": 0.1, "cap": None, "log_ratio_clip": None}
    found, metrics = losses.dppo(live, p_old.log(), advantages, **options)
    # a rare token may grow a hundredfold, and a way back is always open
    assert metrics["clip_fraction"].tolist() == [1, 0, 0, 1, 0, 0]
    _, both = losses.dppo(live, p_old.log(), advantages, drop="all", **options)
    assert both["clip_fraction"].tolist() == [1, 1, 1, 1, 0, 0]
    value, _ = losses.dppo(live, p_old.log(), advantages, value="ratio", **options)
    torch.testing.assert_close(gradient(value, live), gradient(found, live))
    torch.testing.assert_close(value, -p_new / p_old * advantages * (metrics["clip_fraction"] == 0))


def test_a_ratio_that_dppo_holds_has_no_gradient() -> None:
    live = torch.tensor([-0.5, -0.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-25.0, -0.5], dtype=torch.float64)
    value, _ = losses.dppo(live, old, -torch.ones(2, dtype=torch.float64), value="ratio", cap=None)
    torch.testing.assert_close(value[0].item(), math.exp(20.0))
    assert gradient(value, live).tolist() == [0.0, 1.0]


def test_binary_kl_is_finite_at_certain_tokens() -> None:
    live = torch.tensor([0.0, -1.0, 0.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.0, 0.0, -1.0], dtype=torch.float64)
    loss, _ = losses.dppo(live, old, torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64), divergence="binary_kl")
    assert loss.isfinite().all() and gradient(loss, live).isfinite().all()


def test_covariance_losses_act_on_the_tokens_of_greatest_covariance() -> None:
    live, old, advantages, _ = batch(1, by_row=False)
    seen = live.detach()
    cov = (advantages - advantages.mean()) * (seen - seen.mean())
    held, metrics = losses.kl_cov(live, old, advantages, share=0.25, coef=2.0)
    chosen = metrics["cov_fraction"] == 1
    assert chosen.sum() == 2 and cov[chosen].min() > cov[~chosen].max()
    plain = -(live - old).exp() * advantages
    torch.testing.assert_close(held - plain, 2.0 * chosen * (live - old).abs())

    bounds: dict[str, Any] = {"low_cov": float(cov.min()) - 1, "high_cov": float(cov.max()) + 1, "clip": 9.0}
    for share, count in ((1.0, 8), (0.5, 4), (1e-9, 1), (0.0, 0)):
        loss, metrics = losses.clip_cov(live, old, advantages, share=share, **bounds)
        assert metrics["cov_fraction"].sum() == count
        assert torch.equal(loss == 0, metrics["cov_fraction"] == 1)
    draws = [losses.clip_cov(live, old, advantages, share=0.5, seed=s, **bounds)[1]["cov_fraction"] for s in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_top_entropy_takes_the_quantile_of_the_step(share: float, count: int) -> None:
    entropy = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(count)).requires_grad_()
    weight, _ = losses.top_entropy(entropy, share=share)
    assert torch.equal(weight == 1, entropy >= torch.quantile(entropy, 1 - share))
    assert not weight.requires_grad


EMPTY = torch.zeros(0, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", [*ON_POLICY, "top_entropy", "gmpo"])
def test_no_token_is_no_problem(name: str) -> None:
    segments = Segments.of(torch.zeros(0, dtype=torch.int64), 2)
    if name == "top_entropy":
        output = losses.top_entropy(EMPTY)
    elif name == "gmpo":
        output = losses.gmpo(EMPTY, EMPTY, EMPTY, segments)
    else:
        output = ON_POLICY[name](EMPTY, EMPTY, EMPTY, segments)
    loss = output[0] if isinstance(output, tuple) else output
    assert loss.sum() == 0


@pytest.mark.parametrize("name", sorted({*ON_POLICY} - {"reinforce", "dro"}))
def test_ratios_far_from_1_stay_finite(name: str) -> None:
    live = torch.tensor([-0.1, -90.0, -200.0, -1e-3], dtype=torch.float32, requires_grad=True)
    old = torch.tensor([-120.0, -0.1, -torch.inf, -50.0], dtype=torch.float32)
    segments = Segments.of(torch.tensor([0, 0, 1, 1]), 2)
    for advantages in (torch.ones(4), -torch.ones(4)):
        output = ON_POLICY[name](live, old, advantages, segments)
        assert output[0].isfinite().all() and gradient(output[0], live).isfinite().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda live: losses.ppo_clip(live, live, live, clip=0.0), "clip > 0"),
        (lambda live: losses.ppo_clip(live, live, live, level="row"), "one of token, sequence, .*'row'"),
        (lambda live: losses.ppo_clip(live, live, live, level="geometric"), "needs the rows of the tokens"),
        (lambda live: losses.ppo_clip(live, live, live, row_advantage=True), "needs the rows of the tokens"),
        (lambda live: losses.cispo(live, live, live, high=-0.1), "high >= 0"),
        (lambda live: losses.topr(live, live, live, live, low=2.0), "low <= high"),
        (lambda live: losses.sapo(live, live, live, tau=0.0), "tau > 0"),
        (lambda live: losses.dro(live, live, live, beta=-1.0), "beta >= 0"),
        (lambda live: losses.dppo(live, live, live, divergence="kl"), "divergence is one of tv, binary_kl; found 'kl'"),
        (lambda live: losses.dppo(live, live, live, low=-1.0), "low >= 0"),
        (lambda live: losses.clip_cov(live, live, live, low_cov=2.0, high_cov=1.0), "low_cov < high_cov"),
        (lambda live: losses.kl_cov(live, live, live, share=0.0), "0 < share <= 1"),
        (lambda live: losses.top_entropy(live, share=0.0), "0 < share <= 1"),
        (lambda live: losses.vespo(live, live, live, None, power=(1.0,)), "power"),
        (lambda live: losses.vespo(live, live, live, None, power=(1.0, -1.0)), "two numbers >= 0"),
        (lambda live: losses.ppo_clip(-0.2), "clip > 0.*clip=-0.2"),
        (lambda live: losses.ppo_clip("0.2"), "a number as clip"),
        (lambda live: losses.ppo_clip(0.2, level="geometrical"), "level is one of .*'geometrical'"),
        (lambda live: losses.ppo_clip(log_ratio_clip=(1.0, -1.0)), "low < high.*found log_ratio_clip=.1.0, -1.0."),
        (lambda live: losses.ppo_clip(count_eps=-1.0), "count_eps >= 0"),
        (lambda live: losses.gmpo(live, live, live, None, clip=0.0), "clip > 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(make: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(torch.zeros(2, requires_grad=True))


def test_a_ratio_to_the_sampler_is_a_renamed_column() -> None:
    @fr.flow
    def learns(rows, policy):
        rows = fr.rollout(policy, rows, n=2)
        rows = rows.with_columns(advantage=1.0, old_logprobs=fr.col("rollout_logprobs"))
        return fr.update(policy, rows, loss=losses.cispo(low=1.0))

    assert learns.graph().check() == ()


@pytest.mark.parametrize("token", [False, True])
def test_gspo_is_ppo_clip_with_the_ratio_of_the_response(token: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(3, 5, generator=generator, dtype=torch.float64)
    columns = {"old_logprobs": old, "advantages": torch.randn(3, 5, generator=generator, dtype=torch.float64)}
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
    level = "geometric_token" if token else "geometric"
    found = []
    for loss in (losses.gspo(token=token), losses.ppo_clip(3e-4, high=4e-4, level=level)):
        leaf = (
            old + 0.01 * torch.randn(3, 5, generator=generator.manual_seed(1), dtype=torch.float64)
        ).requires_grad_()
        value, _ = fr.apply_loss(loss, {**columns, "logprobs": leaf}, mask, average="sequence_mean")
        value.backward()
        found.append((value.item(), leaf.grad))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
