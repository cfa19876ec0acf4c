"""The folder of a run: written a step at a time, readable after any end, one point per metric and step."""

import json
import os
import select
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import flowrl as fr
from flowrl.errors import ConfigError, RunError
from flowrl.runtime.rundir import RunDir
from flowrl.schema import PROMPT, SAMPLE, TOKEN
from flowrl.store.rows import RowBatch
from flowrl.trace import Event


def rows(count: int) -> RowBatch:
    return RowBatch(
        {
            "prompt_id": [str(i) for i in range(count)],
            "response_ids": [[i] * (i % 3) for i in range(count)],
            "reward": list(range(count)),
        },
        {"prompt_id": PROMPT.str, "response_ids": TOKEN.i32, "reward": SAMPLE.f32},
    )


def points(folder: RunDir) -> dict[tuple[str, int], float]:
    return {(name, row["step"]): value for row in folder.metrics() for name, value in row.items() if name != "step"}


def test_a_run_is_written_and_read_back(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "runs", "grpo") as folder:
        folder.write_graph("flow grpo")
        folder.write_info({"seed": 3, "models": {"policy": Path("x")}, "lr": float("inf")})
        folder.write_metrics(0, {"reward/mean": 0.5, "kl": float("nan"), "best": float("inf")}, notes=["short batch"])
        folder.write_samples(0, [{"prompt": "1+1", "response": "2", "reward": float("nan")}])
        folder.trace.add(Event("compute", "rollout", 0, 1.0, 2.0))
        path = folder.write_edge(0, "refill/rollout", rows(3))
        assert RunDir.open(folder.path).status == "running"
    read = RunDir.open(tmp_path / "runs" / "grpo-1")
    assert read.status == read.info["status"] == "finished"
    assert read.info["seed"] == 3 and read.info["name"] == "grpo-1" and read.info["lr"] == "Infinity"
    assert read.info["ended_s"] >= read.info["started_s"]
    assert read.graph_text() == "flow grpo\n"
    (first,) = read.metrics()
    assert first["reward/mean"] == 0.5 and first["kl"] != first["kl"] and first["best"] == float("inf")
    assert read.notes() == [(0, "short batch")]
    assert read.samples() == [{"step": 0, "prompt": "1+1", "response": "2", "reward": None}]
    assert read.events() == [Event("compute", "rollout", 0, 1.0, 2.0)]
    assert read.edge(0, "refill/rollout") == rows(3)
    assert path.parent == read.path / "edges" / "step_000000"  # a node's path makes no folders
    assert read.edges() == {0: ["refill/rollout"]}
    assert (read.path / "weights").is_dir()
    with pytest.raises(RunError, match="opened for reading"):
        read.write_metrics(1, {})


def test_numbers_are_taken_once(tmp_path: Path) -> None:
    (tmp_path / "grpo-7").mkdir()
    (tmp_path / "grpo-x").mkdir()
    (tmp_path / "other-9").mkdir()
    made: list[str] = []

    def make() -> None:
        made.extend(RunDir.create(tmp_path, "grpo").path.name for _ in range(5))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(made, key=lambda n: int(n[5:])) == [f"grpo-{n}" for n in range(8, 28)]
    assert RunDir.create(tmp_path).path.name == "run-1"


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a\nb"])
def test_a_name_stays_in_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="a run's name"):
        RunDir.create(tmp_path, name)


def test_a_folder_that_cannot_be_made_is_an_error_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="choose another with out="):
        RunDir.create(tmp_path / "file", "x")


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), "interrupted"), (ValueError("no such thing"), "failed"), (None, "finished")],
)
def test_the_end_is_noted(tmp_path: Path, error: BaseException | None, status: str) -> None:
    try:
        with RunDir.create(tmp_path) as folder:
            folder.trace.add(Event("compute", start_s=0, end_s=1))
            if error is not None:
                raise error
    except (KeyboardInterrupt, ValueError):
        pass
    read = RunDir.open(folder.path)
    assert read.status == status
    assert read.info["error"] == (
        "ValueError: no such thing" if status == "failed" else "KeyboardInterrupt: " if error else None
    )
    assert len(read.events()) == 1
    with pytest.raises(ConfigError, match="status is one of"):
        folder.finish("done")


def test_out_of_order_steps_are_all_kept(tmp_path: Path) -> None:
    folder = RunDir.create(tmp_path)
    folder.write_metrics(8000, {"inference/rows": 1.0})
    folder.write_metrics(0, {"loss": 2.0})
    folder.write_metrics(0, {"reward/mean": 3.0})
    folder.write_metrics(1, {"loss": 1.5})
    assert points(folder) == {
        ("inference/rows", 8000): 1.0,
        ("loss", 0): 2.0,
        ("reward/mean", 0): 3.0,
        ("loss", 1): 1.5,
    }
    assert [row["step"] for row in folder.metrics()] == [0, 1, 8000]
    assert folder.metric("loss") == [(0, 2.0), (1, 1.5)]
    with pytest.raises(RunError, match="no metric 'los'; did you mean 'loss'"):
        folder.metric("los")
    for reserved in ("step", "notes", "time_s", "resumed_at"):
        with pytest.raises(RunError, match="cannot be the name of a metric"):
            folder.write_metrics(0, {reserved: 1.0})


def test_after_a_resume_there_is_one_point_per_metric_and_step(tmp_path: Path) -> None:
    folder = RunDir.create(tmp_path)
    folder.write_metrics(8000, {"inference/rows": 1.0})
    for step in range(8):
        folder.write_metrics(step, {"loss": float(step), "old": 0.0}, notes=[f"first {step}"])
        folder.write_samples(step, [{"response": f"first {step}"}])
    folder.finish("interrupted")
    again = RunDir.resume(folder.path, 5)
    assert again.info["error"] is None and RunDir.open(folder.path).status == "running"
    assert ("loss", 7) in points(again)  # nothing is lost while nothing replaces it
    again.write_metrics(5, {"loss": 50.0}, notes=["second 5"])
    again.write_samples(5, [{"response": "second 5"}])
    again.finish()
    read = RunDir.open(folder.path)
    assert read.metric("loss") == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0)]
    assert read.metric("inference/rows") == [(8000, 1.0)]
    assert [step for step, _ in read.metric("old")] == list(range(8))
    assert [s["response"] for s in read.samples()] == [f"first {i}" for i in range(5)] + ["second 5"]
    assert [text for _, text in read.notes()] == [f"first {i}" for i in range(5)] + ["second 5"]
    twice = RunDir.resume(folder.path, 2)
    twice.write_metrics(3, {"loss": 30.0})
    assert twice.metric("loss") == [(0, 0.0), (1, 1.0), (3, 30.0)]
    with pytest.raises(RunError, match="still running"):
        RunDir.resume(folder.path, 3)


def test_a_recording_cut_anywhere_gives_whole_batches(tmp_path: Path) -> None:
    folder = RunDir.create(tmp_path)
    full = rows(600)
    path = folder.write_edge(12, "rollout", full)
    assert folder.edge(12, "rollout") == full
    whole = path.read_bytes()
    seen = set()
    for cut in [*range(0, len(whole), 97), len(whole) - 1, len(whole)]:
        path.write_bytes(whole[:cut])
        try:
            found = folder.edge(12, "rollout")
        except RunError as error:
            assert "cut off before its first row" in str(error)
            continue
        assert found == full.slice(0, len(found))
        seen.add(len(found))
    assert seen == {0, 256, 512, 600}


@pytest.mark.parametrize("count", [0, 1])
def test_few_rows_are_recorded_too(tmp_path: Path, count: int) -> None:
    folder = RunDir.create(tmp_path)
    folder.write_edge(0, "rollout", rows(1))
    folder.write_edge(0, "rollout", rows(count))  # recording again replaces
    assert folder.edge(0, "rollout") == rows(count)


def test_asking_for_what_was_not_recorded_says_what_was(tmp_path: Path) -> None:
    folder = RunDir.create(tmp_path, "grpo")
    with pytest.raises(RunError, match="nothing was recorded: run with record="):
        folder.edge(0, "rollout")
    for step in (0, 1, 2, 7):
        folder.write_edge(step, "rollout", rows(1))
    with pytest.raises(RunError, match="no rows of node 'rolout'; did you mean 'rollout'"):
        folder.edge(1, "rolout")
    with pytest.raises(RunError, match="no rows of step 5; recorded steps are 0 to 2, 7"):
        folder.edge(5, "rollout")
    assert folder.has_edge(7, "rollout") and not folder.has_edge(7, "reward")
    with pytest.raises(RunError, match="no run.json.*did you mean 'grpo-1'"):
        RunDir.open(tmp_path / "grpo-2")
    with pytest.raises(RunError, match="it holds the runs grpo-1"):
        RunDir.open(tmp_path)
    with pytest.raises(RunError, match="no graph.txt"):
        folder.graph_text()


def test_no_name_leaves_its_folder(tmp_path: Path) -> None:
    folder = RunDir.create(tmp_path)
    for node in ("..", "../../x", "a/b", "a%2Fb", "/", "."):
        assert folder.write_edge(0, node, rows(1)).parent == folder.path / "edges" / "step_000000"
        assert folder.weights_path(node).parent == folder.path / "weights"
    assert sorted(folder.edges()[0]) == sorted(("..", "../../x", "a/b", "a%2Fb", "/", "."))


KILLED = """
import os, signal, sys
from flowrl.runtime.rundir import RunDir
from flowrl.trace import Event
from tests.null.runtime_io.test_rundir import rows
folder = RunDir.create(sys.argv[1], "killed")
for step in range(3):
    folder.write_edge(step, "rollout", rows(2))
    folder.trace.add(Event("compute", "rollout", step, 0.0, 1.0))
    folder.write_metrics(step, {"loss": float(step)})
    folder.write_samples(step, [{"response": "x"}])
    folder.flush()
folder.trace.add(Event("compute", "rollout", 3, 0.0, 1.0))  # the step that never ended
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_is_readable_and_known_to_be_dead(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as process:
        ended, _, _ = select.select([process.stdout], [], [], 60)
        if not ended:
            process.kill()
    assert process.returncode == -9 and ended
    read = RunDir.open(tmp_path / "killed-1")
    assert read.info["status"] == "running" and read.status == "interrupted"
    assert read.metric("loss") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert len(read.samples()) == len(read.events()) == 3
    assert read.edge(2, "rollout") == rows(2)
    again = RunDir.resume(read.path, 3)
    again.write_metrics(3, {"loss": 3.0})
    assert again.info["pid"] == os.getpid() and again.status == "running"


def test_run_json_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunDir.create(tmp_path)

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(OSError, match="disk full"):
                folder.write_info({"seed": 1})
        found = json.loads((folder.path / "run.json").read_text())
        assert found["status"] == "running" and "seed" not in found
    (folder.path / "run.json").write_text("{")
    with pytest.raises(RunError, match="cannot be read"):
        _ = RunDir.open(folder.path).info


def test_a_run_named_without_its_folder_is_found(tmp_path: Path) -> None:
    made = RunDir.create(tmp_path / "runs", "mine")
    with pytest.raises(RunError, match=f"did you mean '{tmp_path / 'runs' / made.path.name}'"):
        RunDir.open(tmp_path / made.path.name)
    with pytest.raises(RunError, match="there is no run beside it"):
        RunDir.open(tmp_path / "other")


def test_a_run_says_which_versions_of_packs_and_of_what_they_need_it_ran_with(tmp_path: Path) -> None:
    from flowrl_operators import advantages, losses, rewards

    @fr.flow
    def small(prompts, policy):
        rows = advantages.group_norm(rewards.exact(fr.rollout(policy, prompts, n=2)))
        return fr.update(policy, rows, loss=losses.ppo_clip(0.2))

    prompts = [{"prompt": "1+1=", "answer": "2"}]
    run = fr.run_local(
        small, steps=1, engine="null", prompts=prompts, policy="null", progress="off", out=str(tmp_path / "run")
    )
    versions = json.loads((Path(run.path) / "run.json").read_text())["versions"]
    assert versions["flowrl-operators"] == versions["flowrl"] and "numpy" in versions
    try:
        assert versions["math-verify"] == metadata.version("math-verify")
    except metadata.PackageNotFoundError:
        assert "math-verify" not in versions
