"""Advantages of recorded rows with the numbers people met: wrong groups, missing rewards, rounding, masked values."""

import itertools

import numpy as np
import pytest
import torch

import flowrl as fr
from examples.tiny import CharTokenizer
from flowrl_operators import advantages, filters, losses
from tests.scenarios.pieces import gpt2, policy, run

NAN = float("nan")


def rows_of(groups: str, rewards: list[float]) -> list[dict[str, object]]:
    """One recorded response per letter; all prompts have the same text."""
    return [
        {"prompt_id": group, "prompt": "same", "response": str(i), "reward": reward}
        for i, (group, reward) in enumerate(zip(groups, rewards, strict=True))
    ]


@fr.flow
def normed(rows, *, scale="group", unbiased=False, eps=1e-6):
    return advantages.group_norm(rows, scale=scale, unbiased=unbiased, eps=eps)


@fr.flow
def one_dropped(rows):
    kept = fr.filter(rows, rows["response"] != "2")
    return advantages.group_norm(kept, scale="none")


def test_a_dropped_sibling_shifts_no_group() -> None:
    # six rows in two groups of three; without row 2 a stride of three would mix A with B
    rows = rows_of("AAABBB", [1, 0, 9, 1, 1, 0])
    wanted = {"0": 0.5, "1": -0.5, "3": 1 / 3, "4": 1 / 3, "5": -2 / 3}
    for order in itertools.islice(itertools.permutations(range(6)), 0, None, 97):
        found = run(one_dropped, engine="null", rows=[rows[i] for i in order]).rows()
        assert dict(zip(found["response"], found["advantage"], strict=True)) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, NAN, 3], [-1, 0, 1]),  # population deviation of 1 and 3 is 1
        ([1], [0]),
        ([NAN] * 3 + [1] + [NAN] * 4, [0] * 8),
        ([NAN] * 4, [0] * 4),
    ],
)
def test_missing_rewards_and_groups_of_one_poison_nobody(rewards: list[float], expected: list[float]) -> None:
    rows = rows_of("A" * len(rewards) + "BB", [*rewards, 0.0, 1.0])
    found = run(normed, engine="null", rows=rows).rows()["advantage"]
    assert found.tolist() == pytest.approx([*expected, -1, 1], abs=1e-5)


STEP = float(np.nextafter(np.float32(0.3), 1))
"""0.1 + 0.2 added up in another order: one step of float32 above 0.3."""


@pytest.mark.parametrize("eps", [1e-6, 0.0])
@pytest.mark.parametrize("rewards", [[0.95] * 8, [0.7] * 16, [0.3, STEP] * 4])
def test_equal_rewards_are_exactly_no_signal(rewards: list[float], eps: float) -> None:
    values = torch.tensor(rewards)
    plain = (values - values.mean()) / (values.std() + eps)
    assert plain.abs().max() > 0.02  # none of them is representable: the formula alone finds a signal
    rows = rows_of("A" * len(rewards), rewards)
    found = run(normed.graph(unbiased=True, eps=eps), engine="null", rows=rows).rows()
    assert found["advantage"].tolist() == [0.0] * len(rewards)


@fr.flow
def critic_advantages(rows):
    return advantages.gae(rows, gamma=1.0, lam=0.95, whiten=False)


def test_a_masked_value_bootstraps_nothing() -> None:
    row = {
        "prompt_ids": [1], "response_ids": [3, 4, 5], "loss_mask": [True, True, False], "reward": 0.0,
        "token_rewards": [0.0, 1.0, 0.0], "values": [0.0, 0.0, 100.0],
    }  # fmt: skip
    found = run(critic_advantages, engine="null", rows=[row]).rows()
    assert found["advantages"].to_list() == [pytest.approx([0.95, 1.0, 0.0])]


# --- through a whole run ----------------------------------------------------------------------------------------------


@fr.reward
def digits(response):
    """The number of digits; a verifier that fails on some responses."""
    if response[-1:] < "5":
        raise ValueError("cannot read that")
    return float(len(response))


@fr.reward
def broken(response):
    raise RuntimeError("verifier is down")


REWARDS = {"some": digits, "all": broken}


@fr.flow
def grpo(prompts, policy, *, reward="some"):
    rows = advantages.group_norm(REWARDS[reward](fr.rollout(policy, prompts, n=8, temperature=1.5)))
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    passes = fr.repeat(rows, epochs=2, minibatches=2)
    return fr.update(policy, passes, loss=losses.ppo_clip(0.2) + 0.01 * losses.entropy_bonus()), rows


@pytest.mark.parametrize("which", ["some", "all"])
def test_failing_rewards_leave_a_run_finite(which: str) -> None:
    prompts = [{"prompt": f"{i}="} for i in range(2)]
    done = run(grpo.graph(reward=which), steps=3, prompts=prompts, policy=policy(gpt2(), CharTokenizer()), max_tokens=5)
    rows = done.rows()
    missing = np.isnan(rows["reward"])
    assert missing.all() if which == "all" else 0 < missing.sum() < len(missing)
    assert (rows["advantage"][missing] == 0).all() and np.isfinite(rows["advantage"]).all()
    assert all("cannot read" in e or "down" in e for e in rows["row_error"][missing])
    assert all(np.isfinite(w).all() for w in done.hosts["policy"].state()["weights"].values())
    assert done.history("update/skipped") == [0, 0, 0]
    assert np.isfinite(done.history("update/loss")).all()
    # the mean of what is known, and how much is not
    assert done.metrics[-1]["reward/num_nan"] == missing.sum()
    assert np.isnan(done.metrics[-1]["reward/mean"]) == (which == "all")


# --- groups that never come -------------------------------------------------------------------------------------------


@fr.reward
def constant(response):
    return 0.0


@fr.reward
def three_of_four(prompt, response):
    """Responses to `3=` all score the same."""
    return 0.0 if prompt == "3=" else float(len(response))


def refilled(prompts, policy, reward):
    def attempt(p):
        return reward(fr.rollout(policy, p, n=6, temperature=1.5))

    rows = fr.refill(attempt, prompts, keep=filters.group_has_signal(), max_rounds=3)
    return fr.update(policy, advantages.group_norm(rows), loss=losses.ppo_clip(0.2)), rows


@fr.flow
def never(prompts, policy):
    return refilled(prompts, policy, constant)


@fr.flow
def sometimes(prompts, policy):
    return refilled(prompts, policy, three_of_four)


def test_sampling_for_signal_ends_with_a_reason(tmp_path) -> None:  # type: ignore[no-untyped-def]
    prompts = fr.Data([{"prompt": f"{i}="} for i in range(4)], batch=4)
    done = run(never, prompts=prompts, policy=policy(gpt2(), CharTokenizer()), max_tokens=4, out=tmp_path)
    numbers = done.metrics[0]
    assert (numbers["refill/rounds"], numbers["refill/groups"], numbers["refill/tried"]) == (3, 0, 12)
    assert numbers["update/steps"] == 0 and len(done.rows()) == 0
    assert done.hosts["policy"].version == 0
    lines = (done.path / "metrics.jsonl").read_text()
    assert "0 of 4 groups passed 'group_has_signal' after 3 rounds (max_rounds=3)" in lines
    assert "no rows, so 'policy' keeps its weights" in lines


@fr.loss(on_policy=False)
def ones(logprobs):
    return 1 + 0 * logprobs


@fr.flow
def counted(prompts, policy):
    def attempt(p):
        return three_of_four(fr.rollout(policy, p, n=6, temperature=1.5))

    rows = fr.refill(attempt, prompts, keep=filters.group_has_signal(), max_rounds=1)
    return fr.update(policy, rows, loss=ones()), rows


def test_a_short_batch_is_averaged_over_what_is_there() -> None:
    prompts = [{"prompt": f"{i}="} for i in range(4)]
    done = run(counted, prompts=prompts, policy=policy(gpt2(), CharTokenizer()), max_tokens=6)
    numbers = done.metrics[0]
    assert numbers["refill/groups"] == 3 and len(done.rows()) == 18
    assert numbers["update/tokens"] == done.rows()["loss_mask"].values.sum()
    assert numbers["update/loss"] == pytest.approx(1.0, abs=1e-6)  # with the missing group counted: 0.75
