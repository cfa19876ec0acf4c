"""One round of TRL's GRPOTrainer, run by `benchmarks.trl_grpo` in TRL's environment. Prints a JSON object.

TRL's settings are those of its fastest run on a CPU that does the same work: fp32, no gradient checkpointing, no dropout
workers, no reports, one forward with gradient for the whole batch, and no second pass for log-probabilities (TRL leaves it
out when a rollout is used for one step).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl  # type: ignore[import-not-found]
from datasets import Dataset  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.task import Settings, train_rows


class Rewards:
    """Exact match, and its mean at every step."""

    __name__ = "exact"

    def __init__(self) -> None:
        self.means: list[float] = []
        self.tokens: list[int] = []

    def __call__(self, completions: list[str], answer: list[str], completion_ids: list[Any], **_: Any) -> list[float]:
        rewards = [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]
        self.means.append(sum(rewards) / len(rewards))
        self.tokens.append(sum(len(ids) for ids in completion_ids))
        return rewards


class Stamps(TrainerCallback):
    """The time at the end of every step."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())


def config(settings: Settings, steps: int, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        seed=settings.seed,
        # the same work
        per_device_train_batch_size=settings.prompts * settings.group_size,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        num_generations=settings.group_size,
        max_completion_length=settings.max_tokens,
        temperature=1.0,
        beta=0.0,
        epsilon=settings.clip,
        loss_type="bnpo",  # the mean over all tokens of the step
        scale_rewards="group",
        learning_rate=settings.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=settings.max_grad_norm,
        shuffle_dataset=False,
        # as fast as it goes
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        disable_tqdm=True,
    )


def run(settings: Settings, start: Path, steps: int) -> dict[str, Any]:
    torch.set_num_threads(settings.threads)
    tokenizer = AutoTokenizer.from_pretrained(start, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    rewards, stamps = Rewards(), Stamps()
    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in train_rows(settings)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            args=config(settings, steps, folder),
            reward_funcs=rewards,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[stamps],
        )
        trainer.train()
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return {
        "wall": stamps.wall,
        "cpu": stamps.cpu,
        "rewards": rewards.means,
        "tokens": rewards.tokens,
        "versions": versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    out, sys.stdout = sys.stdout, sys.stderr  # what the trainer prints is no result
    result = run(Settings(**args.settings), args.start, args.steps)
    print(json.dumps(result), file=out)


if __name__ == "__main__":
    main()
