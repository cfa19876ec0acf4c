"""Schedules: nothing overlaps, nothing is early, the bound holds. Slow ways to compute the same are in `task_cases`."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given, settings, strategies as st

from flowrl.errors import ConfigError
from flowrl.planner.orders import Shape
from flowrl.planner.simulate import (
    Lane,
    StepKind,
    Task,
    _preemptive as preemptive,
    lower_bound,
    period,
    schedule,
    unroll,
)
from tests.null.planner.task_cases import DEVICES_PER_NODE, compute, move, optimum, resources, task_sets

SLACK_S = 1e-9
GRPO = (
    compute("rollout", 31.0),
    compute("old", 19.4, "rollout"),
    compute("ref", 19.4, "rollout"),
    compute("update", 97.1, "old", "ref"),
    Task("reshard", StepKind.RESHARD, (0,), (Lane.NVLINK,), 0.026, ("update",)),
)


def plan(tasks: tuple[Task, ...], **options: object):
    return schedule(tasks, devices_per_node=DEVICES_PER_NODE, **options)  # type: ignore[arg-type]


def test_one_mesh_is_the_sum() -> None:
    found = schedule(GRPO)
    assert found.makespan_s == pytest.approx(31 + 19.4 + 19.4 + 97.1 + 0.026)
    assert list(found.starts) == ["rollout", "old", "ref", "update", "reshard"]
    assert found.critical_path == ("rollout", "old", "ref", "update", "reshard")
    assert found.busy_s(0, Lane.COMPUTE) == pytest.approx(166.9)
    assert found.busy_s(0, Lane.NVLINK) == 0.026
    assert found.busy_s(1, Lane.COMPUTE) == 0.0


def test_lanes_of_a_device_run_side_by_side() -> None:
    found = schedule([compute("a", 3.0), move("in", Lane.H2D, 2.0), move("out", Lane.D2H, 1.0)])
    assert found.makespan_s == 3.0 and set(found.starts.values()) == {0.0}


def test_the_longer_path_goes_first() -> None:
    tasks = [compute("a", 5.0), compute("b", 1.0), compute("then", 9.0, "b", devices=(1,))]
    assert schedule(tasks).makespan_s == 10.0
    assert schedule(tasks, order=["a", "b", "then"]).makespan_s == 15.0


def test_an_order_is_kept_on_every_lane() -> None:
    tasks = [
        compute("a", 2.0, devices=(1,)),
        compute("late", 3.0, "a"),
        compute("early", 2.0),
        move("in", Lane.H2D, 1.0),
    ]
    found = schedule(tasks, order=["a", "late", "early", "in"])
    assert found.starts == {"a": 0.0, "in": 0.0, "late": 2.0, "early": 5.0}
    assert list(found.starts) == ["a", "in", "late", "early"]
    assert found.critical_path == ("a", "late", "early")


@settings(max_examples=50)
@given(task_sets())
def test_the_order_of_a_schedule_gives_it_again(tasks: tuple[Task, ...]) -> None:
    found = plan(tasks)
    assert plan(tasks, order=list(found.starts)) == found


def test_a_task_of_no_length_frees_what_is_more_urgent() -> None:
    tasks = [compute("gate", 0.0, devices=()), compute("long", 9.0, "gate"), compute("short", 1.0)]
    assert list(schedule(tasks).starts) == ["gate", "long", "short"]


def test_the_host_is_one_per_node() -> None:
    tasks = [move("a", Lane.HOST, 2.0, devices=(0,)), move("b", Lane.HOST, 2.0, devices=(1,))]
    assert schedule(tasks).makespan_s == 4.0
    assert schedule(tasks, devices_per_node=2).makespan_s == 4.0
    assert schedule(tasks, devices_per_node=1).makespan_s == 2.0


def test_equal_moments_are_equal_whatever_the_sums() -> None:
    # 0.1 + 0.2 is not 0.3 in floating point; here both devices are free at the same moment
    tasks = [
        compute("a", 0.1),
        compute("b", 0.2, "a"),
        compute("c", 0.3, devices=(1,)),
        compute("x", 1.0, "b", "c", devices=(0, 1)),
        compute("y", 0.5, "c", devices=(1,)),
    ]
    found = schedule(tasks)
    assert found.ends["b"] == found.ends["c"] == found.starts["x"] == 0.3
    assert found.starts["y"] == 1.3


@settings(max_examples=50)
@given(task_sets())
def test_a_schedule_respects_order_and_lanes(tasks: tuple[Task, ...]) -> None:
    found = plan(tasks)
    assert set(found.starts) == set(found.ends) == {task.name for task in tasks}
    for task in tasks:
        assert found.ends[task.name] - found.starts[task.name] == pytest.approx(task.seconds, abs=SLACK_S)
        assert all(found.ends[name] <= found.starts[task.name] for name in task.after)
    for one, other in combinations(tasks, 2):
        if resources(one) & resources(other):
            first, second = sorted((one.name, other.name), key=lambda name: (found.starts[name], found.ends[name]))
            assert found.ends[first] <= found.starts[second]
    assert found.makespan_s == max(found.ends.values())


@settings(max_examples=50)
@given(task_sets())
def test_the_critical_path_has_no_gap(tasks: tuple[Task, ...]) -> None:
    found, by_name = plan(tasks), {task.name: task for task in tasks}
    path = found.critical_path
    assert found.starts[path[0]] == 0.0 and found.ends[path[-1]] == found.makespan_s
    for before, then in pairwise(path):
        assert found.ends[before] == found.starts[then]
        assert before in by_name[then].after or resources(by_name[before]) & resources(by_name[then])
    assert sum(by_name[name].seconds for name in path) == pytest.approx(found.makespan_s, abs=SLACK_S)


@settings(max_examples=50)
@given(task_sets())
def test_nothing_waits_for_nothing(tasks: tuple[Task, ...]) -> None:
    found = plan(tasks)
    for task in tasks:
        start = found.starts[task.name]
        ready = max((found.ends[name] for name in task.after), default=0.0)
        rivals = [other for other in tasks if other is not task and resources(other) & resources(task)]
        # at every moment between being ready and starting, one of its lanes is taken
        for moment in {ready, *(found.ends[other.name] for other in rivals)}:
            if ready <= moment < start:
                assert any(found.starts[other.name] <= moment < found.ends[other.name] for other in rivals)


@settings(max_examples=50)
@given(task_sets())
def test_busy_time_is_the_load(tasks: tuple[Task, ...]) -> None:
    found = plan(tasks)
    for device in range(4):
        for lane in Lane:
            load = sum(t.seconds for t in tasks if lane in t.lanes and device in t.devices)
            if lane is not Lane.HOST:
                assert found.busy_s(device, lane) == pytest.approx(load, abs=SLACK_S)
            assert found.busy_s(device, lane) <= found.makespan_s


@settings(max_examples=50)
@given(task_sets(), st.randoms(use_true_random=False))
def test_the_order_of_the_input_does_not_matter(tasks: tuple[Task, ...], dice: random.Random) -> None:
    mixed = [replace(task, after=tuple(reversed(task.after))) for task in dice.sample(tasks, len(tasks))]
    assert plan(tuple(mixed)) == plan(tasks)
    assert list(plan(tuple(mixed)).starts) == list(plan(tasks).starts)
    assert lower_bound(mixed, devices_per_node=2) == lower_bound(tasks, devices_per_node=2)
    assert period(mixed, max_staleness=2) == period(tasks, max_staleness=2)


# ------------------------------------------------------------------------------------------------------------- bound


@settings(max_examples=60)
@given(task_sets(most=5))
def test_the_bound_is_below_the_best_of_all_orders(tasks: tuple[Task, ...]) -> None:
    bound, best = lower_bound(tasks, devices_per_node=DEVICES_PER_NODE), optimum(tasks)
    after = {task.name: set(task.after) for task in tasks}
    orders = [
        order for order in permutations(after) if all(after[name] <= set(order[:i]) for i, name in enumerate(order))
    ]
    shortest = min(plan(tasks, order=order).makespan_s for order in orders)
    assert shortest == pytest.approx(best, abs=SLACK_S)
    # no slack here: both count whole ticks
    assert bound <= shortest <= plan(tasks).makespan_s


@settings(max_examples=50)
@given(task_sets())
def test_the_bound_is_at_least_the_longest_path_and_the_largest_load(tasks: tuple[Task, ...]) -> None:
    bound = lower_bound(tasks, devices_per_node=DEVICES_PER_NODE)
    by_name, paths = {task.name: task for task in tasks}, dict[str, float]()

    def path(name: str) -> float:
        task = by_name[name]
        return paths.setdefault(name, task.seconds + max((path(one) for one in task.after), default=0.0))

    assert bound >= max(path(name) for name in by_name) - SLACK_S
    for resource in set().union(*map(resources, tasks)):
        assert bound >= sum(task.seconds for task in tasks if resource in resources(task)) - SLACK_S


@settings(max_examples=50)
@given(task_sets(), st.integers(0, 6), st.floats(0, 3))
def test_the_bound_never_falls(tasks: tuple[Task, ...], which: int, longer: float) -> None:
    bound = lower_bound(tasks, devices_per_node=DEVICES_PER_NODE)
    one = tasks[which % len(tasks)]
    slower = [replace(task, seconds=task.seconds + longer) if task is one else task for task in tasks]
    assert lower_bound(slower, devices_per_node=DEVICES_PER_NODE) >= bound
    more = [*tasks, replace(one, name="z", after=(), seconds=longer)]
    assert lower_bound(more, devices_per_node=DEVICES_PER_NODE) >= bound


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=6))
def test_one_machine_is_bounded_by_its_worst_set(jobs: list[tuple[int, int, int]]) -> None:
    # Jackson's preemptive schedule ends at the largest of: least head + all durations + least tail, over all sets of jobs
    worst = max(
        min(head for head, _, _ in some) + sum(middle for _, middle, _ in some) + min(tail for _, _, tail in some)
        for count in range(1, len(jobs) + 1)
        for some in combinations(jobs, count)
    )
    assert preemptive(list(jobs)) == worst


def test_heads_and_tails_lift_the_bound() -> None:
    # two meshes take turns on device 0: neither the path nor the load says more than 8
    tasks = [
        compute("in", 2.0, devices=(1,)),
        compute("a", 3.0, "in"),
        compute("b", 3.0, "in"),
        compute("out_a", 2.0, "a", devices=(2,)),
        compute("out_b", 2.0, "b", devices=(3,)),
    ]
    assert lower_bound(tasks) == schedule(tasks).makespan_s == 10.0


def test_a_faster_task_can_make_a_list_schedule_slower() -> None:
    # which is why the makespan of the fastest options is no bound
    def tasks(b: float) -> list[Task]:
        return [
            compute("a", 1.0, devices=(1,)),
            compute("b", b, "a", devices=(1,)),
            compute("c", 3.0, "b", devices=(0,)),
            compute("d", 5.0, devices=(1,)),
        ]

    assert (schedule(tasks(2.0)).makespan_s, schedule(tasks(1.0)).makespan_s) == (8.0, 10.0)
    assert (lower_bound(tasks(2.0)), lower_bound(tasks(1.0))) == (8.0, 7.0)


@settings(max_examples=50)
@given(task_sets(most=5))
def test_the_search_counts_as_the_simulator_does(tasks: tuple[Task, ...]) -> None:
    names = list(plan(tasks).starts)
    by_name = {task.name: task for task in tasks}
    lanes = sorted(set().union(*map(resources, tasks)), key=str)
    sets = tuple(tuple(i for i, lane in enumerate(lanes) if lane in resources(by_name[name])) for name in names)
    shape = Shape(sets, tuple(tuple(names.index(one) for one in by_name[name].after) for name in names), len(lanes))
    seconds = [by_name[name].seconds for name in names]
    shortest, order = shape.shortest(seconds)
    assert shortest == pytest.approx(optimum(tasks), abs=SLACK_S)
    assert plan(tasks, order=[names[i] for i in order]).makespan_s == pytest.approx(shortest, abs=SLACK_S)
    # the search's bound is quicker to compute and no better
    assert shape.bound_s(seconds) <= lower_bound(tasks, devices_per_node=DEVICES_PER_NODE) + SLACK_S


# ------------------------------------------------------------------------------------------------------------ period


def split(rollout: float, update: float) -> tuple[Task, ...]:
    return (
        compute("rollout", rollout, devices=(0, 1)),
        compute("update", update, "rollout", devices=(2, 3)),
        Task("reshard", StepKind.RESHARD, (0, 1, 2, 3), (Lane.NVLINK,), 1.0, ("update",)),
    )


def test_the_period_of_disjoint_meshes_is_the_busiest_one() -> None:
    found = period(split(10.0, 7.0), max_staleness=1)
    assert (found.seconds, found.staleness, found.latency_s) == (11.0, 1, 18.0)
    assert found.busy == (((0, 1), 11.0), ((2, 3), 8.0))
    assert not found.is_bound_by_staleness


def test_a_long_chain_is_bound_by_staleness() -> None:
    tasks = [compute(f"t{i}", 4.0, *([f"t{i - 1}"] if i else []), devices=(i,)) for i in range(4)]
    for allowed, seconds in ((0, 16.0), (1, 8.0), (2, 16 / 3), (3, 4.0), (9, 4.0)):
        found = period(tasks, max_staleness=allowed)
        assert found.seconds == pytest.approx(seconds)
        assert found.staleness == min(allowed, 3)
        assert found.is_bound_by_staleness == (allowed < 3)


@settings(max_examples=50)
@given(task_sets())
def test_more_staleness_never_takes_longer(tasks: tuple[Task, ...]) -> None:
    found = [period(tasks, max_staleness=allowed, devices_per_node=2) for allowed in range(4)]
    assert found[0].seconds == found[0].latency_s == plan(tasks).makespan_s
    assert all(then.seconds <= before.seconds for before, then in pairwise(found))
    assert all(one.staleness <= allowed for allowed, one in enumerate(found))


def test_the_period_agrees_with_iterations_written_out() -> None:
    tasks = split(10.0, 7.0)
    for allowed in (0, 1, 2):
        many = schedule(unroll(tasks, 12, max_staleness=allowed))
        steady = many.ends["update#11"] - many.ends["update#10"]
        expected = period(tasks, max_staleness=allowed).seconds
        # written out, a rollout may overlap the reshard that the period counts as busy time
        assert expected - 1.0 <= steady <= expected


@settings(max_examples=40)
@given(task_sets(most=4), st.integers(0, 2))
def test_iterations_written_out_are_never_staler_than_allowed(tasks: tuple[Task, ...], allowed: int) -> None:
    many = unroll(tasks, 5, max_staleness=allowed)
    found = plan(many)
    for index in range(allowed + 1, 5):
        done = max(found.ends[f"{task.name}#{index - allowed - 1}"] for task in tasks)
        assert min(found.starts[f"{task.name}#{index}"] for task in tasks) >= done
    if allowed == 0:
        assert found.makespan_s <= 5 * plan(tasks).makespan_s + SLACK_S


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([compute("a", 1.0), compute("a", 2.0)], "more than once there: a"),
        ([compute("update", 1.0), compute("b", 1.0, "updat")], "'b' comes after 'updat', which is no task"),
        ([compute("a", 1.0, "c"), compute("b", 1.0, "a"), compute("c", 1.0, "b")], "a circle: a -> b -> c -> a"),
        ([compute("a", 1.0, "a")], "a circle: a -> a"),
    ],
)
def test_wrong_tasks_are_named(tasks: list[Task], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule(tasks)
    with pytest.raises(ConfigError, match=message):
        lower_bound(tasks)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_seconds_are_checked(seconds: float) -> None:
    with pytest.raises(ConfigError, match="task 'a' needs seconds of at least 0"):
        compute("a", seconds)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="names each of the 5 tasks once"):
        schedule(GRPO, order=["rollout"])
    with pytest.raises(ConfigError, match="the order has 'old' before 'rollout', which it waits for"):
        schedule(GRPO, order=["old", "rollout", "ref", "update", "reshard"])
    with pytest.raises(ConfigError, match="max_staleness is a whole number of at least 0; found -1"):
        period(GRPO, max_staleness=-1)
    with pytest.raises(ConfigError, match="at least 1 iteration"):
        unroll(GRPO, 0, max_staleness=0)


def test_no_tasks_take_no_time() -> None:
    assert schedule([]).makespan_s == lower_bound([]) == period([], max_staleness=1).seconds == 0.0
    assert schedule([]).critical_path == ()


def test_more_devices_alike_change_nothing() -> None:
    few = [replace(task, devices=tuple(range(8))) for task in GRPO]
    many = [replace(task, devices=tuple(range(128))) for task in GRPO]
    assert schedule(few).starts == schedule(many).starts
    assert len(schedule(many).busy) == len(schedule(few).busy) == 2
