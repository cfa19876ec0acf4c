"""What the ranks of a test do with the torch engine: GRPO on a tiny model, and a critic beside it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flowrl as fr
from examples.tiny import MAX_TOKENS, CharTokenizer, make_task, tiny_llama
from flowrl.graph.drift import code_in
from flowrl.graph.passes import optimise
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.steps import Plan, Predicted, Step
from flowrl.planner.tasks import Lane, StepKind
from flowrl.runtime.ranks import run_ranks
from flowrl_operators import advantages, losses

STEPS = 5


@fr.reward(on_error="raise")
def even_digits(response, answer):
    """Answers of a model that knows nothing differ in it, so that there is something to learn."""
    return sum(digit in "02468" for digit in response) / len(answer)


@fr.flow
def grpo(prompts, policy, ref, *, group_size=4, beta=0.05):
    rows = fr.rollout(policy, prompts, n=group_size)
    rows = even_digits(rows)
    rows = advantages.group_norm(rows)
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    rows = fr.repeat(rows, epochs=1, minibatches=2)
    policy = fr.update(policy, rows, loss=losses.ppo_clip(0.2) + beta * losses.kl("k3"))
    return policy, fr.ema(ref, policy, 0.5)


def model(seed: int = 0) -> fr.Model:
    # a large eps: with a small one a first step moves a weight by its gradient's sign, whose rounding is then all there is
    optimizer = fr.AdamW(lr=1e-2, eps=1e-3)
    return fr.Model(
        tiny_llama(seed, hidden_size=32), tokenizer=CharTokenizer(), optimizer=optimizer, device="cpu", micro_batch_tokens=64,
        sample_batch_tokens=256,
    )  # fmt: skip


def inputs() -> dict[str, Any]:
    return {"prompts": make_task(0, num_train=64, num_heldout=1)[0], "policy": model(), "ref": model()}


OPTIONS: dict[str, Any] = {"batch": 7, "max_tokens": MAX_TOKENS, "progress": "off", "reward_workers": 0, "out": None}
"""Seven prompts do not divide by the ranks; micro-batches are so small that ranks have different numbers of them."""


def plan_of(graph: fr.Graph, where: dict[str, tuple[Mesh, str]], *moves: Step) -> Plan:
    """A plan of a graph's model calls on meshes with layouts, then the moves."""
    graph, _ = optimise(graph)
    steps = [
        Step(name, name, StepKind.COMPUTE, mesh, (Lane.COMPUTE,), Predicted(0.1), layout=Layout.parse(layout))
        for name, (mesh, layout) in where.items()
    ]
    steps.extend(moves)
    return Plan.of(
        graph.name, graph.hash, Cluster.named("8xA100-80G"), steps, order=[one.name for one in steps],
        operator_hashes=code_in(graph),
    )  # fmt: skip


def placed(shape: str) -> Plan:
    """Plans of `grpo`."""
    four, two, pair = Mesh(0, 4), Mesh(0, 2), Mesh(2, 2)
    calls = ("rollout", "old_logprobs", "ref_logprobs", "update")
    where = {
        "f2": dict(zip(calls, [(two, "d2"), (two, "f2"), (two, "f2"), (two, "f2")], strict=True)),
        "t2": dict(zip(calls, [(two, "d2"), (two, "t2"), (two, "t2"), (two, "t2")], strict=True)),
        "f2t2": dict(zip(calls, [(four, "d4"), (four, "f2t2"), (four, "f2t2"), (four, "f2t2")], strict=True)),
        "apart": dict(zip(calls, [(two, "d2"), (pair, "f2"), (Mesh(0, 1), "d1"), (pair, "f2")], strict=True)),
    }[shape]
    source, target = where["update"][0], where["rollout"][0]
    handover = Step(
        "gen.weights", "policy", StepKind.RESHARD, target, (Lane.COMPUTE, Lane.NVLINK), Predicted(0.01), source=source,
        reads=("policy",),
    )  # fmt: skip
    return plan_of(grpo.graph(), where, handover)


def numbers(run: fr.Run) -> list[dict[str, float]]:
    return [
        {name: value for name, value in step.items() if not name.startswith("time/") and name != "tokens_per_s"}
        for step in run.metrics
    ]


def trained(said: dict[str, Any]) -> None:
    """On each rank: what comes of each plan, and the weights as they are written to a folder."""
    rank = int(os.environ["RANK"])
    folder = Path(said["folder"])
    for shape in said["shapes"]:
        with run_ranks(grpo.graph(), plan=placed(shape), steps=STEPS, timeout_s=120.0, **OPTIONS, **inputs()) as run:
            for name in ("policy", "ref"):
                run.save(name, folder / shape / name)
            events = [event for event in run.events if event.what == "reshard" and event.attributes["rank"] == rank]
            moved = [event.attributes["did"] for event in events]
            held = {name: host.state()["weights"] for name, host in run.hosts.items() if host.has_main}
        torch.save({"numbers": numbers(run), "moved": moved, "weights": held}, folder / f"{shape}.{rank}.pt")


def alone() -> tuple[list[dict[str, float]], dict[str, dict[str, np.ndarray]]]:
    """Metrics and weights of one process without a plan."""
    with fr.run_local(grpo.graph(), steps=STEPS, **OPTIONS, **inputs()) as run:
        return numbers(run), {name: run.hosts[name].state()["weights"] for name in ("policy", "ref")}


@fr.operator(writes={"reward": fr.SAMPLE.f32})
def deadly(response, max_policy_version: fr.SAMPLE.i32, *, rank: int):
    """Ends its process, without a word, on one rank, when the policy has changed."""
    if os.environ.get("RANK") == str(rank) and len(response) and max_policy_version[0] > 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return np.array([len(text) for text in response], np.float32)


@fr.flow
def short(prompts, policy, ref, *, rank=1):
    rows = fr.rollout(policy, prompts, n=4)
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    rows = advantages.group_norm(deadly(rows, rank=rank))
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2) + 0.1 * losses.kl("k3"))


def killed(said: dict[str, Any]) -> None:
    """On each rank."""
    Path(said["folder"], f"pid.{os.environ['RANK']}").write_text(f"{os.getpid()} {os.environ['FLOWRL_JOB']}")
    two = Mesh(0, 2)
    plan = plan_of(short.graph(), {"rollout": (two, "d2"), "ref_logprobs": (two, "f2"), "update": (two, "f2")})
    run_ranks(short.graph(), plan=plan, steps=3, timeout_s=60.0, **{**OPTIONS, "out": said["folder"]}, **inputs())
