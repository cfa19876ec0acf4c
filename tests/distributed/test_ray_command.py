"""`flowrl run --plan PLAN.json --launcher ray`: a cluster of its own, started for the run and ended with it."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import ConfigError
from flowrl.recipe import load
from flowrl.runtime.rundir import RunDir
from flowrl.store import folders

pytest.importorskip("ray", reason="ranks on Ray need the extra [ray]")
from flowrl.engines.launch import ray_cluster  # it imports ray

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


SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """Address of a program that accepts connections and answers so; None: says nothing."""

    def accept() -> None:
        while True:
            try:
                one, _ = other.accept()
            except OSError:  # the test has ended
                return
            held.append(one)
            if answer is not None:
                one.sendall(answer)

    held: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{other.getsockname()[1]}"
        other.shutdown(socket.SHUT_RDWR)
    for one in held:
        one.close()


@pytest.fixture
def file(sessions: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In which `ray start` names this host's cluster."""
    monkeypatch.setenv("RAY_TMPDIR", str(sessions))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cluster, "ANSWER_S", 0.5)
    monkeypatch.setattr(ray_cluster, "find_gcs_addresses", set)
    (sessions / "ray").mkdir()
    return sessions / "ray" / "ray_current_cluster"


@pytest.mark.parametrize(
    ("answer", "why"), [(None, "timed out"), (b"220 mail.example ESMTP", "no Ray cluster"), (b"", "timed out")]
)
def test_a_port_that_is_anothers_is_no_cluster(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: bytes | None, why: str
) -> None:
    with listening(answer) as address:
        file.write_text(address)
        assert ray_cluster._running(needs_one=False) is None
        found = capsys.readouterr().err
        assert f"note: {file} names a Ray cluster at {address}, where none answers (" in found and why in found
        with pytest.raises(
            ConfigError,
            match=r"RAY_ADDRESS=auto, and no Ray cluster answers on this host: .*remove that file; start one",
        ):
            ray_cluster._running(needs_one=True)
        with pytest.raises(ConfigError, match=f"no Ray cluster answers at {address}: .*{why}"):
            ray_cluster._refuse_silent(address)
        with listening(SETTINGS) as living:  # found among the processes of this host
            monkeypatch.setattr(ray_cluster, "find_gcs_addresses", lambda: {address, living})
            assert ray_cluster._running(needs_one=False) == living
    assert file.read_text() == address


@pytest.mark.parametrize("text", ["", "nonsense", "host:99999", "127.0.0.1:x", "\x00"])
def test_a_file_of_ray_that_is_damaged(file: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    file.write_text(text)
    assert ray_cluster._running(needs_one=False) is None
    assert ("this is no HOST:PORT" in capsys.readouterr().err) == bool(text)


def test_a_cluster_that_answers_is_taken(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with listening(SETTINGS) as address:
        file.write_text(f"{address}\n")
        assert ray_cluster._running(needs_one=False) == ray_cluster._running(needs_one=True) == address
        ray_cluster._refuse_silent(address)
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(
    bool(ray_cluster.find_gcs_addresses()), reason="a Ray cluster runs on this host, which would be taken"
)
def test_a_cluster_that_is_gone_is_not_waited_for(folder: Path, sessions: Path) -> None:
    """Ray would wait for minutes for the cluster that its file names."""
    named = sessions / "ray" / "ray_current_cluster"
    named.parent.mkdir()
    named.write_text("127.0.0.1:1")
    done = flowrl("--plan", "plan.json", "--launcher", "ray", sessions=sessions)
    assert done.returncode == 0, done.stderr
    assert f"note: {named} names a Ray cluster at 127.0.0.1:1, where none answers (" in done.stderr
    assert "this run starts one of its own (`ray stop`, or remove that file)" in done.stderr
    assert not processes_of(sessions)


CLUSTER = """
import sys
from ray.cluster_utils import Cluster

options = {"num_cpus": 4, "include_dashboard": False, "object_store_memory": 80_000_000}
cluster = Cluster(initialize_head=True, head_node_args=options)
print(f"address {cluster.address}", flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_cluster_that_runs_is_joined_and_stays(folder: Path, sessions: Path) -> None:
    given = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env={**given, "RAY_TMPDIR": str(sessions)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as cluster:  # fmt: skip
        assert cluster.stdout is not None
        address = next(line.split()[1] for line in cluster.stdout if line.startswith("address "))
        (sessions / "ray" / "ray_current_cluster").write_text(address)
        done = flowrl("--plan", "plan.json", "--launcher", "ray", sessions=sessions)
        assert done.returncode == 0, done.stderr
        assert "note:" not in done.stderr
        assert len(list((sessions / "ray").glob("session_2*"))) == 1  # none of its own
        assert any("gcs_server" in name for name in processes_of(sessions).values())
    assert cluster.returncode == 0 and not processes_of(sessions)


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
    client = flowrl("--plan", "plan.json", "--launcher", "ray", sessions=sessions, RAY_ADDRESS="ray://127.0.0.1:1")
    assert client.returncode == 2 and "not through a client; found ray://127.0.0.1:1" in client.stderr
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
