"""The search for a placement: equal to looking at everything, and what must hold for every answer."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from flowrl.cost.offload import ADAM_FP32, ADAM_MASTER
from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.graph.schedule import Async, Sync
from flowrl.mesh import Cluster, Mesh, Placement
from flowrl.planner.fill import Budget, Fill
from flowrl.planner.options import Choices, all_options
from flowrl.planner.problem import Found, Problem, place, slice_sizes, splits
from flowrl.planner.roles import Call, Role
from flowrl.planner.search import search
from flowrl.planner.space import Space
from flowrl.planner.ties import simplicity
from flowrl.planner.workload import Lengths, Workload
from tests.null.planner.every_plan import EveryPlan
from tests.null.planner.search_cases import (
    CASES,
    FEW,
    GROUPS,
    LARGE,
    MIDDLE,
    SMALL,
    WORK,
    cluster,
    critic_roles,
    group_roles,
)


def agrees(problem: Problem, every: EveryPlan) -> Found:
    """Search a problem and compare with all of its plans: the least seconds, the bound, and the plan that a tie takes."""
    found = search(problem)
    assert found.is_exhaustive
    if every.least == float("inf"):
        assert found.best is None and found.fastest is None and found.bound_s == float("inf")
        return found
    assert found.best is not None and found.fastest is not None
    assert found.fastest.seconds == pytest.approx(every.least, rel=1e-12)
    assert found.bound_s <= every.least * (1 + 1e-12)
    expected = every.simplest()
    assert simplicity(problem, found.best)[:7] == expected[:7]
    assert found.best.seconds == pytest.approx(expected[-1], rel=1e-12)
    return found


@pytest.mark.parametrize("tie", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("name", CASES)
def test_as_good_as_looking_at_everything(name, tie):
    problem = replace(CASES[name], tie=tie)
    agrees(problem, EveryPlan(problem))


def test_the_cases_differ():
    """The family would prove little if all of it ended in one mesh with everything on the device."""
    best = {name: search(problem).best for name, problem in CASES.items()}
    assert best["tighter"] is not None and any(dict(o.settings).get("offload") not in ("none", None)
                                               for one in best["tighter"].combinations for o in one.options)  # fmt: skip
    assert len({len(one.meshes) for one in best.values() if one is not None}) > 1
    assert any(one is None for one in best.values()) or best["consent"].numerics == 1


@pytest.mark.parametrize("name", ["tight", "async_2", "critic_tight"])
def test_the_order_of_roles_does_not_matter(name):
    problem = CASES[name]
    first = search(problem)
    for roles in (tuple(reversed(problem.roles)), problem.roles[1:] + problem.roles[:1]):
        assert search(replace(problem, roles=roles)).best == first.best


@pytest.mark.parametrize("tie", [0.0, 0.05])
@pytest.mark.parametrize("schedule", [Sync(), Async(1)])
def test_more_memory_is_never_worse(schedule, tie):
    last = float("inf")
    for gib in (14, 18, 22, 28, 40, 80):
        best = search(replace(CASES["tighter"], cluster=cluster("4xA100-80G", gib), schedule=schedule, tie=tie)).best
        seconds = float("inf") if best is None else best.seconds
        assert seconds <= last * (1 + max(tie, 1e-12))
        last = seconds
    assert last < float("inf")


@pytest.mark.parametrize("tie", [0.0, 0.05])
@pytest.mark.parametrize("schedule", [Sync(), Async(1)])
def test_more_devices_are_never_worse(schedule, tie):
    last = float("inf")
    for name in ("1xA100-80G", "2xA100-80G", "4xA100-80G", "8xA100-80G", "16xA100-80G"):
        best = search(replace(CASES["plenty"], cluster=cluster(name, 60), schedule=schedule, tie=tie)).best
        seconds = float("inf") if best is None else best.seconds
        assert seconds <= last * (1 + max(tie, 1e-12))
        last = seconds


def test_async_is_never_slower_than_sync():
    for name in ("plenty", "tight", "critic"):
        problem = replace(CASES[name], tie=0.0)
        sync = search(problem).best
        later = search(replace(problem, schedule=Async(2))).best
        assert sync is not None and later is not None and later.seconds <= sync.seconds * (1 + 1e-12)


def test_a_placement_can_be_read_back():
    best = search(CASES["async"]).best
    assert best is not None
    assert best.placement.parse(str(best.placement)) == best.placement
    sizes = [mesh.size for mesh in best.meshes]
    assert sizes == [group.size for group in best.placement.groups]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(best.meshes, 2))


def test_every_split_once():
    bell = [1, 1, 2, 5, 15, 52, 203]
    for count, number in enumerate(bell):
        found = [frozenset(map(frozenset, split)) for split in splits(count)]
        assert len(found) == len(set(found)) == number


def test_nothing_fits():
    found = search(replace(CASES["tight"], cluster=cluster("1xA100-80G", 8)))
    assert found.best is None and found.simulated == 0 and found.others == ()


def test_sets_stand_apart_on_buddy_slices():
    machine = Cluster.named("16xH100-80G")
    for sizes in itertools.product((1, 2, 4, 8), repeat=3):
        if sum(sizes) > 16:
            continue
        meshes = place(machine, sizes)
        assert meshes is not None
        assert all(mesh.is_aligned(8) for mesh in meshes)
        assert not any(a.overlaps(b) for a, b in itertools.combinations(meshes, 2))
    assert place(machine, (16, 1)) is None


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 8), (2, 4), (3, 6), (2, 12), (4, 1)])
def test_places_are_the_lowest_free_slices(nodes, per_node):
    machine = replace(Cluster.named("8xA100-80G"), nodes=nodes, devices_per_node=per_node)
    sizes = [size for size in range(1, machine.num_devices + 1) if machine.slices(size)]
    assert slice_sizes(machine) == tuple(sizes)
    for asked in itertools.product((*sizes, 3, machine.num_devices + 1), repeat=3):
        taken: dict[int, Mesh] = {}
        for index in sorted(range(3), key=lambda i: (-asked[i], i)):
            free = (one for one in machine.slices(asked[index]) if not any(one.overlaps(t) for t in taken.values()))
            mesh = next(free, None)
            if mesh is None:
                break
            taken[index] = mesh
        expected = tuple(taken[index] for index in range(3)) if len(taken) == 3 else None
        assert place(machine, asked) == expected, asked


def test_engine_shares_are_of_the_device():
    role = GROUPS[0]
    machine = cluster("2xA100-80G", 40)
    for option in all_options(role, machine, Mesh(0, 2), WORK, FEW):
        share = dict(option.settings)["utilization"]
        assert option.dynamic_bytes == pytest.approx(share * machine.device.memory_bytes)


@pytest.mark.parametrize(
    "text",
    [
        "gen:t2 | (policy:f2 + ref:f2)",
        "(gen:... + ref:...) | policy:f2",
        "gen:d2 | ...",
        "(gen:d4 + policy:f4 + ref:f4)",
    ],
)
@pytest.mark.parametrize("schedule", [Sync(), Async(1)])
def test_what_the_user_asks_for(text, schedule):
    problem = replace(CASES["async"], schedule=schedule, tie=0.0)
    free = search(problem).best
    asked = search(replace(problem, placement=Placement.parse(text))).best
    assert free is not None and asked is not None and asked.seconds >= free.seconds
    groups = {frozenset(role.name for role in group.roles) for group in asked.placement.groups}
    for group in Placement.parse(text).groups:
        assert frozenset(role.name for role in group.roles) in groups
        for role in group.roles:
            assert role.layout is None or asked.option(role.name).layout == role.layout
    again = search(replace(problem, placement=asked.placement)).best
    assert again.seconds == asked.seconds


def test_asking_for_the_best_gives_the_best():
    for name in ("tighter", "async_2", "critic_tight"):
        problem = replace(CASES[name], tie=0.0)
        best = search(problem).best
        assert search(replace(problem, placement=best.placement)).best == best


def test_a_placement_that_cannot_be():
    with pytest.raises(ConfigError, match="placed but not in the flow"):
        replace(CASES["plenty"], placement=Placement.parse("actor:f2 | ..."))
    none = replace(CASES["plenty"], placement=Placement.parse("gen:t2 | policy:f2 | ref:f2"))
    assert search(none).best is None
    odd = replace(CASES["plenty"], placement=Placement.parse("(gen:d16 + policy:f16 + ref:f16)"))
    assert search(odd).best is None


def test_a_large_model_on_one_node():
    """70B with a reference on eight 80 GiB devices streams the optimizer's state, and needs about 830 GB of host memory with
    bf16 gradients; with fp32 gradients the reference goes to the host too, or the trainer is tensor-parallel with Adam on the
    CPU."""
    shape = ModelShape.of("meta-llama/Llama-2-70b-hf")
    work = Workload(256, Lengths.fixed(512), Lengths.fixed(512))
    roles = group_roles(shape, shape, 256)
    cases = (
        (ADAM_MASTER, 840e9, True),
        (ADAM_MASTER, 760e9, False),
        (ADAM_FP32, 980e9, True),
        (ADAM_FP32, 760e9, False),
    )
    for state, host_bytes, fits in cases:
        machine = Cluster.named("8xA100-80G").with_memory(host_bytes=int(host_bytes))
        best = search(Problem(roles, machine, work, choices=Choices(optimizers=(state,)))).best
        assert (best is not None) == fits
        if best is not None:
            assert dict(best.option("policy").settings)["offload"] == "sopt"
            assert 150 < best.seconds < 260


@settings(max_examples=60, deadline=None)
@given(
    models=st.tuples(st.sampled_from([SMALL, MIDDLE, LARGE]), st.sampled_from([SMALL, MIDDLE, LARGE])),
    devices=st.sampled_from(["1xA100-80G", "2xA100-80G", "4xH100-80G"]),
    memory_gib=st.sampled_from([14, 18, 24, 32, 48, 80]),
    host_gib=st.sampled_from([4, 40, 100, 1024]),
    staleness=st.integers(0, 2),
    sequences=st.sampled_from([8, 64, 200]),
    tie=st.sampled_from([0.0, 0.02, 0.2]),
)
def test_a_family_of_small_problems(models, devices, memory_gib, host_gib, staleness, sequences, tie):
    roles = group_roles(*models, sequences)
    schedule = Async(staleness) if staleness else Sync()
    problem = Problem(roles, cluster(devices, memory_gib, host_gib), WORK, schedule=schedule, choices=FEW, tie=tie)
    agrees(problem, EveryPlan(problem))


@pytest.mark.parametrize("schedule", [Sync(), Async(1)])
@pytest.mark.parametrize("memory_gib", [18, 40])
def test_bounds_leave_out_nothing_of_five_roles(schedule, memory_gib):
    """Without bounds, every placement of five roles on four devices."""
    roles = critic_roles(SMALL, MIDDLE)
    judge = Role("judge", "judge", MIDDLE, (Call("reward", "judge", "forward", 128, ("rollout",)),))
    problem = Problem((*roles, judge), cluster("4xA100-80G", memory_gib), WORK, schedule=schedule, choices=FEW, tie=0.0)
    found, space, least, placements = search(problem), Space(problem), float("inf"), 0
    for split in space.splits:
        for sizes in itertools.product(space.sizes, repeat=len(split)):
            meshes = space.meshes(sizes)
            if meshes is not None:
                one = Fill(space, split, meshes, Budget(10**6)).fastest(float("inf"))
                least = min(least, float("inf") if one is None else one.seconds)
                placements += 1
    assert found.best is not None and found.best.seconds == pytest.approx(least, rel=1e-12)
    assert placements > found.placements
