"""Ranks end with torchrun, however it ends, and leave no memory."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

from flowrl.store import folders

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os, sys
from pathlib import Path

sys.path.insert(0, {jobs!r})
import rank_jobs

from flowrl.engines.launch import place
from flowrl.runtime.ranks import run_ranks

rank_jobs.without_math_verify()
flow, config, inputs = rank_jobs.FLOWS["grpo"]
graph = flow.graph(**config)
board = place.join(timeout_s=60.0)
aside = Path({out!r}, "aside." + os.environ["RANK"])
aside.write_text(json.dumps([os.getpid(), str(board.folder)]))
aside.rename(Path({out!r}, "pid." + os.environ["RANK"]))
options = {{**rank_jobs.OPTIONS, "timeout_s": 60.0, "out": None}}
run_ranks(graph, plan=rank_jobs.plan_of(graph, 2), steps=10**6, engine="null", **options, **inputs)
"""


def test_ranks_end_with_a_torchrun_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "my_run.py"
    script.write_text(SCRIPT.format(jobs=str(ROOT / "tests" / "null" / "runtime"), out=str(tmp_path)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.DEVNULL) as launcher:
        ranks = []
        for rank in range(2):
            path = tmp_path / f"pid.{rank}"
            while not path.exists():
                assert launcher.poll() is None
                time.sleep(0.05)
            ranks.append(json.loads(path.read_text()))
        watched = [os.pidfd_open(pid) for pid, _ in ranks]
        launcher.kill()
    for descriptor in watched:
        assert select.select([descriptor], [], [], 120.0)[0], "a rank lives on without torchrun"
        os.close(descriptor)
    folders.reclaim_orphans()
    assert not Path(ranks[0][1]).exists()
