"""`torchrun my_run.py`: a script that calls run_ranks, as each of the processes that torchrun starts."""

from __future__ import annotations

import json
import os
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
