"""Sampling on several ranks (gloo): copies and tensor parallelism, with either sampler; samples are those of one process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.engines.launch.spawn import run_job
from flowrl.errors import RunError
from tests.distributed import sampling_flows

no_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'flowrl[cpu]'")
WORKER = "tests.distributed.sampling_flows:sampled"


def compare(said: dict[str, Any], world: int, tmp_path: Path) -> list[list[dict[str, Any]]]:
    """Run the layouts on ranks, and compare each with one process; what each rank found of each."""
    run_job(WORKER, {"folder": str(tmp_path), **said}, world)
    torch.set_num_threads(1)
    expected = sampling_flows.alone(said)
    first = sampling_flows.inputs(said)["policy"].source.state_dict()
    moved = max(float(np.abs(value - first[name].numpy()).max()) for name, value in expected["weights"].items())
    assert moved > 1e-2  # else equal weights would say little
    every = []
    for sampling, training in said["layouts"]:
        where = f"{sampling} {training}"
        ranks = [torch.load(tmp_path / f"{sampling}-{training}.{rank}.pt", weights_only=False) for rank in range(world)]
        rows = ranks[0]["rows"]
        assert rows["response"] == expected["rows"]["response"], where
        np.testing.assert_array_equal(rows["ids"], expected["rows"]["ids"], err_msg=where)
        np.testing.assert_allclose(rows["logprobs"], expected["rows"]["logprobs"], atol=1e-4, err_msg=where)
        for mine, theirs in zip(expected["numbers"], ranks[0]["numbers"], strict=True):
            assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-4), where
        held = [rank["weights"] for rank in ranks if rank["weights"]]
        assert held
        for weights in held:
            for name, value in expected["weights"].items():
                np.testing.assert_allclose(weights[name], value, atol=2e-5, rtol=0, err_msg=f"{where} {name}")
        assert [gap for rank in ranks for gap in rank["gaps"]] and all(
            gap < 1e-4 for rank in ranks for gap in rank["gaps"]
        )
        if (
            said["sampler"] == "transformers"
        ):  # vLLM's first engine of a process lets go of what it has seen with its next one
            assert not any(rank["left"] for rank in ranks), where  # a model that is closed is given back
        assert sum(rank["asked"] for rank in ranks) == expected["asked"], where
        assert all("from shards straight into" in text for rank in ranks for text in rank["moved"])
        every.append(ranks)
    return every


def test_the_torch_sampler_on_a_tensor_parallel_copy(tmp_path: Path) -> None:
    compare({"layouts": [("t2", "f2"), ("t2", "t2"), ("d2", "d2")], "sampler": "transformers"}, 2, tmp_path)


def test_copies_of_two_ranks_with_an_environment(tmp_path: Path) -> None:
    (ranks,) = compare({"layouts": [("d2t2", "f2t2")], "sampler": "transformers", "turns": 2}, 4, tmp_path)
    assert [rank["asked"] > 0 for rank in ranks] == [True, False, True, False]  # whoever follows asks nobody


def test_a_layout_that_cannot_sample_is_refused(tmp_path: Path) -> None:
    said = {"folder": str(tmp_path), "layouts": [("f2", "f2")], "sampler": "transformers"}
    with pytest.raises(
        RunError, match=r"cut by tensor parallelism; found layout f2: plan with d and t, as d2, for sampling"
    ):
        run_job(WORKER, said, 2)


@no_vllm
@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_vllm_on_ranks(tied: bool, tmp_path: Path) -> None:
    layouts = [("d2", "f2"), ("t2", "f2"), ("t2", "t2"), ("d1", "f2")]
    compare({"layouts": layouts, "sampler": "vllm", "tied": tied}, 2, tmp_path)


@no_vllm
@pytest.mark.slow
def test_vllm_on_copies_of_two_ranks(tmp_path: Path) -> None:
    compare({"layouts": [("d2t2", "f2t2")], "sampler": "vllm", "turns": 2}, 4, tmp_path)
