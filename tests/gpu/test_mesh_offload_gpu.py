"""Classes of offload on two GPUs: each rank parks its own shards in pinned memory, and numbers stay."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flowrl.engines.calibrate.processes import run_processes  # noqa: E402

STORES = {"park": "ResidentAdamW", "sopt": "StreamedAdamW", "opt": "CpuAdamW"}


@pytest.mark.parametrize("layout", ["f2", "t2"])
def test_shards_leave_two_gpus_and_come_back(layout: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    jobs = [json.dumps({"rank": rank, "world": 2, "folder": str(tmp_path), "layout": layout}) for rank in range(2)]
    ended = run_processes("tests.gpu.offload_worker", jobs, tmp_path, 240.0)
    assert not ended, f"{ended}\n{(tmp_path / '0.err').read_text()[-3000:]}"
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        expected = found["none"]
        for kind, store in STORES.items():
            assert found[kind]["store"] == store and found[kind]["is_parked"] == (kind == "park")
            assert found[kind]["host_bytes"] > 0
            for name, value in expected["weights"].items():  # a backward pass need not give the same bits twice
                np.testing.assert_allclose(found[kind]["weights"][name], value, atol=1e-4, err_msg=f"{kind} {name}")
        parked = found["parked"]
        assert len(set(parked["rounds"])) == 1  # memory of both sides is flat
        copied, away, _, host_bytes = parked["rounds"][0]
        assert copied > 2**20 and host_bytes >= copied
        # what stays are FSDP's own buffers and those of the libraries
        assert parked["here"] - away >= 0.95 * copied
        assert found["checkpoint"]
