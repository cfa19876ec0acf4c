"""GRPO on ranks of two hosts (gloo): shards and copies across them, rows by Arrow Flight; what comes of it is what one process
gives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.engines.launch.spawn import run_job
from flowrl.errors import RunError
from tests.distributed import host_flows, rank_flows

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("world", "shape"), [(2, "f2"), pytest.param(4, "apart", marks=SLOW), pytest.param(4, "f2t2", marks=SLOW)]
)
def test_two_hosts_train_as_one_process_does(world: int, shape: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run_job("tests.distributed.host_flows:trained", {"folder": str(tmp_path), "shape": shape}, world, hosts=2)
    ranks: list[Any] = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(world)]
    assert len({one["folder"] for one in ranks}) == 2  # hosts have no memory in common
    expected = host_flows.alone()
    for mine, theirs in zip(expected["numbers"], ranks[0]["numbers"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-4)
    first = rank_flows.model().source.state_dict()
    moved = [float((torch.from_numpy(value) - first[name]).abs().max()) for name, value in expected["weights"].items()]
    assert max(moved) > 1e-3  # else equal weights would say little
    held = [one["weights"] for one in ranks if one["weights"] is not None]
    assert held
    for found in held:
        for name, value in expected["weights"].items():
            np.testing.assert_allclose(found[name], value, atol=1e-5, rtol=0, err_msg=name)
    assert all("from shards straight into" in text for one in ranks for text in one["moved"])


@SLOW
def test_a_killed_rank_on_the_other_host_ends_all(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^rank 1 failed first, in step 1, at 'deadly': its process "):
        run_job("tests.distributed.rank_flows:killed", {"folder": str(tmp_path)}, 2, hosts=2)
    for path in tmp_path.glob("pid.*"):
        pid, job = path.read_text().split()
        assert not Path(job).exists()
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
