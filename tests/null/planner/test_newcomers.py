"""What a person tries first in Python: text forms, wrong arguments, and what there is to look at."""

from __future__ import annotations

from pathlib import Path

import pytest

import flowrl as fr
import flowrl.viz
from examples.flows.grpo import grpo
from flowrl.errors import CheckError, ConfigError
from flowrl.planner.figures import placement_of
from flowrl.planner.schedules import schedule_of
from flowrl.planner.shapes import shape_of

SMALL = "Qwen/Qwen2.5-0.5B-Instruct"
WORK = fr.Workload(8, 64, fr.Lengths.fixed(64))
ASKED = {"models": {"policy": SMALL, "ref": SMALL}, "cluster": "1xA100-80G", "workload": WORK}


@pytest.fixture(scope="module")
def plan() -> fr.Plan:
    return fr.plan(grpo, **ASKED)


def test_schedules_as_text() -> None:
    assert schedule_of("sync") == fr.Sync() and schedule_of("async") == fr.Async() and schedule_of(None) is None
    assert schedule_of(" async:2 ") == fr.Async(2) and schedule_of(fr.Async(3)) == fr.Async(3)
    for text in ("", "async:", "async:x", "async:-1", "sync:1", "later"):
        with pytest.raises(ConfigError, match="a schedule is 'sync', or 'async:K'"):
            schedule_of(text)


def test_a_plan_takes_the_text_of_a_schedule(plan: fr.Plan) -> None:
    assert fr.plan(grpo, **ASKED, schedule="sync") == plan
    with pytest.raises(CheckError, match="FR-V02"):  # it came as far as the flow's own rules
        fr.plan(grpo, **ASKED, schedule="async:1")


def test_a_plan_takes_the_file_of_a_cluster(plan: fr.Plan, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    fr.Cluster.named("1xA100-80G").to_toml(path)
    assert fr.plan(grpo, **(ASKED | {"cluster": str(path)})) == plan


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"group_size": 16}, r"plan takes no 'group_size'.*fr.plan\(flow\(group_size=16\), ...\)"),
        ({"work_load": WORK}, "plan takes no 'work_load'; did you mean 'workload'"),
        ({"cluster": "8xa100.toml"}, "the cluster file 8xa100.toml cannot be read: No such file"),
        ({"models": {"policy": "Qwen2.5-7b-instrct", "ref": SMALL}}, "model 'policy': .*did you mean Qwen/Qwen2.5-7B"),
    ],
)
def test_what_is_wrong_is_said(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fr.plan(grpo, **(ASKED | changed))  # type: ignore[arg-type]


def test_units_of_a_cluster_are_looked_at() -> None:
    from dataclasses import replace

    named = fr.Cluster.named("1xA100-80G")
    with pytest.raises(ConfigError, match="device.peak_flops is in FLOP/s, and 312 is too little"):
        fr.plan(grpo, **(ASKED | {"cluster": replace(named, device=replace(named.device, peak_flops=312))}))


def test_a_bare_length_is_for_prompts_only() -> None:
    assert WORK == fr.Workload(8, fr.Lengths.fixed(64), fr.Lengths.fixed(64))
    with pytest.raises(
        ConfigError, match=r"Lengths as response_lengths; found 2000: .*Lengths.lognormal\(2000, 0.6, cap=8000\)"
    ):
        fr.Workload(128, 512, 2000)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Lengths as prompt_lengths; found '512'"):
        fr.Workload(128, "512", fr.Lengths.fixed(8))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a whole number as prompts; found 1.5"):
        fr.Workload(1.5, 512, fr.Lengths.fixed(8))  # type: ignore[arg-type]


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the plan .*nope.json cannot be read: No such file"):
        fr.Plan.load(tmp_path / "nope.json")


def test_folders_and_files_of_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no config.json"):
        shape_of(str(tmp_path), "policy")
    with pytest.raises(ConfigError, match="there is no file '.*nowhere.json'"):
        shape_of(str(tmp_path / "nowhere.json"), "policy")


def test_a_picture_of_another_graph(plan: fr.Plan) -> None:
    with pytest.raises(ConfigError, match="the flow or graph that was planned as graph; found 'mine'"):
        plan.to_html(graph="mine")  # type: ignore[arg-type]


def test_what_a_person_looks_for(plan: fr.Plan) -> None:
    assert str(plan.placement) == str(placement_of(plan)) and "policy" in str(plan.placement)
    assert "is on the critical path for" in plan.bottleneck
    assert plan.peak_bytes == plan.predicted.device_bytes > 0 and plan.seconds == plan.predicted.seconds > 0


def test_parts_of_a_plan_print_in_a_line(plan: fr.Plan) -> None:
    for part in (plan.predicted, *plan.steps):
        assert "predicted" in str(part) and "\n" not in str(part) and len(str(part)) < 200
        assert "Hold(" not in repr(part)
    assert str(plan.steps[0]).startswith(f"{plan.steps[0].name}: {plan.steps[0].kind} on device 0")
