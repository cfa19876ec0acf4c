"""Plans on several ranks, in processes: the numbers are those of one process, whatever the layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.engines.launch.spawn import run_job

from . import rank_jobs

HERE = Path(__file__).with_name("rank_jobs.py")
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What one process gives, for each flow."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowrl_operators.rewards.math.function", lambda response, answer, **_: float(answer in response))
        for name in rank_jobs.FLOWS:
            with rank_jobs.local(name) as run:
                found[name] = {"numbers": rank_jobs.numbers(run), "weights": rank_jobs.weights(run)}
    return found


@pytest.mark.parametrize(
    ("world", "shapes"),
    [
        (2, ["together"]),
        (4, ["scattered"]),
        pytest.param(2, ["apart"], marks=SLOW),
        pytest.param(4, ["together", "sharded", "apart"], marks=SLOW),
    ],
)
def test_every_flow_gives_what_one_process_gives(
    world: int, shapes: list[str], alone: dict[str, Any], tmp_path: Path
) -> None:
    said = {"folder": str(tmp_path), "flows": list(rank_jobs.FLOWS), "shapes": shapes}
    run_job(f"{HERE}:every_flow", said, world)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    expected = json.loads(json.dumps(alone))
    for shape in shapes:
        for name, one in expected.items():
            where = f"{shape} {name}"
            assert ranks[0][where]["numbers"] == one["numbers"], where
            held = [model for rank in ranks for model in rank[where]["weights"]]
            assert set(held) == set(one["weights"]), where
            for rank in ranks:
                for model, value in rank[where]["weights"].items():
                    assert value == one["weights"][model], (where, model)
