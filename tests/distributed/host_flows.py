"""What the ranks of two hosts do with the torch engine: a few steps of GRPO on a tiny model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import flowrl as fr
from examples.tiny import MAX_TOKENS
from flowrl.engines.launch.place import join
from flowrl.mesh import Layout, Mesh
from flowrl.planner.steps import Plan, Predicted, Step
from flowrl.planner.tasks import Lane, StepKind
from flowrl.runtime.ranks import run_ranks
from tests.distributed.rank_flows import grpo, inputs, numbers, plan_of

OPTIONS: dict[str, Any] = {
    "batch": 5,
    "max_tokens": MAX_TOKENS,
    "progress": "off",
    "reward_workers": 0,
    "out": None,
    "steps": 3,
}
CALLS = ("old_logprobs", "ref_logprobs", "update")


def placed(shape: str) -> Plan:
    """Sampling on copies, the rest as the shape says on the same ranks; or `apart`, with a host for each."""
    if shape == "apart":
        samples, trains, layout = Mesh(0, 2), Mesh(2, 2), "f2"
    else:
        samples = trains = Mesh(0, Layout.parse(shape).size)
        layout = shape
    where = {"rollout": (samples, f"d{samples.size}"), **dict.fromkeys(CALLS, (trains, layout))}
    handover = Step(
        "gen.weights", "policy", StepKind.RESHARD, samples, (Lane.COMPUTE, Lane.NVLINK), Predicted(0.01), source=trains,
        reads=("policy",),
    )  # fmt: skip
    return plan_of(grpo.graph(), where, handover)


def trained(said: dict[str, Any]) -> None:
    """On each rank: what came of it, and the weights of the policy where it trains."""
    rank = int(os.environ["RANK"])
    board = join(timeout_s=120.0)
    with run_ranks(grpo.graph(), plan=placed(said["shape"]), timeout_s=120.0, **OPTIONS, **inputs()) as run:
        policy = run.hosts["policy"]
        events = [event for event in run.events if event.what == "reshard" and event.attributes["rank"] == rank]
        found = {
            "folder": str(board.folder), "numbers": numbers(run),
            "moved": [event.attributes["did"] for event in events],
            "weights": policy.state()["weights"] if policy.has_main else None,
        }  # fmt: skip
    torch.save(found, Path(said["folder"], f"{rank}.pt"))


def alone() -> dict[str, Any]:
    with fr.run_local(grpo.graph(), **OPTIONS, **inputs()) as run:
        return {"numbers": numbers(run), "weights": run.hosts["policy"].state()["weights"]}
