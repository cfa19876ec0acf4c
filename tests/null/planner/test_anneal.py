"""Where branches are too many: a random search whose answers are good, equal for equal seeds, and whose bound holds."""

from dataclasses import replace

import pytest

from flowrl.cost.shapes import ModelShape
from flowrl.graph.schedule import Async, Sync
from flowrl.mesh import Cluster, Placement
from flowrl.planner.problem import Effort, Problem, num_splits
from flowrl.planner.roles import Call, Role
from flowrl.planner.search import search
from flowrl.planner.workload import Lengths, Workload
from tests.null.planner.search_cases import FEW, MIDDLE, SMALL, WORK, cluster, critic_roles


def five(gib: float, schedule, devices: str = "16xA100-80G") -> Problem:
    roles = critic_roles(SMALL, MIDDLE)
    judge = Role("judge", "judge", MIDDLE, (Call("reward", "judge", "forward", 128, ("rollout",)),))
    return Problem((*roles, judge), cluster(devices, gib), WORK, schedule=schedule, choices=FEW, tie=0.0)


@pytest.mark.parametrize("schedule", [Sync(), Async(1), Async(3)])
@pytest.mark.parametrize("gib", [20, 40])
def test_close_to_the_best(schedule, gib):
    problem = five(gib, schedule)
    best = search(problem)
    assert best.is_exhaustive
    few = replace(problem, effort=Effort(branches=5, moves=300))
    found = search(few)
    assert not found.is_exhaustive
    assert found.best.seconds <= best.best.seconds * 1.1
    assert found.bound_s <= best.best.seconds * (1 + 1e-12)
    assert found.gap >= 0
    assert search(few) == found


def test_the_random_search_is_what_finds_it():
    problem = five(40, Async(1))
    few = replace(problem, effort=Effort(branches=5, moves=0))
    assert search(few).best.seconds > search(problem).best.seconds * 1.1
    seeds = {search(replace(problem, effort=Effort(branches=5, moves=40, seed=seed))).best.seconds for seed in range(4)}
    assert len(seeds) > 1, "the seed should matter where there are few moves"


def test_never_worse_with_more_branches():
    last = float("inf")
    for branches in (1, 3, 10, 100, 100_000):
        found = search(replace(five(40, Async(1)), effort=Effort(branches=branches, moves=0)))
        seconds = float("inf") if found.best is None else found.best.seconds
        assert seconds <= last
        last = seconds
    assert found.is_exhaustive


def test_more_roles_than_splits_can_be_listed_for():
    """Six models that score, an engine and a policy: 4,140 ways to split them."""
    scores = tuple(Role(f"score_{i}", f"score_{i}", SMALL, (Call(f"s{i}", f"score_{i}", "forward", 64, ("rollout",)),))
                   for i in range(6))  # fmt: skip
    policy = (
        Role("gen", "policy", SMALL, (Call("rollout", "gen", "generate", 64),), weights_from="policy"),
        Role("policy", "policy", SMALL, (Call("update", "policy", "train", 64, tuple(f"s{i}" for i in range(6))),)),
    )
    problem = Problem((*policy, *scores), cluster("8xA100-80G", 80), WORK, choices=FEW,
                      effort=Effort(branches=1000, moves=50))  # fmt: skip
    assert [num_splits(count) for count in range(1, 9)] == [1, 2, 5, 15, 52, 203, 877, 4140]
    found = search(problem)
    assert not found.is_exhaustive and found.best is not None
    assert 0 < found.bound_s <= found.best.seconds
    assert len({option.role for one in found.best.combinations for option in one.options}) == 8


def test_moves_keep_to_what_was_asked_for():
    asked = Placement.parse("(gen:... + ref:...) | policy:f4 | ...")
    problem = replace(five(40, Async(1)), effort=Effort(branches=30, moves=200), placement=asked)
    found = search(problem)
    assert not found.is_exhaustive and found.best is not None
    names = {frozenset(option.role for option in one.options) for one in found.best.combinations}
    assert frozenset({"gen", "ref"}) in names
    assert str(found.best.option("policy").layout) == "f4"


def test_a_large_cluster_is_searched_to_the_end():
    """Five roles of 32B on 64 devices need a small part of the branches that are allowed."""
    shape = ModelShape.of("Qwen/Qwen2.5-32B")
    roles = tuple(replace(role, shape=shape) for role in five(80, Sync()).roles)
    work = Workload(128, Lengths.fixed(1024), Lengths.lognormal(2048, 0.6, cap=8192))
    found = search(Problem(roles, Cluster.named("64xH100-80G"), work, schedule=Async(1)))
    assert found.is_exhaustive and found.best is not None
