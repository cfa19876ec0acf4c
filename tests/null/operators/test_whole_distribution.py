"""What needs the whole distribution of a model: the exact KL as a reward, the sum of squared probabilities; and in flows."""

import math
from typing import Any

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import CheckError, ConfigError, DataError
from flowrl_operators import advantages, losses, rewards

VOCABULARY = 257  # of the null engine


def distributions(tokens: int = 7, size: int = 9, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities [tokens, size] of two models."""
    drawn = 2 * np.random.default_rng(seed).normal(size=(2, tokens, size))
    policy, reference = drawn - np.log(np.exp(drawn).sum(-1, keepdims=True))
    return policy, reference


def top(logprobs: np.ndarray, k: int) -> tuple[fr.Ragged, fr.Ragged]:
    ids = np.argsort(-logprobs, axis=-1, kind="stable")[:, :k].astype(np.int32)
    offsets = np.asarray([0, 3, 3, len(logprobs)])
    return fr.Ragged(ids, offsets), fr.Ragged(np.take_along_axis(logprobs, ids, -1), offsets)


def full_kl(policy: np.ndarray, reference: np.ndarray, k: int, j: int | None = None) -> np.ndarray:
    return rewards.token_kl(*top(policy, k), *top(reference, j or k)).values


# ------------------------------------------------------------------------------------------------ squared probabilities


def test_squares_of_all_tokens_are_the_sum_and_of_some_a_bound_that_is_close() -> None:
    policy, _ = distributions()
    whole = (np.exp(policy) ** 2).sum(-1)
    before = np.zeros(7)
    for k in (1, 4, 8, 9):
        ids, logprobs = top(policy, k)
        found = advantages.sum_pi_squared(logprobs)
        assert found.offsets.tolist() == ids.offsets.tolist()
        outside = 1 - np.exp(logprobs.values).sum(-1)
        assert (found.values >= before).all() and (found.values <= whole + 1e-12).all()
        assert (whole - found.values <= outside * np.exp(logprobs.values[:, -1]) + 1e-12).all()
        before = found.values
    np.testing.assert_allclose(before, whole)


# ------------------------------------------------------------------------------------------------ KL


def test_kl_over_all_tokens_is_the_kl() -> None:
    policy, reference = distributions()
    np.testing.assert_allclose(
        full_kl(policy, reference, 9), (np.exp(policy) * (policy - reference)).sum(-1), atol=1e-9
    )
    np.testing.assert_allclose(full_kl(policy, policy, 9), 0.0, atol=1e-12)


def test_kl_over_some_tokens_is_a_bound_from_below_and_never_negative() -> None:
    policy, reference = distributions(200)
    whole = (np.exp(policy) * (policy - reference)).sum(-1)
    for k, j in ((1, 1), (2, 5), (5, 2), (4, 4), (8, 8)):
        found = full_kl(policy, reference, k, j)
        assert (found >= -1e-12).all() and (found <= whole + 1e-4).all()
        np.testing.assert_allclose(full_kl(policy, policy, k, j), 0.0, atol=1e-12)
    assert full_kl(policy, reference, 1).mean() < full_kl(policy, reference, 6).mean() < whole.mean()


def test_tokens_that_one_list_lacks_are_one_token_with_what_is_left() -> None:
    policy, reference = np.log([[0.6, 0.3, 0.1]]), np.log([[0.5, 0.1, 0.4]])
    ids = [fr.Ragged(np.asarray([i], np.int32), np.asarray([0, 1])) for i in ([0, 1], [0, 2])]
    nats = [fr.Ragged(side[:, i.values[0]], i.offsets) for side, i in zip((policy, reference), ids, strict=True)]
    found = rewards.token_kl(ids[0], nats[0], ids[1], nats[1]).values
    assert found == pytest.approx([0.6 * math.log(0.6 / 0.5) + 0.4 * math.log(0.4 / 0.5)])


def test_a_token_of_probability_0_adds_nothing_and_one_that_the_reference_excludes_is_infinitely_far() -> None:
    impossible = np.asarray([[math.log(0.5), math.log(0.5), -math.inf], [math.log(0.5), math.log(0.5), -1e4]])
    certain = np.log([[0.25, 0.25, 0.5]]).repeat(2, 0)
    offsets = np.asarray([0, 2])
    ids = fr.Ragged(np.arange(3, dtype=np.int32)[None].repeat(2, 0), offsets)
    one, other = fr.Ragged(impossible, offsets), fr.Ragged(certain, offsets)
    assert rewards.token_kl(ids, one, ids, other).values == pytest.approx([math.log(2)] * 2)
    assert np.isinf(rewards.token_kl(ids, other, ids, one).values[0])
    assert np.isfinite(rewards.token_kl(ids, one, ids, one).values).all()


def test_many_tokens_are_worked_on_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, reference = distributions()
    whole, squares = full_kl(policy, reference, 5), advantages.sum_pi_squared(top(policy, 5)[1]).values

    def by_two(values: np.ndarray) -> Any:
        return (slice(start, start + 2) for start in range(0, len(values), 2))

    monkeypatch.setattr("flowrl_operators.rewards._kl.token_blocks", by_two)
    monkeypatch.setattr("flowrl_operators.advantages._optimal.token_blocks", by_two)
    np.testing.assert_array_equal(full_kl(policy, reference, 5), whole)
    np.testing.assert_array_equal(advantages.sum_pi_squared(top(policy, 5)[1]).values, squares)


def test_columns_that_do_not_fit_are_refused() -> None:
    policy, reference = distributions()
    ids, _ = top(policy, 3)
    with pytest.raises(DataError, match=r"ids and log-probabilities .* found .*\(7, 4\)"):
        rewards.token_kl(ids, top(policy, 4)[1], *top(reference, 3))


# ------------------------------------------------------------------------------------------------ as a penalty

ROWS = np.asarray([0, 2, 3])
REWARD = np.asarray([1.0, 2.0])
KL = fr.Ragged(np.asarray([0.5, 4.0, math.nan]), ROWS)
MASK = fr.Ragged(np.asarray([True, True, False]), ROWS)
DRAWN = fr.Ragged(np.asarray([9.0, 9.0, 9.0]), ROWS)
OTHER = fr.Ragged(np.zeros(3), ROWS)


def test_the_exact_kl_takes_the_place_of_the_estimate() -> None:
    options: dict[str, Any] = {"coefficient": 0.1, "kind": "full"}
    shaped = rewards.kl_shaped(REWARD, DRAWN, OTHER, MASK, None, KL, **options)
    np.testing.assert_allclose(shaped.values, [-0.05, 0.6, 0.0])
    clipped = rewards.kl_shaped(REWARD, DRAWN, OTHER, MASK, None, KL, value_clip=1.0, **options)
    np.testing.assert_allclose(clipped.values, [-0.05, 0.9, 0.0])
    np.testing.assert_allclose(rewards.kl_penalised(REWARD, DRAWN, OTHER, MASK, KL, **options), [0.55, 2.0])
    state = fr.State()
    moved = rewards.adaptive_kl_shaped.function(
        REWARD, DRAWN, OTHER, MASK, None, KL, target=1.0, horizon=10, state=state, **options
    )
    np.testing.assert_allclose(moved["token_rewards"].values, shaped.values)
    assert state["kl"] == pytest.approx(2.25)


def test_the_estimate_does_not_look_at_it() -> None:
    plain = rewards.kl_shaped(REWARD, DRAWN, OTHER, MASK, coefficient=0.1)
    beside = rewards.kl_shaped(REWARD, DRAWN, OTHER, MASK, None, KL, coefficient=0.1)
    np.testing.assert_array_equal(plain.values, beside.values)


@pytest.mark.parametrize("operator", [rewards.kl_shaped, rewards.kl_penalised])
def test_without_the_column_it_says_what_writes_it(operator: Any) -> None:
    with pytest.raises(ConfigError, match=r"needs the column 'token_kl', .* rewards\.token_kl\(rows\)"):
        operator(REWARD, DRAWN, OTHER, MASK, coefficient=0.1, kind="full")
    with pytest.raises(ConfigError, match="value_clip > 0 or None; found value_clip=0"):
        column = {"token_kl": KL}
        operator(REWARD, DRAWN, OTHER, MASK, coefficient=0.1, kind="full", value_clip=0.0, **column)


# ------------------------------------------------------------------------------------------------ flows


@fr.reward
def length(response: str) -> float:
    return float(len(response))


@fr.flow
def least_variance(prompts, policy):  # type: ignore[no-untyped-def]
    rows = length(fr.rollout(policy, prompts, n=4))
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    rows = fr.top_logprobs(policy, rows, k=64, out="policy_top")
    rows = advantages.optimal_token_baseline(advantages.sum_pi_squared(rows))
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2))


@fr.flow
def distilled(prompts, policy, ref, *, k=8):  # type: ignore[no-untyped-def]
    rows = fr.top_logprobs(ref, fr.rollout(policy, prompts), k=k, out="teacher")
    return fr.update(policy, rows, loss=losses.jsd(0.5))


@fr.flow
def penalised(prompts, policy, ref):  # type: ignore[no-untyped-def]
    rows = length(fr.rollout(policy, prompts, n=4))
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    rows = fr.top_logprobs(policy, rows, k=VOCABULARY, out="policy_top")
    rows = fr.top_logprobs(ref, rows, k=VOCABULARY, out="ref_top")
    rows = rewards.kl_shaped(rewards.token_kl(rows), coefficient=0.05, kind="full")
    return fr.update(policy, advantages.reinforce(rows), loss=losses.ppo_clip(0.2))


@pytest.mark.parametrize("flow", [least_variance, distilled, penalised])
def test_flows_check_clean_and_run(flow: Any) -> None:
    prompts = [{"prompt_id": str(i), "prompt": f"{i}+1="} for i in range(4)]
    model = fr.Model({f"{i}+1=": ["1", "two", "three"] for i in range(4)}, optimizer=fr.AdamW(lr=1e-3))
    inputs: dict[str, Any] = {"prompts": prompts, "policy": model}
    if flow is not least_variance:
        inputs["ref"] = fr.Model("null")
    fr.check(flow)
    done = fr.run_local(
        flow.graph(), steps=2, engine="null", out=None, progress="off", batch=4, max_tokens=12, **inputs
    )
    assert done.status == "finished" and len(done.metrics) == 2


def test_columns_that_nothing_writes_are_found_before_the_run() -> None:
    @fr.flow
    def forgotten(prompts, policy):  # type: ignore[no-untyped-def]
        rows = length(fr.rollout(policy, prompts, n=4))
        rows = fr.top_logprobs(policy, rows, k=VOCABULARY, out="policy_top")
        rows = fr.logprobs(policy, rows, out="old_logprobs")
        rows = advantages.optimal_token_baseline(
            advantages.sum_pi_squared(rewards.token_kl(rows), of="policy_logprobs")
        )
        return fr.update(policy, rows, loss=losses.ppo_clip(0.2))

    with pytest.raises(CheckError) as caught:
        fr.check(forgotten)
    said = str(caught.value)
    assert said.count("FR-C01") == 3
    assert all(f"'{column}'" in said for column in ("ref_top_ids", "ref_top_logprobs", "policy_logprobs"))
