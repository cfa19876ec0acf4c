"""State of runs on ranks (gloo): it leaves its devices and comes back, and it outlives the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import flowrl as fr
from examples.tiny import CharTokenizer, tiny_llama
from flowrl.engines.launch.spawn import run_job
from flowrl.errors import EngineError, RunError
from flowrl.runtime.checkpoints import Checkpoint
from flowrl.runtime.rundir import RunDir
from tests.distributed import rank_flows, state_flows

FLOWS = "tests.distributed.state_flows"


def of_ranks(folder: Path, name: str) -> list[Any]:
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob(f"{name}.[0-9].pt"))]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    run_job(f"{FLOWS}:state_on_two", {"folder": str(folder), "layout": "f2"}, 2)
    return folder


def assert_equal(found: dict[str, Any], expected: dict[str, Any], *, exactly: bool = True) -> None:
    if exactly:
        assert found["numbers"] == expected["numbers"]
    else:
        for mine, theirs in zip(found["numbers"], expected["numbers"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3, abs=1e-4)
    assert found["weights"].keys() == expected["weights"].keys()
    for model, weights in expected["weights"].items():
        for name, value in weights.items():
            np.testing.assert_allclose(
                found["weights"][model][name], value, rtol=0, atol=0 if exactly else 1e-5, err_msg=f"{model} {name}"
            )


def test_plans_with_state_on_the_host_give_the_same_numbers(two: Path) -> None:
    ranks = of_ranks(two, "offloaded")
    assert len(ranks) == 2
    for rank in ranks:
        expected = rank["f2 none"]
        assert (expected["store"], expected["is_parked"]) == ("ResidentAdamW", False) and max(expected["on_host"]) == 0
        for name, store in (("parks", "ResidentAdamW"), ("opt", "CpuAdamW"), ("sopt", "StreamedAdamW")):
            found = rank[f"f2 {name}"]
            assert_equal(found, expected)
            assert found["store"] == store and found["is_parked"] == (name != "opt")
            assert max(found["on_host"]) > 0
    found = ranks[0]["f2 parks"]
    moves = {(step, name): (size, did) for step, name, size, did in found["moves"]}
    size = sum(array.nbytes for array in found["weights"]["policy"].values())
    assert moves[0, "gen.out"] == (moves[1, "gen.in"][0], "copied to the host") and moves[0, "gen.out"][0] >= size
    for step in range(state_flows.STEPS):
        # half of the weights and both moments; and what each rank holds whole
        assert 3 * size / 2 <= moves[step, "policy.out"][0] < 1.1 * 3 * size / 2
        assert moves[step, "ref.out"][0] >= size / 2  # it follows the policy, so it has changed
    assert moves[2, "policy.in"] == (moves[1, "policy.out"][0], "copied to the device")
    assert "state in host memory: " in found["memory"]


def assert_resumed(folder: Path, world: int) -> None:
    ranks = of_ranks(folder, "runs")
    assert len(ranks) == world
    for rank in ranks:
        assert_equal(rank["parts"], rank["whole"])
    run = RunDir.open(folder / "parts-1")
    assert [row["step"] for row in run.metrics()] == list(range(state_flows.STEPS)) and run.status == "finished"
    saves = [event for event in run.events() if event.what == "save"]
    assert {(event.step, event.attributes["rank"]) for event in saves} == {
        (step, rank) for step in (1, 2, 3) for rank in range(world)
    }


def test_a_resumed_run_equals_one_that_was_not_interrupted(two: Path) -> None:
    assert_resumed(two, 2)


@pytest.mark.slow
def test_so_it_does_on_four_ranks_with_the_optimizer_on_the_cpu(tmp_path: Path) -> None:
    run_job(f"{FLOWS}:whole_and_in_parts", {"folder": str(tmp_path), "layout": "f2t2", "offload": "opt"}, 4)
    assert_resumed(tmp_path, 4)


def test_a_run_goes_on_in_one_process_and_on_ranks(two: Path, tmp_path: Path) -> None:
    """One process, or ranks that are killed in a step and while they write; then two ranks, or one process again."""
    torch.set_num_threads(1)
    options = {**rank_flows.OPTIONS, "out": str(tmp_path), "name": "moved", "checkpoint_every": 1}
    graph, given = rank_flows.grpo.graph(), rank_flows.inputs()
    with fr.run_local(graph, steps=state_flows.STEPS, **rank_flows.OPTIONS, **given) as run:
        expected = {
            "numbers": rank_flows.numbers(run),
            "weights": {name: host.state()["weights"] for name, host in run.hosts.items()},
        }
    with fr.run_local(graph, steps=1, **options, **rank_flows.inputs()) as run:
        paths = [str(run.path)]
    for what, count in (("update", 3), ("write_state", 5)):  # two models, of which it writes one
        with pytest.raises(
            RunError, match=r"^rank 1 failed first, in .*: its process |lost another rank.*; rank 1 was last at"
        ):
            run_job(f"{FLOWS}:killed", {"folder": str(tmp_path), "layout": "f2", "kill": (what, count)}, 2)
        run_of = RunDir.open(tmp_path / f"killed_{what}-1")
        assert run_of.status == "failed" and Checkpoint.find(run_of.path).step == 2
        paths.append(str(run_of.path))
    run_job(f"{FLOWS}:goes_on", {"folder": str(tmp_path), "layout": "f2", "resume": paths}, 2)
    wholes = [rank["whole"] for rank in of_ranks(two, "runs")]
    for found, whole in zip(of_ranks(tmp_path, "on"), wholes, strict=True):
        assert_equal(
            found[0], {**expected, "numbers": expected["numbers"] if found[0]["numbers"] else []}, exactly=False
        )
        assert_equal(found[1], whole)
        assert_equal(found[2], whole)
    at = f"{paths[0]}/checkpoints/step_000001"
    with fr.run_local(graph, steps=state_flows.STEPS, **{**options, "resume": at}, **rank_flows.inputs()) as run:
        held = {name: host.state()["weights"] for name, host in run.hosts.items()}
        assert_equal({"numbers": rank_flows.numbers(run), "weights": held}, expected)
    wide = fr.Model(tiny_llama(0, hidden_size=64), tokenizer=CharTokenizer(), device="cpu")
    with pytest.raises(EngineError, match=r"parameter '.*' of the checkpoint in '.*policy' has shape .* of one arch"):
        fr.run_local(graph, steps=9, **{**options, "resume": paths[0]}, **{**rank_flows.inputs(), "policy": wide})
