"""A plan beside the trace of a run of it: made-up events, so that every number is known."""

from __future__ import annotations

import math

import pytest

from flowrl.errors import RunError
from flowrl.mesh import Cluster, Mesh
from flowrl.planner.measured import compare, compare_run
from flowrl.planner.steps import Plan, Predicted, Step
from flowrl.planner.tasks import Hold, Lane, StepKind
from flowrl.trace import Event, TraceWriter

MIB = 2**20


def step(name: str, seconds: float, *after: str, kind: StepKind = StepKind.COMPUTE) -> Step:
    holds = (Hold(name, device_bytes=round(seconds * 100) * MIB),)
    return Step(name, name, kind, Mesh(0, 1), (Lane.COMPUTE,), Predicted(seconds, holds=holds), after)


PLAN = Plan.of(
    "small", "a" * 12, Cluster.named("1xA100-80G"),
    [step("rollout", 2.0), step("old", 1.0, "rollout"), step("update", 4.0, "old"), step("eval", 0.5, "update")],
)  # fmt: skip


def event(name: str, number: int, start: float, seconds: float, memory: int = 0, kind: str = "") -> Event:
    attributes: dict[str, object] = {"plan_step": name, "kind": kind or name}
    if memory:
        attributes["device_bytes"] = memory
    return Event("compute", name, number, 1000 * number + start, 1000 * number + start + seconds, attributes=attributes)


def iteration(number: int, rollout: float, update: float, memory: int = 0) -> list[Event]:
    """Rollout, a second without a step, the old log-probabilities in two rounds, the update."""
    gap = Event(
        "compute",
        "reward",
        number,
        1000 * number + rollout,
        1000 * number + rollout + 1.0,
        attributes={"kind": "apply"},
    )
    at = rollout + 1.0
    return [
        event("rollout", number, 0.0, rollout, memory, "rollout"),
        gap,
        event("old", number, at, 0.25, memory, "logprobs"),
        event("old", number, at + 0.25, 0.5, 2 * memory, "logprobs"),
        event("update", number, at + 0.75, update, 5 * memory, "update"),
    ]


def events() -> list[Event]:
    warm = iteration(0, 50.0, 90.0, 500 * MIB)
    usual = iteration(1, 3.0, 5.0, 10 * MIB) + iteration(2, 5.0, 5.0, 20 * MIB) + iteration(3, 4.0, 2.0, 10 * MIB)
    return warm + usual + [event("eval", 2, 20.0, 1.5)]


def test_medians_without_the_first_iteration():
    found = {one.name: one for one in compare(PLAN, events()).steps}
    rollout, old, update = found["rollout"], found["old"], found["update"]
    assert (rollout.predicted_s, rollout.measured_s, rollout.ratio) == (2.0, 4.0, 2.0)
    assert (rollout.start_s, rollout.runs, rollout.iterations, rollout.node_kind) == (0.0, 3, 3, "rollout")
    assert old.measured_s == pytest.approx(0.75)  # both rounds
    assert (update.measured_s, update.ratio) == (5.0, 1.25)
    assert update.start_s == pytest.approx(5.75)


def test_what_happens_in_some_iterations_is_spread_over_all():
    (row,) = (one for one in compare(PLAN, events()).steps if one.name == "eval")
    assert (row.seconds, row.runs, row.iterations) == (1.5, 1, 3)
    assert row.measured_s == pytest.approx(0.5) and row.ratio == pytest.approx(1.0)


def test_a_refill_that_is_a_step_has_what_its_rounds_leave():
    """Ten seconds, of which seven were the rounds' sampling, a step of its own; an operator inside that is none stays."""
    plan = Plan.of("refilled", "a" * 12, Cluster.named("1xA100-80G"), [step("rollout", 2.0), step("refill", 1.0)])
    inner = [
        Event("compute", "refill/rollout", n, at, at + seconds, attributes={"plan_step": "rollout", "kind": "rollout"})
        for n in range(2)
        for at, seconds in ((0.0, 4.0), (5.0, 3.0))
    ]
    other = [Event("compute", "refill/math", n, 4.0, 5.0, attributes={"kind": "apply"}) for n in range(2)]
    outer = [
        Event("compute", "refill", n, 0.0, 10.0, attributes={"plan_step": "refill", "kind": "refill"}) for n in range(2)
    ]
    found = {one.name: one.measured_s for one in compare(plan, inner + other + outer).steps}
    assert found == {"rollout": 7.0, "refill": 3.0}


def test_the_whole_iteration_and_what_no_step_stands_for():
    found = compare(PLAN, events())
    assert found.iterations == 3 and found.predicted_s == PLAN.predicted.seconds == 7.5
    # 9.75, 21.5 (the evaluation comes late) and 7.75 seconds
    assert found.measured_s == pytest.approx(9.75) and found.ratio == pytest.approx(1.3)
    assert found.unplanned_s == pytest.approx(0.0)
    only = compare(PLAN, [e for e in events() if e.step < 2])
    assert only.measured_s == pytest.approx(9.75) and only.unplanned_s == pytest.approx(1.0)


def test_memory_is_the_most_of_the_iterations_that_count():
    found = compare(PLAN, events())
    assert found.memory == "device" and all(one.process_bytes is None for one in found.steps)
    assert {one.name: one.measured_bytes for one in found.steps} == {
        "rollout": 20 * MIB, "old": 40 * MIB, "update": 100 * MIB, "eval": None,
    }  # fmt: skip
    assert next(one for one in found.steps if one.name == "update").predicted_bytes == 400 * MIB
    assert compare(PLAN, [event("rollout", n, 0.0, 1.0) for n in range(3)]).memory == ""


def test_what_was_to_run_side_by_side_is_said():
    """Two operators beside a forward pass of the same length: a second of the iteration's three is predicted twice."""
    host = Step("math", "math", StepKind.COMPUTE, Mesh(0, 1), (Lane.HOST,), Predicted(1.0), ("rollout",))
    steps = [step("rollout", 2.0), step("old", 1.0, "rollout"), host]
    beside = Plan.of("beside", "a" * 12, Cluster.named("1xA100-80G"), steps)
    found = compare(beside, events())
    assert (found.predicted_s, found.beside_s) == (3.0, 1.0)
    assert "predicted to run beside other steps: 1.0 s per iteration" in str(found)
    assert compare(PLAN, events()).beside_s == 0.0 and "beside other" not in str(compare(PLAN, events()))


def test_the_largest_errors_come_first_and_are_in_the_text():
    found = compare(PLAN, events())
    assert [one.name for one in found.largest(2)] == ["rollout", "update"]
    text = str(found)
    head = next(line for line in text.splitlines() if line.startswith("step"))
    assert [head.index(word) for word in ("predicted s", "measured s", "ratio", "predicted memory", "measured memory")]
    assert "largest errors: rollout 2.0 s predicted, 4.0 s measured; update 4.0 s predicted, 5.0 s measured" in text
    row = next(line for line in text.splitlines() if line.startswith("update"))
    assert row.split()[3:] == ["4.0", "s", "5.0", "s", "1.25", "400.0", "MiB", "100.0", "MiB"]
    assert "median of 3 iterations" in text and "first does not count" in text


def test_ratios_keep_three_digits():
    slow = [event("rollout", n, 0.0, seconds) for n, seconds in ((0, 1), (1, 1234.0))]
    assert "617" in str(compare(PLAN, slow)).splitlines()[3]
    fast = [event("rollout", n, 0.0, seconds) for n, seconds in ((0, 1), (1, 0.0246))]
    assert "0.0123" in str(compare(PLAN, fast)).splitlines()[3]


def test_one_iteration_is_none():
    found = compare(PLAN, iteration(0, 1.0, 1.0))
    assert found.iterations == 0 and found.measured_s is None and found.ratio is None and found.largest() == ()
    assert all(one.measured_s is None and one.ratio is None and one.error_s == 0.0 for one in found.steps)
    assert "run at least 2" in str(found)
    assert str(compare(PLAN, [])) == str(found)


def test_a_step_that_never_ran_is_said_to_be():
    found = compare(PLAN, [event("rollout", n, 0.0, 1.0) for n in range(2)])
    assert "not run: old, update, eval" in str(found) and [one.name for one in found.ran] == ["rollout"]
    assert found.unplanned_s == pytest.approx(0.0)


def test_a_folder_gives_what_its_events_give(tmp_path):
    PLAN.to_json(tmp_path / "plan.json")
    with TraceWriter(tmp_path / "trace.jsonl") as trace:
        for one in events():
            trace.add(one)
        trace.add(Event("save", step=-1, start_s=0.0, end_s=1e9))  # outside of iterations
    found = compare_run(tmp_path)
    assert found == compare(PLAN, events())
    assert all(math.isfinite(one.measured_s or 0.0) for one in found.steps)


def test_a_folder_without_a_plan_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"has no plan.json: it is no folder of a run that was given a plan"):
        compare_run(tmp_path)
