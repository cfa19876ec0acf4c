"""Why a plan is as it is: figures, memory by what is held, and what other choices would cost."""

from dataclasses import replace

import pytest

from examples.flows.grpo import grpo
from flowrl.errors import PlanError
from flowrl.graph.schedule import Async
from flowrl.mesh import Placement
from flowrl.planner.explain import Other, Reason, explain, explain_plan
from flowrl.planner.figures import (
    Phase,
    alternative_lines,
    binding_lines,
    chosen,
    overlap_line,
    phase_table,
    phases,
    placement_of,
    summary,
)
from flowrl.planner.planning import plan_found
from flowrl.planner.search import search
from tests.null.planner.search_cases import CASES, FEW, WORK

GRAPH = grpo.graph()
PLENTY = replace(CASES["plenty"], tie=0.0)


@pytest.fixture(scope="module")
def found():
    return search(PLENTY)


@pytest.fixture(scope="module")
def explanation(found):
    return explain(PLENTY, GRAPH, found)


def test_figures(found):
    plan = plan_found(found, GRAPH)
    figures = summary(plan, PLENTY)
    assert figures.seconds == plan.predicted.seconds
    assert figures.tokens == sum(WORK.totals(128))
    assert figures.tokens_per_s == pytest.approx(figures.tokens / figures.seconds)
    assert summary(plan).tokens_per_s is None
    # one mesh does everything: all of the critical path is its own
    assert figures.loads[0].critical_s == pytest.approx(figures.latency_s)
    longest = max(plan.steps, key=lambda step: step.predicted.seconds)
    assert figures.longest == (longest.name, longest.predicted.seconds)
    during = next(step for step in plan.steps if step.name == figures.during)
    assert during.predicted.memory_bytes == figures.device_bytes
    # moves of rows, which a search leaves out, take milliseconds
    assert figures.gap == pytest.approx(found.gap, abs=0.01)


def test_with_overlap_the_busiest_mesh_comes_first():
    problem = replace(CASES["async"], schedule=Async(1), placement=Placement.parse("gen:d2 | (policy:f2 + ref:f2)"))
    plan = plan_found(search(problem), GRAPH)
    loads = summary(plan, problem).loads
    busy = [load.busy_s for load in loads]
    assert busy == sorted(busy, reverse=True) and len({load.mesh for load in loads}) == 2


@pytest.mark.parametrize("name", ["plenty", "tight", "async", "critic"])
def test_what_a_phase_holds_adds_up(name):
    plan = plan_found(search(CASES[name]), GRAPH)
    held = phases(plan)
    assert [phase.step for phase in held] == [step.name for step in plan.steps]
    for phase, step in zip(held, plan.steps, strict=True):
        assert phase.device_bytes == step.predicted.memory_bytes
        assert sum(count for _, count in phase.parts) == phase.device_bytes
        assert list(phase.parts) == sorted(phase.parts, key=lambda part: (-part[1], part[0]))
    assert max(phase.device_bytes for phase in held) <= plan.predicted.device_bytes
    lines = phase_table(held)
    assert lines[0].startswith("step") and "gen" in lines[1]
    assert phase_table([*held[:1], *held[:1], held[-1]])[1].startswith("0-1")


def test_a_table_names_the_largest_parts():
    parts = tuple((f"part {index}", 2**30 * (9 - index)) for index in range(8))
    (_, line) = phase_table([Phase("update", sum(count for _, count in parts), parts, 2**30)])
    assert "part 4 5.0 GiB, 3 more 9.0 GiB" in line and "1.0 GiB" in line


def test_each_role_has_its_reasons(explanation):
    said = [(reason.role, reason.choice) for reason in explanation.reasons]
    assert {("gen", "mesh"), ("gen", "layout"), ("policy", "offload"), ("ref", "offload")} <= set(said)
    assert ("gen", "offload") not in said  # it sleeps without weights: there is nothing to choose
    for reason in explanation.reasons:
        for other in reason.others:
            assert other.seconds is None or other.seconds >= explanation.plan.predicted.seconds * (1 - 1e-9)
        fitting = [other.seconds for other in reason.others if other.seconds is not None]
        assert fitting == sorted(fitting)


def test_the_other_choice_is_what_planning_with_it_gives(explanation):
    """State streamed for the policy: the same as a plan whose options for it are only those."""
    reason = next(one for one in explanation.reasons if (one.role, one.choice) == ("policy", "offload"))
    streamed = next(other for other in reason.others if other.what == "sopt")
    split = Placement.parse("gen:... + ref:... + policy:f2")
    plan = plan_found(search(replace(PLENTY, only=(("policy", "offload", "sopt"),), placement=split)), GRAPH)
    assert streamed.seconds == plan.predicted.seconds > explanation.plan.predicted.seconds
    assert chosen(plan)["policy"].offload == "sopt"


def test_a_placement_can_be_asked_for_again(explanation):
    asked = replace(PLENTY, placement=placement_of(explanation.plan))
    assert placement_of(plan_found(search(asked), GRAPH)) == placement_of(explanation.plan)
    assert str(placement_of(explanation.plan)) == explanation.placement


def test_what_was_asked_for_is_no_choice():
    problem = replace(PLENTY, placement=Placement.parse("gen:d2 + policy:f2 + ref:f2"))
    asked = [reason for reason in explain(problem, GRAPH).reasons if reason.choice in ("mesh", "layout")]
    assert all(reason.is_asked and "asked for" in str(reason) for reason in asked)


def test_relief_tells_whether_memory_binds(explanation):
    tight = explain(CASES["tighter"], GRAPH)
    more = {one.what: one.seconds for one in tight.relief}
    assert more["twice the device memory"] < tight.summary.seconds
    assert "less (-" in str(tight)
    assert "no faster" in str(explanation)


def test_the_text(explanation):
    text = str(explanation)
    assert text == str(explain(PLENTY, GRAPH))  # deterministic
    for said in ("placement", "what binds (predicted)", "device memory:", "why each choice (predicted", "next best"):
        assert said in text
    alone = str(explain_plan(explanation.plan))
    assert "what binds (predicted)" in alone and "why each choice" not in alone
    assert "policy" in alone and "offload none" in alone
    assert alternative_lines(replace(explanation.plan, searched=None))


def test_nothing_fits():
    problem = replace(PLENTY, cluster=PLENTY.cluster.with_memory(device_bytes=2**30))
    with pytest.raises(PlanError, match="FR-P01"):
        explain(problem, GRAPH)


def test_settings_have_reasons_too():
    problem = replace(PLENTY, choices=replace(FEW, recompute=(True, False)))
    said = {(reason.role, reason.choice): reason for reason in explain(problem, GRAPH).reasons}
    assert {("gen", "utilization"), ("policy", "recompute")} <= set(said) and ("ref", "recompute") not in said
    recompute = said["policy", "recompute"]
    assert {recompute.chosen, *(other.what for other in recompute.others)} == {"yes", "no"}
    asked = replace(problem, only=(("policy", "recompute", recompute.chosen == "yes"),))
    reason = next(one for one in explain(asked, GRAPH).reasons if (one.role, one.choice) == ("policy", "recompute"))
    assert reason.is_asked and str(reason) == f"recompute {recompute.chosen}: asked for"


def test_what_another_choice_costs():
    reason = Reason("policy", "offload", "park", 100.0, (), tie=0.02, device_bytes=2**30)
    assert reason._costs([Other("none", 100.0, 2**30)]) == ["none, as fast and no less memory"]
    assert reason._cost(Other("none", 100.0, 2**31, 2**30)) == "none, as fast (2.0 GiB per device, 1.0 GiB per host)"
    assert reason._cost(Other("sopt", 110.0)) == "sopt, +10.0 s (+10.0%)"
    assert reason._cost(Other("sopt", 99.0)) == "sopt, -1.0 s (-1.0%), a tie"
    assert reason._cost(Other("sopt", 90.0)) == "sopt, -10.0 s (-10.0%), which the search passed over"
    assert str(reason) == "offload park; there is no other"


def test_where_iterations_overlap_the_longest_steps_are_those_of_the_busiest_mesh():
    problem = replace(CASES["async"], schedule=Async(1), placement=Placement.parse("gen:d2 | (policy:f2 + ref:f2)"))
    plan = plan_found(search(problem), GRAPH)
    load = summary(plan, problem).loads[0]
    names = [name for name, _ in load.steps]
    assert sum(seconds for _, seconds in load.steps) == pytest.approx(load.busy_s)
    line = binding_lines(summary(plan, problem), plan)[0]
    assert f"longest there: {names[0]} " in line
    assert overlap_line(plan) == ""
    together = replace(problem, placement=Placement.parse("gen:d4 + policy:f4 + ref:f4"))
    assert "do not overlap" in overlap_line(plan_found(search(together), GRAPH))


def test_of_planned_ties_the_simplest_is_taken():
    """A plan that is much slower as the search counts it, and a tie when it is planned, can be the simplest."""
    problem = replace(CASES["tight"], tie=0.3)
    found = search(problem)
    plan = plan_found(found, GRAPH)
    assert plan.searched is not None
    least = min([plan.predicted.seconds, *(one.seconds for one in plan.searched.alternatives)])
    assert plan.predicted.seconds <= least * 1.3 * (1 + 1e-9)
    assert bool(plan.searched.why_simpler) == (plan.predicted.seconds > least * (1 + 5e-4))
