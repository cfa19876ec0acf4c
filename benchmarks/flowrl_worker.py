"""One round of the GRPO flow, run by `benchmarks.trl_grpo`. Prints a JSON object like `benchmarks.trl_worker`."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import flowrl as fr
from benchmarks.task import Settings, train_rows
from flowrl_operators import advantages, losses, rewards


@fr.flow
def grpo(prompts, policy, *, group_size, clip, eps):  # type: ignore[no-untyped-def]
    rows = rewards.exact(fr.rollout(policy, prompts, n=group_size))
    rows = advantages.group_norm(rows, unbiased=True, eps=eps)  # as TRL does it
    return fr.update(policy, rows, loss=losses.ppo_clip(clip))


def start_model(settings: Settings, start: Path) -> fr.Model:
    """The policy both sides begin with. One forward with gradient holds the whole batch, as on the other side."""
    return fr.Model(str(start), optimizer=fr.AdamW(lr=settings.lr, max_grad_norm=settings.max_grad_norm))


class StampedData(fr.Data):
    """Notes the time whenever a step asks for its rows."""

    def __init__(self, rows: Any, **options: Any) -> None:
        super().__init__(rows, **options)
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def next(self, count: int | None = None) -> Any:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())
        return super().next(count)


def run(settings: Settings, start: Path, steps: int) -> dict[str, Any]:
    torch.set_num_threads(settings.threads)
    data = StampedData(train_rows(settings), batch=settings.prompts, shuffle=False)
    graph = grpo(group_size=settings.group_size, clip=settings.clip, eps=settings.eps)
    with tempfile.TemporaryDirectory() as folder:  # a run folder with metrics, samples and a trace, as by default
        done = fr.run_local(
            graph,
            steps=steps,
            seed=settings.seed,
            prompts=data,
            policy=start_model(settings, start),
            max_tokens=settings.max_tokens,
            progress="off",
            out=folder,
        )
        # a step ends where the next one begins
        wall, cpu = [*data.wall[1:], time.perf_counter()], [*data.cpu[1:], time.process_time()]
        rows = settings.prompts * settings.group_size
        tokens = [round(value * rows) for value in done.history("response_length/mean")]
        means = done.history("reward/mean")
        done.close()
    versions = {name: metadata.version(name) for name in ("flowrl", "torch", "transformers")}
    return {"wall": wall, "cpu": cpu, "rewards": means, "tokens": tokens, "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    print(json.dumps(run(Settings(**args.settings), args.start, args.steps)))


if __name__ == "__main__":
    main()
