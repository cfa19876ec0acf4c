"""`torchrun my_run.py`: a script that calls run_ranks, as each of the processes that torchrun starts."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flowrl.store import folders

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json
import sys
from pathlib import Path

sys.path.insert(0, {jobs!r})
import rank_jobs

rank_jobs.without_math_verify()
for number, shape in enumerate(["together", "apart"]):  # two runs of one job, one after the other
    with rank_jobs.on_ranks("grpo", shape, 2, out={out!r}) as run:
        found = {{"numbers": rank_jobs.numbers(run), "path": str(run.path), "weights": rank_jobs.weights(run)}}
        if run.path is not None:
            Path({out!r}, f"{{number}}.json").write_text(json.dumps(found))
"""


PLACE = """
from flowrl.engines.launch.place import join

board = join(timeout_s=60.0)
print("on hosts", board.host_of, "in", board.folder, flush=True)
"""
KILLED = """
import os
import sys
from pathlib import Path

sys.path.insert(0, {jobs!r})
import failing_jobs

failing_jobs.os.environ["FLOWRL_JOB"] = ""  # torchrun sets none
failing_jobs.fails({{"folder": {out!r}, "how": "kill", "rank": 1, "timeout_s": 60.0}})
"""


def jobs() -> set[str]:
    folder = folders.shm_folder()
    return {path.name for path in folder.iterdir() if path.is_dir()} if folder.exists() else set()


def test_a_script_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "null" / "runtime"))
    import rank_jobs

    before = jobs()
    script = tmp_path / "my_run.py"
    script.write_text(SCRIPT.format(jobs=str(ROOT / "tests" / "null" / "runtime"), out=str(tmp_path)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    monkeypatch.setattr(
        "flowrl_operators.rewards.math.function", lambda response, answer, **_: float(answer in response)
    )
    with rank_jobs.local("grpo") as alone:
        expected = json.loads(json.dumps({"numbers": rank_jobs.numbers(alone), "weights": rank_jobs.weights(alone)}))
    for number in range(2):
        found = json.loads((tmp_path / f"{number}.json").read_text())
        assert found["numbers"] == expected["numbers"]
        assert all(expected["weights"][name] == value for name, value in found["weights"].items())
        assert Path(found["path"], "trace.jsonl").exists()
    assert jobs() <= before  # the last rank removed the folder of the job


def two_hosts(script: Path, port: int) -> list[subprocess.Popen[str]]:
    """`torchrun --nnodes 2` on two hosts: agents of their own, which are told that they are on different ones."""
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1",
             "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two", "--local-addr", "127.0.0.1",
             str(script)],
            env={**os.environ, "PYTHONPATH": paths, "FLOWRL_HOST": f"host{node}"}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )
        for node in range(2)
    ]  # fmt: skip


def ended(agents: list[subprocess.Popen[str]]) -> list[str]:
    """What each agent and its ranks printed; none is left."""
    try:
        return [agent.communicate(timeout=250)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()


@pytest.fixture
def port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def nothing_is_left(said: list[str]) -> bool:
    """Whether the folders of both hosts, which are two, have gone."""
    found = [re.search(r"on hosts \(0, 1\) in (\S+)", text) for text in said]
    paths = {Path(one[1]) for one in found if one}
    return len(paths) == 2 and not any(path.exists() for path in paths)


def test_a_script_under_torchrun_on_two_hosts(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "null" / "runtime"))
    import rank_jobs

    script = tmp_path / "my_run.py"
    script.write_text(SCRIPT.format(jobs=str(ROOT / "tests" / "null" / "runtime"), out=str(tmp_path)) + PLACE)
    agents = two_hosts(script, port)
    said = ended(agents)
    assert [agent.returncode for agent in agents] == [0, 0], said[0][-2000:] + said[1][-2000:]
    assert nothing_is_left(said)
    monkeypatch.setattr(
        "flowrl_operators.rewards.math.function", lambda response, answer, **_: float(answer in response)
    )
    with rank_jobs.local("grpo") as alone:
        expected = json.loads(json.dumps({"numbers": rank_jobs.numbers(alone), "weights": rank_jobs.weights(alone)}))
    for number in range(2):
        found = json.loads((tmp_path / f"{number}.json").read_text())
        assert found["numbers"] == expected["numbers"]
        assert all(expected["weights"][name] == value for name, value in found["weights"].items())


@pytest.mark.slow
def test_a_killed_rank_on_another_host_ends_both(tmp_path: Path, port: int) -> None:
    script = tmp_path / "my_run.py"
    script.write_text(PLACE + KILLED.format(jobs=str(ROOT / "tests" / "null" / "runtime"), out=str(tmp_path)))
    agents = two_hosts(script, port)
    said = ended(agents)
    assert all(agent.returncode for agent in agents)
    assert any("rank 1 failed first, in step 1, at 'troubled': its process is gone" in text for text in said), said
    folders.reclaim_orphans()  # of the host whose only rank was killed: whoever makes the next table does this
    assert nothing_is_left(said)
