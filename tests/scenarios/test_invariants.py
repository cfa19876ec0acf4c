"""The same result for every split into chunks and micro-batches, for any padding and for any order of rows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import flowrl as fr
from examples.tiny import CharTokenizer
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch
from flowrl_operators import advantages, losses, rewards
from tests.scenarios.pieces import gpt2, policy, run

few = settings(max_examples=12, deadline=None)
seeds = st.integers(0, 10_000)
budgets = st.sampled_from([1, 9, 17, 30, 64, 10_000])


def recorded(seed: int, *, num_groups: int = 3) -> list[dict[str, Any]]:
    """Responses to a few prompts: of every length from 0, some with holes, some masked whole, some without reward."""
    generator = np.random.default_rng(seed)
    rows = []
    for group in range(num_groups):
        for _ in range(int(generator.integers(1, 5))):
            length = int(generator.choice([0, 1, 2, 3, 7]))
            ids = generator.integers(3, 14, length).tolist()
            mask = (generator.random(length) < generator.choice([0.0, 0.7, 1.0])).tolist()
            rows.append(
                {
                    "prompt_id": str(group), "prompt_ids": [1, *[3 + group] * (1 + 3 * group)], "response_ids": ids,
                    "loss_mask": mask, "reward": float(generator.choice([0.0, 0.95, 1.0, np.nan])),
                    "sample_id": f"{group}/{len(rows)}", "ref_logprobs": generator.normal(-2, 1, length).tolist(),
                }
            )  # fmt: skip
    rows.append(
        {"prompt_id": "sure", "prompt_ids": [1, 5], "response_ids": [6, 7], "loss_mask": [True, True], "reward": 1.0,
         "sample_id": "sure/0", "ref_logprobs": [-1.0, -2.0]}
    )  # fmt: skip
    return rows


@fr.loss(on_policy=False)
def clipped(logprobs, old_logprobs, advantage, segments):
    """PPO's term, allowed on recorded rows."""
    ratio = (logprobs - old_logprobs + 0.1).exp()
    spread = segments.spread(advantage)
    bound = ratio.clamp(0.8, 1.2)
    return -(ratio * spread).minimum(bound * spread), {"clip_fraction": (bound != ratio).float()}


@fr.flow
def learns(rows, policy, *, average="token_mean"):
    rows = advantages.group_norm(rows)
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    loss = clipped() + 0.1 * losses.kl("k3") + 0.01 * losses.entropy_bonus()
    return fr.update(policy, rows, loss=loss, average=average), rows


def trained(rows: list[dict[str, Any]], average: str, **options: Any) -> tuple[fr.Run, dict[str, np.ndarray]]:
    """The run and the gradient of its step."""
    done = run(learns.graph(average=average), rows=rows, policy=policy(gpt2(), CharTokenizer(), **options))
    state = done.hosts["policy"].state()["optimizer"]
    return done, {name: entry["exp_avg"] / 0.1 for name, entry in state.items()}


def assert_same(found: tuple[fr.Run, dict[str, np.ndarray]], expected: tuple[fr.Run, dict[str, np.ndarray]]) -> None:
    scale = max(float(np.abs(g).max()) for g in expected[1].values())
    assert found[1].keys() == expected[1].keys() and scale > 0
    for name, gradient in expected[1].items():
        np.testing.assert_allclose(found[1][name], gradient, rtol=1e-4, atol=4e-6 * scale, err_msg=name)
    for name, value in expected[0].metrics[0].items():
        if not name.startswith(("time/", "tokens_per_s")):
            assert found[0].metrics[0][name] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True), name
    columns = ("advantage", "old_logprobs")
    one, other = ({r["sample_id"]: r for r in made[0].rows().rows()} for made in (found, expected))
    assert one.keys() == other.keys()
    for key, row in other.items():
        for column in columns:
            np.testing.assert_allclose(one[key][column], row[column], atol=1e-5)


@few
@given(seeds, budgets, budgets, st.sampled_from(["token_mean", "sequence_mean"]))
def test_any_micro_batches(seed: int, train_budget: int, score_budget: int, average: str) -> None:
    rows = recorded(seed)
    split = trained(rows, average, micro_batch_tokens=train_budget, sample_batch_tokens=score_budget)
    assert_same(split, trained(rows, average))


@few
@given(seeds, st.randoms(use_true_random=False), st.sampled_from(["token_mean", "sequence_mean"]))
def test_any_order_of_rows(seed: int, random: Any, average: str) -> None:
    rows = recorded(seed)
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert_same(trained(shuffled, average, micro_batch_tokens=30), trained(rows, average))


@few
@given(seeds, st.integers(1, 40))
def test_any_padding(seed: int, length: int) -> None:
    # a row that trains nowhere, as long as it likes, only pads the others
    rows = recorded(seed)
    long = {**rows[-1], "prompt_id": "long", "sample_id": "long/0", "response_ids": [9] * length, "loss_mask": [False] * length,
            "ref_logprobs": [0.0] * length}  # fmt: skip
    padded, plain = trained([*rows, long], "token_mean"), trained(rows, "token_mean")
    scale = max(float(np.abs(g).max()) for g in plain[1].values())
    for name, gradient in plain[1].items():
        np.testing.assert_allclose(padded[1][name], gradient, rtol=1e-4, atol=4e-6 * scale, err_msg=name)
    for name in ("loss", "kl", "entropy", "clip_fraction", "tokens", "grad_norm"):
        assert padded[0].metrics[0][f"update/{name}"] == pytest.approx(plain[0].metrics[0][f"update/{name}"], rel=1e-4)


# --- pairs ------------------------------------------------------------------------------------------------------------


@fr.flow
def prefers(rows, policy, ref):
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    return fr.update(policy, rows, loss=losses.dpo(0.5))


@few
@given(seeds, budgets, st.randoms(use_true_random=False))
def test_pairs_in_any_order_and_any_micro_batches(seed: int, budget: int, random: Any) -> None:
    generator = np.random.default_rng(seed)
    rows = [
        {"prompt_ids": [1, 4], "response_ids": generator.integers(3, 14, generator.integers(1, 6)).tolist(), "pair_id": str(pair),
         "chosen": chosen}
        for pair in range(4)
        for chosen in (True, False)
    ]  # fmt: skip
    shuffled = list(rows)
    random.shuffle(shuffled)
    ref = fr.Model(gpt2(1), CharTokenizer(), device="cpu")

    def gradient(rows: list[dict[str, Any]], budget: int) -> dict[str, np.ndarray]:
        done = run(prefers, rows=rows, policy=policy(gpt2(), CharTokenizer(), micro_batch_tokens=budget), ref=ref)
        state = done.hosts["policy"].state()["optimizer"]
        return {name: entry["exp_avg"] / 0.1 for name, entry in state.items()}

    expected, found = gradient(rows, 10_000), gradient(shuffled, budget)
    scale = max(float(np.abs(g).max()) for g in expected.values())
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=4e-6 * scale, err_msg=name)


# --- sampling ---------------------------------------------------------------------------------------------------------


@fr.flow
def sampled(prompts, policy):
    return fr.logprobs(policy, fr.rollout(policy, prompts, n=2, temperature=1.3, top_p=0.95), out="old_logprobs")


@few
@given(
    st.lists(st.text("0123456789=", min_size=0, max_size=9), min_size=1, max_size=6),
    st.sampled_from([10, 25, 40, 10_000]),
    st.randoms(use_true_random=False),
)
def test_any_company_and_any_batch_gives_the_same_responses(texts: list[str], budget: int, random: Any) -> None:
    prompts = [{"prompt_id": str(i), "prompt": text} for i, text in enumerate(texts)]
    shuffled = list(prompts)
    random.shuffle(shuffled)

    def responses(prompts: list[dict[str, str]], budget: int) -> dict[str, dict[str, Any]]:
        model = policy(gpt2(), CharTokenizer(), sample_batch_tokens=budget)
        rows = run(sampled, prompts=prompts, policy=model, max_tokens=8).rows()
        return {row["sample_id"]: row for row in rows.rows()}

    expected, found = responses(prompts, 10_000), responses(shuffled, budget)
    assert found.keys() == expected.keys()
    for key, row in expected.items():
        assert found[key]["response_ids"] == row["response_ids"]
        np.testing.assert_allclose(found[key]["rollout_logprobs"], row["rollout_logprobs"], atol=1e-5)
        np.testing.assert_allclose(found[key]["old_logprobs"], row["old_logprobs"], atol=1e-5)


# --- chunks -----------------------------------------------------------------------------------------------------------

ROW_OPERATORS = {
    "exact": rewards.exact.bind(replace=True),
    "format": rewards.format.bind(replace=True),
    "overlong": rewards.overlong.bind(soft=2, hard=5),
    "kl_shaped": rewards.kl_shaped.bind(coefficient=0.1, kind="k3"),
    "remax": advantages.remax.bind(),
    "gae": advantages.gae.bind(whiten=False, gamma=0.9),
    "step values": advantages.from_step_values.bind(),
}


def table(seed: int) -> RowBatch:
    generator = np.random.default_rng(seed)
    count = int(generator.integers(1, 12))
    lengths = generator.integers(0, 8, count)
    steps = [max(1, int(n) // 3) for n in lengths]
    tokens = {name: [generator.normal(size=n) for n in lengths] for name in ("old_logprobs", "ref_logprobs", "values")}
    texts = np.asarray([str(generator.choice(["<think>x</think>4", "4", "5"])) for _ in range(count)], dtype=object)
    columns: dict[str, Any] = {
        **tokens, "prompt_id": [str(i % 3) for i in range(count)], "response": texts, "answer": ["4"] * count,
        "reward": generator.choice([0.0, 0.95, np.nan], count), "baseline": generator.choice([0.5, np.nan], count),
        "response_ids": [[3] * int(n) for n in lengths], "loss_mask": [generator.random(n) < 0.7 for n in lengths],
        "step_value": [generator.normal(size=k) for k in steps], "step_starts": [np.arange(k) * 3 for k in steps],
    }  # fmt: skip
    types = {
        "prompt_id": fr.PROMPT.str, "response": fr.SAMPLE.str, "answer": fr.PROMPT.str, "reward": fr.SAMPLE.f32,
        "baseline": fr.SAMPLE.f32, "response_ids": fr.TOKEN.i32, "loss_mask": fr.TOKEN.bool, "step_value": fr.TURN.f32,
        "step_starts": fr.TURN.i32, **dict.fromkeys(tokens, fr.TOKEN.f32),
    }  # fmt: skip
    return RowBatch(columns, types)


@settings(max_examples=30, deadline=None)
@given(seeds, st.lists(st.integers(0, 12), max_size=4), st.sampled_from(sorted(ROW_OPERATORS)))
def test_any_chunks_for_operators_that_look_at_rows(seed: int, cuts: list[int], name: str) -> None:
    rows, call = table(seed), ROW_OPERATORS[name]
    assert str(call.locality) == "row"
    bounds = sorted({0, len(rows), *(min(cut, len(rows)) for cut in cuts)})
    parts = [run_operator(call, rows.slice(a, b)).rows for a, b in itertools.pairwise(bounds)]
    assert RowBatch.concat(parts) == run_operator(call, rows).rows


@settings(max_examples=30, deadline=None)
@given(seeds, st.sampled_from(["group_norm", "rloo"]))
def test_any_chunks_that_keep_groups_for_operators_that_look_at_groups(seed: int, name: str) -> None:
    rows, call = table(seed), getattr(advantages, name).bind()
    whole = run_operator(call, rows).rows["advantage"]
    for group in rows.group_indices("prompt_id"):
        np.testing.assert_array_equal(run_operator(call, rows.take(group)).rows["advantage"], whole[group])
