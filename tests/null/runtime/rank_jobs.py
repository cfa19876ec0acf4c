"""What the ranks of a test do: flows on plans written by hand, in processes of their own. Also the plans."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import flowrl as fr
from flowrl.graph.drift import code_in
from flowrl.graph.kinds import KINDS
from flowrl.graph.passes import optimise
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.steps import Plan, Predicted, Step
from flowrl.planner.tasks import Lane, StepKind
from flowrl.runtime.ranks import run_ranks
from flowrl_operators import losses
from tests.null.flow_cases import FLOWS, MODEL, PROMPTS
from tests.null.runtime.plans import numbers

OPTIONS: dict[str, Any] = {"progress": "off", "batch": 5, "max_tokens": 12, "reward_workers": 0}
"""Five prompts do not divide by the ranks."""
STEPS = 3


def without_math_verify() -> None:
    """The reward of arithmetic, without a package that is slow to import."""
    import flowrl_operators.rewards as rewards

    rewards.math.function = lambda response, answer, **_: float(answer in response)


def calls(graph: fr.Graph, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(what a plan calls it, kind) of nodes that run a model."""
    for node in graph:
        if node.body is not None:
            yield from calls(node.body, f"{prefix}{node.name}.")
        elif KINDS[node.kind].uses_model:
            yield prefix + node.name, node.kind


def layouts(shape: str, world: int) -> Mapping[str, tuple[Mesh, Layout]]:
    """Where each kind of work is: `rollout`, `update`, and "" for the rest."""
    whole = Mesh(0, world)
    if shape == "together":
        return {"": (whole, Layout(dp=world))}
    if shape == "sharded":  # training is cut, sampling is copied
        return {"rollout": (whole, Layout(dp=world)), "": (whole, Layout(fsdp=world // 2, tp=2))}
    half = world // 2
    first, second = Mesh(0, half), Mesh(half, world - half)
    if shape == "apart":  # rank 0 only samples, and writes the metrics
        return {"rollout": (first, Layout(dp=half)), "": (second, Layout(dp=second.size))}
    assert shape == "scattered"
    return {
        "rollout": (second, Layout(dp=second.size)), "update": (first, Layout(dp=half)), "": (whole, Layout(dp=world)),
    }  # fmt: skip


def plan_of(graph: fr.Graph, world: int, shape: str = "together") -> Plan:
    """A plan of the models' nodes, as they are written."""
    graph, _ = optimise(graph)
    where = layouts("scattered" if shape == "reordered" else shape, world)
    steps = []
    listed = list(calls(graph))
    if (
        shape == "reordered"
    ):  # forward passes wait for tokens only, so a plan may have them in another order than the flow
        forward = [one for one in listed if KINDS[one[1]].is_forward]
        others = iter(reversed(forward))
        listed = [next(others) if one in forward else one for one in listed]
    for name, kind in listed:
        mesh, layout = where.get(kind, where[""])
        steps.append(Step(name, name, StepKind.COMPUTE, mesh, (Lane.COMPUTE,), Predicted(0.5), layout=layout))
    order = [step.name for step in steps]
    return Plan.of(
        graph.name, graph.hash, Cluster.named("8xA100-80G"), steps, order=order, operator_hashes=code_in(graph)
    )


def weights(run: fr.Run) -> dict[str, Any]:
    """Of the models whose newest weights this process has."""
    return {
        name: [host.state()["weights"], host.version]
        for name, host in run.hosts.items()
        if getattr(host, "has_main", True)
    }


def local(name: str, **options: Any) -> fr.Run:
    flow, config, inputs = FLOWS[name]
    return fr.run_local(flow.graph(**config), steps=STEPS, engine="null", out=None, **{**OPTIONS, **options}, **inputs)


def on_ranks(name: str, shape: str, world: int, **options: Any) -> fr.Run:
    flow, config, inputs = FLOWS[name]
    graph = flow.graph(**config)
    given = {"out": None, **OPTIONS, "timeout_s": 60.0, **options}
    return run_ranks(graph, plan=plan_of(graph, world, shape), steps=STEPS, engine="null", **given, **inputs)


@fr.operator(writes={"reward": fr.SAMPLE.f32})
def counted(response, sample_id: fr.SAMPLE.str, *, folder: str):
    """Writes down which rows it sees."""
    with open(Path(folder, f"seen.{os.environ['RANK']}"), "a") as file:
        file.writelines(f"{name}\n" for name in sample_id)
    return np.array([len(text) for text in response], np.float32)


@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality=fr.group("prompt_id"))
def counted_group(reward: fr.SAMPLE.f32, sample_id: fr.SAMPLE.str, *, folder: str):
    with open(Path(folder, f"groups.{os.environ['RANK']}"), "a") as file:
        file.write(f"{sorted(sample_id)}\n")
    return reward - reward.mean()


@fr.operator(writes={"advantage": fr.SAMPLE.f32}, locality="batch", replaces=True)
def counted_batch(advantage: fr.SAMPLE.f32, *, folder: str):
    with open(Path(folder, f"batches.{os.environ['RANK']}"), "a") as file:
        file.write(f"{len(advantage)}\n")
    return advantage / (1 + np.abs(advantage).max())


@fr.flow
def counting(prompts, policy, *, folder=""):
    rows = counted(fr.rollout(policy, prompts, n=4), folder=folder)
    rows = counted_group(rows, folder=folder)
    rows = counted_batch(rows, folder=folder)
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2))


def counts(said: dict[str, Any]) -> None:
    """On each rank: one step of operators that write down what they see."""
    graph = counting.graph(folder=said["folder"])
    plan = plan_of(graph, int(os.environ["WORLD_SIZE"]))
    options = {**OPTIONS, "out": None, "timeout_s": 60.0}
    run_ranks(graph, plan=plan, engine="null", prompts=PROMPTS, policy=MODEL, **options)


def every_flow(said: dict[str, Any]) -> None:
    """On each rank: all flows in some shapes; what came of them is written to the folder."""
    without_math_verify()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {}
    for shape in said["shapes"]:
        for name in said["flows"]:
            with on_ranks(name, shape, world, **said.get("options", {})) as run:
                found[f"{shape} {name}"] = {"numbers": numbers(run), "weights": weights(run)}
    Path(said["folder"], f"{rank}.json").write_text(json.dumps(found))
