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
from flowrl.planner.handover import Side, handover_s
from flowrl.planner.options import Choices, all_options
from flowrl.planner.problem import Problem, place, splits
from flowrl.planner.roles import Call, Role
from flowrl.planner.search import search
from flowrl.planner.workload import Lengths, Workload
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


def everything(problem: Problem) -> float:
    """The least seconds of all plans, by the rules and nothing else; infinite when none fits."""
    best, roles, machine = float("inf"), problem.roles, problem.cluster
    context, capacity = problem.choices.memory.context_bytes, machine.device.memory_bytes
    sizes = [n for n in range(1, machine.num_devices + 1) if machine.slices(n)]
    for labels in itertools.product(range(len(roles)), repeat=len(roles)):
        if [label for i, label in enumerate(labels) if label not in labels[:i]] != list(range(max(labels) + 1)):
            continue
        for chosen in itertools.product(sizes, repeat=max(labels) + 1):
            meshes = place(machine, chosen)
            if meshes is None:
                continue
            ways = [all_options(role, machine, meshes[label], problem.workload, problem.choices)
                    for role, label in zip(roles, labels, strict=True)]  # fmt: skip
            for options in itertools.product(*ways):
                if _fits(problem, labels, meshes, options, context, capacity):
                    best = min(best, _seconds(problem, labels, meshes, options, best))
    return best


def _fits(problem, labels, meshes, options, context, capacity) -> bool:
    hosts = [0.0] * problem.cluster.nodes
    for label, mesh in enumerate(meshes):
        mine = [option for option, at in zip(options, labels, strict=True) if at == label]
        held = sum(option.static_bytes for option in mine) + context * any(option.has_context for option in mine)
        handed = sum(option.handover_bytes for option in mine if option.role in ("gen", "policy"))
        if held + max(option.dynamic_bytes for option in mine) > capacity:
            return False
        # the critic may be updated while new weights wait
        meanwhile = max([option.dynamic_bytes for option in mine if option.role == "critic"], default=0.0)
        if held + handed + meanwhile > capacity:
            return False
        nodes = mesh.nodes(problem.cluster.devices_per_node)
        for node in nodes:
            hosts[node] += sum(option.host_bytes for option in mine) / len(nodes)
    return max(hosts) <= problem.cluster.host.memory_bytes


def _seconds(problem, labels, meshes, options, best) -> float:
    """The shortest order of the calls, found by trying all."""
    tasks: dict[str, tuple[float, set[int], set[str]]] = {}
    at = {role.name: label for role, label in zip(problem.roles, labels, strict=True)}
    option_of = {option.role: option for option in options}
    for role in problem.roles:
        for call, seconds in zip(role.calls, option_of[role.name].seconds, strict=True):
            tasks[call.node] = (seconds, {at[role.name]}, set(call.after))
    gen, policy = option_of["gen"], option_of["policy"]
    moving = handover_s(problem.roles[[r.name for r in problem.roles].index("gen")].shape, problem.cluster,
                        Side(meshes[at["policy"]], policy.layout), Side(meshes[at["gen"]], gen.layout),
                        is_on_host=policy.is_on_host)  # fmt: skip
    tasks["move"] = (moving, {at["gen"], at["policy"]}, {"rollout", "update"})
    loads = [sum(seconds for seconds, sets, _ in tasks.values() if label in sets) for label in range(len(meshes))]
    shares = problem.schedule.max_staleness + 1
    if (max(loads) if shares > 1 else 0.0) >= best:
        return best
    shortest = float("inf")

    def down(done: dict[str, float], free: tuple[float, ...]) -> None:
        nonlocal shortest
        if len(done) == len(tasks):
            shortest = min(shortest, max(done.values()))
        for name, (seconds, sets, after) in tasks.items():
            if name not in done and after <= set(done):
                start = max([0.0, *(done[one] for one in after), *(free[one] for one in sets)])
                now = tuple(start + seconds if one in sets else time for one, time in enumerate(free))
                down({**done, name: start + seconds}, now)

    down({}, (0.0,) * len(meshes))
    return shortest if shares == 1 else max([shortest / shares, *loads])


@pytest.mark.parametrize("name", CASES)
def test_as_good_as_looking_at_everything(name):
    problem = CASES[name]
    found, expected = search(problem), everything(problem)
    if expected == float("inf"):
        assert found.best is None
        return
    assert found.best is not None
    assert found.best.seconds == pytest.approx(expected, rel=1e-12)
    assert found.bound_s <= expected * (1 + 1e-12)


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


@pytest.mark.parametrize("schedule", [Sync(), Async(1)])
def test_more_memory_is_never_worse(schedule):
    last = float("inf")
    for gib in (14, 18, 22, 28, 40, 80):
        best = search(replace(CASES["tighter"], cluster=cluster("4xA100-80G", gib), schedule=schedule)).best
        seconds = float("inf") if best is None else best.seconds
        assert seconds <= last * (1 + 1e-12)
        last = seconds
    assert last < float("inf")


@pytest.mark.parametrize("schedule", [Sync(), Async(1)])
def test_more_devices_are_never_worse(schedule):
    last = float("inf")
    for name in ("1xA100-80G", "2xA100-80G", "4xA100-80G", "8xA100-80G", "16xA100-80G"):
        best = search(replace(CASES["plenty"], cluster=cluster(name, 60), schedule=schedule)).best
        seconds = float("inf") if best is None else best.seconds
        assert seconds <= last * (1 + 1e-12)
        last = seconds


def test_async_is_never_slower_than_sync():
    for name in ("plenty", "tight", "critic"):
        problem = CASES[name]
        sync = search(problem).best
        later = search(replace(problem, schedule=Async(2))).best
        assert sync is not None and later is not None and later.seconds <= sync.seconds * (1 + 1e-12)


def test_slack_finds_others_and_the_same_best():
    problem = CASES["critic"]
    first, wide = search(problem), search(problem, slack=0.5)
    assert wide.best == first.best
    assert wide.others
    for other in wide.others:
        assert other.seconds >= wide.best.seconds
        assert str(other.placement) in wide.why_not(other) and "busy for" in wide.why_not(other)


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
    problem = replace(CASES["async"], schedule=schedule)
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
        best = search(CASES[name]).best
        assert search(replace(CASES[name], placement=best.placement)).best == best


def test_a_placement_that_cannot_be():
    with pytest.raises(ConfigError, match="placed but not in the flow"):
        replace(CASES["plenty"], placement=Placement.parse("actor:f2 | ..."))
    none = replace(CASES["plenty"], placement=Placement.parse("gen:t2 | policy:f2 | ref:f2"))
    assert search(none).best is None
    odd = replace(CASES["plenty"], placement=Placement.parse("(gen:d16 + policy:f16 + ref:f16)"))
    assert search(odd).best is None


def test_a_large_model_on_one_node():
    """70B with a reference on eight 80 GiB devices streams the optimizer's state, and needs about 830 GB of host memory with
    bf16 gradients; with fp32 gradients the reference goes to the host too."""
    shape = ModelShape.of("meta-llama/Llama-2-70b-hf")
    work = Workload(256, Lengths.fixed(512), Lengths.fixed(512))
    roles = group_roles(shape, shape, 256)
    cases = (
        (ADAM_MASTER, 840e9, True),
        (ADAM_MASTER, 760e9, False),
        (ADAM_FP32, 980e9, True),
        (ADAM_FP32, 840e9, False),
    )
    for state, host_bytes, fits in cases:
        machine = Cluster.named("8xA100-80G").with_memory(host_bytes=int(host_bytes))
        best = search(Problem(roles, machine, work, choices=Choices(optimizers=(state,)))).best
        assert (best is not None) == fits
        if best is not None:
            assert dict(best.option("policy").settings)["offload"] == "sopt"
            assert 150 < best.seconds < 260


@settings(max_examples=25, deadline=None)
@given(
    models=st.tuples(st.sampled_from([SMALL, MIDDLE, LARGE]), st.sampled_from([SMALL, MIDDLE, LARGE])),
    devices=st.sampled_from(["1xA100-80G", "2xA100-80G", "4xH100-80G"]),
    memory_gib=st.sampled_from([14, 18, 24, 32, 48, 80]),
    host_gib=st.sampled_from([4, 40, 100, 1024]),
    staleness=st.integers(0, 2),
    sequences=st.sampled_from([8, 64, 200]),
)
def test_a_family_of_small_problems(models, devices, memory_gib, host_gib, staleness, sequences):
    roles = group_roles(*models, sequences)
    schedule = Async(staleness) if staleness else Sync()
    problem = Problem(roles, cluster(devices, memory_gib, host_gib), WORK, schedule=schedule, choices=FEW)
    found, expected = search(problem), everything(problem)
    assert (found.best is None) == (expected == float("inf"))
    if found.best is not None:
        assert found.best.seconds == pytest.approx(expected, rel=1e-12)
        wide = search(problem, prune=False).best
        assert wide is not None and wide.seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", [Sync(), Async(1)])
@pytest.mark.parametrize("memory_gib", [18, 40])
def test_bounds_leave_out_nothing_of_five_roles(schedule, memory_gib):
    """Without bounds, every placement of five roles on four devices."""
    roles = critic_roles(SMALL, MIDDLE)
    judge = Role("judge", "judge", MIDDLE, (Call("reward", "judge", "forward", 128, ("rollout",)),))
    problem = Problem((*roles, judge), cluster("4xA100-80G", memory_gib), WORK, schedule=schedule, choices=FEW)
    found, every = search(problem), search(problem, slack=float("inf"))
    assert found.best is not None and found.best == every.best
    assert every.placements > found.placements and every.simulated > found.simulated
    assert len(search(problem, slack=float("inf"), top=100).others) > 5
