"""Two plans side by side."""

from dataclasses import replace

from examples.flows.grpo import grpo
from flowrl.graph.schedule import Async
from flowrl.mesh import Placement
from flowrl.planner.diff import Figure, diff
from flowrl.planner.planning import plan_found
from flowrl.planner.search import search
from flowrl.planner.steps import Plan
from flowrl.planner.workload import Lengths
from tests.null.planner.search_cases import CASES

GRAPH = grpo.graph()


def planned(problem):
    return plan_found(search(problem), GRAPH)


ONE = planned(CASES["plenty"])


def test_equal_plans():
    same = diff(ONE, Plan.from_json(ONE.to_json()))
    assert same.is_equal and str(same) == "the plans are equal"
    # names of meshes and what the search looked at are no differences
    assert diff(ONE, replace(ONE, searched=None, meshes=())).is_equal


def test_another_placement():
    other = planned(replace(CASES["plenty"], placement=Placement.parse("gen:d1 | (policy:d1 + ref:d1)")))
    found = diff(ONE, other)
    assert not found.is_equal and not found.removed and not found.inputs
    update = next(one for one in found.changed if one.step == "update")
    said = {change.what: (change.before, change.after) for change in update.changes}
    assert said["layout"] == ("f2", "d1")
    assert said["mesh"] == ("A[2] of devices 0 to 1", "B[1] of device 1")
    text = str(found)
    assert "~ update" in text and "layout: f2 -> d1" in text and "predicted" in text
    figures = {one.what: one for one in found.figures}
    assert figures["seconds per iteration"].after > figures["seconds per iteration"].before
    assert figures["seconds per iteration"].row[3].startswith("+")


def test_inputs_that_differ():
    problem = CASES["plenty"]
    longer = replace(problem.workload, prompts=32, response_lengths=Lengths.lognormal(600, 0.6, cap=2048))
    slower = replace(problem.cluster, nvlink_bytes_s=problem.cluster.nvlink_bytes_s / 2)
    other = planned(replace(problem, workload=longer, cluster=slower, schedule=Async(1)))
    said = {change.what: (change.before, change.after) for change in diff(ONE, other).inputs}
    assert said["workload.prompts"] == ("16", "32")
    assert said["workload.response_lengths"][1].startswith("mean 600, longest 2048")
    assert said["max_staleness"] == ("0", "1")
    assert said["cluster.nvlink_bytes_s"] == ("300000000000.0", "150000000000.0")
    assert not any(".all" in what for what in said)


def test_models_that_differ():
    problem = CASES["plenty"]
    roles = tuple(replace(role, shape=role.shape.with_lora(8)) if role.is_trained else role for role in problem.roles)
    adapters = planned(replace(problem, roles=roles))
    said = {change.what: (change.before, change.after) for change in diff(ONE, adapters).inputs}
    assert said["models.policy.lora.rank"] == (None, "8")
    assert not any(what.startswith("models.ref") for what in said)
    assert Plan.from_json(adapters.to_json()) == adapters


def test_histograms_that_differ_only_inside():
    one, other = Lengths((1, 2, 3, 4), (1.0, 1.0, 1.0, 1.0)), Lengths((1, 2, 3, 4), (1.0, 2.0, 0.1, 1.0))
    other = replace(other, weights=(1.0, 0.5, 2.0, 1.0))
    assert ONE.workload is not None
    plans = [replace(ONE, workload=replace(ONE.workload, response_lengths=lengths)) for lengths in (one, other)]
    (change,) = diff(*plans).inputs
    assert change.what.startswith("workload.response_lengths")
    same_mean = replace(ONE.workload, response_lengths=Lengths((1, 2, 3, 4), (1.0, 2.0, 2.0, 1.0)))
    first = replace(ONE, workload=replace(ONE.workload, response_lengths=one))
    (change,) = diff(first, replace(ONE, workload=same_mean)).inputs
    assert change.before == "another histogram"


def test_steps_that_only_one_has_and_order():
    last = ONE.steps[-1]
    shorter = replace(ONE, steps=ONE.steps[:-1])
    found = diff(ONE, shorter)
    assert found.removed == (last.name,) and diff(shorter, ONE).added == (last.name,)
    assert f"- {last.name}" in str(found)
    figure = next(one for one in found.figures if one.what == f"{last.name}, seconds")
    assert figure.after is None and figure.row[2:] == ("", "")
    loose = [replace(step, after=()) for step in ONE.steps]
    turned = diff(replace(ONE, steps=tuple(loose)), replace(ONE, steps=tuple(loose[::-1])))
    assert turned.is_reordered and "in another order" in str(turned)


def test_settings_that_differ():
    steps = tuple(
        replace(step, settings=tuple((k, v if k != "offload" else "opt") for k, v in step.settings))
        for step in ONE.steps
    )
    found = diff(ONE, replace(ONE, steps=steps))
    assert {(one.what, one.after) for step in found.changed for one in step.changes} == {("offload", "opt")}
    assert "the steps are the same" not in str(found)


def test_predictions_alone():
    found = diff(ONE, replace(ONE, predicted=replace(ONE.predicted, seconds=2 * ONE.predicted.seconds)))
    assert not found.is_equal and not found.changed
    assert "the steps are the same" in str(found) and "+100.0%" in str(found)


def test_no_change_is_shown_where_both_read_alike():
    assert Figure("score, seconds", 2.0e-5, 3.0e-5, "s").row == ("score, seconds", "0.0 ms", "0.0 ms", "")
    assert Figure("score, seconds", 2.0e-3, 3.0e-3, "s").row == ("score, seconds", "2.0 ms", "3.0 ms", "+50.0%")
