"""GRPO of a tiny model on four devices: each samples with a copy of its own, and together they train it, cut by fsdp 2 x tp 2.

    python -m examples.many_devices                                     # one process, without a plan: what it is compared with
    torchrun --nproc-per-node 4 -m examples.many_devices                # four processes of this host
    flowrl run examples/many_devices.py:planned --nproc 4               # the same without a script
    flowrl run examples/many_devices.py:planned --launcher ray          # on a node of a Ray cluster

A device is a process on the CPU here. The model learns from a reward alone to say the smallest digit that it is shown. All ways
begin with the same weights and draw the same samples; only sums over ranks round otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import flowrl as fr
from examples.demo import grpo
from examples.tiny import CharTokenizer, make_task, tiny_llama
from flowrl.recipe import Recipe
from flowrl.runtime.options import Options
from flowrl.runtime.ranks import run_ranks

DEVICES = 4
PLACEMENT = "gen:d4 + policy:f2t2"
"""Four copies that sample, and one model that is trained, in four parts, on the same four devices."""
STEPS, PROMPTS, GROUP = 30, 32, 8


def alone() -> Recipe:
    """One process, no plan."""
    rows = [{**row, "answer": row["answer"][0]} for row in make_task(0, num_train=512, digits=(2, 3))[0]]
    # a large eps: with a small one, a weight whose gradient is rounding and little else moves by its sign
    policy = fr.Model(
        tiny_llama(0, hidden_size=64), tokenizer=CharTokenizer(), optimizer=fr.AdamW(lr=5e-3, eps=1e-4), device="cpu",
        micro_batch_tokens=1024,
    )  # fmt: skip
    options = Options(batch=PROMPTS, max_tokens=1, name="many-devices", progress="off", reward_workers=0)
    return Recipe(grpo(group_size=GROUP), {"prompts": rows, "policy": policy}, steps=STEPS, options=options)


def planned() -> Recipe:
    """The same on four devices. Every rank makes the same plan; a file of one is read with `fr.Plan.load`."""
    recipe = alone()
    plan = fr.plan(
        recipe.flow,
        models={"policy": recipe.inputs["policy"]},
        cluster=f"{DEVICES}xcpu",
        workload=fr.Workload(PROMPTS, fr.Lengths.fixed(5), fr.Lengths.fixed(1)),
        placement=PLACEMENT,
    )
    return recipe.replace(plan=plan)


def world() -> int:
    """Processes of this job, as its launcher says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def train(steps: int, out: str | None) -> fr.Run:
    """As this process was started: alone, or as one rank of several."""
    if world() == 1:
        recipe = alone()
        return recipe.replace(steps=steps, options=recipe.options.updated({"out": out})).run()
    recipe = planned()
    return run_ranks(recipe.flow, plan=recipe.plan, steps=steps, options=recipe.options, out=out, **recipe.inputs)


def main(argv: Sequence[str]) -> None:
    """Train, and print what came of it: rank 0 for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", default="runs")
    parser.add_argument("--save", help="a folder for the trained model")
    given = parser.parse_args(argv)
    with train(given.steps, given.out) as run:
        if given.save:
            run.save("policy", given.save)  # every rank calls it; those that hold the weights write
        if run.path is not None:  # rank 0
            reward = run.history("reward/mean")
            for step in [*range(0, len(reward) - 1, 5), len(reward) - 1]:
                print(f"step {step:2}  reward {reward[step]:.2f}")
            print(f"{world()} process{'es' if world() > 1 else ''}; results in {run.path}")


if __name__ == "__main__":
    main(sys.argv[1:])
