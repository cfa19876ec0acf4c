"""The search on made-up options, where nothing is as regular as in a cost model: equal to looking at every plan."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import flowrl.planner.space
from flowrl.graph.schedule import Async, Sync
from flowrl.mesh import Cluster
from flowrl.planner.floors import Floor
from flowrl.planner.problem import Effort, Problem
from flowrl.planner.search import search
from flowrl.planner.ties import simplicity
from tests.null.planner.every_plan import GIB, EveryPlan
from tests.null.planner.made_up import LAYOUTS, options
from tests.null.planner.search_cases import FEW, SMALL, WORK, critic_roles

ROLES = tuple(role for role in critic_roles(SMALL, SMALL) if role.name != "ref")
ROLES = tuple(replace(role, calls=tuple(replace(call, after=tuple(set(call.after) - {"score"})) for call in role.calls))
              for role in ROLES)  # fmt: skip


UNIT = GIB // 2
"""So that whole GiB differ, and halves do not."""


def scaled(option):
    """Bytes in halves of a GiB."""
    unit = UNIT
    return replace(option, static_bytes=option.static_bytes * unit, dynamic_bytes=option.dynamic_bytes * unit,
                   host_bytes=option.host_bytes * unit, handover_bytes=option.handover_bytes * unit)  # fmt: skip


@st.composite
def problems(draw):
    shape = draw(st.sampled_from([(1, 2), (2, 1), (1, 4), (2, 2)]))
    unit = UNIT
    machine = replace(Cluster.named("2xA100-80G"), nodes=shape[0], devices_per_node=shape[1])
    machine = machine.with_memory(
        device_bytes=draw(st.integers(4, 14)) * unit, host_bytes=draw(st.integers(1, 8)) * unit
    )
    staleness = draw(st.integers(0, 2))
    memory = replace(FEW.memory, context_bytes=draw(st.sampled_from([0, unit])))
    problem = Problem(ROLES, machine, WORK, schedule=Async(staleness) if staleness else Sync(),
                      choices=replace(FEW, memory=memory), tie=draw(st.sampled_from([0.0, 0.1, 0.5])))  # fmt: skip
    parts = [replace(machine, devices_per_node=one) for one in range(1, machine.devices_per_node + 1)]
    places = {part.devices_per_node: [one for one in range(1, 5) if part.slices(one)] for part in parts}
    if machine.nodes == 1:  # inside a node an option does not depend on what else the node has
        places = {0: sorted({size for sizes in places.values() for size in sizes})}
    table = {
        (role.name, size, per_node): tuple(map(scaled, draw(st.lists(options(role.name), max_size=4))))
        for role in problem.roles
        for per_node, sizes in places.items()
        for size in sizes
    }
    moves = {(apart, a, b): float(draw(st.integers(0, 2))) for apart in (False, True) for a in LAYOUTS for b in LAYOUTS}
    return problem, table, moves


def use(monkeypatch, table, moves):
    """Let the search see a table of options, and handovers whose seconds differ by layouts and places."""
    space = flowrl.planner.space

    def handover_s(shape, machine, source, target, *, is_on_host=False):
        return moves[source.mesh != target.mesh, source.layout, target.layout] + is_on_host

    def all_options(role, machine, size, workload, choices, asked):
        return table[role.name, size, machine.devices_per_node if machine.nodes > 1 else 0]

    monkeypatch.setattr(space, "_options", all_options)
    monkeypatch.setattr(space, "handover_s", handover_s)
    monkeypatch.setattr(space, "floors", lambda role, *_: tuple(Floor(0.0) for _ in role.calls))

    def expected(problem):
        return EveryPlan(
            problem,
            lambda problem, role, size: all_options(problem.roles[role], problem.cluster, size, None, None, None),
            lambda problem, source, a, target, b: moves[source != target, a.layout, b.layout] + a.is_on_host,
        )

    return expected


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems())
def test_equal_to_every_plan(monkeypatch, made):
    problem, table, moves = made
    with monkeypatch.context() as patch:
        every = use(patch, table, moves)(problem)
        found = search(problem)
    assert found.is_exhaustive
    if every.least == float("inf"):
        assert found.best is None
        return
    assert found.fastest is not None and found.best is not None
    assert found.fastest.seconds == pytest.approx(every.least) and found.bound_s <= every.least + 1e-9
    expected = every.simplest()
    assert simplicity(problem, found.best)[:7] == expected[:7]
    assert found.best.seconds == pytest.approx(expected[-1])
    for other in found.others:
        assert other.seconds >= found.fastest.seconds


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problems(), st.integers(1, 60))
def test_a_search_that_is_cut_short(monkeypatch, made, branches):
    """Whatever it had time for: the bound holds, a plan is one that there is, and the same seed gives the same plan."""
    problem, table, moves = made
    problem = replace(problem, effort=Effort(branches=branches, moves=20, seed=7))
    with monkeypatch.context() as patch:
        every = use(patch, table, moves)(problem)
        found, again = search(problem), search(problem)
    assert found == again
    assert found.bound_s <= every.least + 1e-9
    if found.fastest is not None:
        assert found.fastest.seconds >= every.least - 1e-9
        assert found.gap >= -1e-9
    if found.is_exhaustive and every.least < float("inf"):
        assert found.fastest is not None and found.fastest.seconds == pytest.approx(every.least)
