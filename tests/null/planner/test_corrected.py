"""Measured seconds put into a cluster: the next plan for it predicts what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flowrl as fr
from examples.flows.ppo import ppo
from flowrl.cost.generation import EngineConstants
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster
from flowrl.mesh.devices import Overheads
from flowrl.planner.corrected import corrected
from flowrl.planner.measured import Comparison, compare
from flowrl.planner.options import Choices
from flowrl.planner.steps import Plan, Step
from flowrl.planner.tasks import StepKind
from flowrl.trace import Event

MODELS = dict.fromkeys(("policy", "ref", "critic", "judge"), "Qwen/Qwen2.5-0.5B")
WORK = fr.Workload(32, fr.Lengths.fixed(256), fr.Lengths.fixed(512), group_size=4)
CHOICES = Choices(engine=EngineConstants(step_overhead_s=0.0))
KINDS = {"rollout": "rollout", "update": "update", "update_2": "update", "score": "score", "values": "values"}
TIMES = {"train": 1.5, "forward": 0.8, "sample": 2.0}
"""Measured over predicted, by what a step does."""
OPERATORS = ("kl_shaped", "gae")
WORK_OF = {"rollout": "sample", "update": "train"}


def planned(cluster: Cluster) -> Plan:
    return fr.plan(ppo, models=MODELS, cluster=cluster, workload=WORK, choices=CHOICES)


def work_of(node: str) -> str:
    return WORK_OF.get(KINDS.get(node, "logprobs"), "forward")


def is_call(step: Step) -> bool:
    """Whether it runs a model: neither a move nor an operator."""
    return step.kind is StepKind.COMPUTE and step.node not in OPERATORS


def measured(plan: Plan, times: dict[str, float]) -> Comparison:
    """Two iterations in which every step took as long as predicted, times a number for what it does."""
    events = []
    for number in range(2):
        for step in plan.steps:
            kind = KINDS.get(step.node, "logprobs") if is_call(step) else "apply" if step.node in OPERATORS else ""
            seconds = step.predicted.seconds * (times[work_of(step.node)] if is_call(step) else 7.0)
            events.append(
                Event(
                    str(step.kind), step.node, number, 0.0, seconds, attributes={"plan_step": step.name, "kind": kind}
                )
            )
    return compare(plan, events)


def seconds_of(plan: Plan) -> dict[str, float]:
    return {step.node: step.predicted.seconds for step in plan.steps if is_call(step)}


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    whole = Cluster.named("1xH100-80G")
    efficiency = replace(whole.efficiency, decode_hbm=0.5, decode_flops=0.4)
    beside = Overheads(train_passes=6.0, forward_passes=2.0, train_logit_bytes=8.0, forward_logit_bytes=4.0)
    return replace(whole, efficiency=efficiency, overheads=beside)


def test_the_next_plan_predicts_what_was_measured(cluster):
    before = planned(cluster)
    found = corrected(measured(before, TIMES), cluster)
    assert dict(found.ratios) == pytest.approx(TIMES)
    then, now = seconds_of(before), seconds_of(planned(found.cluster))
    assert then.keys() == now.keys()
    for node, seconds in now.items():
        wanted = TIMES[work_of(node)]
        # within the parts that are left as they are: the optimizer's step, the reading of prompts
        assert seconds / then[node] == pytest.approx(wanted, rel=0.15), node
        assert abs(seconds / then[node] - wanted) < 0.5 * abs(1 - wanted), node
    assert any("optimizer's step" in line for line in found.left) and any("prompts" in line for line in found.left)


def test_a_run_counts_by_its_weight(cluster):
    comparison = measured(planned(cluster), TIMES)
    half = corrected(comparison, cluster, weight=0.5).cluster
    assert half.efficiency.train == pytest.approx(cluster.efficiency.train / 1.5**0.5)
    twice = corrected(comparison, half, weight=0.5).cluster.efficiency.train
    assert twice == pytest.approx(corrected(comparison, cluster).cluster.efficiency.train)
    for weight in (0.0, 1.5, -1.0):
        with pytest.raises(ConfigError, match="weight is above 0 and at most 1"):
            corrected(comparison, cluster, weight=weight)


def test_as_predicted_nothing_changes(cluster):
    same = corrected(measured(planned(cluster), dict.fromkeys(TIMES, 1.0)), cluster)
    assert same.cluster.efficiency.train == pytest.approx(cluster.efficiency.train)
    assert same.cluster.overheads.train_passes == pytest.approx(cluster.overheads.train_passes)
    assert same.cluster.device == cluster.device and same.cluster.nvlink_bytes_s == cluster.nvlink_bytes_s


def test_faster_than_the_peak_is_said_and_not_hidden(cluster):
    found = corrected(measured(planned(cluster), {**TIMES, "train": 0.1}), cluster)
    assert found.cluster.efficiency.train == 1.0
    assert any(line.startswith("train: efficiency.train would be 4.00") for line in found.left)


def test_without_a_measurement_there_is_no_correction(cluster):
    plan = planned(cluster)
    found = corrected(compare(plan, []), cluster)
    assert found.cluster == cluster and found.ratios == () and found.left == ()


def test_what_no_figure_stands_for_is_named(cluster):
    plan = planned(cluster)
    events = [
        Event("compute", "score", n, 0.0, 1.0, attributes={"plan_step": "score", "kind": "apply"}) for n in range(2)
    ]
    moved = [Event("reshard", "policy", n, 0.0, 1.0, attributes={"plan_step": "gen.weights"}) for n in range(2)]
    found = corrected(compare(plan, events + moved), cluster)
    assert found.cluster == cluster
    assert any(line.startswith("operators (score)") for line in found.left)
    assert any(line.startswith("moves (gen.weights)") for line in found.left)


@pytest.mark.parametrize("processes", [1, 4])
def test_of_moves_it_is_said_how_many_processes_made_them(cluster, processes):
    events = [
        Event("reshard", "policy", n, 0.0, 1.0, attributes={"plan_step": "gen.weights", "rank": rank})
        for n in range(2)
        for rank in range(processes)
    ]
    comparison = compare(planned(cluster), events)
    assert comparison.processes == processes
    (line,) = corrected(comparison, cluster).left
    assert ("4 processes" in line, "one process" in line) == (processes == 4, processes == 1)


def test_what_it_changed_is_said(cluster):
    found = corrected(measured(planned(cluster), {**TIMES, "train": 1.0, "sample": 1.0}), cluster)
    changed = {name: (before, after) for name, before, after in found.changed}
    assert changed.keys() == {"efficiency.forward", "overheads.forward_passes", "overheads.forward_logit_bytes"}
    assert changed["overheads.forward_passes"] == (2.0, pytest.approx(1.6))
    assert "overheads.forward_passes: 2 -> 1.6" in str(found) and "forward: measured 0.80" in str(found)


def test_a_correction_of_forward_passes_leaves_updates_alone(cluster):
    plan = planned(cluster)
    later = planned(corrected(measured(plan, {**TIMES, "train": 1.0, "forward": 2.0, "sample": 1.0}), cluster).cluster)
    before, after = seconds_of(plan), seconds_of(later)
    assert after["update"] == pytest.approx(before["update"]) and after["values"] > 1.9 * before["values"]
