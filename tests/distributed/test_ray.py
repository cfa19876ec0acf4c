"""Ranks on Ray: the numbers of one process, the first error of any rank, and nothing left behind."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flowrl.engines.launch.ray_options import RayOptions
from flowrl.errors import ConfigError, RunError, WaitTimeout
from flowrl.runtime.rundir import RunDir

ray = pytest.importorskip("ray", reason="ranks on Ray need the extra [ray]")

from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group  # noqa: E402

from flowrl.engines.launch import ray_job  # noqa: E402
from flowrl.engines.launch.ray_cluster import Node, refuse_too_large  # noqa: E402

NULL = Path(__file__).parents[1] / "null" / "runtime"
JOBS, FLOWS, FAILING = Path(__file__).with_name("ray_jobs.py"), NULL / "rank_jobs.py", NULL / "failing_jobs.py"
SLOTS = 4


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A cluster of one node with four slots, and two GPUs that Ray takes our word for; all jobs of this file share it."""
    ray.init(
        address="local", _node_ip_address="127.0.0.1", num_cpus=SLOTS, num_gpus=2, include_dashboard=False, log_to_driver=False,
        object_store_memory=100_000_000, logging_level="error",
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def nothing_placed() -> Iterator[None]:
    """No test leaves a placement group."""
    yield
    assert {one["state"] for one in placement_group_table().values()} <= {"REMOVED"}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(NULL))


def module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nothing_is_left(folder: Path, count: int) -> None:
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("pid.*"))]
    assert len(found) == count
    for pid, job in found:
        assert not Path(job).exists()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def failure(entry: str, said: dict[str, Any], nproc: int = 4, **options: Any) -> str:
    with pytest.raises(RunError) as raised:
        ray_job.run_job(entry, said, nproc, **options)
    nothing_is_left(Path(said["folder"]), nproc)
    return str(raised.value)


# --- what ranks are -------------------------------------------------------------------------------------------------------


def test_four_ranks_give_what_one_process_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: Any = module_of(FLOWS)
    names, shapes = ["grpo", "ppo", "dapo"], ["together", "apart"]
    monkeypatch.setattr(
        "flowrl_operators.rewards.math.function", lambda response, answer, **_: float(answer in response)
    )
    alone = {}
    for name in names:
        with jobs.local(name) as run:
            alone[name] = {"numbers": jobs.numbers(run), "weights": jobs.weights(run)}
    ray_job.run_job(f"{FLOWS}:every_flow", {"folder": str(tmp_path), "flows": names, "shapes": shapes}, 4)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for name, one in json.loads(json.dumps(alone)).items():
        assert len(one["numbers"]) == jobs.STEPS
        for shape in shapes:
            where = f"{shape} {name}"
            assert ranks[0][where]["numbers"] == one["numbers"], where
            assert {model for rank in ranks for model in rank[where]["weights"]} == set(one["weights"])
            for rank in ranks:
                for model, value in rank[where]["weights"].items():
                    assert value == one["weights"][model], (where, model)


def test_a_rank_is_a_process_with_the_environment_of_any_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ray_job.run_job(f"{JOBS}:tells", {"folder": str(tmp_path)}, 2, environment={"EXTRA": "given"})
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert len({one["pid"] for one in found} | {os.getpid()}) == 3
    for rank, one in enumerate(found):
        assert one["RANK"] == one["LOCAL_RANK"] == str(rank)
        assert one["WORLD_SIZE"] == one["LOCAL_WORLD_SIZE"] == "2"
        assert one["EXTRA"] == "given" and one["cwd"] == str(tmp_path / "here") and one["is_main_thread"]
        assert one["MASTER_ADDR"] == "127.0.0.1" and int(one["MASTER_PORT"]) > 0
        assert not Path(one["FLOWRL_JOB"]).exists()
    assert found[0]["FLOWRL_JOB"] == found[1]["FLOWRL_JOB"] and found[0]["MASTER_PORT"] == found[1]["MASTER_PORT"]
    printed = capfd.readouterr()
    lines = printed.out.splitlines()
    assert [one for one in lines if "rank" not in one] == ["printed by 0", "written by 0", "without an end by 0"]
    assert [one for one in lines if "rank" in one] == [
        f"rank 1: {how} by 1" for how in ("printed", "written", "without an end")
    ]
    assert sorted(printed.err.splitlines()) == ["complained by 0", "rank 1: complained by 1"]


def test_ranks_on_gpus_see_those_of_all_each_its_own_at_its_place(tmp_path: Path) -> None:
    ray_job.run_job(f"{JOBS}:tells", {"folder": str(tmp_path)}, 2, options=RayOptions(cpus=0.5, gpus=1))
    found = [json.loads((tmp_path / f"{rank}.json").read_text())["CUDA_VISIBLE_DEVICES"] for rank in range(2)]
    assert found[0] == found[1] and sorted(found[0].split(",")) == ["0", "1"]


# --- what goes wrong ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_raises(tmp_path: Path, rank: int) -> None:
    text = failure(f"{FAILING}:fails", {"folder": str(tmp_path), "how": "raise", "rank": rank, "timeout_s": 60.0})
    first = text.splitlines()[0]
    assert first.startswith(f"rank {rank} failed first, in step 1, at 'troubled': OperatorError: operator 'troubled'")
    assert first.endswith(f"[on node {ray.nodes()[0]['NodeManagerAddress']} ({ray.nodes()[0]['NodeManagerHostname']})]")
    assert "the judge is asleep" in text and "failing_jobs.py" in text
    run = RunDir.open(tmp_path / "runs" / "rewarded-1")
    assert run.status == "failed" and [row["step"] for row in run.metrics()] == [0]


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    text = failure(f"{FAILING}:fails", {"folder": str(tmp_path), "how": "kill", "rank": 2, "timeout_s": 60.0})
    assert text.startswith("rank 2 failed first, in step 1, at 'troubled': its process is gone")
    assert RunDir.open(tmp_path / "runs" / "rewarded-1").status == "failed"


def test_a_process_that_ends_ends_ranks_that_look_at_nothing(tmp_path: Path) -> None:
    text = failure(f"{JOBS}:leaves", {"folder": str(tmp_path)}, 2, grace_s=0.2)
    assert text.startswith("rank 1 failed first, in nothing named: its process is gone: ")


@pytest.mark.slow
def test_a_rank_that_stands_still(tmp_path: Path) -> None:
    said = {"folder": str(tmp_path), "how": "stall", "rank": 3, "timeout_s": 2.0}
    text = failure(f"{FAILING}:fails", said, grace_s=1.0)
    assert "WaitTimeout: rank " in text
    assert "waited 2 s in step 1 for what 'troubled' writes from rank 3" in text


@pytest.mark.slow
def test_a_rank_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    text = failure(f"{FAILING}:stubborn", {"folder": str(tmp_path)}, 2, grace_s=0.2)
    assert text.startswith("rank 1 failed first, in the beginning: ValueError: gives up [on node ")


def test_an_entry_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="failed first, in the beginning: AttributeError: .*nowhere"):
        ray_job.run_job(f"{JOBS}:nowhere", {}, 1)


def test_a_folder_that_the_node_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.engines.launch.ray_job.os.getcwd", lambda: "/not/on/this/node")
    with pytest.raises(
        ConfigError, match="cannot work in /not/on/this/node.*start it in a folder that all nodes share"
    ):
        ray_job.run_job(f"{JOBS}:tells", {}, 1)


# --- what does not fit ----------------------------------------------------------------------------------------------------


def test_what_the_cluster_cannot_hold_is_refused_before_anything_is_placed() -> None:
    before = set(placement_group_table())
    with pytest.raises(ConfigError, match=r"3 ranks need one node with 3 CPUs and 3 GPUs.* has 4 CPUs and 2 GPUs"):
        ray_job.run_job(f"{JOBS}:tells", {}, 3, options=RayOptions(gpus=1))
    with pytest.raises(ConfigError, match="5 ranks need one node with 5 CPUs"):
        ray_job.run_job(f"{JOBS}:tells", {}, 5)
    assert set(placement_group_table()) == before


def test_ranks_of_a_host_are_on_one_node_and_hosts_on_several() -> None:
    two = [Node("10.0.0.1 (a)", 96, 4), Node("10.0.0.2 (b)", 96, 4)]
    refuse_too_large(two, [4], RayOptions(gpus=1))
    refuse_too_large(two, [4, 3], RayOptions(gpus=1))
    refuse_too_large([Node("a", 0.3, 0)], [3], RayOptions(cpus=0.1))
    refuse_too_large([Node("a", 1, 0), Node("b", 4, 0)], [4, 1], RayOptions())
    with pytest.raises(ConfigError) as raised:
        refuse_too_large(two, [8], RayOptions(gpus=1))
    assert "8 ranks need one node with 8 CPUs and 8 GPUs, as devices of one node of the plan; in this" in str(
        raised.value
    )
    assert "10.0.0.1 (a) has 96 CPUs and 4 GPUs; 10.0.0.2 (b) has 96 CPUs and 4 GPUs" in str(raised.value)
    with pytest.raises(
        ConfigError, match="9 ranks need 3 nodes, as the plan has: 2 with 4 CPUs and 4 GPUs and 1 with 1 CPU"
    ):
        refuse_too_large(two, [4, 4, 1], RayOptions(gpus=1))
    with pytest.raises(ConfigError, match="6 ranks need 2 nodes, as the plan has: 1 with 5 CPUs"):
        refuse_too_large(two, [5, 1], RayOptions(gpus=1))


def test_a_cluster_that_is_busy(tmp_path: Path) -> None:
    other = placement_group([{"CPU": 3}])
    assert other.wait(60)
    try:
        with pytest.raises(WaitTimeout) as raised:
            ray_job.run_job(f"{JOBS}:tells", {"folder": str(tmp_path)}, 2, options=RayOptions(place_s=1))
    finally:
        remove_placement_group(other)
    assert "waited 1 s until so much is free: 2 ranks need one node with 2 CPUs and 0 GPUs" in str(raised.value)
    assert re.search(r"has 4 CPUs and 2 GPUs, and [01] CPUs? and [02] GPUs of all are free", str(raised.value))
    assert not list(tmp_path.iterdir())


def test_ranks_that_do_not_start_in_time_are_named() -> None:
    with pytest.raises(WaitTimeout, match=r"waited 0.001 s for the process beside the ranks to start on node "):
        ray_job.run_job(f"{JOBS}:tells", {}, 2, options=RayOptions(start_s=0.001))


def test_hosts_have_the_ranks_of_the_job() -> None:
    with pytest.raises(ConfigError, match="3 ranks are on hosts with 1, 1 ranks"):
        ray_job.run_job(f"{JOBS}:tells", {}, 3, hosts=(1, 1))
    with pytest.raises(
        ConfigError, match="2 ranks need 2 nodes, as the plan has: 2 with 1 CPU and 0 GPUs; in this Ray"
    ):
        ray_job.run_job(f"{JOBS}:tells", {}, 2, hosts=(1, 1))  # there is one node


def test_a_job_has_a_process() -> None:
    with pytest.raises(ConfigError, match="at least 1 process; found 0"):
        ray_job.run_job(f"{JOBS}:tells", {}, 0)
