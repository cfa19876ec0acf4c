"""Rows handed from process to process: a sampler appends groups, a judge fills in rewards, a trainer streams padded batches.

    sampler --append--> table --claim("judge")--> judge --fill--> table --stream("train")--> trainer

    python -m examples.tables

None of them waits for a step of another to end: the judge has a group as soon as it was appended, the trainer a batch as soon
as its rewards are there. The table holds at most 256 rows, and the sampler waits when the trainer falls behind. What is left out:
the models. A sampler that guesses sums and a trainer that counts stand in their place.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
from collections.abc import Sequence

import flowrl as fr

GROUP = 8


def sample(table: fr.ExperienceTable, prompts: int) -> None:
    """Append a group for each prompt."""
    draw = random.Random(0)
    for number in range(prompts):
        left, right = draw.randrange(10), draw.randrange(10)
        prompt = {"prompt_id": str(number), "prompt": f"{left}+{right}="}
        answers = [str(left + right + draw.choice((0, 0, 1))) for _ in range(GROUP)]
        table.append([{**prompt, "response": a, "response_ids": list(a.encode())} for a in answers])
    table.finish()


def judge(table: fr.ExperienceTable) -> None:
    """Give every row its reward; `claim` gives None when no more will come."""
    while claim := table.claim("judge", 4 * GROUP, columns=["prompt", "response"], wait_s=60):
        with claim:
            rewards = []
            for row in claim.batch().rows():
                left, right = row["prompt"].removesuffix("=").split("+")
                rewards.append(float(int(row["response"]) == int(left) + int(right)))
            claim.fill({"reward": rewards})  # and done with them, in one: a judge that dies in between stops nobody


def train(table: fr.ExperienceTable) -> tuple[int, float]:
    """Use every row once. Returns: rows, and their mean reward."""
    rows, total = 0, 0.0
    for batch in table.stream("train", batch_rows=32, columns=["response_ids", "reward"], layout="padded"):
        assert batch["response_ids"].shape == batch["mask"].shape  # [rows, longest]
        rows += len(batch["reward"])
        total += float(batch["reward"].sum())
    return rows, total / rows


def main(arguments: Sequence[str] | None = None) -> tuple[int, float]:
    parser = argparse.ArgumentParser(description="A sampler, a judge and a trainer around one experience table.")
    parser.add_argument("--prompts", type=int, default=100)
    options = parser.parse_args(arguments)
    start = multiprocessing.get_context("spawn")
    with fr.ExperienceTable(max_rows=256, on_full="wait", keep_together="prompt_id") as table:
        table.add_column("reward", None, fr.SAMPLE.f32)  # rows come without it
        processes = [
            start.Process(target=sample, args=(table, options.prompts)),
            start.Process(target=judge, args=(table,)),
        ]
        for process in processes:
            process.start()
        rows, reward = train(table)
        for process in processes:
            process.join(timeout=60)
    print(f"trained on {rows} rows of {options.prompts} prompts, mean reward {reward:.2f}")
    return rows, reward


if __name__ == "__main__":
    main()
