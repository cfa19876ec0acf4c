"""A run's folder that goes away, or cannot be written: an error that says so, and never a run that claims to be there."""

import errno
import shutil

import pytest

import flowrl as fr
from flowrl.errors import OperatorError, RunError
from flowrl.runtime.rundir import RunDir
from tests.null.breaking.pieces import length, sampled


@pytest.mark.parametrize("record", [(), ("*",)])
def test_a_folder_removed_during_the_run(tmp_path, record):
    @fr.operator(writes={"x": fr.SAMPLE.f32})
    def removes(reward):
        shutil.rmtree(tmp_path / "made-1")
        return reward

    with pytest.raises(
        RunError, match=r"run '.*made-1' cannot be written in step 0: its folder was removed or renamed"
    ):
        sampled(lambda rows, policy: removes(length(rows)), out=str(tmp_path), steps=3, record=record)
    assert not (tmp_path / "made-1").exists()


def test_a_full_disk_is_named_and_does_not_hide_what_ended_the_run(tmp_path, monkeypatch):
    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RunDir, "write_metrics", full)
    with pytest.raises(RunError, match="cannot be written in step 0: .*No space left on device.*out="):
        sampled(lambda rows, policy: length(rows), out=str(tmp_path))

    @fr.operator(writes={"x": fr.SAMPLE.f32})
    def broken(reward):
        raise LookupError("first")

    monkeypatch.setattr(RunDir, "finish", full)
    with pytest.raises(OperatorError, match="first") as caught:
        sampled(lambda rows, policy: broken(length(rows)), out=str(tmp_path))
    assert "No space left" in caught.value.__notes__[0]


def test_a_run_that_was_interrupted_failed_at_nothing(tmp_path):
    @fr.operator(writes={"x": fr.SAMPLE.f32})
    def stopped(reward):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sampled(lambda rows, policy: stopped(length(rows)), out=str(tmp_path))
    folder = RunDir.open(tmp_path / "made-1")
    assert folder.status == "interrupted" and folder.info["error"] is None
