"""What a mesh keeps in memory and computes in pieces, and every family cut both ways at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flowrl.engines.host_torch import TorchEngine
from tests.distributed import test_mesh_training as training
from tests.distributed.mesh_cases import CASES, model_of, smollm, train, uses_of
from tests.distributed.mesh_pieces import SHORT_ROWS, SLICE, VOCAB, neighbours

WORK = {
    2: {"f2": ["qwen3", "kept", "logits", "packed", "buffers"], "t2": ["smollm", "kept", "logits", "packed", "skips"]},
    4: {"f2t2": ["llama", "qwen2", "qwen3", "gpt2"]},
}
FAMILIES = ("llama", "smollm", "qwen2", "qwen3", "gpt2")

one_thread = training.one_thread


def made(world: int, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp(f"pieces{world}")
    smollm().save_pretrained(folder / "smollm", max_shard_size="8KB")
    return training.run(world, folder, WORK[world], worker="tests.distributed.mesh_pieces")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return made(2, tmp_path_factory)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return made(4, tmp_path_factory)


def test_every_family_has_each_layout() -> None:
    work = [(key, name) for every in (WORK, training.WORK) for group in every.values() for key, names in group.items()
            for name in names]  # fmt: skip
    for family in FAMILIES:
        assert {layout for layout, name in work if name == family} >= {"f2", "t2", "f2t2"}, family


@pytest.mark.parametrize("key", ["f2 qwen3", "t2 smollm"])
def test_two_ranks_train_as_one_device(two: list[dict[str, Any]], key: str) -> None:
    training.assert_as_alone(two, key)


@pytest.mark.parametrize("key", [f"f2t2 {name}" for name in WORK[4]["f2t2"]])
def test_four_ranks_train_as_one_device(four: list[dict[str, Any]], key: str) -> None:
    training.assert_as_alone(four, key)


def test_the_norm_that_clips_is_the_global_one(two: list[dict[str, Any]], four: list[dict[str, Any]]) -> None:
    """In all of these runs steps are clipped, by the norm that one device finds."""
    for ranks, key in ((two, "f2 qwen3"), (two, "t2 smollm"), *((four, f"f2t2 {name}") for name in WORK[4]["f2t2"])):
        limit = CASES[key.split(" ")[1]].max_grad_norm
        assert limit is not None
        expected = training.alone(key.split(" ")[1])["reports"]
        for mine, theirs in zip(ranks[0][key]["reports"], expected, strict=True):
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
            assert mine["grad_clipped"] == float(mine["grad_norm"] > limit)
        assert any(report["grad_clipped"] for report in expected)


@pytest.mark.parametrize("layout", ["f2", "t2"])
def test_recomputing_keeps_less_and_changes_no_number(two: list[dict[str, Any]], layout: str) -> None:
    for rank in two:
        found = rank[f"{layout} kept"]
        (all_bytes, whole), (less_bytes, recomputed) = found[False], found[True]
        assert whole == recomputed
        assert 0 < less_bytes < 0.5 * all_bytes


@pytest.mark.parametrize("layout", ["f2", "t2"])
def test_logits_are_never_there_for_all_tokens(two: list[dict[str, Any]], layout: str) -> None:
    for rank in two:
        (kept, made, whole), (kept_in_slices, made_in_slices, sliced) = rank[f"{layout} logits"].values()
        assert kept == made > 2 * SLICE  # the meter sees them where they are small enough to be kept
        assert kept_in_slices == 0 and made_in_slices == SLICE
        for name, value in whole.items():
            assert sliced[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("layout", ["f2", "t2"])
def test_rows_that_share_a_line_are_as_if_they_were_alone(two: list[dict[str, Any]], layout: str) -> None:
    host = TorchEngine().open("packed", model_of(SHORT_ROWS), uses_of(SHORT_ROWS), seed=0)
    host.forward.packs = False  # type: ignore[attr-defined]
    expected = train(host, SHORT_ROWS)  # type: ignore[arg-type]
    for rank in two:
        found = rank[f"{layout} packed"]
        assert found["saved"] > 0
        training.assert_equal_reports(found["trained"]["reports"], expected["reports"])
        training.assert_equal_states(found["trained"]["state"], expected["state"])
        np.testing.assert_allclose(found["before"].values, found["padded"].values, atol=1e-5)
        changed = set(range(2, len(neighbours(0)), 2))
        for row in range(len(neighbours(0))):
            is_same = np.array_equal(found["before"][row], found["after"][row])  # to the bit
            assert is_same != (row in changed), row


def test_buffers_that_no_file_holds_are_made_on_every_rank(two: list[dict[str, Any]]) -> None:
    expected = dict(smollm().named_buffers())
    assert any("inv_freq" in name for name in expected)
    for rank in two:
        found = rank["f2 buffers"]
        assert found.keys() == expected.keys()
        for name, buffer in expected.items():
            assert torch.equal(found[name], buffer), name


def test_a_step_that_is_not_finite_on_one_rank_changes_no_state_on_any(two: list[dict[str, Any]]) -> None:
    for rank in two:
        found = rank["t2 skips"]
        assert found["report"]["skipped"] == 1 and found["report"]["steps"] == 0
        assert found["is_same"]
        assert found["schedules"][0] == found["schedules"][1] == {"steps": 1}
        assert found["versions"] == (1, 1)
        assert found["next"]["steps"] == 1 and found["next"]["skipped"] == 0


def test_vocabularies_of_these_models_are_as_the_meter_thinks() -> None:
    for module in (smollm(), model_of(SHORT_ROWS).source()):
        assert module.config.vocab_size == VOCAB != module.config.intermediate_size
