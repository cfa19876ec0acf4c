"""Checkpoints and resuming, with the null engine: a run that was resumed is a run that was not interrupted."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowrl as fr
from flowrl.engines.null import NullHost
from flowrl.errors import ConfigError, DataError, EngineError, RunError
from flowrl.runtime import plain
from flowrl.runtime.checkpoints import Checkpoint
from flowrl.runtime.rundir import RunDir
from flowrl_operators import advantages, losses

STEPS = 7


@fr.operator(writes={"reward": fr.SAMPLE.f32}, locality="stateful")
def above_mean(response_ids: fr.TOKEN.i32, *, state: fr.State):
    """Remembers numbers, a list and an array."""
    state.setdefault("mean", 0.0)
    state.setdefault("seen", [])
    state.setdefault("sums", np.zeros(3))
    lengths = np.array([len(ids) for ids in response_ids], np.float32)
    reward = lengths - state["mean"]
    state["mean"] = 0.9 * state["mean"] + 0.1 * float(lengths.mean())
    state["seen"].append(len(lengths))
    state["sums"] = state["sums"] + lengths.sum()
    return reward


@fr.flow
def remembering(prompts, policy, ref):
    """An operator with a state, a buffer, a refill and an average."""
    rows = fr.rollout(policy, prompts, n=3)
    rows = fr.buffer(above_mean(rows), capacity=60, draw=18, by="prompt_id")
    rows = fr.logprobs(ref, advantages.group_norm(rows), out="ref_logprobs")
    loss = losses.ppo_clip(0.2) * losses.truncated_importance(2.0) + 0.1 * losses.kl("k3")
    policy = fr.update(policy, rows, loss=loss)
    return policy, fr.ema(ref, policy, 0.5)


DATA = [{"prompt_ids": [3 + i % 5, 4 + i % 3, 5]} for i in range(11)]


def run(folder: Path, steps: int = STEPS, **options: Any) -> fr.Run:
    settings = {"batch": 4, "max_tokens": 6, "progress": "off", "out": str(folder), **options}
    flow = settings.pop("flow", remembering)
    data = settings.pop("data", DATA)
    return fr.run_local(
        flow, steps=steps, engine="null", prompts=data, policy=fr.Model("p"), ref=fr.Model("r"), **settings
    )


def numbers(found: fr.Run) -> list[dict[str, float]]:
    return [
        {name: value for name, value in step.items() if not name.startswith("time/") and name != "tokens_per_s"}
        for step in found.metrics
    ]


def states(found: fr.Run) -> dict[str, Any]:
    return {name: host.state() for name, host in found.hosts.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> fr.Run:
    return run(tmp_path_factory.mktemp("whole"))


def steps_of(found: fr.Run) -> list[str]:
    assert found.path is not None
    return sorted(path.name for path in (found.path / "checkpoints").iterdir())


def test_a_resumed_run_equals_one_that_was_not_interrupted(whole: fr.Run, tmp_path: Path) -> None:
    first = run(tmp_path, steps=4, checkpoint_every=2)
    assert steps_of(first) == ["step_000002", "step_000004"]
    again = run(tmp_path, resume=str(first.path), checkpoint_every=2)
    assert again.path == first.path and [path.name for path in tmp_path.iterdir()] == [first.path.name]
    assert numbers(again) == numbers(whole) and len(numbers(whole)) == STEPS
    assert states(again) == states(whole)
    assert whole.hosts["policy"].version == STEPS
    assert steps_of(again) == ["step_000006", "step_000007"]  # the newest two, and one after the last step
    info = RunDir.open(again.path).info
    assert (info["status"], info["resumed_at"], info["steps"]) == ("finished", 4, STEPS)
    assert [row["step"] for row in RunDir.open(again.path).metrics()] == list(range(STEPS))
    saves = [event for event in RunDir.open(again.path).events() if event.what == "save"]
    assert [event.step for event in saves] == [1, 3, 5, 6] and all(event.bytes > 1000 for event in saves)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_from_any_checkpoint(whole: fr.Run, tmp_path: Path, at: int) -> None:
    first = run(tmp_path, steps=5, checkpoint_every=1, checkpoint_keep=9)
    again = run(tmp_path, resume=str(first.path / "checkpoints" / f"step_{at:06d}"))
    assert numbers(again) == numbers(whole) and states(again) == states(whole)
    third = run(tmp_path, resume=str(first.path / "checkpoints" / f"step_{at:06d}"), checkpoint_every=1)
    assert states(third) == states(whole) and steps_of(third) == ["step_000006", "step_000007"]


DYING = """
import os, signal, sys
signal.alarm(120)  # its own limit: a wait with one polls, which tests here must not
from flowrl.runtime import checkpoints
from tests.null.runtime import test_checkpoints as t
from flowrl.engines.null import NullHost
from pathlib import Path
folder, when, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
seen = {"n": 0}
def die(*args, **kwargs):
    seen["n"] += 1
    if seen["n"] == count:
        os.kill(os.getpid(), signal.SIGKILL)
    return kept(*args, **kwargs)
owner, name = {"state": (NullHost, "write_state"), "flush": (checkpoints, "_flush"), "rename": (Path, "rename"),
    "step": (NullHost, "update"), "prune": (checkpoints.shutil, "rmtree")}[when]
kept = getattr(owner, name)
setattr(owner, name, die)
t.run(folder, checkpoint_every=1, checkpoint_keep=1)
"""


@pytest.mark.parametrize(
    ("when", "count", "done"),
    [("step", 4, 3), ("state", 6, 2), ("flush", 12, 1), ("rename", 3, 2), ("prune", 2, 2)],
)
def test_killed_at_any_moment(whole: fr.Run, tmp_path: Path, when: str, count: int, done: int) -> None:
    """The newest complete one is there, and what was being written is not in the way."""
    ended = subprocess.run(
        [sys.executable, "-c", DYING, str(tmp_path), when, str(count)], capture_output=True, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()[-2000:]
    (folder,) = tmp_path.iterdir()
    assert RunDir.open(folder).status == "interrupted"
    found = Checkpoint.find(folder)
    assert found.step >= done
    again = run(tmp_path, resume=str(folder), checkpoint_every=3)
    assert numbers(again) == numbers(whole) and states(again) == states(whole)
    assert not list((folder / "checkpoints").glob(".*"))


def test_a_disk_that_is_full_ends_the_run_and_keeps_what_there_is(
    whole: fr.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = NullHost.write_state

    def full(host: NullHost, path: str, *, is_first: bool = True) -> None:
        if host.version == 3:
            raise OSError(28, "No space left on device")
        kept(host, path, is_first=is_first)

    monkeypatch.setattr(NullHost, "write_state", full)
    with pytest.raises(RunError, match=r"checkpoint after step 2 cannot be written .* No space left .* make room"):
        run(tmp_path, checkpoint_every=1)
    monkeypatch.undo()
    (folder,) = tmp_path.iterdir()
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_000001", "step_000002"]
    assert states(run(tmp_path, resume=str(folder))) == states(whole)


@fr.flow
def another(prompts, policy, ref):
    rows = fr.rollout(policy, prompts, n=3)
    rows = fr.logprobs(ref, advantages.group_norm(above_mean(rows)), out="ref_logprobs")
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2) + 0.1 * losses.kl("k3"))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    first = run(tmp_path, steps=4, checkpoint_every=2)
    path = str(first.path)
    with pytest.raises(ConfigError, match=r"is of another graph: its hash is .* resume with the flow and the config"):
        run(tmp_path, resume=path, flow=another)
    with pytest.raises(ConfigError, match=r"is of a run with seed=0, and this one has seed=1"):
        run(tmp_path, resume=path, seed=1)
    with pytest.raises(ConfigError, match=r"has done 4 steps, and the run is to have 3 in all"):
        run(tmp_path, steps=3, resume=path)
    with pytest.raises(DataError, match=r"saved with 11 rows .* Resume with the same data"):
        run(tmp_path, resume=path, data=DATA[:5])
    with pytest.raises(
        EngineError, match=r"is of a model 'policy' with \d+ tokens, and this one has 9; resume with the"
    ):
        fr.run_local(
            remembering, steps=9, engine="null", resume=path, prompts=DATA, batch=4, progress="off", ref=fr.Model("r"),
            policy=fr.Model("p", tokenizer=Small()),
        )  # fmt: skip
    with pytest.raises(RunError, match=r"has no checkpoint to resume from: it was run without checkpoint_every="):
        run(tmp_path, resume=str(run(tmp_path, steps=1).path))
    with pytest.raises(RunError, match=r"is not the folder of a run"):
        run(tmp_path, resume=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"checkpoints lie in the run's folder, and out=None writes none"):
        run(tmp_path, out=None, checkpoint_every=1)
    assert RunDir.open(path).status == "finished"  # what was refused has left no trace


class Small:
    vocab_size, eos_ids, pad_id, fingerprint = 9, frozenset({2}), 0, "small"

    def encode(self, text: str) -> list[int]:
        return [3]

    encode_continuation = encode

    def decode(self, ids: Any) -> str:
        return ""


def test_a_damaged_checkpoint_is_named_with_what_else_there_is(tmp_path: Path) -> None:
    first = run(tmp_path, steps=4, checkpoint_every=2)
    newest = first.path / "checkpoints" / "step_000004"
    kept = tmp_path / "kept"
    shutil.copytree(newest, kept)
    for spoil, said in (
        (lambda: (newest / "memory.0").write_bytes(b"x"), r"its file 'memory.0' has 1 bytes instead of [\d,]+"),
        (lambda: (newest / "models/policy/null.json").unlink(), r"its file 'models/policy/null.json' is missing"),
        (lambda: (newest / "checkpoint.json").write_text("{"), r"its checkpoint.json cannot be read"),
    ):
        spoil()
        with pytest.raises(RunError, match=rf"step_000004' is damaged: {said}.*resume from another one: .*step_000002"):
            run(tmp_path, resume=str(first.path))
        shutil.rmtree(newest)
        shutil.copytree(kept, newest)
    data = (newest / "memory.0").read_bytes()
    (newest / "memory.0").write_bytes(b"?" * len(data))
    with pytest.raises(RunError, match=r"its file 'memory.0' cannot be read"):
        run(tmp_path, resume=str(first.path))
    text = json.loads((newest / "checkpoint.json").read_text())
    (newest / "checkpoint.json").write_text(json.dumps({**text, "format": 99}))
    with pytest.raises(RunError, match=r"has format 99, and this version reads 1"):
        run(tmp_path, resume=str(first.path))


def test_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    value = {
        "a": 1, 2: [True, None, 0.1, "é"], "b": (1, (b"\n\x00",)), "n": np.float32(0.5), "$array": {"x": []},
        "array": np.arange(6, dtype=np.int16).reshape(2, 3), "objects": np.array(["a", ("b", 1)], object), "e": np.zeros((0, 2)),
    }  # fmt: skip
    plain.write(tmp_path / "x", value, "it")
    found = plain.read(tmp_path / "x")
    assert list(found) == list(value) and found[2] == value[2] and found["b"] == value["b"]
    assert found["n"] == np.float32(0.5) and type(found["n"]) is np.float32 and found["$array"] == {"x": []}
    for name in ("array", "e"):
        np.testing.assert_array_equal(found[name], value[name])
        assert found[name].dtype == value[name].dtype and found[name].shape == value[name].shape
    assert found["objects"].tolist() == value["objects"].tolist()
    found["array"][0, 0] = 9  # its own memory
    with pytest.raises(RunError, match=r"it holds a set at \['a'\]\[1\], which a checkpoint cannot keep"):
        plain.write(tmp_path / "y", {"a": [1, {2}]}, "it")
    data = (tmp_path / "x").read_bytes()
    for broken in (data[:5], data[:-3], b"{}\n", b'{"$odd": 1}\n'):
        (tmp_path / "z").write_bytes(broken)
        with pytest.raises((ValueError, KeyError)):
            plain.read(tmp_path / "z")
