"""A plan's hosts on the nodes of a Ray cluster: several nodes of this machine, in a network of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrl.runtime.rundir import RunDir
from tests.distributed.ray_hosts import NETWORK

pytest.importorskip("ray", reason="ranks on Ray need the extra [ray]")

HERE = Path(__file__).parent
NULL = HERE.parent / "null" / "runtime"
JOBS = HERE / "host_jobs.py"


def own_network() -> bool:
    """Whether a network of its own can be had here, which needs rights and the tools of it."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run(["unshare", "-n", "sh", "-c", NETWORK], capture_output=True, timeout=60).returncode == 0


def on_cluster(tmp_path: Path, nodes: list[int], *jobs: dict[str, Any]) -> dict[str, Any]:
    """What came of jobs, one after the other, on a cluster whose nodes have so many processors."""
    told = tmp_path / "told.json"
    said = json.dumps({"nodes": nodes, "jobs": jobs, "out": str(told)})
    inside = f'{NETWORK} && exec "$0" "$1" "$2"'
    paths = os.pathsep.join([str(HERE.parents[1]), *filter(None, sys.path)])
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", inside, sys.executable, str(HERE / "ray_hosts.py"), said],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(told.read_text())
    return found


def nothing_is_left(folder: Path, count: int) -> None:
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("pid.*"))]
    assert len(found) == count
    assert len({job for _, job in found}) == 2  # a folder on each node
    for pid, job in found:
        assert not Path(job).exists()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.skipif(not own_network(), reason="a Ray cluster of several nodes here needs `unshare -n` and `ip`")
def test_hosts_of_a_plan_are_nodes_of_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(NULL))
    import rank_jobs

    for name in ("well", "killed"):
        (tmp_path / name).mkdir()
    well = {"folder": str(tmp_path / "well"), "flows": ["dapo"], "shapes": ["together"]}
    dead = {"folder": str(tmp_path / "killed"), "how": "kill", "rank": 3, "timeout_s": 60.0}
    found = on_cluster(
        tmp_path, [2, 2, 1],
        {"entry": f"{JOBS}:every_flow", "said": well, "nproc": 4, "hosts": [2, 2]},
        {"entry": f"{JOBS}:fails", "said": dead, "nproc": 4, "hosts": [2, 2]},
        {"entry": f"{JOBS}:fails", "said": dead, "nproc": 6, "hosts": [2, 2, 2]},
    )  # fmt: skip
    finished, killed, refused = found["told"]
    assert finished == ""
    monkeypatch.setattr(
        "flowrl_operators.rewards.math.function", lambda response, answer, **_: float(answer in response)
    )
    with rank_jobs.local("dapo") as run:
        expected = json.loads(json.dumps({"numbers": rank_jobs.numbers(run), "weights": rank_jobs.weights(run)}))
    ranks = [json.loads((tmp_path / "well" / f"{rank}.json").read_text())["together dapo"] for rank in range(4)]
    assert ranks[0]["numbers"] == expected["numbers"]
    assert all(value == expected["weights"][model] for rank in ranks for model, value in rank["weights"].items())

    assert killed.startswith("RunError: rank 3 failed first, in step 1, at 'troubled': its process is gone")
    assert "[on node 10.99.0.1 (" in killed.splitlines()[0]
    nothing_is_left(tmp_path / "killed", 4)
    assert RunDir.open(tmp_path / "killed" / "runs" / "rewarded-1").status == "failed"

    assert refused.startswith(
        "ConfigError: 6 ranks need 3 nodes, as the plan has: 3 with 2 CPUs and 0 GPUs; in this Ray"
    )
    assert found["states"] == ["REMOVED"]  # no placement group is left
