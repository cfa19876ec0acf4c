"""The shortest order of a few tasks: equal to trying all, and never longer when something becomes shorter."""

import itertools

import pytest
from hypothesis import given, settings, strategies as st

from flowrl.planner.orders import Rule, Shape, Window


@st.composite
def shapes(draw):
    count, num_sets = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    sets = [tuple(sorted(draw(st.sets(st.integers(0, num_sets - 1), min_size=1, max_size=2)))) for _ in range(count)]
    before = [
        tuple(sorted(draw(st.sets(st.integers(0, task - 1), max_size=2)))) if task else () for task in range(count)
    ]
    return Shape(tuple(sets), tuple(before), num_sets)


def all_orders(shape: Shape, seconds, rule: Rule | None = None) -> float:
    """The least over every order of the tasks that respects what waits for what, and a rule."""
    best = float("inf")
    for order in itertools.permutations(range(len(seconds))):
        place = {task: index for index, task in enumerate(order)}
        if all(place[one] < place[task] for task in order for one in shape.before[task]) and (
            rule is None or all(is_kept(rule, order, at) for at in range(len(order)))
        ):
            best = min(best, shape.replay(seconds, order))
    return best


def is_kept(rule: Rule, order, at: int) -> bool:
    """Whether the task at a place of an order may stand there, by what the words of a rule say."""
    passed = set(order[:at])
    opened = [set(one.opens) <= passed for one in rule.windows]
    closed = [one.closes is not None and set(one.closes) <= passed for one in rule.windows]
    mask = sum((is_opened and not is_closed) << bit
               for bit, (is_opened, is_closed) in enumerate(zip(opened, closed, strict=True)))  # fmt: skip
    return mask not in rule.barred[order[at]]


@st.composite
def rules(draw, shape: Shape):
    """Windows of tasks, and tasks of the same sets that may not run in some of them."""
    count = len(shape.sets)
    tasks = st.sets(st.integers(0, count - 1), max_size=2).map(sorted).map(tuple)
    windows = tuple(Window(draw(tasks), draw(st.none() | tasks.filter(bool))) for _ in range(draw(st.integers(1, 2))))
    barred = []
    for sets in shape.sets:
        # a window counts for tasks that share a set with all that opens and closes it: those are in order with it
        near = [
            bit
            for bit, one in enumerate(windows)
            if all(set(shape.sets[task]) & set(sets) for task in (*one.opens, *(one.closes or ())))
        ]
        bad = draw(st.sets(st.sampled_from(near), max_size=2)) if near else set()
        barred.append(frozenset(mask for mask in range(1 << len(windows)) if any(mask >> bit & 1 for bit in bad)))
    return Rule(windows, tuple(barred))


@settings(max_examples=300)
@given(shapes(), st.data())
def test_equal_to_all_orders_that_keep_a_rule(shape, data):
    rule = data.draw(rules(shape))
    seconds = data.draw(st.lists(st.integers(0, 9), min_size=len(shape.sets), max_size=len(shape.sets)))
    limit_s = data.draw(st.sampled_from([float("inf"), 1000.0, 20.0, 5.0]))
    least = all_orders(shape, seconds, rule)
    makespan, order = shape.shortest(seconds, limit_s, rule)
    if least < limit_s:
        assert makespan == least and shape.replay(seconds, order) == makespan
        assert rule.keeps(order) and all(is_kept(rule, order, at) for at in range(len(order)))
    else:
        assert makespan >= limit_s


@settings(max_examples=150)
@given(shapes(), st.data())
def test_equal_to_all_orders(shape, data):
    seconds = data.draw(st.lists(st.integers(0, 9), min_size=len(shape.sets), max_size=len(shape.sets)))
    makespan, order = shape.shortest(seconds)
    assert makespan == all_orders(shape, seconds)
    assert shape.replay(seconds, order) == makespan
    assert shape.bound_s(seconds) <= makespan
    assert makespan >= max(shape.loads(seconds))


@settings(max_examples=60)
@given(shapes(), st.data())
def test_shorter_tasks_are_never_worse(shape, data):
    count = len(shape.sets)
    seconds = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    less = [data.draw(st.integers(0, time)) for time in seconds]
    assert shape.shortest(less)[0] <= shape.shortest(seconds)[0]
    assert shape.bound_s(less) <= shape.bound_s(seconds)


@settings(max_examples=60)
@given(shapes(), st.data())
def test_neighbours_keep_the_order(shape, data):
    """With what each task waits for in an order, every schedule is that order's."""
    seconds = data.draw(st.lists(st.integers(1, 9), min_size=len(shape.sets), max_size=len(shape.sets)))
    makespan, order = shape.shortest(seconds)
    fixed = shape.neighbours(order)
    ends: dict[int, float] = {}
    for task in order:
        ends[task] = max((ends[one] for one in fixed[task]), default=0.0) + seconds[task]
    assert max(ends.values()) == makespan


def test_a_list_schedule_is_not_enough():
    """A long task that is not ready yet should have been waited for."""
    shape = Shape(sets=((0,), (1,), (0,), (1,)), before=((), (), (1,), (2,)), num_sets=2)
    seconds = [5.0, 1.0, 1.0, 9.0]  # the list schedule starts task 0 at once, and task 2 waits for it
    assert shape.replay(seconds, shape._listed(seconds, shape.tails(seconds))) == pytest.approx(15)
    makespan, order = shape.shortest(seconds)
    assert makespan == pytest.approx(11)
    assert order.index(2) < order.index(0)
