"""The benchmark of predictions: what is compared with what. No time is judged here."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import predict
from benchmarks.predict_worker import KINDS, Case, Job, Scored
from flowrl.mesh import Cluster

CLUSTER = replace(Cluster.named("2xH200"), calibrated_at="2026-01-31")
CASE = Case("tiny", predict.TINY, rows=2, sequence=64, steps=1)


@pytest.mark.parametrize("devices", [1, 2])
def test_terms_of_a_prediction_belong_together(devices: int) -> None:
    case = predict.cases(["0.5B"], tiny=False)[0]
    said = predict.predicted(case, CLUSTER, devices)
    assert said["forward_s"] + said["backward_s"] == pytest.approx(said["compute_s"])
    assert said["step_s"] >= said["compute_s"] + said["optimizer_s"]
    assert (said["communication_s"] > 0) is (devices > 1)
    assert said["state_bytes"] < said["allocated_bytes"] < said["device_bytes"]
    assert said["score_s"] < said["forward_s"]  # one micro-batch of two


def test_a_line_for_each_term_that_was_measured_with_its_verdict() -> None:
    said = {"step_s": 1.0, "score_s": 1.0, "state_bytes": 2.0**30, "device_bytes": 2.0**30}
    found = {"step_s": 1.1, "score_s": 2.0, "device_bytes": 2.0**31}
    rows = predict.lines(CASE, 2, said, found)
    assert [(row[2], row[-2], row[-1]) for row in rows] == [
        ("step", "0.91", ""), ("score", "0.50", "miss"), ("device", "0.50", "miss"),
    ]  # fmt: skip
    assert rows[0][:2] == ["tiny, 2 x 64 tokens", "2"]


def test_a_case_that_failed_says_why() -> None:
    (row,) = predict.lines(CASE, 1, {"step_s": 1.0}, {"error": "out of memory"})
    assert row[-1] == "out of memory"


def test_ratios_mark_what_is_too_far_away() -> None:
    one: dict[str, Any] = {"case": predict.asdict(CASE), "devices": 1}
    one |= {"predicted": {"step_s": 1.2, "device_bytes": 107.0}, "measured": {"step_s": 1.0, "device_bytes": 100.0}}
    last = predict.ratios([one]).splitlines()[-1]
    assert "(1.20)" in last and "1.07" in last and "(1.07)" not in last


def test_cases_are_published_shapes() -> None:
    names = [(case.name, case.tokens) for case in predict.cases(["0.5B", "7B"], tiny=False)]
    assert names == [("Qwen2.5-0.5B", 8192), ("Qwen2.5-0.5B", 65536), ("Qwen2.5-7B", 4096), ("Qwen2.5-7B", 8192)]


def test_a_job_survives_its_text() -> None:
    job = Job(0, 2, "folder", False, (CASE, replace(CASE, rows=4)))
    assert Job.from_json(job.to_json()) == job


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", "communication"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("pytorch_flash::flash_fwd_kernel", "attention"),
        ("multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
    ],
)
def test_kernels_have_kinds(name: str, kind: str) -> None:
    assert next(found for found, words in KINDS if any(word in name.lower() for word in words)) == kind


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU")
def test_two_processes_take_steps() -> None:
    (found,) = predict.measured([CASE], 2, is_gpu=False)
    assert "error" not in found, found
    assert {"forward_s", "backward_s", "optimizer_s", "step_s", "score_s", "communication_s"} <= set(found)


def test_the_loss_is_that_of_the_whole_model() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**predict.TINY), dtype=torch.float32)
    ids = torch.randint(512, (2, 64))
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        torch.testing.assert_close(Scored(model)(ids), whole)
