"""Plans of other kinds: always some, each the best of its kind, and why they lost or do not fit."""

from dataclasses import replace

import pytest

from flowrl.cost.offload import Offload
from flowrl.cost.shapes import ModelShape
from flowrl.graph.schedule import Async, Sync
from flowrl.mesh import Cluster, Placement
from flowrl.planner.problem import Effort, Problem
from flowrl.planner.search import search
from flowrl.planner.ties import burden
from flowrl.planner.workload import Lengths, Workload
from tests.null.planner.search_cases import CASES, FEW, LARGE, WORK, cluster, group_roles


def split(candidate):
    return frozenset(frozenset(option.role for option in one.options) for one in candidate.combinations)


@pytest.mark.parametrize("schedule", [Sync(), Async(1)])
def test_there_are_others_even_when_they_are_far_slower(schedule):
    problem = Problem(group_roles(LARGE, LARGE, 1024), Cluster.named("8xA100-80G"), WORK, schedule=schedule)
    found = search(problem)
    splits = {split(one) for one in found.others}
    assert len(splits - {split(found.best)}) == problem.effort.alternatives
    assert all(a.seconds <= b.seconds for a, b in zip(found.others, found.others[1:], strict=False))
    assert max(one.seconds for one in found.others) > 1.2 * found.best.seconds
    for other in found.others:
        assert str(other.placement) in found.why_not(other)
        assert ("is busy for" in found.why_not(other)) == (len(other.meshes) > 1)


@pytest.mark.parametrize("name", ["plenty", "async_2", "critic", "large_ref"])
def test_each_other_split_is_the_best_of_its_kind(name):
    """Asked for the same split, a search finds the same seconds; no split that is not listed is faster than one that is."""
    problem = replace(CASES[name], tie=0.0)
    found = search(problem)
    listed = {split(one): one.seconds for one in reversed(found.others) if split(one) != split(found.best)}
    every = {}
    for placed in placements(problem):
        best = search(replace(problem, placement=Placement.parse(placed))).best
        if best is not None:
            every[split(best)] = best.seconds
    del every[split(found.best)]
    ranked = sorted(every.values())[: problem.effort.alternatives]
    assert sorted(listed.values()) == pytest.approx(ranked)
    for one, seconds in listed.items():
        assert every[one] == pytest.approx(seconds)


def placements(problem):
    """Every split in the notation of placements."""

    def grow(names):
        if not names:
            yield []
            return
        for rest in grow(names[1:]):
            yield [[names[0]], *rest]
            for at in range(len(rest)):
                yield [*rest[:at], [names[0], *rest[at]], *rest[at + 1 :]]

    for sets in grow([role.name for role in problem.roles]):
        yield " | ".join("(" + " + ".join(f"{name}:..." for name in mine) + ")" for mine in sets)


def offloaded(candidate):
    return {option.role for one in candidate.combinations for option in one.options if burden(option)}


def test_without_offload_or_what_that_lacks():
    tight = search(CASES["tight"])
    assert offloaded(tight.best)
    line = next(line for line in tight.refused if line.startswith("nothing offloaded"))
    assert "GiB" in line and "> 40.0" in line
    # parked weights leave an engine more room, which here is worth more than the copies
    shape = ModelShape.of("Qwen/Qwen2.5-32B")
    work = Workload(128, Lengths.fixed(1024), Lengths.fixed(4096))
    roomy = search(Problem(group_roles(shape, shape, 1024), Cluster.named("16xH100-80G"), work, tie=0.0))
    plain = [one for one in roomy.others if not offloaded(one) and split(one) == split(roomy.best)]
    assert "policy" in offloaded(roomy.best) and len(plain) == 1
    away = dict(roomy.best.option("policy").settings)["offload"]
    assert f"'policy' offload {away} -> none; " in roomy.why_not(plain[0])


def test_splits_that_do_not_fit_say_what_is_short():
    shape = ModelShape.of("meta-llama/Llama-2-70b-hf")
    work = Workload(256, Lengths.fixed(512), Lengths.fixed(512))
    found = search(Problem(group_roles(shape, shape, 256), Cluster.named("8xA100-80G"), work))
    assert found.best is not None and len(found.best.meshes) == 1
    apart = [line for line in found.refused if "|" in line.split(":")[0]]
    assert apart and all("GiB" in line for line in apart)


def test_none_where_none_are_asked_for():
    problem = replace(CASES["plenty"], effort=Effort(alternatives=0))
    found = search(problem)
    assert found.others == () and found.refused == () and found.best == search(CASES["plenty"]).best


def test_a_role_more_than_devices():
    problem = Problem(group_roles(LARGE, LARGE), cluster("1xA100-80G", 80), WORK,
                      choices=replace(FEW, offload=tuple(Offload)))  # fmt: skip
    found = search(problem)
    assert found.best is not None and any("2 meshes on 1 devices" in line for line in found.refused)


def test_layouts_of_a_trainer_that_are_worth_nothing_are_not_said_to_lack_memory():
    """Of tensor parallelism only those options are offered that gain seconds; here none of these fits, and others would."""
    shape = ModelShape.of("Qwen/Qwen3-30B-A3B")
    work = Workload(128, Lengths.fixed(512), Lengths.lognormal(1024, 0.6, cap=4096))
    found = search(Problem(group_roles(shape, shape, 1024), Cluster.named("8xH100-80G"), work))
    assert not any("another layout of 'policy'" in line for line in found.refused)
    # with less of the policy offloaded too: parked where the best one streams
    away = dict(found.best.option("policy").settings)["offload"]
    other = {dict(one.option("policy").settings)["offload"] for one in found.others if split(one) == split(found.best)}
    assert away == "sopt" and "park" in other


def test_why_another_lost_says_what_differs():
    found = search(CASES["plenty"])
    for other in found.others:
        line = found.why_not(other)
        if split(other) == split(found.best) and other.meshes == found.best.meshes:
            assert " -> " in line
    same = replace(found.best, seconds=found.best.seconds * (1 + 1e-6))
    assert found.why_not(same) == f"{same.placement}: {same.seconds:.1f} s (as fast)"
    slower = replace(same, seconds=found.best.seconds * 1.5, work_s=tuple(2 * one for one in same.work_s))
    assert "(+50.0%)" in found.why_not(slower) and "'rollout'" in found.why_not(slower)
    faster = replace(same, seconds=found.best.seconds * 0.99)
    assert found.why_not(faster).endswith("(-1.0%); a tie: what was chosen is simpler")
