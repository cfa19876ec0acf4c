"""`python -m benchmarks one_copy` on the CPU: it measures what it says, and one copy takes less memory than two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import one_copy


def measured(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "numbers.json"
    assert one_copy.main(["--tiny", "--steps", "1", "--samplers", "transformers", "--json", str(path), *arguments]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def sizes(numbers: dict[str, Any]) -> tuple[int, int]:
    """Bytes of the whole model in fp32, and of one of two shards with its moments."""
    weights = 4 * int(numbers["params"])
    return weights, 3 * weights // 2


def test_one_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = measured(tmp_path, "--ways", "one_copy")
    found = numbers["ways"]["transformers one_copy"]
    weights, shard = sizes(numbers)
    # a little more than that where a dimension does not divide by two
    assert weights <= found["states"]["sampling"] < 1.05 * weights  # the sampler's alone
    assert shard <= found["states"]["training"] < 1.1 * shard  # the trainer's alone
    assert found["host_bytes"] >= shard and found["step_s"] > 0
    assert "3 prompts of 5 tokens, 2 responses of 4 each" in capsys.readouterr().out


@pytest.mark.slow
def test_two_copies_take_more(tmp_path: Path) -> None:
    numbers = measured(tmp_path)
    one, two = (numbers["ways"][f"transformers {way}"]["states"] for way in ("one_copy", "two_copies"))
    weights, shard = sizes(numbers)
    assert two["sampling"] == two["training"] >= weights + shard
    assert max(one.values()) <= two["training"] - min(weights, shard)
