"""More to choose from is never worse: memory, devices, choices, and the planner's own placement against one that is asked for.

Within the tie: of plans that the model cannot tell apart the simplest is taken.
"""

from dataclasses import replace

import pytest

from examples.flows.grpo import grpo
from examples.flows.ppo import ppo
from flowrl.cost.offload import Offload
from flowrl.mesh import Cluster
from flowrl.planner.choices import Choices
from flowrl.planner.planning import problem_of
from flowrl.planner.problem import TIE, Found
from flowrl.planner.search import search
from flowrl.planner.workload import Lengths, Workload

GIB = 2**30
WORK = Workload(64, Lengths.fixed(256), Lengths.lognormal(512, 0.6, cap=2048))
H100 = Cluster.named("8xH100-80G")
SMALL, LARGE = "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-32B"


def machine(gib: int = 80, per_node: int = 8, nodes: int = 1) -> Cluster:
    found = replace(H100, devices_per_node=per_node, nodes=nodes)
    return found.with_memory(device_bytes=gib * GIB, host_bytes=1024 * GIB)


def planned(flow, model: str, cluster: Cluster, **asked) -> Found:
    names = ("policy", "ref") if flow is grpo else ("policy", "ref", "critic", "judge")
    problem, _ = problem_of(flow, models=dict.fromkeys(names, model), cluster=cluster, workload=WORK, **asked)
    found = search(problem)
    assert found.best is not None and found.fastest is not None and found.is_exhaustive
    assert found.best.seconds <= found.fastest.seconds * (1 + TIE)
    return found


def not_worse(more: Found, less: Found) -> bool:
    assert more.best is not None and more.fastest is not None and less.best is not None and less.fastest is not None
    is_faster = more.fastest.seconds <= less.fastest.seconds * (1 + 1e-12)
    return is_faster and more.best.seconds <= less.best.seconds * (1 + TIE)


@pytest.mark.parametrize(
    ("flow", "model", "per_node", "sizes"),
    [
        (ppo, LARGE, 8, (40, 48, 60, 80, 96, 141)),
        (ppo, SMALL, 2, (60, 80, 128, 141, 192)),
        (ppo, SMALL, 8, (24, 40, 80)),
        (grpo, LARGE, 4, (80, 141, 192)),
        (grpo, SMALL, 6, (24, 40, 80)),
    ],
)
def test_more_memory(flow, model, per_node, sizes):
    before = None
    for gib in sizes:
        found = planned(flow, model, machine(gib, per_node))
        assert before is None or not_worse(found, before), gib
        before = found


@pytest.mark.parametrize(("flow", "model", "counts"), [(grpo, SMALL, range(1, 9)), (ppo, SMALL, range(2, 9))])
def test_more_devices_of_a_node(flow, model, counts):
    before = None
    for count in counts:
        found = planned(flow, model, machine(80, count))
        assert before is None or not_worse(found, before), count
        before = found


@pytest.mark.parametrize("per_node", [3, 4, 6, 8])
def test_more_nodes(per_node):
    before = None
    for nodes in (1, 2, 3):
        found = planned(grpo, SMALL, machine(80, per_node, nodes))
        assert before is None or not_worse(found, before), nodes
        before = found


@pytest.mark.parametrize(("model", "gib", "per_node"), [(SMALL, 141, 2), (LARGE, 80, 8)])
@pytest.mark.parametrize(
    "fewer",
    [
        {"recompute": (False,)},
        {"recompute": (True,)},
        {"micro_batch_tokens": (8192,)},
        {"train_tensor_parallel": (1,)},
        {"train_tensor_parallel": (2,)},
        {"offload": (Offload.PARK, Offload.STREAM_OPTIMIZER)},
        {"utilization": (0.9, 0.5)},
    ],
    ids=str,
)
def test_more_choices(model, gib, per_node, fewer):
    every = planned(ppo, model, machine(gib, per_node))
    problem, _ = problem_of(ppo, models=dict.fromkeys(("policy", "ref", "critic", "judge"), model),
                            cluster=machine(gib, per_node), workload=WORK, choices=Choices(**fewer))  # fmt: skip
    found = search(problem)
    assert found.best is None or not_worse(every, found)


@pytest.mark.parametrize(
    "placement",
    [
        "(critic:f4t2 + gen:t8 + judge:f8 + policy:f4t2 + ref:f8)",
        "(critic:f2t4 + gen:d2t4 + judge:f4t2 + policy:f2t4 + ref:f4t2)",
        "(critic:f8 + gen:t8 + judge:t8 + policy:t8 + ref:t8)",
        "gen:t4 | (critic:f2t2 + judge:f4 + policy:f2t2 + ref:f4)",
    ],
)
@pytest.mark.parametrize("gib", [80, 141])
def test_what_is_asked_for(placement, gib):
    asked, free = planned(ppo, LARGE, machine(gib), placement=placement), planned(ppo, LARGE, machine(gib))
    assert not_worse(free, asked)
