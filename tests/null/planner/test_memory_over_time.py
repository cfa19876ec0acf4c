"""Memory over time: equal to adding up hold by hold at every moment; the peak says what it consists of."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from flowrl.errors import ConfigError
from flowrl.mesh import Cluster
from flowrl.planner.simulate import Edge, Hold, Lane, StepKind, Task, memory, schedule
from tests.null.planner.task_cases import DEVICES_PER_NODE, GROUPS, compute, held, task_sets

GIB = 2**30
EIGHT = tuple(range(8))


@st.composite
def holding_sets(draw: Any) -> tuple[tuple[Task, ...], tuple[Hold, ...]]:
    """Tasks with holds that end at the task itself or at one that comes after it; and residents."""
    tasks = draw(task_sets(most=5))
    made: list[Task] = []
    for task in tasks:
        later = [one.name for one in tasks if task.name in one.after]
        holds = []
        for _ in range(draw(st.integers(0, 2))):
            until = draw(st.sampled_from(["", *later]))
            devices = draw(st.sampled_from(GROUPS)) if task.devices else (0,)
            from_edge = draw(st.sampled_from(Edge))
            until_edge = draw(st.sampled_from(Edge)) if until else Edge.END
            what, size = draw(st.sampled_from(["weights", "cache"])), draw(st.integers(0, 9))
            holds.append(Hold(what, size, draw(st.integers(0, 9)), "", from_edge, until, until_edge, devices))
        made.append(Task(task.name, task.kind, task.devices, task.lanes, task.seconds, task.after, "", tuple(holds)))
    some = st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from(GROUPS[:-1]))
    residents = [Hold("resident", one, other, devices=group) for one, other, group in draw(st.lists(some, max_size=2))]
    return tuple(made), tuple(residents)


@settings(max_examples=50)
@given(holding_sets())
def test_every_level_and_peak_is_the_sum_of_its_holds(case: tuple[tuple[Task, ...], tuple[Hold, ...]]) -> None:
    tasks, residents = case
    found = schedule(tasks, devices_per_node=DEVICES_PER_NODE)
    used = memory(tasks, found, resident=residents, devices_per_node=DEVICES_PER_NODE)
    holds = [(task, hold) for task in tasks for hold in task.holds] + [(None, hold) for hold in residents]
    named = {d for task in tasks for d in task.devices} | {d for task, hold in holds for d in hold.devices}
    assert set(used.devices) == named
    edges = sorted({0.0, *found.starts.values(), *found.ends.values()})
    between = [(one + then) / 2 for one, then in itertools.pairwise(edges)]
    for device, usage in used.devices.items():
        at = {moment: held(holds, found, device, moment) for moment in edges}
        inside = {moment: held(holds, found, device, moment) for moment in between}
        for moment, count in inside.items():
            assert [level for since, level in usage.levels if since <= moment][-1] == count
        assert usage.peak_bytes == max([0, *at.values(), *inside.values()])
        assert usage.peak_s == min(moment for moment, count in at.items() if count == usage.peak_bytes)
        assert sum(count for _, count in usage.parts) == usage.peak_bytes
        assert [count for _, count in usage.parts] == sorted((count for _, count in usage.parts), reverse=True)
        for name in usage.during:
            assert found.starts[name] <= usage.peak_s < found.ends[name]


@settings(max_examples=50)
@given(holding_sets(), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(
    case: tuple[tuple[Task, ...], tuple[Hold, ...]], dice: random.Random
) -> None:
    tasks, residents = case
    found = schedule(tasks)
    mixed = dice.sample(tasks, len(tasks))
    assert memory(mixed, found, resident=residents[::-1]) == memory(tasks, found, resident=residents)


@settings(max_examples=50)
@given(holding_sets())
def test_hosts_together_hold_what_was_asked(case: tuple[tuple[Task, ...], tuple[Hold, ...]]) -> None:
    _, residents = case
    tasks = (compute("a", 1.0, devices=(0, 1, 2, 3)),)
    used = memory(tasks, schedule(tasks), resident=residents, devices_per_node=DEVICES_PER_NODE)
    asked = sum(hold.host_bytes for hold in residents)
    # each node rounds its part up
    assert asked <= sum(one.peak_bytes for one in used.hosts.values()) <= asked + 2 * len(residents)


def test_phases_do_not_add_up_but_residents_do() -> None:
    tasks = (
        compute("rollout", 31.0, devices=EIGHT, holds=(Hold("cache", 40 * GIB),)),
        compute("update", 97.0, "rollout", devices=EIGHT, holds=(Hold("activations", 20 * GIB),)),
    )
    resident = (Hold("state", 15 * GIB, devices=EIGHT), Hold("parked", host_bytes=96 * GIB, devices=EIGHT))
    used = memory(tasks, schedule(tasks), resident=resident)
    assert used.devices[7].levels == ((0.0, 55 * GIB), (31.0, 35 * GIB), (128.0, 0))
    assert used.devices[7].parts == (("cache", 40 * GIB), ("state", 15 * GIB))
    assert used.devices[7].during == ("rollout",)
    assert used.hosts[0].peak_bytes == 96 * GIB


def test_weights_are_held_from_one_boundary_to_another() -> None:
    until_update = Hold("engine", 10, until_task="update", until_edge=Edge.START)
    tasks = (
        compute("reshard", 1.0),
        compute("rollout", 5.0, "reshard", holds=(until_update,)),
        compute("reward", 2.0, "rollout"),
        compute("update", 4.0, "reward", holds=(Hold("late", 1, from_edge=Edge.END, until_task="save"),)),
        compute("save", 1.0, "update"),
    )
    used = memory(tasks, schedule(tasks)).devices[0]
    assert used.levels == ((0.0, 0), (1.0, 10), (8.0, 0), (12.0, 1), (13.0, 0))
    assert [used.between(0.0, 1.0), used.between(0.5, 1.5), used.between(8.0, 12.0), used.between(12.0, 12.0)] == [
        0,
        10,
        0,
        1,
    ]


def test_a_task_of_no_length_still_needs_its_memory() -> None:
    tasks = (
        compute("before", 1.0, holds=(Hold("a", 5),)),
        compute("now", 0.0, "before", holds=(Hold("b", 7),)),
        compute("then", 1.0, "now", holds=(Hold("c", 3),)),
    )
    used = memory(tasks, schedule(tasks)).devices[0]
    assert used.levels == ((0.0, 5), (1.0, 3), (2.0, 0))
    assert (used.peak_bytes, used.peak_s, used.parts) == (10, 1.0, (("b", 7), ("c", 3)))


def test_what_waits_between_two_tasks_is_not_there_twice() -> None:
    """Weights that come in, wait for the engine and are used: where it does not wait, once."""
    waiting = Hold(
        "weights", 5, from_task="come", from_edge=Edge.END, until_task="use", until_edge=Edge.START, devices=(0,)
    )
    for wait_s, peak in ((0.0, 7), (1.0, 7)):
        tasks = (
            compute("come", 1.0, holds=(Hold("weights", 5),)),
            Task("wait", StepKind.SYNC, (1,), (Lane.COMPUTE,), wait_s, ("come",)),
            compute("use", 1.0, "come", "wait", holds=(Hold("weights", 5), Hold("cache", 2))),
        )
        used = memory(tasks, schedule(tasks), resident=[waiting]).devices[0]
        assert used.peak_bytes == peak and used.between(1.0, 1.0 + wait_s) == (5 if wait_s else 7)


def test_bytes_are_whole_and_rounded_up() -> None:
    assert Hold("a", 1.5, 0.1) == Hold("a", 2, 1)
    with pytest.raises(ConfigError, match="Hold 'a' needs device_bytes of at least 0; found -1"):
        Hold("a", -1)


# ------------------------------------------------------------------------------------------------------- feasibility


def test_what_does_not_fit_is_named_with_its_parts() -> None:
    cluster = Cluster.named("8xA100-80G")
    holds = (
        Hold("state", 128.5 * GIB),
        Hold("activations", 20 * GIB),
        Hold("gather", 4 * GIB),
        Hold("logits", GIB),
        Hold("x", GIB // 10),
    )
    tasks = (compute("update", 97.0, devices=EIGHT, holds=holds),)
    over = memory(tasks, schedule(tasks)).excess(cluster)
    assert over is not None and over.usage.index == 0
    assert str(over) == (
        "memory of device 0 during update: 153.6 > 80.0 GiB (state 128.5, activations 20.0, gather 4.0, 2 more 1.1)"
    )


def test_the_host_is_checked_per_node() -> None:
    cluster = Cluster.named("16xA100-80G").with_memory(host_bytes=50 * GIB)
    sixteen = tuple(range(16))
    tasks = (compute("update", 1.0, devices=sixteen),)
    for asked, binds in ((100 * GIB, False), (100 * GIB + 2, True)):
        parked = (Hold("parked", host_bytes=asked, devices=sixteen),)
        used = memory(tasks, schedule(tasks), resident=parked, devices_per_node=8)
        over = used.excess(cluster)
        assert (over is not None) == binds
        if over is not None:
            assert (over.usage.place, over.usage.index) == ("host", 0)


def test_the_place_that_is_most_over_binds() -> None:
    cluster = Cluster.named("2xH200").with_memory(device_bytes=100, host_bytes=100)
    tasks = (compute("a", 1.0, devices=(0, 1)),)

    def binding(*holds: Hold) -> tuple[str, int]:
        over = memory(tasks, schedule(tasks), resident=holds).excess(cluster)
        assert over is not None
        return over.usage.place, over.usage.index

    assert binding(Hold("a", 110, devices=(0,)), Hold("b", 120, devices=(1,))) == ("device", 1)
    assert binding(Hold("a", 110, 130, devices=(0,))) == ("host", 0)
    assert binding(Hold("a", 110, 110, devices=(0, 1))) == ("device", 0)
    assert memory(tasks, schedule(tasks), resident=[Hold("a", 100, 100, devices=(0,))]).excess(cluster) is None


@pytest.mark.parametrize(
    ("hold", "message"),
    [
        (Hold("w", 1, until_task="updat"), "hold 'w' names the task 'updat', which is not in the schedule"),
        (Hold("w", 1, until_task="rollout"), "hold 'w' would end at 2.000 s, before it begins at 3.000 s"),
    ],
)
def test_wrong_holds_are_named(hold: Hold, message: str) -> None:
    tasks = (
        compute("rollout", 2.0),
        compute("reward", 1.0, "rollout"),
        compute("update", 1.0, "reward", holds=(hold,)),
    )
    with pytest.raises(ConfigError, match=message):
        memory(tasks, schedule(tasks))


def test_holds_need_devices() -> None:
    nowhere = (Task("wait", StepKind.SYNC, (), (Lane.COMPUTE,), 1.0, holds=(Hold("w", 1),)),)
    with pytest.raises(ConfigError, match="hold 'w' has no devices"):
        memory(nowhere, schedule(nowhere))
    with pytest.raises(ConfigError, match="hold 'w' has no devices"):
        memory((), schedule(()), resident=[Hold("w", 1)])
