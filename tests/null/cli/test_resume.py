"""Runs that stop and go on, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.runtime.rundir import RunDir

from .conftest import Cli

RUN = ("run", "flow.py:small", "--set", "progress=off")


def kept(folder: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if not name.startswith("time/") and name != "tokens_per_s"}
        for row in RunDir.open(folder).metrics()
    ]


def test_a_run_goes_on(cli: Cli, folder: Path) -> None:
    assert cli(*RUN, "--steps", "5", "--set", "name=whole").code == 0
    assert cli(*RUN, "--steps", "2", "--set", "name=parts", "--checkpoint-every", "2").code == 0
    done = cli("resume", "runs/parts-1", "--steps", "4")
    assert (done.code, done.err) == (0, ""), done.err
    assert done.out == "parts: finished 4 steps; results in runs/parts-1\n"
    again = cli("resume", str(folder / "runs/parts-1/checkpoints/step_000002"), "--steps", "5")  # resumed twice
    assert again.code == 0, again.err
    assert kept(folder / "runs/parts-1") == kept(folder / "runs/whole-1")
    told = json.loads((folder / "runs/parts-1/run.json").read_text())["options"]["command"]
    assert "--checkpoint-every" in told and not any(word.startswith("resume=") for word in told)
    assert sorted(path.name for path in (folder / "runs/parts-1/checkpoints").iterdir()) == [
        "step_000004",
        "step_000005",
    ]
    assert cli("resume", "runs/parts-1", "--steps", "5").code == 0  # nothing is left to do


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["resume", "runs/nothing"], "'runs/nothing' is not the folder of a run"),
        (["resume", "runs/plain-1"], "run 'runs/plain-1' has no checkpoint to resume from"),
        (["resume", "runs/kept-1", "--steps", "1"], "has done 2 steps, and the run is to have 1 in all"),
        (
            ["run", "flow.py:small", "--checkpoint-every", "0"],
            "option 'checkpoint_every' is a number of steps of at least 1",
        ),
    ],
)
def test_what_cannot_go_on_says_why(cli: Cli, folder: Path, args: list[str], message: str) -> None:
    assert cli(*RUN, "--set", "name=plain").code == 0
    assert cli(*RUN, "--set", "name=kept", "--checkpoint-every", "1").code == 0
    result = cli(*args)
    assert result.code in (1, 2) and message in result.err


def test_a_script_is_resumed_by_itself(cli: Cli, folder: Path) -> None:
    assert cli(*RUN, "--set", "name=kept", "--checkpoint-every", "1").code == 0
    path = folder / "runs/kept-1/run.json"
    about = json.loads(path.read_text())
    about["options"]["command"] = []
    path.write_text(json.dumps(about))
    result = cli("resume", "runs/kept-1")
    assert result.code != 0 and "run your script with resume='runs/kept-1'" in result.err
