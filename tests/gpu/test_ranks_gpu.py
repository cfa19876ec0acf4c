"""A plan on two GPUs, one rank on each: samples, metrics and weights are those of one process on one GPU.

python -m pytest tests/gpu/test_ranks_gpu.py -m gpu
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from flowrl.engines.launch.place import module_paths  # noqa: E402
from flowrl.engines.launch.spawn import run_job  # noqa: E402
from tests.distributed import sampling_flows  # noqa: E402

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
LAYOUTS = [("d2", "f2"), ("d2", "d2"), ("d2", "t2"), ("t2", "f2")]
"""(Sampling, training)."""
TIMEOUT_S = 540.0
GROWS_BYTES = 2**20
"""Most that one run after the other may leave on a GPU; a model that stayed would be several times that."""


def compare(said: dict[str, Any], folder: Path, wire: str) -> None:
    expected = sampling_flows.alone(said)
    for sampling, training in said["layouts"]:
        where = f"{sampling} {training}"
        ranks = [torch.load(folder / f"{sampling}-{training}.{rank}.pt", weights_only=False) for rank in range(2)]
        assert [rank["device"] for rank in ranks] == ["cuda:0", "cuda:1"]
        assert ranks[0]["rows"]["response"] == expected["rows"]["response"], where
        for mine, theirs in zip(expected["numbers"], ranks[0]["numbers"], strict=True):
            assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-3), where
        for rank in ranks:
            assert rank["moved"] and all(wire in text for text in rank["moved"]), rank["moved"]
            assert all(gap < 1e-3 for gap in rank["gaps"]), rank["gaps"]
            for name, value in rank["weights"].items():
                torch.testing.assert_close(
                    torch.from_numpy(value), torch.from_numpy(expected["weights"][name]), atol=1e-4, rtol=1e-3
                )
    for rank in range(2):
        found = [
            torch.load(folder / f"{s}-{t}.{rank}.pt", weights_only=False)["left_bytes"] for s, t in said["layouts"]
        ]
        assert max(found) - found[0] < GROWS_BYTES, (
            found
        )  # what stays after the first run are the libraries' own buffers


@pytest.mark.parametrize("wire", ["copy engines", "nccl"])
def test_two_gpus_under_torchrun(wire: str, tmp_path: Path) -> None:
    said = {"folder": str(tmp_path), "layouts": LAYOUTS, "sampler": "transformers", "device": "cuda", "wire": wire}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(module_paths()), "OMP_NUM_THREADS": "2"}
    ran = subprocess.run(
        [*command, "-m", "tests.distributed.sampling_flows", json.dumps(said)],
        env=environment, timeout=TIMEOUT_S, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-6000:]
    compare(said, tmp_path, wire)


def test_two_gpus_under_the_launcher(tmp_path: Path) -> None:
    said = {"folder": str(tmp_path), "layouts": LAYOUTS[:1], "sampler": "transformers", "device": "cuda"}
    run_job("tests.distributed.sampling_flows:sampled", said, 2)
    compare(said, tmp_path, "copy engines" if torch.cuda.can_device_access_peer(0, 1) else "nccl")


def test_vllm_on_two_gpus(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    options = {"gpu_memory_utilization": 0.1, "enforce_eager": True}
    said = {
        "folder": str(tmp_path), "layouts": [("d2", "f2"), ("t2", "f2")], "sampler": "vllm", "device": "cuda", "options": options
    }  # fmt: skip
    run_job("tests.distributed.sampling_flows:sampled", said, 2)
    for sampling, training in said["layouts"]:
        ranks = [torch.load(tmp_path / f"{sampling}-{training}.{rank}.pt", weights_only=False) for rank in range(2)]
        assert [rank["device"] for rank in ranks] == ["cuda:0", "cuda:1"]
        assert all(gap < 5e-3 for rank in ranks for gap in rank["gaps"])
