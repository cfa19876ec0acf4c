"""Memory that plans leave free, plans with less of it, and engines whose slots wait for the longest responses."""

from dataclasses import replace

import pytest

from examples.flows.grpo import grpo
from flowrl.errors import ConfigError
from flowrl.graph.schedule import Async
from flowrl.planner.choices import Choices
from flowrl.planner.explain import Other, Reason, explain, explain_plan
from flowrl.planner.figures import FULL, binding_lines, full_line, summary, tail_lines
from flowrl.planner.planning import plan, plan_found, problem_of
from flowrl.planner.problem import CLEARLY_LESS, GIB, NEAR
from flowrl.planner.relax import explain as refusal_of
from flowrl.planner.search import search
from flowrl.planner.steps import Plan
from flowrl.planner.ties import burden
from flowrl.planner.workload import Lengths, Workload
from tests.null.planner.search_cases import CASES, FEW

GRAPH = grpo.graph()
LONG = Workload(128, Lengths.fixed(512), Lengths.lognormal(2000, 0.7, cap=8192))
MODELS = dict.fromkeys(("policy", "ref"), "Qwen/Qwen2.5-7B")


def made(workload=LONG, **arguments) -> Plan:
    return plan(grpo(group_size=8), models=MODELS, cluster="8xA100-80G", workload=workload, **arguments)


@pytest.fixture(scope="module")
def tight() -> Plan:
    return made()


@pytest.mark.parametrize("headroom", [-0.1, 1.0])
def test_headroom_is_a_part(headroom):
    with pytest.raises(ConfigError, match="headroom"):
        Choices(headroom=headroom)


def test_headroom_is_left_free(tight):
    assert tight.predicted.device_bytes > 0.9 * 80 * GIB, "this case shows nothing when it leaves room by itself"
    roomy = made(choices=Choices(headroom=0.1))
    assert roomy.predicted.device_bytes <= 0.9 * 80 * GIB
    assert roomy.seconds >= tight.seconds
    lines = binding_lines(summary(roomy), roomy)
    assert any(line.startswith("device memory") and "10% kept free" in line for line in lines)
    assert "kept free" not in " ".join(binding_lines(summary(tight), tight))
    assert Plan.from_json(roomy.to_json()) == roomy


def test_what_does_not_fit_is_measured_against_what_may_be_used():
    problem = replace(CASES["plenty"], choices=replace(FEW, headroom=0.95))
    assert search(problem).best is None
    share = problem.cluster.device.memory_bytes * 0.05 / GIB
    assert f"{share:.1f} GiB" in refusal_of(problem).binding


def test_a_full_plan_says_so(tight):
    assert tight.predicted.device_bytes > FULL * 80 * GIB
    assert "close to full" in full_line(tight) and "--headroom" in full_line(tight)
    assert "warning: close to full" in str(explain_plan(tight))
    free = replace(tight, predicted=replace(tight.predicted, device_bytes=int(FULL * 80 * GIB)))
    assert full_line(free) == "" and "warning" not in str(explain_plan(free))


def test_a_plan_with_less_memory_stands_beside():
    """On one device the engine's share of memory buys little."""
    problem, graph = problem_of(grpo(group_size=8), models=dict.fromkeys(MODELS, "HuggingFaceTB/SmolLM2-135M"),
                                cluster="1xH100-80G", workload=LONG)  # fmt: skip
    found = search(problem)
    plan = plan_found(found, graph)
    assert plan.searched is not None
    near = [one for one in plan.searched.alternatives if one.seconds <= plan.seconds * (1 + NEAR)]
    light = min(near, key=lambda one: one.device_bytes)
    assert light.device_bytes <= (1 - CLEARLY_LESS) * plan.predicted.device_bytes
    assert f"{light.device_bytes / GIB:.1f} GiB per device instead of" in light.why
    # nothing else is given up for it
    held = sum(burden(option) for one in found.best.combinations for option in one.options)
    (other,) = [
        one
        for one in found.others
        if round(one.peak_bytes) == light.device_bytes and one.seconds <= 1.05 * plan.seconds
    ]
    assert sum(burden(option) for one in other.combinations for option in one.options) <= held
    assert other.numerics <= found.best.numerics


def test_slots_that_wait_are_said(tight):
    step = next(step for step in tight.steps if step.name == "rollout")
    used = step.predicted.slot_utilization
    assert used is not None and 0 < used < 0.5
    assert tail_lines(tight) == [
        f"rollout: its slots work {used:.0%} of the time, the longest responses decide; a lower cap or Async helps"
    ]
    assert tail_lines(tight)[0] in str(explain_plan(tight))
    # a prediction, and no part of what the plan is
    steps = tuple(replace(one, predicted=replace(one.predicted, slot_utilization=None)) for one in tight.steps)
    assert replace(tight, steps=steps).hash == tight.hash
    equal = made(replace(LONG, response_lengths=Lengths.fixed(2000)))
    assert next(step for step in equal.steps if step.name == "rollout").predicted.slot_utilization == pytest.approx(1)
    assert tail_lines(equal) == []


def test_async_is_no_advice_to_who_has_it():
    problem = replace(CASES["async"], schedule=Async(1), workload=LONG)
    lines = tail_lines(plan_found(search(problem), GRAPH))
    assert lines and all(line.endswith("a lower cap helps") for line in lines)


def test_what_changes_besides_is_named():
    others = (
        Other("4096", 10.0, 5, 0),
        Other("8192", 10.0, 5, 0),
        Other("16384", 15.0, 4, 0, changes=("recompute yes",)),
    )
    text = str(Reason("policy", "micro_batch_tokens", "2048", 10.0, others, device_bytes=5))
    assert text == (
        "micro_batch_tokens 2048; next best 4096, 8192, as fast and no less memory; 16384, +5.0 s (+50.0%), with recompute yes"
    )


def test_what_changes_besides_is_found():
    """A larger micro-batch needs recomputation here."""
    problem, graph = problem_of(grpo(group_size=8), models=MODELS, cluster="8xA100-80G", workload=LONG)
    (reason,) = [
        one for one in explain(problem, graph).reasons if (one.role, one.choice) == ("policy", "micro_batch_tokens")
    ]
    slower = [one for one in reason.others if one.seconds > 1.1 * reason.seconds]
    assert slower and all("recompute yes" in one.changes for one in slower)


def test_a_reason_is_never_empty():
    """Many small differences, none of which alone is a cause; and work that does not overlap any more."""
    found = search(replace(CASES["plenty"], tie=0.0))
    best = found.best
    work = tuple(0.1 for _ in best.work_s)
    base = replace(found, best=replace(best, work_s=work, seconds=1.0))
    other = replace(base.best, work_s=tuple(0.12 for _ in work), seconds=1.0 + 0.02 * len(work))
    assert " -> " in base.why_not(other)
    split = replace(base.best, meshes=best.meshes * 2, busy_s=best.busy_s * 2, combinations=best.combinations * 2)
    assert "take turns on one mesh, where 2" in replace(base, best=split).why_not(replace(base.best, seconds=1.5))
