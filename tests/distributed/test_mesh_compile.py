"""Compiled layers on real ranks (gloo): they run, and the numbers are those of one device that compiles nothing."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flowrl.engines.host_torch import TorchEngine
from tests.distributed import test_mesh_training as training
from tests.distributed.mesh_cases import ADAPTED, CASES, Case, model_of, train, uses_of

HAS_PEFT = importlib.util.find_spec("peft") is not None
STEPS, LAYERS = 3, 2
pytestmark = pytest.mark.slow


one_thread = training.one_thread


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    work = {"f2": ["compiled", *(["compiled_adapters"] if HAS_PEFT else [])], "t2": ["compiled"]}
    return training.run(2, tmp_path_factory.mktemp("compiled"), work)


def assert_as_uncompiled(found: dict[str, Any], case: Case) -> None:
    expected = train(TorchEngine().open("alone", model_of(case), uses_of(case), seed=0), case, steps=STEPS)
    training.assert_equal_reports(found["reports"], expected["reports"])
    for key in ("before", "after"):
        np.testing.assert_allclose(found[key], expected[key], atol=1e-5, rtol=1e-5)
    moved = 0.0
    start = TorchEngine().open("start", model_of(case), uses_of(case), seed=0).state()["weights"]
    for name, array in expected["state"]["weights"].items():
        np.testing.assert_allclose(found["state"]["weights"][name], array, atol=1e-5, rtol=0, err_msg=name)
        moved = max(moved, float(np.abs(array - start[name]).max()))
    assert moved > 1e-3


@pytest.mark.parametrize("layout", ["f2", "t2"])
def test_compiled_layers_train_as_one_device(two: list[dict[str, Any]], layout: str) -> None:
    for rank in two:
        for name, found in rank[f"{layout} compiled"].items():
            assert_as_uncompiled(found, CASES[name])
            assert found["graphs"] >= 1, name
            assert found["calls"] >= STEPS * LAYERS, name  # each layer in each step, and more to score


@pytest.mark.skipif(not HAS_PEFT, reason="adapters come from peft, which is not installed")
def test_adapters_train_compiled(two: list[dict[str, Any]]) -> None:
    for rank in two:
        found = rank["f2 compiled_adapters"]
        assert found["calls"] >= STEPS * LAYERS
        assert_as_uncompiled(found, replace(ADAPTED, model={}))
