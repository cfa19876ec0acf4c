"""What a flow costs: a step of it against the same step written by hand.

    python -m benchmarks overhead            7 rounds of 20 steps
    python -m benchmarks overhead --quick    fewer

Three ways to take a GRPO step, from the same weights on the same prompts:

    flow        `fr.run_local` as a user calls it, with its run folder, metrics, samples and trace
    same engine a loop that calls the same host's `generate` and `update`, with reward and advantage in a few lines of NumPy
    by hand     `examples/grpo_by_hand.py`: plain PyTorch, nothing of FlowRL

The first two do the same work exactly, draw the same tokens and get the same rewards (this is checked), so their difference
is what the language, the executor, the tables and the metrics cost. Steps alternate within one process: all three see the
same machine in the same second. The third draws other tokens and is about the engine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

import flowrl as fr
from benchmarks.common import median, report, table
from benchmarks.flowrl_worker import grpo, start_model
from benchmarks.task import CASES, Settings, save_start, train_rows
from examples import grpo_by_hand
from examples.tiny import score
from flowrl.engines import open_engine
from flowrl.engines.protocol import Host, SampleKey, SampleRequest, SamplingOptions, TokenRows, UpdateJob
from flowrl_operators import losses

WAYS = ("flow", "same engine", "by hand")


@dataclass
class SameEngine:
    """The step written out against the host that the flow would use."""

    settings: Settings
    host: Host
    rewards: list[float] = field(default_factory=list)

    def step(self, number: int, rows: list[dict[str, str]]) -> None:
        use, host = self.settings, self.host
        prompts = [host.tokenizer.encode(row["prompt"]) for row in rows]
        requests = [
            SampleRequest(ids, use.max_tokens, SampleKey(use.seed, number, "rollout", row["prompt_id"], index))
            for ids, row in zip(prompts, rows, strict=True)
            for index in range(use.group_size)
        ]
        sampled = host.generate(requests, SamplingOptions(temperature=1.0))
        ends = host.tokenizer.eos_ids
        texts = [host.tokenizer.decode(s.ids[:-1] if s.ids[-1] in ends else s.ids) for s in sampled]
        answers = [row["answer"] for row in rows for _ in range(use.group_size)]
        reward = np.array([text.strip() == answer for text, answer in zip(texts, answers, strict=True)], np.float64)
        reward_PG = reward.reshape(-1, use.group_size)
        centred_PG = reward_PG - reward_PG.mean(axis=1, keepdims=True)
        advantage = (centred_PG / (reward_PG.std(axis=1, ddof=1, keepdims=True) + use.eps)).astype(np.float32).ravel()
        responses = fr.Ragged.of([s.ids for s in sampled], np.int32)
        job = UpdateJob(
            rows=TokenRows(
                fr.Ragged.of([request.prompt_ids for request in requests], np.int32),
                responses,
                np.ones(len(requests), np.float32),
            ),
            mask=fr.Ragged.like(np.ones(len(responses.values), bool), responses),
            columns={"advantage": advantage},
            loss=losses.ppo_clip(use.clip),
            seed=SampleKey(use.seed, number, "update", "", 0).number(),
        )
        host.update(job)
        self.rewards.append(float(reward.mean()))


class ByHand:
    """The step of `examples/grpo_by_hand.py`."""

    def __init__(self, settings: Settings, policy: Any) -> None:
        self.settings = settings
        self.policy = policy
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.lr, weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(settings.seed)

    def step(self, number: int, rows: list[dict[str, str]]) -> None:
        use = self.settings
        rollout = grpo_by_hand.sample(self.policy, [row["prompt"] for row in rows], use.group_size, self.generator)
        answers = [row["answer"] for row in rows for _ in range(use.group_size)]
        reward = torch.tensor([score(text, answer) for text, answer in zip(rollout.texts(), answers, strict=True)])
        advantage = grpo_by_hand.group_norm(reward, use.group_size)[:, None]
        ratio = (grpo_by_hand.response_logprobs(self.policy, rollout) - rollout.logprobs).exp()
        objective = torch.minimum(ratio * advantage, ratio.clamp(1 - use.clip, 1 + use.clip) * advantage)
        grpo_by_hand.take_step(self.policy, self.optimizer, -objective[rollout.response_mask].mean())


class TakingTurns(fr.Data):
    """When the flow asks for the rows of a step, its last step is over: the other ways take theirs, on the same rows."""

    def __init__(
        self, rows: Any, others: dict[str, Callable[[int, list[dict[str, str]]], None]], **options: Any
    ) -> None:
        super().__init__(rows, **options)
        self.others = others
        self.times: dict[str, list[float]] = {name: [] for name in WAYS}
        self.begun: list[float] = []
        self.number = [0]

    def next(self, count: int | None = None) -> Any:
        self.note_end()
        rows = super().next(count)
        dicts = [{name: rows[name][i] for name in rows.names} for i in range(len(rows))]
        names = list(self.others)
        for name in names if self.number[0] % 2 else names[::-1]:
            start = time.perf_counter()
            self.others[name](self.number[0], dicts)
            self.times[name].append(time.perf_counter() - start)
        self.number[0] += 1
        self.begun.append(time.perf_counter())
        return rows

    def note_end(self) -> None:
        if self.begun:
            self.times["flow"].append(time.perf_counter() - self.begun.pop())


def measure(settings: Settings, steps: int) -> dict[str, list[float]]:
    """Seconds of every step, by way."""
    torch.set_num_threads(settings.threads)
    with tempfile.TemporaryDirectory() as folder:
        start = save_start(settings, Path(folder) / "start")
        model = start_model(settings, start)
        host = open_engine("torch").open("policy", model, frozenset({"generate", "update"}), seed=settings.seed)
        same = SameEngine(settings, host)
        hand = ByHand(settings, LlamaForCausalLM.from_pretrained(start).float())
        data = TakingTurns(
            train_rows(settings),
            {"same engine": same.step, "by hand": hand.step},
            batch=settings.prompts,
            shuffle=False,
        )
        run = fr.run_local(
            grpo(group_size=settings.group_size, clip=settings.clip, eps=settings.eps),
            steps=steps,
            seed=settings.seed,
            prompts=data,
            policy=model,
            max_tokens=settings.max_tokens,
            progress="off",
            out=folder,
        )
        data.note_end()
        rewards = run.history("reward/mean")
        run.close()
    if not np.allclose(rewards, same.rewards, atol=1e-6):
        first = int(np.argmax(~np.isclose(rewards, same.rewards, atol=1e-6)))
        raise SystemExit(
            f"the flow and the same engine by hand got other rewards at step {first}: their work is not the same"
        )
    return data.times


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks overhead", description="a step of a flow against loops by hand"
    )
    parser.add_argument("--quick", action="store_true", help="3 rounds of 6 steps, the tiny case")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/")
    parser.add_argument("--case", choices=(*CASES, "all"))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, help="steps of a round")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    rounds, steps = args.rounds or (3 if args.quick else 7), args.steps or (6 if args.quick else 20)
    case = args.case or ("tiny" if args.quick else "all")
    rows: list[list[str]] = []
    numbers: dict[str, Any] = {}
    for name in CASES if case == "all" else (case,):
        times = measure(replace(CASES[name], threads=args.threads), rounds * steps + 2)
        per_round = {  # two steps of warm-up; a round is the median of its steps
            way: [median(seconds[2 + i * steps : 2 + (i + 1) * steps]) for i in range(rounds)]
            for way, seconds in times.items()
        }
        pairs = {
            way: [flow / other for flow, other in zip(times["flow"][2:], times[way][2:], strict=True)]
            for way in WAYS[1:]
        }
        rows.append([name, *(f"{1000 * median(per_round[way]):.1f}" for way in WAYS), *(
            f"{100 * (median(pairs[way]) - 1):+.1f} %" for way in WAYS[1:]
        )])  # fmt: skip
        numbers[name] = {
            "step_s": {way: median(per_round[way]) for way in WAYS},
            "rounds_step_s": per_round,
            "flow_over": {way: median(pairs[way]) for way in WAYS[1:]},
        }
    header = ["case", *(f"{way}, ms a step" for way in WAYS), "flow over same engine", "flow over by hand"]
    report("overhead", table(header, rows), {"rounds": rounds, "steps": steps, "cases": numbers}, save=args.save)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
