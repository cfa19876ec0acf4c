"""GRPO on several ranks (gloo): sharded training, sampling on copies; what comes of it is what one process gives."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from flowrl.engines.launch.spawn import run_job
from flowrl.engines.mesh.shares import shares
from flowrl.engines.packing import split_by_tokens
from flowrl.errors import RunError
from flowrl.runtime.rundir import RunDir
from tests.distributed import rank_flows

SLOW = pytest.mark.slow


@cache
def alone(name: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    return rank_flows.alone(name)


@pytest.mark.parametrize(
    ("world", "todo"),
    [
        (2, [("grpo", "f2"), ("grpo", "t2")]),
        (4, [("grpo", "f2t2"), ("grpo", "apart"), ("ppo", "f2t2"), ("two rows", "f4")]),
        pytest.param(2, [("ppo", "f2"), ("ppo", "t2"), ("two rows", "f2"), ("one prompt", "f2")], marks=SLOW),
        pytest.param(4, [("grpo", "f4"), ("grpo", "d2f2"), ("ppo", "f4"), ("ppo", "d2f2")], marks=SLOW),
        pytest.param(4, [("ppo", "apart"), ("ppo", "t4"), ("grpo", "t4")], marks=SLOW),
        pytest.param(
            4, [(name, shape) for name in ("one prompt", "two rows") for shape in ("f2t2", "d2f2", "apart")], marks=SLOW
        ),
    ],
)
def test_the_layout_changes_nothing(world: int, todo: list[tuple[str, str]], tmp_path: Path) -> None:
    run_job("tests.distributed.rank_flows:trained", {"folder": str(tmp_path), "todo": todo}, world)
    for name, shape in todo:
        folder = tmp_path / f"{name} {shape}"
        ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]
        check(f"{name} {shape}", rank_flows.CASES[name], alone(name), ranks, folder)


def check(where: str, case: rank_flows.Case, expected: dict[str, Any], ranks: list[Any], folder: Path) -> None:
    """Samples, metrics of every step, and weights after the last one, on every rank and as they were saved."""
    inputs = case.inputs()
    assert ranks[0]["texts"] == expected["texts"], where
    assert len(expected["numbers"]) == rank_flows.STEPS
    for mine, theirs in zip(expected["numbers"], ranks[0]["numbers"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-4), where
    for name, weights in expected["weights"].items():
        first = inputs[name].source.state_dict()
        moved = max(float((torch.from_numpy(weights[n]) - first[n]).abs().max()) for n in first if n in weights)
        assert moved > 1e-2, where  # else equal weights would say little
        held = [rank["weights"][name] for rank in ranks if name in rank["weights"]]
        assert held, where
        for found in held:
            assert set(found) == set(weights)
            for tensor, value in weights.items():
                np.testing.assert_allclose(found[tensor], value, atol=1e-5, rtol=0, err_msg=f"{where} {name} {tensor}")
        if inputs[name].head == "lm":
            saved = LlamaForCausalLM.from_pretrained(folder / name).state_dict()
            for tensor, value in weights.items():
                np.testing.assert_allclose(saved[tensor].numpy(), value, atol=1e-5, rtol=0)
    assert len(ranks[0]["moved"]) == rank_flows.STEPS
    assert all("from shards straight into" in text for rank in ranks for text in rank["moved"])


def test_ranks_of_these_cases_have_different_numbers_of_micro_batches() -> None:
    """Else the cases would not show that it does not matter."""
    lengths = np.full(14, 5 + 6)  # half of seven prompts' four responses, with all that they may have
    blocks = [list(split_by_tokens(lengths[own], rank_flows.MICRO_BATCH_TOKENS)) for own in shares(lengths, 4)]
    assert len({len(each) for each in blocks}) > 1


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
