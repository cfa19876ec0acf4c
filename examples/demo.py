"""The whole story in minutes on two CPU cores: a tiny model is warmed up, then learns to sort digits from a reward alone.

    python -m examples.demo --seed 0

1. A Llama of a quarter of a million parameters is built on the spot; the SFT flow shows it demonstrations, 40 % of them wrong.
2. The GRPO flow below does the rest. Nothing but the reward, 1 for the sorted digits and 0 for anything else, tells it how.
3. Prompts that were never trained on say how far it got.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch

import flowrl as fr
from examples.sft import sft
from examples.tiny import MAX_TOKENS, Row, make_task, sft_examples, tiny_model
from flowrl_operators import advantages, losses, rewards


@fr.flow
def grpo(prompts, policy, *, group_size=8):
    rows = fr.rollout(policy, prompts, n=group_size)
    rows = rewards.exact(rows)
    rows = advantages.group_norm(rows)
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2))


@fr.flow
def answers(prompts, policy):
    return rewards.exact(fr.rollout(policy, prompts))


def heldout_reward(policy: fr.Model, rows: list[Row], seed: int) -> float:
    """Mean reward on the held-out prompts, one sampled answer each."""
    run = fr.run_local(
        answers,
        seed=seed,
        out=None,
        progress="off",
        max_tokens=MAX_TOKENS,
        prompts=fr.Data(rows, batch="all"),
        policy=policy,
    )
    return run.metrics[0]["reward/mean"]


def warm_up(train: list[Row], a: argparse.Namespace) -> fr.Model:
    """The model after supervised training on noisy demonstrations."""
    policy = tiny_model(a.seed, lr=2e-3)
    examples = sft_examples(train, a.seed, num_examples=a.sft_steps * 64)
    run = fr.run_local(
        sft, steps=a.sft_steps, seed=a.seed, batch=64, out=None, progress="off", examples=examples, policy=policy
    )
    return run.model("policy")


def main(argv: list[str] | None = None) -> tuple[float, float]:
    """Runs the demo; returns the held-out reward before and after GRPO."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200, help="GRPO steps")
    parser.add_argument("--prompts", type=int, default=64, help="prompts per step")
    parser.add_argument("--group-size", type=int, default=8, help="responses per prompt")
    parser.add_argument("--lr", type=float, default=7e-4, help="of the first GRPO step; falls to 0")
    parser.add_argument("--sft-steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1, help="of torch; more help only on cores that are idle")
    parser.add_argument("--out", default="runs")
    parser.add_argument("--progress", default="auto", choices=("auto", "live", "plain", "off"))
    a = parser.parse_args(argv)
    torch.set_num_threads(a.threads)
    start = time.perf_counter()

    flow = grpo.graph(group_size=a.group_size)
    print(flow)
    problems = flow.check()
    print(f"\nchecks: {len(problems)} problems" + "".join(f"\n{p}" for p in problems))

    train, heldout = make_task(a.seed)
    print(f"\nwarm-up: {a.sft_steps} steps of the SFT flow on demonstrations, 40 % of them wrong")
    policy = warm_up(train, a)
    before = heldout_reward(policy, heldout, a.seed)
    print(f"held-out reward after the warm-up: {before:.3f} ({time.perf_counter() - start:.0f} s)\n")

    run = fr.run_local(
        flow,
        steps=a.steps,
        seed=a.seed,
        batch=a.prompts,
        max_tokens=MAX_TOKENS,
        name="demo",
        out=a.out,
        progress=a.progress,
        prompts=train,
        policy=replace(policy, optimizer=fr.AdamW(lr=a.lr, schedule="linear", total_steps=a.steps)),
    )
    after = heldout_reward(run.model("policy"), heldout, a.seed)
    print(
        f"\nheld-out reward: {before:.3f} after the warm-up, {after:.3f} after GRPO ({time.perf_counter() - start:.0f} s in all)"
    )
    print(f"results: {run.path} (metrics.jsonl, samples.jsonl, graph.txt)")
    print(f"look with: flowrl runs show {run.path}, or as a page of curves and responses: flowrl view {run.path}")
    return before, after


if __name__ == "__main__":
    main()
