"""Plans that the model cannot tell apart: the simpler one is taken, and it is said why."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from flowrl.cost.offload import ADAM_8BIT, ADAM_FP32
from flowrl.errors import ConfigError
from flowrl.graph.schedule import Async
from flowrl.planner.problem import Problem
from flowrl.planner.search import search
from flowrl.planner.ties import burden, simplicity
from tests.null.planner.search_cases import CASES, FEW, LARGE, SMALL, WORK, cluster, group_roles


@pytest.mark.parametrize("name", CASES)
def test_the_simpler_is_never_slower_than_the_tie(name):
    last = None
    for tie in (0.0, 0.01, 0.05, 0.2, 0.5):
        problem = replace(CASES[name], tie=tie)
        found = search(problem)
        if found.best is None:
            return
        assert found.best.seconds <= found.fastest.seconds * (1 + tie) * (1 + 1e-12)
        assert bool(found.why_simpler) == (found.best != found.fastest)
        rank = simplicity(problem, found.best)
        if found.best != found.fastest:
            assert rank < simplicity(problem, found.fastest)
            assert found.fastest in found.others and "a tie" in found.why_simpler
        assert last is None or rank <= last  # more plans to choose from
        last = rank


def test_fewer_meshes():
    problem = replace(CASES["async_2"], tie=0.1)
    found = search(problem)
    assert len(found.best.meshes) < len(found.fastest.meshes)
    assert "fewer meshes (2 against 3 meshes)" in found.why_simpler


def test_numerics_come_first():
    """8-bit moments are faster where they save a copy; within the tie they are not taken."""
    choices = replace(FEW, optimizers=(ADAM_FP32, ADAM_8BIT))
    problem = Problem(group_roles(LARGE, SMALL), cluster("4xA100-80G", 40), WORK, choices=choices, tie=0.0)
    eager = search(problem)
    shy = search(replace(problem, tie=0.3))
    assert eager.best.numerics == 1, "this case shows nothing when fp32 moments are the fastest"
    assert shy.best.numerics == 0 and "numerics are those asked for" in shy.why_simpler


def test_less_offload():
    problem = replace(CASES["tight"], cluster=cluster("2xA100-80G", 44), tie=0.3)
    found = search(problem)

    def steps(candidate):
        return sum(burden(option) for one in candidate.combinations for option in one.options)

    assert steps(found.best) <= steps(found.fastest)
    assert steps(search(replace(problem, tie=0.0)).best) >= steps(found.best)


@pytest.mark.parametrize("tie", [-0.1, 1.0, float("nan")])
def test_a_tie_is_a_part(tie):
    with pytest.raises(ConfigError, match="relative error"):
        replace(CASES["plenty"], tie=tie)


@settings(max_examples=40, deadline=None)
@given(
    models=st.tuples(st.sampled_from([SMALL, LARGE]), st.sampled_from([SMALL, LARGE])),
    memory_gib=st.integers(14, 60),
    more_gib=st.integers(0, 30),
    host_gib=st.sampled_from([10, 60, 200]),
    more_host=st.sampled_from([0, 100]),
    devices=st.sampled_from(
        [("1xA100-80G", "2xA100-80G"), ("2xA100-80G", "4xA100-80G"), ("8xA100-80G", "16xA100-80G")]
    ),
    staleness=st.integers(0, 1),
    tie=st.sampled_from([0.0, 0.02, 0.1]),
    turn=st.integers(0, 2),
)
def test_more_is_never_worse_and_order_is_nothing(
    models, memory_gib, more_gib, host_gib, more_host, devices, staleness, tie, turn
):
    roles = group_roles(*models)
    schedule = Async(staleness)
    problem = Problem(roles, cluster(devices[0], memory_gib, host_gib), WORK, schedule=schedule, choices=FEW, tie=tie)
    found = search(problem)
    assert search(replace(problem, roles=roles[turn:] + roles[:turn])) == found
    roomier = search(replace(problem, cluster=cluster(devices[0], memory_gib + more_gib, host_gib + more_host)))
    larger = search(replace(problem, cluster=cluster(devices[1], memory_gib, host_gib)))
    for other in (roomier, larger):
        if found.best is not None:
            assert other.best is not None
            assert other.fastest.seconds <= found.fastest.seconds * (1 + 1e-12)
            assert other.best.seconds <= found.best.seconds * (1 + tie) * (1 + 1e-12)
            assert other.bound_s <= found.bound_s * (1 + 1e-12)
