"""A rank that fails ends the run: with its error on top, no process left, no shared memory kept, and what was written intact."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrl.engines.launch.spawn import run_job
from flowrl.errors import RunError
from flowrl.runtime.rundir import RunDir

HERE = Path(__file__).parent
JOBS = HERE / "failing_jobs.py"
PATHS = {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}


def failure(folder: Path, how: str, rank: int, *, timeout_s: float = 60.0, grace_s: float = 5.0) -> str:
    said = {"folder": str(folder), "how": how, "rank": rank, "timeout_s": timeout_s}
    with pytest.raises(RunError) as raised:
        run_job(f"{JOBS}:fails", said, 4, grace_s=grace_s)
    return str(raised.value)


def nothing_is_left(folder: Path) -> None:
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("pid.*"))]
    assert found
    for pid, job in found:
        assert not Path(job).exists()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


@pytest.mark.parametrize("rank", [2, 0])
def test_a_rank_that_raises(tmp_path: Path, rank: int) -> None:
    text = failure(tmp_path, "raise", rank)
    first = text.splitlines()[0]
    assert first.startswith(f"rank {rank} failed first, in step 1, at 'troubled': OperatorError: operator 'troubled'")
    assert "the judge is asleep" in text and "failing_jobs.py" in text
    nothing_is_left(tmp_path)
    run = RunDir.open(tmp_path / "runs" / "rewarded-1")
    assert run.status == "failed" and "the judge is asleep" in run.info["error"]
    assert [row["step"] for row in run.metrics()] == [0]
    assert len(run.edge(0, "rollout")) == 16


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    text = failure(tmp_path, "kill", 2)
    assert text.startswith("rank 2 failed first, in step 1, at 'troubled': its process ")
    nothing_is_left(tmp_path)
    run = RunDir.open(tmp_path / "runs" / "rewarded-1")
    assert run.status == "failed" and "rank 2 failed first" in run.info["error"]
    assert [row["step"] for row in run.metrics()] == [0]


def test_the_first_rank_is_killed(tmp_path: Path) -> None:
    assert failure(tmp_path, "kill", 0).startswith("rank 0 failed first, in step 1, at 'troubled': its process ")
    nothing_is_left(tmp_path)
    assert [row["step"] for row in RunDir.open(tmp_path / "runs" / "rewarded-1").metrics()] == [0]


def test_a_rank_that_stands_still(tmp_path: Path) -> None:
    text = failure(tmp_path, "stall", 3, timeout_s=6.0, grace_s=1.0)
    assert "WaitTimeout: rank " in text
    assert "waited 6 s in step 1 for what 'troubled' writes from rank 3" in text
    assert "rank 3 was last in step 1, at 'troubled'" in text
    nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("others", "steps", "text"),
    [
        (
            ["seed", "batch"],
            1,
            r"need the same arguments; found seed: 0 on rank 0, 1 on rank 1; batch: 4 on rank 0, 3 on rank 1",
        ),
        (["prompts"], 1, r"in step 0 ranks drew different rows, .* prompts: \w+ on rank 0, \w+ on rank 1\."),
        (["prompts"], 3, r"in step 0 ranks drew different rows, .* prompts: \w+ on rank 0, \w+ on rank 1\."),
    ],
)
def test_ranks_that_run_different_things_are_refused(others: list[str], steps: int, text: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=text):
        run_job(f"{JOBS}:unlike", {"folder": str(tmp_path), "others": others, "steps": steps}, 2)
    nothing_is_left(tmp_path)


def test_a_job_whose_memory_was_removed_has_failed(tmp_path: Path) -> None:
    text = failure(tmp_path, "remove", 2)
    first = text.splitlines()[0]
    # either the rank that removed it ends first, or one that reads rows which went with it
    assert first.startswith("rank ") and (
        "its process ended with code " in first or "No such file or directory" in first
    )
    nothing_is_left(tmp_path)


def test_a_rank_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"rank 1 failed first, in the beginning: ValueError: gives up"):
        run_job(f"{JOBS}:stubborn", {"folder": str(tmp_path)}, 2, grace_s=0.2)
    nothing_is_left(tmp_path)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_and_their_memory_end_with_a_launcher_that_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    code = f"import failing_jobs; failing_jobs.launch({{'folder': {str(tmp_path)!r}}})"
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **PATHS}) as launcher:
        ranks = [wait_for(tmp_path / f"pid.{rank}", launcher) for rank in range(2)]
        watched = [os.pidfd_open(pid) for pid, _ in ranks]
        launcher.send_signal(how)
    assert launcher.returncode == (-how if how is signal.SIGKILL else 128 + how)
    for descriptor in watched:
        assert select.select([descriptor], [], [], 60.0)[0], "a rank lives on without its launcher"
        os.close(descriptor)
    assert not Path(ranks[0][1]).exists()


@pytest.mark.parametrize("everybody", [True, False])
def test_an_interrupted_run_is_written_to_its_end(tmp_path: Path, everybody: bool) -> None:
    said = {"folder": str(tmp_path), "how": "", "rank": 0, "timeout_s": 60.0, "steps": 100_000}
    code = f"import failing_jobs; failing_jobs.launch_long({said!r})"
    metrics = tmp_path / "runs" / "rewarded-1" / "metrics.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **PATHS}, start_new_session=True, stderr=subprocess.PIPE
    ) as launcher:
        while not metrics.exists() or not metrics.stat().st_size:
            assert launcher.poll() is None
            os.sched_yield()
        if everybody:  # as Ctrl-C in a terminal
            os.killpg(launcher.pid, signal.SIGINT)
        else:
            launcher.send_signal(signal.SIGINT)
        _, said_last = launcher.communicate()
    assert b"KeyboardInterrupt" in said_last and b"RunError" not in said_last
    nothing_is_left(tmp_path)
    assert RunDir.open(metrics.parent).status == "interrupted"


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> Any:
    while not path.exists():
        assert process.poll() is None
        os.sched_yield()
    return json.loads(path.read_text())
