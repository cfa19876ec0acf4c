"""Calibration of a CPU, by one process and by two (gloo): something sensible is measured, and no process is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.engines.calibrate import calibrate, compute, links, processes, worker
from flowrl.engines.calibrate.effort import Effort, LayerShape
from flowrl.engines.calibrate.loss import chunked_loss
from flowrl.engines.calibrate.timing import seconds
from flowrl.errors import ConfigError, EngineError
from flowrl.mesh import Cluster

CPU = torch.device("cpu")
SMALL = replace(
    Effort.of(is_gpu=False, quick=True), rounds=1, layers=(LayerShape(16, 2, 1, 32), LayerShape(32, 4, 2, 64))
)

REFUSED = "measure again while nothing else runs"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="measures a machine without a GPU")


def failed(cluster: Cluster) -> list[str]:
    """Notes of what could not be measured; other programs beside a test, and what is refused for them, are none."""
    return [note for note in cluster.notes if not note.startswith("the machine was busy") and REFUSED not in note]


@pytest.fixture(scope="module")
def two() -> Cluster:
    return calibrate(devices=min(2, os.cpu_count() or 1), quick=True, deadline_s=200)


def test_two_processes_measure_everything(two: Cluster) -> None:
    assert failed(two) == []
    assert two.calibrated_at
    assert two.device.name == "cpu" and two.device.peak_flops > 1e8
    operations = {one.operation for one in two.measured}
    assert operations >= {"to_device", "to_host"}
    if two.num_devices == 2:
        assert operations >= set(links.OPERATIONS)
    assert 0 < two.efficiency.train <= 1 and 0 < two.efficiency.train_attention <= 1 and 0 < two.efficiency.adam <= 1
    refused = " ".join(note for note in two.notes if REFUSED in note)
    assert two.overheads.train_layer_s > 0 or "train_layer_s" in refused or "more layers took" in refused
    assert two.overheads.train_logit_bytes > 0 or "train_logit_bytes" in refused


def test_what_was_measured_survives_its_file(two: Cluster, tmp_path: Path) -> None:
    two.to_toml(tmp_path / "cluster.toml")
    assert Cluster.from_toml(tmp_path / "cluster.toml") == two


def test_one_process_has_no_links() -> None:
    cluster = calibrate(devices=1, quick=True, deadline_s=200)
    assert cluster.num_devices == 1 and failed(cluster) == []
    assert {one.operation for one in cluster.measured} == {"to_device", "to_host"}


@pytest.mark.parametrize("devices", [0, -1, 10_000])
def test_devices_that_are_not_there(devices: int) -> None:
    with pytest.raises(ConfigError, match=f"calibrate needs 1 to .* devices.*; found {devices}"):
        calibrate(devices=devices)


def test_a_worker_that_cannot_start_is_told_with_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MODULE", "flowrl.engines.calibrate.no_such_module")
    with pytest.raises(EngineError, match="no_such_module"):
        processes.run_workers(2, is_gpu=False, quick=True, deadline_s=60)


def test_a_worker_that_hangs_is_ended_at_the_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text("import threading\nthreading.Event().wait(100)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(processes, "MODULE", "hangs")
    started: list[Any] = []
    real = subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> Any:
        started.append(real(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    with pytest.raises(EngineError, match=r"0\.2 s were over"):
        processes.run_workers(2, is_gpu=False, quick=True, deadline_s=0.2)
    assert len(started) == 2 and all(one.poll() is not None for one in started)


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    code = "import threading; from flowrl.engines.calibrate import worker\n"
    code += "threading.Thread(target=worker.end_with_parent, daemon=True).start(); threading.Event().wait(100)"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert child.poll() is None and child.stdin is not None
    child.stdin.close()  # as it is when the parent is gone
    assert child.wait(60) == 1


def test_a_measurement_that_fails_leaves_the_others(tmp_path: Path) -> None:
    log = worker.Log(tmp_path / "0.jsonl")

    def fails() -> None:
        raise RuntimeError("gloo has no such operation\nmore")

    log.attempt("one", fails)
    log.attempt("two", lambda: 3.0)
    results = processes.read(tmp_path, 1)
    assert results.values == {"two": [3.0]}
    assert results.errors == {"one": "RuntimeError: gloo has no such operation (process 0)"}


def test_layers_count_the_work_that_is_done() -> None:
    found = compute.layers(CPU, SMALL)
    for (forward, attending, kept, _), (train, trained, same, _) in zip(found["forward"], found["train"], strict=True):
        assert (train, trained) == (4 * forward, 4 * attending) and kept == same > 0


def test_attention_counts_half_of_the_pairs() -> None:
    found = compute.attention(CPU, SMALL)
    shape = SMALL.layers[-1]
    assert found["forward"][0] == SMALL.rows * 4 * shape.hidden * SMALL.sequence**2 / 2
    assert found["train"][0] == 4 * found["forward"][0]


def test_a_loss_in_chunks_is_the_loss_at_once() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 50, bias=False)
    hidden, labels = torch.randn(10, 8, requires_grad=True), torch.randint(50, (10,))
    chunked_loss(head, hidden, labels, 3).backward()
    assert hidden.grad is not None
    found, grad = hidden.grad.clone(), head.weight.grad.clone()
    hidden.grad = head.weight.grad = None
    whole = torch.nn.functional.cross_entropy(head(hidden), labels, reduction="sum")
    whole.backward()
    torch.testing.assert_close(found, hidden.grad)
    torch.testing.assert_close(grad, head.weight.grad)
    with torch.no_grad():
        torch.testing.assert_close(chunked_loss(head, hidden, labels, 4), whole)


def test_groups_are_powers_of_two_and_all() -> None:
    assert [links.sizes_of_groups(world) for world in (1, 2, 3, 4, 6, 8)] == [
        [], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8],
    ]  # fmt: skip


def test_every_call_of_a_round_is_made() -> None:
    calls: list[int] = []
    assert seconds(lambda: calls.append(1), CPU, rounds=3, calls=4, warmups=2) >= 0
    assert len(calls) == 2 + 3 * 4
