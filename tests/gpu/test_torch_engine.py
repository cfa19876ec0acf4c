"""The torch engine on a CUDA device: what is sampled is what is trained, in fp32 and bf16, and a run learns."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import flowrl as fr
from examples.demo import grpo
from examples.sft import sft
from examples.tiny import MAX_TOKENS, CharTokenizer, make_task, sft_examples, tiny_llama
from flowrl_operators import advantages, losses, rewards

pytestmark = pytest.mark.gpu


def model(**options: Any) -> fr.Model:
    settings = {"optimizer": fr.AdamW(lr=1e-3), "device": "cuda", **options}
    return fr.Model(tiny_llama(0), tokenizer=CharTokenizer(), **settings)


@fr.flow
def sample_and_rescore(prompts, policy, *, n=4):
    rows = fr.rollout(policy, prompts, n=n)
    return fr.logprobs(policy, rows, out="old_logprobs")


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'flowrl[vllm]'")
def test_vllm_samples_for_a_run_that_trains() -> None:
    train, _ = make_task(0)
    policy = fr.Model(
        tiny_llama(0, hidden_size=256, num_heads=4, max_length=64), tokenizer=CharTokenizer(), optimizer=fr.AdamW(lr=1e-4),
        device="cuda", sampler="vllm", sampler_options={"gpu_memory_utilization": 0.1, "enforce_eager": True},
    )  # fmt: skip

    @fr.flow
    def grpo_rescored(prompts, policy):
        rows = advantages.group_norm(rewards.exact(fr.rollout(policy, prompts, n=8)))
        rows = fr.logprobs(policy, rows, out="old_logprobs")
        return fr.update(policy, rows, loss=losses.ppo_clip(0.2))

    with fr.run_local(
        grpo_rescored, steps=3, batch=16, out=None, progress="off", max_tokens=MAX_TOKENS, prompts=train, policy=policy
    ) as run:
        rows = run.rows("old_logprobs")
        apart = np.abs(rows["rollout_logprobs"].values - rows["old_logprobs"].values)
        print(f"vllm after 2 updates: |rollout - rescored| mean {apart.mean():.2e}, max {apart.max():.2e} nats")
        assert apart.max() < 5e-3


@pytest.mark.parametrize(("precision", "most"), [("fp32", 1e-3), ("bf16", 0.1)])
def test_rescoring_gives_the_numbers_of_sampling(precision: str, most: float) -> None:
    train, _ = make_task(0)
    run = fr.run_local(
        sample_and_rescore,
        out=None,
        progress="off",
        batch=64,
        max_tokens=MAX_TOKENS,
        prompts=train,
        policy=model(precision=precision),
    )
    rows = run.rows()
    apart = np.abs(rows["rollout_logprobs"].values - rows["old_logprobs"].values)
    print(
        f"{precision}: |rollout - rescored| mean {apart.mean():.2e}, max {apart.max():.2e} nats over {len(apart)} tokens"
    )
    assert apart.max() < most


def test_warm_up_and_grpo_learn_on_the_device() -> None:
    train, _ = make_task(0)
    examples = sft_examples(train, 0, num_examples=75 * 64)
    warm = fr.run_local(
        sft, steps=75, batch=64, out=None, progress="off", examples=examples, policy=model(optimizer=fr.AdamW(lr=2e-3))
    )
    policy = replace(warm.model("policy"), optimizer=fr.AdamW(lr=3e-4))
    run = fr.run_local(
        grpo, steps=60, batch=64, out=None, progress="off", max_tokens=MAX_TOKENS, prompts=train, policy=policy
    )
    rewards = run.history("reward/mean")
    seconds = np.median(run.history("time/step_s"))
    print(
        f"GRPO on the device: reward {np.mean(rewards[:5]):.3f} -> {np.mean(rewards[-5:]):.3f}, {seconds:.3f} s a step (median)"
    )
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.15


def test_equal_seeds_give_equal_samples_on_the_device() -> None:
    train, _ = make_task(0)

    def sampled(seed: int) -> list[list[int]]:
        run = fr.run_local(
            sample_and_rescore, seed=seed, out=None, progress="off", batch=16, max_tokens=MAX_TOKENS,
            prompts=fr.Data(train[:16], batch="all"), policy=model(),
        )  # fmt: skip
        return run.rows()["response_ids"].to_list()

    assert sampled(0) == sampled(0) != sampled(1)
