"""Checkpoints on ranks, with the null engine: what nodes remember lies on one rank, and goes on wherever it is needed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flowrl.engines.launch.spawn import run_job
from flowrl.runtime.ranks import run_ranks
from flowrl.runtime.rundir import RunDir
from tests.null.runtime import test_checkpoints as alone
from tests.null.runtime.plans import numbers
from tests.null.runtime.rank_jobs import plan_of, weights

ME = "tests.null.runtime.test_ranks_checkpoints"


def run(said: dict[str, Any], steps: int, shape: str, **options: Any) -> Any:
    graph, world = alone.remembering.graph(), int(os.environ["WORLD_SIZE"])
    return run_ranks(
        graph, plan=plan_of(graph, world, shape), steps=steps, engine="null", timeout_s=200.0, prompts=alone.DATA,
        policy=alone.fr.Model("p"), ref=alone.fr.Model("r"), batch=4, max_tokens=6, progress="off", out=said["folder"], **options,
    )  # fmt: skip


def in_parts(said: dict[str, Any]) -> None:
    """On each rank: a run that was begun by one process, goes on here, and here again in another place."""
    with run(said, 4, "together", resume=said["begun"], checkpoint_every=2) as begun:
        assert begun.path is None or begun.path.name == Path(said["begun"]).name
    with run(said, alone.STEPS, "apart", resume=said["begun"], checkpoint_every=2) as done:
        found = {"numbers": numbers(done), "weights": weights(done)}
    Path(said["folder"], f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def test_what_nodes_remember_goes_on_on_ranks(tmp_path: Path) -> None:
    whole = alone.run(tmp_path / "whole")
    begun = alone.run(tmp_path, steps=2, checkpoint_every=1)
    run_job(f"{ME}:in_parts", {"folder": str(tmp_path), "begun": str(begun.path)}, 2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["numbers"] == json.loads(json.dumps(numbers(whole)))
    expected = json.loads(json.dumps(weights(whole)))
    assert {**first["weights"], **second["weights"]} == expected
    folder = RunDir.open(begun.path)
    assert folder.status == "finished" and len(folder.metrics()) == alone.STEPS
    last = begun.path / "checkpoints" / f"step_{alone.STEPS:06d}"
    assert any(path.name.startswith("memory.") for path in last.iterdir())
    resumed = alone.run(tmp_path, steps=alone.STEPS, resume=str(begun.path / "checkpoints" / "step_000006"))
    assert numbers(resumed) == numbers(whole) and alone.states(resumed) == alone.states(whole)
