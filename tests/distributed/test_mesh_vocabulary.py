"""A head that is cut by tokens gives what a whole one gives, and whole rows of the vocabulary are nowhere."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.engines.forward import token_stats
from flowrl.engines.host_torch import TorchEngine, TorchHost
from flowrl.schema.ragged import Ragged
from tests.distributed import test_mesh_training as training
from tests.distributed.mesh_cases import job_of, metrics_of, rows_of, train
from tests.distributed.mesh_vocabulary import (
    HEADED,
    HEADS,
    SLICE,
    TOKENS,
    TOP,
    USES,
    VOCAB,
    WIDE,
    Head,
    whole_rows_job,
    wide_model,
)

WORK = {
    2: {"t2": ["heads", "edges", "models", "whole_rows", "sizes"]},
    4: {"t4": ["heads", "edges", "models", "sizes"], "f2t2": ["models", "no_tokens"]},
}

one_thread = training.one_thread


def made(world: int, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp(f"vocabulary{world}")
    return training.run(world, folder, WORK[world], worker="tests.distributed.mesh_vocabulary")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return made(2, tmp_path_factory)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return made(4, tmp_path_factory)


@pytest.fixture(params=["t2", "t4"])
def ranks(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    return request.param, request.getfixturevalue("two" if request.param == "t2" else "four")


Ranks = tuple[str, list[dict[str, Any]]]


def whole(case: Head, *, only: str = "") -> dict[str, Any]:
    """The same of a whole head: in fp64, by PyTorch's own softmax where it can."""
    head, hidden, targets, temperature = case.made()
    exact = case.dtype == torch.float32
    if exact:
        head, hidden = head.double(), hidden.double()
    hidden.requires_grad_()
    logits = head(hidden)[:, : case.vocab_size].to(torch.float64 if exact else torch.float32)
    if temperature is not None:
        logits = logits / temperature[:, None]
    log_p = logits.log_softmax(-1)
    if case.never is None:
        logprobs, entropy = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    else:
        logprobs, found = token_stats(logits, targets, with_entropy=True)
        assert found is not None
        entropy = found
    first, second = case.weights()
    total = (logprobs * first).sum() + ((entropy * second).sum() if case.with_entropy else 0)
    if only:
        total = {"logprobs": logprobs, "entropy": entropy}[only].sum()
    total.backward()
    top = log_p.topk(TOP, -1)
    return {
        "logprobs": logprobs,
        "entropy": entropy if case.with_entropy else None,
        "hidden": hidden.grad,
        "head": {key: param.grad for key, param in head.named_parameters()},
        "ids": top.indices,
        "nats": top.values,
        "all": log_p,
    }


def near(found: Tensor, expected: Tensor, *, coarse: bool = False, scale: float = 1.0) -> None:
    tolerance = 3e-2 if coarse else 1e-5
    torch.testing.assert_close(
        found.double(), expected.detach().double(), rtol=tolerance, atol=tolerance * scale, equal_nan=False
    )


@pytest.mark.parametrize("name", HEADS)
def test_a_cut_head_is_as_a_whole_one(ranks: Ranks, name: str) -> None:
    layout, all_found = ranks
    case, expected, coarse = HEADS[name], whole(HEADS[name]), HEADS[name].dtype == torch.bfloat16
    step = case.rows // len(all_found)
    for rank, every in enumerate(all_found):
        found = every[f"{layout} heads"][name]
        near(found["logprobs"], expected["logprobs"], coarse=coarse)
        assert (found["entropy"] is None) == (not case.with_entropy)
        if case.with_entropy:
            near(found["entropy"], expected["entropy"], coarse=coarse)
        near(found["hidden"], expected["hidden"], coarse=coarse)
        for key, gradient in expected["head"].items():
            mine = gradient[rank * step : (rank + 1) * step]
            near(found["head"][key], mine, coarse=coarse, scale=float(gradient.abs().max()) if coarse else 1.0)
        near(found["nats"], expected["nats"], coarse=coarse)
        if not coarse:
            assert torch.equal(found["ids"], expected["ids"])
    assert expected["hidden"].abs().max() > 0.1


@pytest.mark.parametrize("name", HEADS)
def test_ranks_have_the_same_to_the_bit(ranks: Ranks, name: str) -> None:
    layout, all_found = ranks
    first = all_found[0][f"{layout} heads"][name]
    for every in all_found[1:]:
        found = every[f"{layout} heads"][name]
        for key in ("logprobs", "entropy", "hidden", "ids", "nats"):
            assert first[key] is found[key] is None or torch.equal(found[key], first[key]), key


def test_edges(ranks: Ranks) -> None:
    layout, all_found = ranks
    case = Head()
    expected = {name: whole(case, only=name) for name in ("logprobs", "entropy")}
    for every in all_found:
        found = every[f"{layout} edges"]
        empty, of_none, of_head = found["none"]
        assert empty.shape == (0,) and of_none.shape[0] == 0 and of_head == 0
        near(found["logprobs"], expected["logprobs"]["hidden"])
        near(found["entropy"], expected["entropy"]["hidden"])
        near(found["frozen"], expected["logprobs"]["hidden"])
        for gradient in found["twice"]:  # what is kept stays as it is
            near(gradient, expected["logprobs"]["hidden"])
        assert f"out of bounds for dimension 0 with size {case.vocab_size - 2}" in found["id"]
        ids, nats = found["all"]
        everything = expected["logprobs"]["all"].sort(-1, descending=True)
        assert torch.equal(ids, everything.indices)
        near(nats, everything.values)
        assert all(one.isnan().all() for one in found["nan"])  # on every rank, though one has it


# --- models -----------------------------------------------------------------------------------------------------------


def host_of(name: str) -> TorchHost:
    host = TorchEngine().open("wide", wide_model(HEADED[name]), USES, seed=0)
    assert isinstance(host, TorchHost)
    return host


@functools.cache
def alone(name: str) -> dict[str, Any]:
    host = host_of(name)
    found = train(host, WIDE, steps=3)
    found["top"] = [one.values for one in host.top_logprobs(rows_of(WIDE, 50), TOP)]
    return found


@pytest.mark.parametrize("name", HEADED)
@pytest.mark.parametrize("layout", ["t2", "t4", "f2t2"])
@pytest.mark.parametrize("size", [None, SLICE])
def test_models_train_as_on_one_device(
    request: pytest.FixtureRequest, layout: str, name: str, size: int | None
) -> None:
    all_found = request.getfixturevalue("two" if layout == "t2" else "four")
    expected = alone(name)
    for every in all_found:
        found = every[f"{layout} models"][f"{name} {size}"]
        assert found["reports"] == all_found[0][f"{layout} models"][f"{name} {size}"]["reports"]  # to the bit
        training.assert_equal_reports(found["reports"], expected["reports"])
        training.assert_equal_states(found["state"], expected["state"])
        np.testing.assert_allclose(found["before"], expected["before"], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(found["after"], expected["after"], atol=1e-5, rtol=1e-5)
        np.testing.assert_array_equal(found["top"][0], expected["top"][0])
        np.testing.assert_allclose(found["top"][1], expected["top"][1], atol=1e-5)


def test_a_loss_that_reads_logits_gets_whole_rows(two: list[dict[str, Any]]) -> None:
    host = host_of("tied")
    reports = [metrics_of(host.update(whole_rows_job(seed))) for seed in range(2)]
    for every in two:
        found, weights = every["t2 whole_rows"]
        training.assert_equal_reports(found, reports)
        for name, array in host.state()["weights"].items():
            np.testing.assert_allclose(weights[name], array, atol=1e-5, err_msg=name)


def test_ranks_without_rows_take_part(four: list[dict[str, Any]]) -> None:
    host = host_of("untied")
    job = job_of(replace(WIDE, num_rows=1), 0)
    report = metrics_of(host.update(replace(job, mask=Ragged.like(np.ones_like(job.mask.values), job.mask))))
    for every in four:
        found, weights = every["f2t2 no_tokens"]
        training.assert_equal_reports([found], [report])
        for name, array in host.state()["weights"].items():
            np.testing.assert_allclose(weights[name], array, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("work", ["update", "logprobs", "top"])
def test_whole_rows_of_the_vocabulary_are_nowhere(ranks: Ranks, work: str) -> None:
    layout, all_found = ranks
    for every in all_found:
        once, sliced, gathered = (every[f"{layout} sizes"][f"{name} {work}"] for name in ("once", "slices", "whole"))
        tokens = once["tokens"]
        assert tokens > 4 * SLICE
        # what the meter sees where rows are gathered, so that it would see them here
        assert gathered["whole_rows"] == tokens and gathered["largest"] >= tokens * VOCAB
        assert once["whole_rows"] == sliced["whole_rows"] == 0
        assert once["part_rows"] == tokens and once["largest"] == tokens * VOCAB // len(all_found)
        assert sliced["part_rows"] == SLICE
        assert sliced["largest"] < tokens * VOCAB // len(all_found)


def test_heads_have_what_the_tests_are_about() -> None:
    assert {case.rows for case in HEADS.values()} == {40} and TOKENS % 5 and TOP < 10
