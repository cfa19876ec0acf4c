"""`examples/many_devices.py`: four processes under any launcher draw the samples of one, and learn as it does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from examples import many_devices
from flowrl.engines.launch.spawn import run_job
from flowrl.runtime.rundir import RunDir

ROOT = Path(__file__).parents[2]
ENTRY = "examples.many_devices:main"
FEW = 5
RISE = 0.5
"""Least rise of the mean reward, from the first five steps to the last five of a whole run: from below 0.15 to above 0.65."""


def arguments(folder: Path, steps: int) -> list[str]:
    return ["--steps", str(steps), "--out", str(folder / "runs"), "--save", str(folder / "policy")]


def alone(folder: Path, steps: int) -> Path:
    torch.set_num_threads(1)
    many_devices.main(arguments(folder, steps))
    return folder


def under_torchrun(folder: Path, steps: int) -> Path:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m"]
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [*command, "examples.many_devices", *arguments(folder, steps)], env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "4 processes; results in" in done.stdout
    return folder


def under_ray(folder: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("ray", reason="ranks on Ray need the extra [ray]")
    from flowrl.engines.launch.ray_job import run_job as run_ray_job
    from flowrl.engines.launch.ray_options import RayOptions

    monkeypatch.chdir(ROOT)
    run_ray_job(ENTRY, arguments(folder, steps), 4, options=RayOptions(address="local"))
    return folder


def in_processes(folder: Path, steps: int) -> Path:
    run_job(ENTRY, arguments(folder, steps), 4)
    return folder


def run_of(folder: Path) -> RunDir:
    (path,) = (folder / "runs").iterdir()
    return RunDir.open(path)


def rewards(folder: Path) -> list[float]:
    return [row["reward/mean"] for row in run_of(folder).metrics()]


def weights(folder: Path) -> dict[str, Any]:
    return dict(LlamaForCausalLM.from_pretrained(folder / "policy").state_dict())


def samples(folder: Path) -> list[Any]:
    return [(one["step"], one["prompt"], one["response"]) for one in run_of(folder).samples()]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return alone(tmp_path_factory.mktemp("alone"), FEW)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return alone(tmp_path_factory.mktemp("alone"), many_devices.STEPS)


def are_equal(found: Path, expected: Path) -> None:
    """Samples and rewards of every step, and weights after the last."""
    assert samples(found) == samples(expected) and len(rewards(found)) == FEW
    assert rewards(found) == rewards(expected)
    first, after = many_devices.alone().inputs["policy"].source.state_dict(), weights(expected)
    assert max(float((after[name] - first[name]).abs().max()) for name in after) > 1e-2  # else it would say little
    for name, value in weights(found).items():
        np.testing.assert_allclose(value.numpy(), after[name].numpy(), atol=1e-5, rtol=0, err_msg=name)


def learns_alike(found: Path, expected: Path) -> None:
    """Equal at first, and as good in the end: where a sum rounds otherwise, a sample may in time be another."""
    mine, theirs = rewards(found), rewards(expected)
    assert mine[:FEW] == theirs[:FEW]
    for curve in (mine, theirs):
        assert np.mean(curve[-5:]) - np.mean(curve[:5]) > RISE, curve
    assert mine == pytest.approx(theirs, abs=0.1)


def test_four_processes_draw_and_learn_what_one_does(few: Path, tmp_path: Path) -> None:
    are_equal(in_processes(tmp_path, FEW), few)


def test_a_plan_of_the_example_is_the_one_that_it_says() -> None:
    plan = many_devices.planned().plan
    assert plan is not None
    assert [(step.node, str(step.layout), step.mesh.size) for step in plan.steps if step.layout is not None] == [
        ("rollout", "d4", 4), ("update", "f2t2", 4), ("policy", "d4", 4),
    ]  # fmt: skip


@pytest.mark.slow
def test_under_torchrun_it_learns_as_in_one_process(few: Path, whole: Path, tmp_path: Path) -> None:
    for name in ("few", "whole"):
        (tmp_path / name).mkdir()
    are_equal(under_torchrun(tmp_path / "few", FEW), few)
    learns_alike(under_torchrun(tmp_path / "whole", many_devices.STEPS), whole)


@pytest.mark.slow
def test_on_ray_it_learns_as_in_one_process(
    few: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("few", "whole"):
        (tmp_path / name).mkdir()
    are_equal(under_ray(tmp_path / "few", FEW, monkeypatch), few)
    learns_alike(under_ray(tmp_path / "whole", many_devices.STEPS, monkeypatch), whole)
