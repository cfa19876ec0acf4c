"""Trackers against the packages themselves, offline. Each is skipped where its package is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

import flowrl as fr
from examples.rloo import rloo

SUMS = [{"prompt": "1+1=", "answer": "2"}]


def run(tmp_path: Path, tracker: str) -> fr.Run:
    return fr.run_local(rloo, steps=3, trackers=(tracker,), engine="null", prompts=SUMS, policy="null",
                        out=str(tmp_path / "runs"), progress="off")  # fmt: skip


def notes_of(done: fr.Run) -> list[tuple[int, str]]:
    from flowrl.runtime.rundir import RunDir

    assert done.path is not None
    return RunDir.open(done.path).notes()


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs flowrl[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = run(tmp_path, "tensorboard")
    assert notes_of(done) == []
    read = EventAccumulator(str(done.path))
    read.Reload()
    assert set(read.Tags()["scalars"]) == set(done.metrics[0])
    points = read.Scalars("reward/mean")
    assert [point.step for point in points] == [0, 1, 2]
    assert [point.value for point in points] == pytest.approx(done.history("reward/mean"), nan_ok=True)
    assert "settings/text_summary" in read.Tags()["tensors"] or "settings" in read.Tags()["tensors"]


def test_tensorboard_needs_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs flowrl[tensorboard]")
    with pytest.raises(fr.FlowError, match="out="):
        fr.run_local(
            rloo, trackers=("tensorboard",), engine="null", prompts=SUMS, policy="null", out=None, progress="off"
        )


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs flowrl[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    done = run(tmp_path, "wandb")
    assert notes_of(done) == []
    assert done.path is not None
    (file,) = done.path.glob("wandb/offline-run-*/run-*.wandb")
    assert file.stat().st_size > 500


def test_mlflow_in_a_local_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs flowrl[mlflow]")
    store = tmp_path / "store"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store.as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    done = run(tmp_path, "mlflow")
    assert notes_of(done) == []
    client = mlflow.MlflowClient(tracking_uri=store.as_uri())
    experiment = client.get_experiment_by_name("rloo")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["options.batch"] == "32"
    history = client.get_metric_history(found.info.run_id, "reward/mean")
    assert [point.step for point in history] == [0, 1, 2]
    assert [point.value for point in history] == pytest.approx(done.history("reward/mean"))
