"""GRPO on several ranks (gloo): sharded training, sampling on copies; what comes of it is what one process gives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from flowrl.engines.launch.spawn import run_job
from flowrl.errors import RunError
from flowrl.runtime.rundir import RunDir
from tests.distributed import rank_flows


@pytest.fixture(scope="module")
def alone() -> Any:
    torch.set_num_threads(1)
    return rank_flows.alone()


@pytest.mark.parametrize(("world", "shapes"), [(2, ["f2", "t2"]), (4, ["f2t2", "apart"])])
def test_grpo_on_ranks_trains_as_one_process_does(world: int, shapes: list[str], alone: Any, tmp_path: Path) -> None:
    run_job("tests.distributed.rank_flows:trained", {"folder": str(tmp_path), "shapes": shapes}, world)
    metrics, weights = alone
    first = rank_flows.model().source.state_dict()
    moved = max(float((torch.from_numpy(weights["policy"][n]) - first[n]).abs().max()) for n in weights["policy"])
    assert moved > 1e-2  # else equal weights would say little
    for shape in shapes:
        ranks = [torch.load(tmp_path / f"{shape}.{rank}.pt", weights_only=False) for rank in range(world)]
        for mine, theirs in zip(metrics, ranks[0]["numbers"], strict=True):
            assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-4), shape
        for name, expected in weights.items():
            held = [rank["weights"][name] for rank in ranks if name in rank["weights"]]
            assert held
            for found in held:
                for tensor, value in expected.items():
                    np.testing.assert_allclose(
                        found[tensor], value, atol=1e-5, rtol=0, err_msg=f"{shape} {name} {tensor}"
                    )
            saved = LlamaForCausalLM.from_pretrained(tmp_path / shape / name).state_dict()
            for tensor, value in expected.items():
                np.testing.assert_allclose(saved[tensor].numpy(), value, atol=1e-5, rtol=0)
        assert len(ranks[0]["moved"]) == rank_flows.STEPS
        assert all("from shards straight into" in text for rank in ranks for text in rank["moved"])


def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"^rank 1 failed first, in step 1, at 'deadly': its process "):
        run_job("tests.distributed.rank_flows:killed", {"folder": str(tmp_path)}, 2)
    for path in tmp_path.glob("pid.*"):
        pid, job = path.read_text().split()
        assert not Path(job).exists()
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
    run = RunDir.open(tmp_path / "short-1")
    assert run.status == "failed" and [row["step"] for row in run.metrics()] == [0]
