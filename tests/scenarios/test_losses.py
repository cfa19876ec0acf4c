"""Losses and steps: averages over the whole step, ratios that move, one temperature everywhere, numbers that are not finite."""

import math

import numpy as np
import pytest
import torch

import flowrl as fr
from examples.tiny import CharTokenizer
from flowrl.errors import CheckError
from flowrl_operators import losses
from tests.scenarios.pieces import Bigram, Ids, gpt2, policy, run

# --- averages ---------------------------------------------------------------------------------------------------------


@fr.loss(on_policy=False)
def slope(logits, weights: fr.TOKEN.f32):
    """The gradient with respect to the first logit is the mean of `weights`."""
    return weights * logits[:, 0], {"weight": weights}


@fr.flow
def sloped(rows, policy, *, minibatches=1):
    return fr.update(policy, fr.repeat(rows, minibatches=minibatches), loss=slope())


def same_context(*weights: list[float], masked: tuple[int, ...] = ()) -> list[dict[str, object]]:
    """Rows whose tokens all follow token 3, so that one row of a bigram table gets the whole gradient."""
    return [
        {"prompt_ids": [3], "response_ids": [3] * len(w), "weights": w, "loss_mask": [i not in masked] * len(w)}
        for i, w in enumerate(weights)
    ]


def gradient(done: fr.Run) -> float:
    """Of table[3, 0] in the first step, from Adam's first moment; all others are 0."""
    moment = done.hosts["policy"].state()["optimizer"]["table"]["exp_avg"] / 0.1
    assert np.count_nonzero(moment) == 1
    return float(moment[3, 0])


def of_bigram(**options: object) -> fr.Model:
    return policy(Bigram(torch.zeros(5, 5)), Ids(5), **options)


@pytest.mark.parametrize("budget", [1, 5, 6, 7, 10, 1000])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_the_mean_is_over_tokens_whatever_the_micro_batches(budget: int, order: tuple[int, ...]) -> None:
    # 5 tokens of 1, one token of 10, and two masked ones: 15 / 6; a mean of means has 5.5
    rows = same_context([1.0] * 5, [10.0], [100.0] * 2, masked=(2,))
    types = {"weights": fr.TOKEN.f32}
    data = fr.Data([rows[i] for i in order], batch="all", types=types)
    done = run(sloped, rows=data, policy=of_bigram(micro_batch_tokens=budget))
    assert gradient(done) == pytest.approx(2.5, abs=1e-6)
    assert done.metrics[0]["update/weight"] == pytest.approx(2.5)
    assert done.metrics[0]["update/tokens"] == 6


@pytest.mark.parametrize(("minibatches", "rows_per_micro"), [(2, 8), (1, 1), (1, 4), (8, 4), (4, 2), (32, 1)])
def test_a_step_is_averaged_over_its_own_tokens(minibatches: int, rows_per_micro: int) -> None:
    # one generation of 32 rows in several steps of several micro-batches: every step's factor is 1
    rows = fr.Data(same_context(*[[1.0] * 2] * 32), batch="all", types={"weights": fr.TOKEN.f32})
    done = run(
        sloped.graph(minibatches=minibatches), rows=rows, policy=of_bigram(micro_batch_tokens=2 * rows_per_micro)
    )
    assert done.metrics[0]["update/steps"] == minibatches
    assert done.metrics[0]["update/grad_norm"] == pytest.approx(1.0, abs=1e-6)


# --- ratios -----------------------------------------------------------------------------------------------------------


@fr.operator(writes={"advantage": fr.SAMPLE.f32})
def alternating(sample_index):
    return np.where(sample_index % 2 == 0, 1.0, -1.0)


@fr.flow
def ppo(prompts, policy, *, epochs=1, minibatches=1, stored=True, temperature=1.0):
    rows = alternating(fr.rollout(policy, prompts, n=8, temperature=temperature))
    if stored:
        rows = fr.logprobs(policy, rows, out="old_logprobs")
    passes = fr.repeat(rows, epochs=epochs, minibatches=minibatches)
    return fr.update(policy, passes, loss=losses.ppo_clip(0.2)), rows


PROMPTS = [{"prompt": "1="}, {"prompt": "23="}]


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 2), (2, 1)])
def test_a_second_step_is_off_policy_and_clips(epochs: int, minibatches: int) -> None:
    large = policy(gpt2(), CharTokenizer(), optimizer=fr.AdamW(lr=5e-2))
    graph = ppo.graph(epochs=epochs, minibatches=minibatches)
    numbers = run(graph, prompts=PROMPTS, policy=large, max_tokens=6).metrics[0]
    assert numbers["update/steps"] == 2
    assert abs(numbers["update/ratio"] - 1) > 1e-2
    assert numbers["update/clip_fraction"] > 0
    once = run(ppo.graph(), prompts=PROMPTS, policy=large, max_tokens=6).metrics[0]
    assert once["update/ratio"] == pytest.approx(1, abs=1e-5)
    assert once["update/clip_fraction"] == 0
    with pytest.raises(CheckError, match="FR-V01"):
        run(ppo.graph(epochs=epochs, minibatches=minibatches, stored=False), prompts=PROMPTS, policy=large)


# --- temperature ------------------------------------------------------------------------------------------------------


@fr.flow
def scaled(prompts, policy, *, temperature):
    rows = alternating(fr.rollout(policy, prompts, n=40, temperature=temperature))
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    loss = losses.ppo_clip(0.2) + 0.01 * losses.entropy_bonus()
    return fr.update(policy, rows, loss=loss), rows


def test_one_temperature_from_sampling_to_entropy() -> None:
    p = np.array([0.7, 0.2, 0.1])
    model = policy(Bigram(torch.from_numpy(np.log(p)).repeat(3, 1)), Ids(3))
    done = run(scaled.graph(temperature=0.5), prompts=[{"prompt": "0"}], policy=model, max_tokens=2)
    rows = done.rows()
    q = p**2 / (p**2).sum()
    token = rows["response_ids"].values
    assert set(token) == {0, 1, 2}
    for column in ("rollout_logprobs", "old_logprobs"):
        np.testing.assert_allclose(rows[column].values, np.log(q)[token], atol=1e-5)
        assert rows[column].values[token == 1][0] == pytest.approx(-2.6027, abs=1e-4)
    assert done.metrics[0]["update/entropy"] == pytest.approx(-(q * np.log(q)).sum(), abs=1e-5)
    assert done.metrics[0]["update/ratio"] == pytest.approx(1, abs=1e-5)


# --- not finite -------------------------------------------------------------------------------------------------------


@fr.loss(on_policy=False)
def weighted(logprobs, advantages: fr.TOKEN.f32):
    return -advantages * logprobs


@fr.flow
def recorded(rows, policy):
    return fr.update(policy, rows, loss=weighted())


def recorded_rows(*advantages: float) -> list[dict[str, object]]:
    return [{"prompt_ids": [1, 4 + i], "response_ids": [5, 6], "advantages": [a, a]} for i, a in enumerate(advantages)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_leaves_no_trace_but_a_count(bad: float, precision: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    optimizer = fr.AdamW(lr=1e-2, warmup_steps=4, weight_decay=0.1)

    def trained(rows: list[dict[str, object]], **options: object) -> fr.Run:
        model = policy(gpt2(), CharTokenizer(), optimizer=optimizer, precision=precision)
        data = fr.Data(rows, batch=1, shuffle=False)
        return run(recorded, rows=data, policy=model, steps=len(rows), **options)

    rows = recorded_rows(1.0, bad, -1.0)
    done = trained(rows, out=tmp_path)
    assert done.history("update/skipped") == [0, 1, 0]
    assert done.history("update/steps") == [1, 0, 1]
    assert done.history("update/lr") == pytest.approx([0.25e-2, 0.5e-2])  # the schedule did not go on without a step
    assert (
        "1 optimizer step skipped, not finite ('advantages' is not finite in some rows)"
        in (done.path / "metrics.jsonl").read_text()
    )
    without = trained([rows[0], rows[2]])
    state, expected = done.hosts["policy"].state(), without.hosts["policy"].state()
    assert done.hosts["policy"].version == without.hosts["policy"].version == 2
    for name, array in expected["weights"].items():
        np.testing.assert_array_equal(state["weights"][name], array, err_msg=name)
    for name, entry in expected["optimizer"].items():
        for key, value in entry.items():
            np.testing.assert_array_equal(state["optimizer"][name][key], value, err_msg=f"{name} {key}")
