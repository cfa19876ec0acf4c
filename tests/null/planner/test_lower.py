"""What the search finds, as a plan: the simulator agrees about its seconds and its memory."""

import math
from dataclasses import replace

import pytest

from examples.flows.grpo import grpo
from examples.flows.ppo import ppo
from flowrl.cost.shapes import ModelShape
from flowrl.graph.schedule import Async
from flowrl.mesh import Cluster
from flowrl.planner.lower import plan_of, steps_of
from flowrl.planner.problem import Problem
from flowrl.planner.search import search
from flowrl.planner.steps import Plan
from flowrl.planner.workload import Lengths, Workload
from tests.null.planner.search_cases import CASES

WORK = Workload(64, Lengths.fixed(256), Lengths.lognormal(512, 0.6, cap=2048), group_size=4)


@pytest.mark.parametrize("name", CASES)
def test_every_plan_passes_the_simulator(name):
    problem = CASES[name]
    found = search(problem, slack=0.3)
    if found.best is None:
        return
    for candidate in (found.best, *found.others):
        plan = plan_of(problem, candidate, grpo.graph())
        times, used = plan.simulated()
        assert times.makespan_s == pytest.approx(candidate.latency_s, rel=1e-6)
        assert plan.predicted.seconds == pytest.approx(candidate.seconds, rel=1e-6)
        assert used.excess(problem.cluster) is None
        # the sum over a set is what its devices hold at the worst moment, give or take whole bytes
        peak = max(one.peak_bytes for one in used.devices.values())
        assert peak <= candidate.peak_bytes + 64


@pytest.mark.parametrize("schedule", [None, Async(1)])
def test_a_flow_to_a_plan_and_back(schedule):
    shape = ModelShape.of("Qwen/Qwen2.5-1.5B")
    models = {"policy": shape, "ref": shape, "critic": shape.with_head("value"), "judge": shape.with_head("reward")}
    problem = Problem.of(ppo.graph(), models, Cluster.named("4xA100-80G"), WORK, schedule=schedule)
    best = search(problem).best
    assert best is not None
    plan = plan_of(problem, best, ppo.graph())
    again = Plan.from_json(plan.to_json())
    assert again == plan
    nodes = {step.node for step in plan.steps}
    assert {"rollout", "score", "ref_logprobs", "old_logprobs", "values", "update", "update_2"} <= nodes
    assert "gen.weights" in str([step.name for step in plan.steps])


def test_less_memory_would_not_do():
    """The peak is no slack estimate: one GiB less on each device, and the same plan is over."""
    problem = CASES["tight"]
    best = search(problem).best
    assert best is not None
    plan = plan_of(problem, best, grpo.graph())
    smaller = problem.cluster.with_memory(device_bytes=int(best.peak_bytes) - 2**30)
    excess = plan.simulated()[1].excess(smaller)
    assert excess is not None and "memory of device" in str(excess)
    assert replace(problem, cluster=smaller) != problem


def test_weights_that_wait_are_counted():
    """From the handover to the next sample the engine's weights are there, over the end of the iteration too."""
    problem = CASES["critic"]
    best = search(problem).best
    assert best is not None
    _, resident = steps_of(problem, best)
    waiting = [hold for hold in resident if hold.what == "gen weights"]
    assert [(hold.from_task, hold.until_task) for hold in waiting] == [("gen.weights", "")]
    assert waiting[0].device_bytes == math.ceil(best.option("gen").handover_bytes) > 0
    assert waiting[0].devices == tuple(best.meshes[0].devices)
