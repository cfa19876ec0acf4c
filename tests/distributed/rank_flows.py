"""What the ranks of a test do with the torch engine: GRPO on a tiny model, and a critic beside it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flowrl as fr
from examples.tiny import MAX_TOKENS, CharTokenizer, make_task, tiny_llama
from flowrl.graph.drift import code_in
from flowrl.graph.flows import Flow
from flowrl.graph.passes import optimise
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.steps import Plan, Predicted, Step
from flowrl.planner.tasks import Lane, StepKind
from flowrl.runtime.ranks import run_ranks
from flowrl_operators import advantages, losses, rewards

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


@fr.flow
def ppo(prompts, policy, ref, critic, *, kl=0.05):
    rows = even_digits(fr.rollout(policy, prompts))
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    rows = fr.values(critic, rows)
    rows = advantages.gae(rewards.kl_shaped(rows, coefficient=kl), gamma=1.0, lam=0.95)
    passes = fr.repeat(rows, epochs=2, minibatches=2)
    policy = fr.update(policy, passes, loss=losses.ppo_clip(0.2))
    return policy, fr.update(critic, passes, loss=losses.value_clip(0.2))


def model(seed: int = 0, *, head: str = "lm") -> fr.Model:
    # a large eps: with a small one a first step moves a weight by its gradient's sign, whose rounding is then all there is
    optimizer = fr.AdamW(lr=1e-2, eps=1e-3)
    return fr.Model(
        tiny_llama(seed, hidden_size=32), tokenizer=CharTokenizer(), head=head, optimizer=optimizer, device="cpu",
        micro_batch_tokens=MICRO_BATCH_TOKENS, sample_batch_tokens=256,
    )  # fmt: skip


MICRO_BATCH_TOKENS = 40
"""Three rows at most, so that ranks whose shares differ by a row have different numbers of micro-batches."""
OPTIONS: dict[str, Any] = {"batch": 7, "max_tokens": MAX_TOKENS, "progress": "off", "reward_workers": 0, "out": None}
"""Seven prompts do not divide by the ranks."""


@dataclass(frozen=True)
class Case:
    """A flow and what it is run with."""

    flow: Flow
    trains: tuple[str, ...]
    """Models whose weights are compared."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def inputs(self) -> dict[str, Any]:
        made = {"prompts": make_task(0, num_train=64, num_heldout=1)[0], "policy": model(), "ref": model()}
        return {**made, "critic": model(1, head="value")} if "critic" in self.trains else made

    def arguments(self, steps: int = STEPS) -> dict[str, Any]:
        """Of `run_local`, and of `run_ranks`."""
        return {"steps": steps, **OPTIONS, **self.options, **self.inputs()}


CASES = {
    "grpo": Case(grpo, ("policy", "ref")),
    "one prompt": Case(grpo, ("policy", "ref"), {"batch": 1}),
    "ppo": Case(ppo, ("policy", "critic")),
    "two rows": Case(ppo, ("policy", "critic"), {"batch": 2}),
}
"""Two have fewer prompts than ranks; the last has an optimizer step for each row."""


def inputs() -> dict[str, Any]:
    return CASES["grpo"].inputs()


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


CALLS = ("ref_logprobs", "old_logprobs", "values", "update", "update_2")
"""Nodes that run a model, beside the rollout."""


def placed(graph: fr.Graph, shape: str) -> Plan:
    """A plan of a flow: a layout for all that scores or trains, with copies that sample on the same ranks; or `apart`."""
    calls = [name for name in CALLS if name in {node.name for node in graph}]
    if shape == "apart":
        two, pair = Mesh(0, 2), Mesh(2, 2)
        where = {"rollout": (two, "d2"), **dict.fromkeys(calls, (pair, "f2")), "ref_logprobs": (Mesh(0, 1), "d1")}
        for name in ("values", "update_2"):  # a critic, if there is one, where the policy samples
            where |= {name: (two, "t2")} if name in where else {}
    else:
        mesh = Mesh(0, Layout.parse(shape).size)
        where = {"rollout": (mesh, f"d{mesh.size}"), **dict.fromkeys(calls, (mesh, shape))}
    source, target = where["update"][0], where["rollout"][0]
    handover = Step(
        "gen.weights", "policy", StepKind.RESHARD, target, (Lane.COMPUTE, Lane.NVLINK), Predicted(0.01), source=source,
        reads=("policy",),
    )  # fmt: skip
    return plan_of(graph, where, handover)


def numbers(run: fr.Run) -> list[dict[str, float]]:
    return [
        {name: value for name, value in step.items() if not name.startswith("time/") and name != "tokens_per_s"}
        for step in run.metrics
    ]


def trained(said: dict[str, Any]) -> None:
    """On each rank: what comes of each case on each plan, and the weights as they are written to a folder."""
    rank = int(os.environ["RANK"])
    for name, shape in said["todo"]:
        case, folder = CASES[name], Path(said["folder"], f"{name} {shape}")
        graph = case.flow.graph()
        with run_ranks(graph, plan=placed(graph, shape), timeout_s=120.0, **case.arguments()) as run:
            for trained in case.trains:
                run.save(trained, folder / trained)
            events = [event for event in run.events if event.what == "reshard" and event.attributes["rank"] == rank]
            moved = [event.attributes["did"] for event in events]
            hosts = {trained: run.hosts[trained] for trained in case.trains}
            held = {trained: host.state()["weights"] for trained, host in hosts.items() if host.has_main}
            rows = run.rows("rollout") if rank == 0 else None
            texts = [] if rows is None else list(rows["response"])
        found = {"numbers": numbers(run), "moved": moved, "weights": held, "texts": texts}
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(found, folder / f"{rank}.pt")


def alone(name: str) -> dict[str, Any]:
    """Metrics, weights and the last responses of one process without a plan."""
    case = CASES[name]
    with fr.run_local(case.flow.graph(), **case.arguments()) as run:
        weights = {model: run.hosts[model].state()["weights"] for model in case.trains}
        return {"numbers": numbers(run), "weights": weights, "texts": list(run.rows("rollout")["response"])}


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
