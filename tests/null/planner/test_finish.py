"""Plans that are fast because they hide copies: they are found although the search counts these copies in full."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import flowrl as fr
from examples.flows.grpo import grpo
from examples.flows.ppo import ppo
from flowrl.cost.offload import Offload
from flowrl.graph.schedule import Async
from flowrl.planner.finish import finished
from flowrl.planner.forced import Forced
from flowrl.planner.free import Free
from flowrl.planner.lower import plan_of
from flowrl.planner.problem import Candidate, Effort, Problem
from flowrl.planner.search import search
from flowrl.planner.space import Space
from flowrl.planner.ties import burden
from tests.null.planner.lower_cases import candidates, graph_of
from tests.null.planner.search_cases import CASES, CRITICS, GROUPS, TINY, WORK, cluster

GIB = 2**30
SEVEN = "Qwen/Qwen2.5-7B"


def seconds_of(problem: Problem, candidate: Candidate) -> float:
    plan = plan_of(problem.on(candidate), candidate, graph_of(problem), is_exact=False)
    return plan.predicted.seconds


def parked(problem: Problem) -> bool:
    found = search(problem).best
    return found is not None and any(burden(option) for one in found.combinations for option in one.options)


@pytest.mark.parametrize("name", CASES)
def test_no_plan_is_below_what_is_forced(name):
    problem = CASES[name]
    for candidate in candidates(name):
        assert Forced(problem.on(candidate)).seconds(candidate) <= seconds_of(problem, candidate) * (1 + 1e-9)


@pytest.mark.parametrize("roles", [GROUPS, CRITICS])
@pytest.mark.parametrize("schedule", [None, Async(1)])
def test_no_tight_plan_is_below_what_is_forced(roles, schedule):
    """With parked state on every mesh; and somewhere copies are forced that calls without copies do not show."""
    is_forced = False
    for gib in (16, 18, 20, 22, 26, 34):
        choices = replace(TINY, offload=(Offload.NONE, Offload.PARK))
        problem = Problem(roles, cluster("2xA100-80G", gib, 400), WORK, schedule=schedule or fr.Sync(), choices=choices)
        found = search(problem)
        for one in filter(None, (found.best, found.fastest, *found.others)):
            least_s, plan_s = Forced(problem.on(one)).seconds(one), seconds_of(problem, one)
            assert least_s <= plan_s * (1 + 1e-9)
            space = Free(problem.on(one))
            role_s = [space.least(role, one.meshes[0].size) for role in range(len(problem.roles))]
            bare_s = sum(role_s[role][call] for role, call, _ in space.work if call is not None)
            is_forced |= len(one.meshes) == 1 and least_s > bare_s * 1.01
    assert is_forced or schedule is not None


def test_free_options_are_those_of_the_space_without_copies():
    problem = CASES["critic"]
    free, space = Free(problem), Space(problem)
    moved = 0
    for role in range(len(problem.roles)):
        for size in free.sizes:
            every = set(space.every_option(role, size))
            for option in free.options(role, size):
                real = free.real(option)
                assert real in every
                assert all(a <= b for a, b in zip(option.seconds, real.seconds, strict=True))
                assert replace(option, seconds=real.seconds) == real
                moved += option.seconds != real.seconds
    assert moved


def test_what_is_parked_is_nowhere_costlier_than_what_stays():
    problem = CASES["critic"]
    plenty = replace(problem, cluster=problem.cluster.with_memory(host_bytes=2**45))
    free = Free(plenty)
    assert free.is_roomy and not Free(replace(problem, cluster=problem.cluster.with_memory(host_bytes=GIB))).is_roomy
    for role, mine in enumerate(plenty.roles):
        if mine.is_trained:
            kinds = {dict(option.settings)["offload"] for option in free.options(role, free.sizes[-1])}
            assert "none" not in kinds and "park" in kinds


def nodes(per_node: int) -> fr.Cluster:
    one = fr.Cluster.named("8xA100-40G")
    host = replace(one.host, memory_bytes=256 * GIB)
    return replace(one, nodes=2, devices_per_node=per_node, host=host)


def plan(per_node: int, **said):
    models = {node.name: SEVEN for node in ppo.graph().inputs if node["kind"] == "weights"}
    work = fr.Workload(3, fr.Lengths.fixed(32), fr.Lengths.lognormal(256, 0.9, cap=512))
    return fr.plan(ppo, models=models, cluster=nodes(per_node), workload=work, **said)


def test_more_devices_do_not_hide_less():
    """On ten devices the plan hides most of what it copies. On twelve the search finds one that copies nothing, and is slower."""
    fewer, more = plan(5), plan(6)
    assert more.seconds <= fewer.seconds * 1.02
    without = plan(6, effort=Effort(finished=0))
    assert without.seconds > more.seconds * 1.1, "the search alone does not see it"
    assert any(step.kind.name == "OFFLOAD" or "park" in str(step.settings) for step in more.steps)


def test_state_that_need_not_be_parked_is_not():
    found = plan(6)
    settings = {
        dict(step.settings).get("role"): dict(step.settings)
        for step in found.steps
        if dict(step.settings).get("offload")
    }
    assert settings["policy"]["offload"] == "none", "six devices hold it all"
    assert settings["critic"]["offload"] == "park"


def test_nothing_is_finished_where_nothing_may_be_faster():
    problem = CASES["plenty"]
    known = search(problem).best
    assert known is not None

    def never(candidate: Candidate) -> float:
        raise AssertionError(f"{candidate.placement} cannot be faster")

    assert finished(problem, known.seconds / 2, 0.0, never) is None
    assert finished(replace(problem, effort=Effort(finished=0)), known.seconds * 2, 0.0, never) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_more_of_anything_is_not_worse_than_the_tie(seed):
    """Finished plans, of clusters so small that state is parked on many."""
    rng = random.Random(seed)
    compared = 0
    while compared < 8:
        flow, size = rng.choice([ppo, grpo]), rng.choice(["Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-3B", SEVEN])
        models = {node.name: size for node in flow.graph().inputs if node["kind"] == "weights"}
        work = fr.Workload(
            rng.choice([3, 16, 64]), fr.Lengths.fixed(rng.choice([32, 512])), fr.Lengths.lognormal(256, 0.9, cap=512)
        )
        base = fr.Cluster.named(rng.choice(["8xA100-40G", "8xH100-80G", "8xRTX4090"]))
        had = [rng.choice([1, 1, 2]), rng.randint(1, 6), rng.choice([64, 128, 256, 512]), rng.choice([16, 24, 32, 48])]
        at = rng.randrange(4)
        has = [*had[:at], had[at] + 1 if at < 2 else had[at] * 5 // 4, *had[at + 1 :]]
        found: list[float] = []
        for count, per_node, host, memory in (had, has):
            host_of = replace(base.host, memory_bytes=host * GIB)
            one = replace(base, nodes=count, devices_per_node=per_node, host=host_of).with_memory(
                device_bytes=memory * GIB
            )
            try:
                found.append(fr.plan(flow, models=models, cluster=one, workload=work).seconds)
            except fr.PlanError:
                found.append(float("inf"))
        if found[0] < float("inf"):
            compared += 1
            assert found[1] <= found[0] * 1.02 + 1e-9, f"{flow.name}, {size}: {had} -> {has}"
