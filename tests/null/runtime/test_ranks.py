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


def test_forward_passes_in_another_order(alone: dict[str, Any], tmp_path: Path) -> None:
    run_job(f"{HERE}:every_flow", {"folder": str(tmp_path), "flows": ["ppo", "online_dpo"], "shapes": ["reordered"]}, 4)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    expected = json.loads(json.dumps(alone))
    for name in ("ppo", "online_dpo"):
        assert ranks[0][f"reordered {name}"]["numbers"] == expected[name]["numbers"]
        for rank in ranks:
            for model, value in rank[f"reordered {name}"]["weights"].items():
                assert value == expected[name]["weights"][model]


@pytest.mark.parametrize("batch", [1, 2])
def test_fewer_prompts_than_ranks(batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flows, options = ["grpo", "remax", "tool_use", "sft"], {"batch": batch}
    said = {"folder": str(tmp_path), "flows": flows, "shapes": ["sharded", "scattered"], "options": options}
    run_job(f"{HERE}:every_flow", said, 4)
    first = json.loads((tmp_path / "0.json").read_text())
    monkeypatch.setattr(
        "flowrl_operators.rewards.math.function", lambda response, answer, **_: float(answer in response)
    )
    for name in flows:
        with rank_jobs.local(name, **options) as run:
            expected = json.loads(json.dumps(rank_jobs.numbers(run)))
        assert first[f"sharded {name}"]["numbers"] == expected == first[f"scattered {name}"]["numbers"], name


def test_a_function_of_the_user_sees_each_row_once(tmp_path: Path) -> None:
    run_job(f"{HERE}:counts", {"folder": str(tmp_path)}, 4)

    def seen(what: str) -> dict[int, list[str]]:
        return {int(path.suffix[1:]): path.read_text().splitlines() for path in sorted(tmp_path.glob(f"{what}.*"))}

    rows, groups, batches = seen("seen"), seen("groups"), seen("batches")
    names = [name for each in rows.values() for name in each]
    assert len(names) == len(set(names)) == 20  # five prompts of four responses
    assert len(rows) == 4  # all ranks have worked
    together = [group for each in groups.values() for group in each]
    assert len(together) == len(set(together)) == 5 and len(groups) > 1
    assert all(group.count("/") == 4 for group in together)  # whole groups
    assert batches == {0: ["20"]}  # what must see all rows runs on one rank


def test_one_process_is_a_job_of_one_rank(alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "FLOWRL_JOB"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        "flowrl_operators.rewards.math.function", lambda response, answer, **_: float(answer in response)
    )
    for name in ("moving_ref", "dapo", "replayed"):
        with rank_jobs.on_ranks(name, "together", 1) as run:
            assert rank_jobs.numbers(run) == alone[name]["numbers"]
            assert json.loads(json.dumps(rank_jobs.weights(run))) == json.loads(json.dumps(alone[name]["weights"]))
