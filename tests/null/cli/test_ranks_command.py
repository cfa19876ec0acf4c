"""`flowrl run --plan PLAN.json --nproc N`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowrl.planner.measured import compare_run
from flowrl.recipe import load
from flowrl.runtime.rundir import RunDir

PLANS = Path(__file__).parents[1] / "runtime" / "rank_jobs.py"


@pytest.fixture
def plan_file(folder: Path) -> Callable[..., str]:
    """Write a plan of the recipe for some ranks."""
    spec = importlib.util.spec_from_file_location("rank_jobs", PLANS)
    assert spec is not None and spec.loader is not None
    jobs: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(jobs)

    def write(world: int, shape: str = "together") -> str:
        jobs.plan_of(load("flow.py:small").graph, world, shape).to_json(folder / "plan.json")
        return "plan.json"

    return write


def test_a_run_on_two_ranks(cli: Any, folder: Path, plan_file: Callable[..., str]) -> None:
    assert cli("run", "flow.py:small", "--set", "name=alone", "progress=off").code == 0
    done = cli("run", "flow.py:small", "--plan", plan_file(2), "--nproc", "2", "--set", "name=two", "progress=off")
    assert done.code == 0, done.err
    two, alone = RunDir.open("runs/two-1"), RunDir.open("runs/alone-1")
    assert [row["reward/mean"] for row in two.metrics()] == [row["reward/mean"] for row in alone.metrics()]
    assert [row["update/loss"] for row in two.metrics()] == [row["update/loss"] for row in alone.metrics()]
    assert two.info["ranks"] == 2 and two.status == "finished"


def test_one_trace_of_all_ranks(cli: Any, folder: Path, plan_file: Callable[..., str]) -> None:
    plan = plan_file(4, "apart")
    assert cli("run", "flow.py:small", "--plan", plan, "--nproc", "4", "--set", "progress=off").code == 0
    run = RunDir.open("runs/grpo-1")
    assert not (run.path / "ranks").exists()
    worked: dict[str, set[int]] = {}
    for event in run.events():
        if "plan_step" in event.attributes:
            worked.setdefault(event.attributes["plan_step"], set()).add(event.attributes["rank"])
    assert worked == {"rollout": {0, 1}, "update": {2, 3}}  # who only reads what others made has none of their time
    assert [row["step"] for row in run.metrics()] == [0, 1]
    found = {step.name: step for step in compare_run(run.path).steps}
    times = [
        event.seconds
        for event in run.events()
        if event.step == 1 and event.node == "rollout" and event.attributes["rank"] < 2
    ]
    assert found["rollout"].seconds == pytest.approx(max(times))


def test_what_cannot_run_is_refused_before_a_process_starts(
    cli: Any, folder: Path, plan_file: Callable[..., str]
) -> None:
    plan = plan_file(4)
    too_few = cli("run", "flow.py:small", "--plan", plan, "--nproc", "2")
    assert too_few.code == 2 and "needs 4 to 8 ranks; this job has 2: start 4 (--nproc 4)" in too_few.err
    without = cli("run", "flow.py:small", "--nproc", "4")
    assert without.code == 2 and "--nproc 4 needs a plan" in without.err
    other = cli("run", "flow.py:small", "--plan", plan, "--nproc", "4", "--config", "group_size=2")
    assert other.code == 2 and "is for another graph" in other.err
    alone = cli("run", "flow.py:small", "--plan", plan)
    assert alone.code == 2 and "start 4 ranks" in alone.err
    assert not Path("runs").exists() or not list(Path("runs").iterdir())


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e300"])
def test_a_wait_is_of_some_time_that_ends(cli: Any, folder: Path, plan_file: Callable[..., str], seconds: str) -> None:
    done = cli("run", "flow.py:small", "--plan", plan_file(2), "--nproc", "2", f"--timeout-s={seconds}")
    assert done.code == 2 and "--timeout-s) is in seconds, more than 0 and at most" in done.err


def test_a_rank_starts_no_ranks(
    cli: Any, folder: Path, plan_file: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    plan = plan_file(2)
    alone = cli("run", "flow.py:small", "--plan", plan, "--nproc", "2")
    assert alone.code == 2 and "found RANK=1 and WORLD_SIZE=1 (WORLD_SIZE is not set)" in alone.err
    monkeypatch.setenv("WORLD_SIZE", "2")
    for option in (("--nproc", "2"), ("--launcher", "ray")):
        done = cli("run", "flow.py:small", "--plan", plan, *option)
        assert (
            done.code == 2 and f"{' '.join(option)} starts ranks, and this process is rank 1 of 2 already" in done.err
        )


def test_a_plan_of_one_device_needs_no_ranks(cli: Any, folder: Path, plan_file: Callable[..., str]) -> None:
    assert cli("run", "flow.py:small", "--plan", plan_file(1), "--set", "progress=off").code == 0
    assert (RunDir.open("runs/grpo-1").path / "plan.json").exists()


def test_the_first_error_of_any_rank_is_the_error(cli: Any, folder: Path, plan_file: Callable[..., str]) -> None:
    text = Path("flow.py").read_text().replace("return float(len(response))", "return 1 / 0")
    text = text.replace("@fr.reward", '@fr.reward(on_error="raise")')
    Path("flow.py").write_text(text)
    failed = cli("run", "flow.py:small", "--plan", plan_file(2), "--nproc", "2", "--set", "progress=off")
    assert failed.code == 1
    assert failed.err.startswith("error: rank ") and "failed first, in step 0, at 'length': OperatorError" in failed.err
    assert "ZeroDivisionError" in failed.err and "Traceback" not in failed.err
    assert RunDir.open("runs/grpo-1").status == "failed"
