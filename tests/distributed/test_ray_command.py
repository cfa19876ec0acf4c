"""`flowrl run --plan PLAN.json --launcher ray`: a cluster of its own, started for the run and ended with it."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrl.recipe import load
from flowrl.runtime.rundir import RunDir
from flowrl.store import folders

pytest.importorskip("ray", reason="ranks on Ray need the extra [ray]")

JOBS = Path(__file__).parents[1] / "null" / "runtime" / "rank_jobs.py"
FAILING = JOBS.with_name("failing_jobs.py")
FLOW = """
import os

import flowrl as fr
from flowrl.recipe import Recipe
from flowrl_operators import advantages, losses


@fr.reward(on_error="raise")
def length(response):
    return len(response) / float(os.environ.get("DIVISOR", "1"))


@fr.flow
def grpo(prompts, policy, *, group_size=4):
    rows = fr.rollout(policy, prompts, n=group_size)
    rows = advantages.group_norm(length(rows))
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2))


def small():
    data = [{"prompt": f"{i}+{i}="} for i in range(8)]
    return Recipe(grpo, {"prompts": data, "policy": "null"}, steps=2, engine="null")
"""


@pytest.fixture
def sessions() -> Iterator[Path]:
    """Where Ray keeps what it has; a short name, as sockets lie there."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    yield folder
    for pid in processes_of(folder):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A flow, and a plan of it for four ranks."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "flow.py").write_text(FLOW)
    spec = importlib.util.spec_from_file_location("rank_jobs", JOBS)
    assert spec is not None and spec.loader is not None
    jobs: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(jobs)
    jobs.plan_of(load(f"{folder / 'flow.py'}:small").graph, 4, "apart").to_json(folder / "plan.json")
    return folder


@pytest.fixture
def folder(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("flow.py", "plan.json"):
        shutil.copy(project / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flowrl(*arguments: str, sessions: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.run(
        [sys.executable, "-m", "flowrl.cli", "run", "flow.py:small", *arguments, "--set", "progress=off"],
        env={**given, "RAY_TMPDIR": str(sessions), **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def processes_of(sessions: Path) -> dict[int, str]:
    """The living processes that were started for sessions in a folder: their ids and names."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"RAY_TMPDIR={sessions}\0".encode() in (path / "environ").read_bytes():
                found[int(path.name)] = (path / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
        except OSError:  # ended meanwhile, or not ours to look at
            continue
    return found


def test_a_run_on_ray_is_the_run_of_one_process(folder: Path, sessions: Path) -> None:
    alone = flowrl("--set", "name=alone", sessions=sessions)
    assert alone.returncode == 0, alone.stderr
    done = flowrl(
        "--plan", "plan.json", "--launcher", "ray", "--set", "name=four", sessions=sessions, RAY_ADDRESS="local"
    )
    assert done.returncode == 0, done.stderr
    assert "four: finished 2 steps; results in runs/four-1" in done.stdout
    four, one = RunDir.open("runs/four-1"), RunDir.open("runs/alone-1")
    assert four.info["ranks"] == 4 and four.status == "finished"
    for name in ("reward/mean", "update/loss"):
        assert [row[name] for row in four.metrics()] == [row[name] for row in one.metrics()]
    assert list(sessions.iterdir()) and not processes_of(sessions)


@pytest.mark.slow
def test_the_first_error_is_the_error(folder: Path, sessions: Path) -> None:
    failed = flowrl("--plan", "plan.json", "--launcher", "ray", sessions=sessions, RAY_ADDRESS="local", DIVISOR="0")
    assert failed.returncode == 1
    error = failed.stderr[failed.stderr.index("error: ") :]
    assert error.startswith("error: rank ") and "failed first, in step 0, at 'length': OperatorError" in error
    assert "[on node " in error.splitlines()[0] and "ZeroDivisionError" in error
    assert RunDir.open("runs/grpo-1").status == "failed"
    assert list(sessions.iterdir()) and not processes_of(sessions)


def test_what_cannot_be_is_refused_before_ray_starts(folder: Path, sessions: Path) -> None:
    without = flowrl("--launcher", "ray", sessions=sessions)
    assert without.returncode == 2 and "--launcher ray needs a plan" in without.stderr
    nobody = flowrl("--plan", "plan.json", "--launcher", "ray", sessions=sessions, RAY_ADDRESS="127.0.0.1:1")
    assert nobody.returncode == 2 and "no Ray cluster answers at 127.0.0.1:1: " in nobody.stderr
    few = flowrl("--plan", "plan.json", "--launcher", "ray", "--nproc", "2", sessions=sessions, RAY_ADDRESS="local")
    assert few.returncode == 2 and "needs 4 to 8 ranks; this job has 2" in few.stderr
    assert not Path("runs").exists() and not list(sessions.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_ranks_and_their_cluster_end_with_the_launcher(tmp_path: Path, sessions: Path, how: int) -> None:
    code = (
        "from flowrl.engines.launch import ray_job, ray_options as o\n"
        f"ray_job.run_job({str(FAILING)!r} + ':waits', {{'folder': {str(tmp_path)!r}}}, 2, options=o.RayOptions(address='local'))"
    )
    environment = {
        **os.environ,
        "RAY_TMPDIR": str(sessions),
        "PYTHONPATH": os.pathsep.join([str(JOBS.parent), *filter(None, sys.path)]),
    }
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE) as launcher:
        ranks = [wait_for(tmp_path / f"pid.{rank}", launcher) for rank in range(2)]
        started = {pid: name for pid, name in processes_of(sessions).items() if pid != launcher.pid}
        assert {pid for pid, _ in ranks} < set(started) and len(started) > 4  # the ranks, and Ray's own
        if how == signal.SIGKILL:  # two of Ray's own then try for a minute to tell of it, and end
            started = {pid: name for pid, name in started.items() if "Agent" not in name}
        watched = [os.pidfd_open(pid) for pid in started]
        launcher.send_signal(how)
        launcher.communicate(timeout=60)
    assert launcher.returncode != 0
    for descriptor in watched:
        assert select.select([descriptor], [], [], 60.0)[0], "a process lives on without its launcher"
        os.close(descriptor)
    folders.reclaim_orphans()  # whoever makes the next table does this
    assert not Path(ranks[0][1]).exists()


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> Any:
    while not path.exists():
        assert process.poll() is None
        os.sched_yield()
    return json.loads(path.read_text())
