"""Sampling: streams that follow their key and nothing else, a vocabulary that ends where the tokenizer's does, no stale cache."""

from pathlib import Path

import numpy as np
import pytest
import torch

import flowrl as fr
from examples.tiny import CharTokenizer
from flowrl.runtime.rundir import RunDir
from flowrl_operators import losses
from tests.scenarios.pieces import Bigram, Ids, gpt2, policy, run

# --- streams ----------------------------------------------------------------------------------------------------------


@fr.flow
def sampled(prompts, policy, *, n=4):
    return fr.rollout(policy, prompts, n=n)


def responses(
    seed: int = 0, prompts: tuple[str, ...] = ("12=",), steps: int = 1, **options: object
) -> dict[str, tuple]:
    """sample_id -> ids of the response."""
    model = policy(gpt2(), CharTokenizer(), **options)
    data = [{"prompt_id": text, "prompt": text} for text in prompts]
    rows = run(sampled, prompts=data, policy=model, max_tokens=12, seed=seed, steps=steps).rows()
    return {name: tuple(ids) for name, ids in zip(rows["sample_id"], rows["response_ids"].to_list(), strict=True)}


def test_a_seed_names_four_streams_and_another_seed_four_others() -> None:
    first = responses(seed=0)
    assert len(set(first.values())) == 4
    assert responses(seed=0) == first
    assert not set(responses(seed=1).values()) & set(first.values())
    assert not set(responses(seed=0, steps=2).values()) & set(first.values())  # nor does a step repeat the one before


@pytest.mark.parametrize("budget", [15, 30, 45, 1000])
def test_streams_do_not_depend_on_who_samples_what(budget: int) -> None:
    # batches of 1, 2, 3 and 4 rows: as many workers would split them
    alone = responses()
    together = responses(prompts=("9=", "12=", "777777="), sample_batch_tokens=budget)
    assert {name: ids for name, ids in together.items() if name.startswith("12=/")} == alone
    assert len(set(together.values())) == 12


# --- vocabulary -------------------------------------------------------------------------------------------------------


@fr.flow
def both_sides(prompts, policy, *, temperature=1.0):
    rows = fr.rollout(policy, prompts, n=64, temperature=temperature)
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    rows = fr.top_logprobs(policy, rows, k=100)
    rows = with_advantage(rows)
    loss = losses.ppo_clip(0.2) + 0.01 * losses.entropy_bonus()
    return fr.update(policy, rows, loss=loss), rows


@fr.operator(writes={"advantage": fr.SAMPLE.f32})
def with_advantage(sample_index):
    return np.ones(len(sample_index))


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_rows_of_padding_in_the_embedding_are_no_tokens(temperature: float) -> None:
    # 100 tokens, 128 rows, and by far the likeliest is row 120
    table = torch.zeros(128, 128)
    table[:, 120] = 20.0
    done = run(
        both_sides.graph(temperature=temperature),
        prompts=[{"prompt": "5"}],
        policy=policy(Bigram(table), Ids(100)),
        max_tokens=4,
    )
    rows = done.rows()
    assert rows["response_ids"].values.max() < 100
    assert rows["teacher_ids"].values.max() < 100
    assert "None" not in "".join(rows["response"])
    # sampler and trainer agree that there are 100 equal tokens
    for column in ("rollout_logprobs", "old_logprobs"):
        np.testing.assert_allclose(rows[column].values, -np.log(100), atol=1e-5)
    assert done.metrics[0]["update/entropy"] == pytest.approx(np.log(100), abs=1e-4)


# --- caches -----------------------------------------------------------------------------------------------------------


@fr.flow
def scored(rows, policy):
    return fr.logprobs(policy, rows, out="old_logprobs")


@fr.flow
def learn_then_score(rows, policy):
    scored = fr.logprobs(policy, rows, out="before")
    updated = fr.update(policy, scored, loss=losses.sft())
    return updated, fr.logprobs(updated, scored, out="after")


def test_a_shared_prefix_changes_no_score(tmp_path: Path) -> None:
    model = policy(gpt2(), CharTokenizer())
    first, second = ({"prompt": "12345=", "response": text} for text in ("678", "679"))
    cold = {row["response"]: run(scored, rows=[row], policy=model).rows()["old_logprobs"][0] for row in (first, second)}
    for order in ([first, second], [second, first], [first, first, second]):
        for batch in (1, len(order)):
            data = fr.Data(order, batch=batch, shuffle=False)
            steps = len(order) // batch
            done = run(scored, rows=data, policy=model, steps=steps, out=tmp_path, record=("*",))
            for step in range(steps):  # all by one model, one after the other
                for row in RunDir.open(str(done.path)).edge(step, "old_logprobs").rows():
                    np.testing.assert_allclose(row["old_logprobs"], cold[row["response"]], atol=1e-6)


def test_scores_after_an_update_are_of_the_new_weights() -> None:
    model = policy(gpt2(), CharTokenizer())
    rows = [{"prompt": "12345=", "response": text} for text in ("678", "679")]
    done = run(learn_then_score, rows=rows, policy=model, steps=2)  # two updates: one would hide a cache of the first
    found = done.rows()
    fresh = run(scored, rows=rows, policy=done.model("policy")).rows()
    np.testing.assert_allclose(found["after"].values, fresh["old_logprobs"].values, atol=1e-6)
    assert (found["after"].sum() > found["before"].sum() + 1e-3).all()
