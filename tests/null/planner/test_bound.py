"""What no plan goes below: plans of all kinds are held against it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

import flowrl as fr
from examples.flows.grpo import grpo
from flowrl.cost.offload import Offload
from flowrl.cost.shapes import ModelShape
from flowrl.graph.schedule import Async, Sync
from flowrl.mesh import Cluster
from flowrl.planner.bound import bound_s
from flowrl.planner.lower import plan_of
from flowrl.planner.planning import plan_found
from flowrl.planner.problem import INFINITE, Effort, Problem
from flowrl.planner.search import search
from flowrl.planner.workload import Lengths, Workload
from tests.null.planner.lower_cases import candidates, graph_of
from tests.null.planner.search_cases import CASES, CRITICS, GROUPS, TINY, WORK, cluster

SMALL = ModelShape.of("Qwen/Qwen2.5-1.5B")


@pytest.mark.parametrize("name", CASES)
def test_no_plan_is_below_it(name):
    problem = CASES[name]
    least = bound_s(problem)
    for candidate in candidates(name):
        assert least <= plan_of(problem, candidate, graph_of(problem)).predicted.seconds + 1e-9


def test_the_bound_of_the_search_would_not_do():
    """It counts copies inside calls, and a plan hides them."""
    problem = CASES["critic"]
    found = search(problem)
    plan = plan_of(problem, found.best, graph_of(problem))
    assert bound_s(problem) <= plan.predicted.seconds < found.bound_s


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([GROUPS, CRITICS]),
    st.sampled_from(["1xA100-80G", "2xA100-80G", "4xA100-80G"]),
    st.integers(16, 60),
    st.integers(20, 200),
    st.sampled_from([(Offload.PARK,), (Offload.NONE, Offload.PARK), (Offload.PARK, Offload.STREAM_OPTIMIZER)]),
    st.sampled_from([Sync(), Async(1)]),
)
def test_a_family_of_plans(roles, devices, gib, host_gib, classes, schedule):
    """Each fits, is read back equal, and is not below the bound."""
    choices = replace(TINY, offload=classes)
    problem = Problem(roles, cluster(devices, gib, host_gib), WORK, schedule=schedule, choices=choices)
    found = search(problem)
    if found.best is None:
        return
    plan = plan_found(found, graph_of(problem))
    assert plan.simulated()[1].excess(problem.cluster) is None
    assert plan.searched is not None and plan.searched.bound_s <= plan.predicted.seconds * (1 + 1e-12)
    assert plan.searched.gap(plan.predicted.seconds) >= 0
    assert fr.Plan.from_json(plan.to_json()) == plan


def test_a_known_plan_limits_the_look():
    problem = CASES["plenty"]
    least = bound_s(problem)
    assert bound_s(problem, least / 2) == least / 2, "what is known to be less is the bound"
    assert bound_s(problem, least * 2) == pytest.approx(least)


def test_few_branches_give_a_lower_bound():
    problem = CASES["critic_tight"]
    quick = bound_s(problem, branches=60)
    assert 0 < quick <= bound_s(problem) + 1e-9
    assert bound_s(replace(problem, effort=Effort(branches=1)), branches=1) <= bound_s(problem) + 1e-9


def test_nothing_fits():
    assert bound_s(replace(CASES["plenty"], cluster=cluster("1xA100-80G", 3))) == INFINITE


def test_the_best_of_what_the_search_kept():
    """Planning takes a candidate that is faster once its copies are hidden, by more than a tie."""
    work = Workload(64, Lengths.fixed(256), Lengths.lognormal(512, 0.6, cap=2048), group_size=4)
    tight = Cluster.named("2xA100-80G").with_memory(device_bytes=24 * 2**30)
    plan = fr.plan(grpo, models={"policy": SMALL, "ref": SMALL}, cluster=tight, workload=work)
    assert plan.searched is not None
    others = [one.seconds for one in plan.searched.alternatives]
    assert others == sorted(others)
    assert plan.predicted.seconds <= min(others) * 1.02 + 1e-9
    assert plan.searched.bound_s <= min(plan.predicted.seconds, *others) + 1e-9
