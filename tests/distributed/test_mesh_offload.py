"""Classes of offload on real ranks (gloo): each rank's own shards, and no bit of a number changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.distributed import test_mesh_training as training

WORK = {
    2: {"f2": ["offloads", "parked"], "t2": ["offloads"]},
    4: {"f2t2": ["offloads", "parked"], "d2f2": ["parked"]},
}
STORES = {"park": "ResidentAdamW", "sopt": "StreamedAdamW", "opt": "CpuAdamW"}


one_thread = training.one_thread


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    return {
        world: training.run(world, tmp_path_factory.mktemp(f"offload{world}"), work) for world, work in WORK.items()
    }


@pytest.mark.parametrize("layout", ["f2", "t2", "f2t2"])
def test_no_class_changes_a_bit(worlds: dict[int, list[dict[str, Any]]], layout: str) -> None:
    for rank in worlds[4 if layout == "f2t2" else 2]:
        found = rank[f"{layout} offloads"]
        assert len(found) == (9 if layout == "f2" else 3)
        for key, one in found.items():
            kind = key.split()[-1]
            assert one["names"][0] == one["names"][1]
            assert one["differ"] == [], key
            assert one["reports"][0] == one["reports"][1]
            np.testing.assert_array_equal(*one["after"])
            assert one["store"] == STORES[kind] and one["is_parked"] == (kind == "park")
            assert one.get("resumed", True), key
            assert one["host_bytes"] >= one["moment_bytes"] > 0


@pytest.mark.parametrize(("world", "layout"), [(2, "f2"), (4, "f2t2"), (4, "d2f2")])
def test_what_is_parked_is_freed_and_five_rounds_are_flat(
    worlds: dict[int, list[dict[str, Any]]], world: int, layout: str
) -> None:
    for rank in worlds[world]:
        found = rank[f"{layout} parked"]
        assert found["size"] > 0 and "is parked in host memory" in found["said"]
        for copied, left, again, is_same, here, _, _ in found["rounds"]:
            assert copied == again == here == found["size"]
            assert left == 0 and is_same
        assert len({round[5:] for round in found["rounds"]}) == 1  # host memory is taken once
        assert found["unchanged"] == 0
        np.testing.assert_array_equal(found["after"], worlds[world][0][f"{layout} parked"]["after"])
