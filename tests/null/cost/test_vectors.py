"""Worked numbers of the cost model, reproduced to the precision they are given in.

The vectors were computed by a separate prototype. Those of weights that move between layouts are tested with that arithmetic.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.cost.collectives import Ring
from flowrl.cost.compute import forward_s
from flowrl.cost.flops import forward_flops, train_flops
from flowrl.cost.generation import Replica, generate, waves_s
from flowrl.cost.memory import activation_token_bytes, cache_capacity_tokens, train_memory
from flowrl.cost.offload import ADAM_8BIT, ADAM_FP32, ADAM_MASTER, Offload, OptimizerState, adam_s, state_cost
from flowrl.cost.shapes import ModelShape
from flowrl.cost.train import train_step
from flowrl.mesh import Cluster

VECTORS = json.loads((Path(__file__).parent / "data" / "vectors.json").read_text())
NAMES = {
    "Llama-3-8B": "Meta-Llama-3-8B",
    "Llama-2-70B": "Llama-2-70b-hf",
}
A100 = Cluster.named("8xA100-80G")
H100 = Cluster.named("16xH100-80G")
GIB = 2**30


def shape_of(name: str) -> ModelShape:
    return ModelShape.of(NAMES.get(name, name))


def cases(name: str) -> list[Any]:
    found = [case for case in VECTORS["cases"] if case["name"] == name]
    assert found
    return [pytest.param(case, id="-".join(str(case[key]) for key in list(case)[2:])) for case in found]


def close(value: float) -> Any:
    return pytest.approx(value, rel=1e-12, abs=1e-15)


def test_every_vector_is_used_here_or_with_resharding() -> None:
    used = {"train_mem", "kv_capacity_tokens", "decode_step_s", "t_allgather_1GB", "adam_gpu_s", "stream_opt_s"}
    assert {case["name"] for case in VECTORS["cases"]} == used | {"reshard_recv_bytes_max_rank"}


@pytest.mark.parametrize("name", VECTORS["models"])
def test_models(name: str) -> None:
    expected, shape = VECTORS["models"][name], shape_of(name)
    assert shape.params() == expected["N"]
    assert shape.layer_params() == expected["layer"]
    assert shape.matmul_params() == expected["N_mm"]
    assert shape.kv_token_bytes() == expected["kv_bytes_per_token_bf16"]
    assert activation_token_bytes(shape) == expected["act_bytes_per_token_layer_hf_eager"]
    assert forward_flops(shape, [1024]).total == expected["fwd_flops_1x1024"]
    assert train_flops(shape, [1024], recompute=False) == expected["train_flops_noAC_1x1024"]


def state_of(offload: Offload) -> OptimizerState:
    """The vectors keep bf16 gradients where the optimizer is elsewhere: that is a master copy's state, not Adam's in fp32."""
    return ADAM_MASTER if offload in (Offload.CPU_OPTIMIZER, Offload.STREAM_OPTIMIZER) else ADAM_FP32


@pytest.mark.parametrize("case", cases("train_mem"))
def test_training_memory(case: dict[str, Any]) -> None:
    kind = Offload(case["offload"])
    found = train_memory(
        shape_of(case["model"]), A100, shards=case["S"], tokens=case["T_mb"], offload=kind, state=state_of(kind)
    )
    expected = case["value"]
    assert found.state_bytes == close(expected["state"])
    assert found.gather_bytes + found.gradient_bytes == close(expected["gather"])
    assert found.activation_bytes == close(expected["act"])
    assert found.logit_bytes == close(expected["logits"])
    assert found.total_bytes == close(expected["total"])
    assert found.host_bytes == close(expected["host"])


@pytest.mark.parametrize("case", cases("kv_capacity_tokens"))
def test_cache_capacity(case: dict[str, Any]) -> None:
    cluster = Cluster.named(f"8x{case['gpu']}")
    found = cache_capacity_tokens(shape_of(case["model"]), cluster, utilization=case["gmu"], tensor_parallel=case["tp"])
    assert found == close(case["value"])


@pytest.mark.parametrize("case", cases("decode_step_s"))
def test_decode_step(case: dict[str, Any]) -> None:
    replica = Replica(shape_of(case["model"]), Cluster.named(f"8x{case['gpu']}"), case["tp"])
    assert replica.decode_step_s(case["b"], case["ctx"]) == close(case["value"])


@pytest.mark.parametrize("case", cases("t_allgather_1GB"))
def test_all_gather(case: dict[str, Any]) -> None:
    assert Ring.neighbours(Cluster.named("16xA100"), case["n"]).all_gather_s(1e9) == close(case["value"])


def test_optimizer() -> None:
    (adam,) = (case for case in VECTORS["cases"] if case["name"] == "adam_gpu_s")
    assert adam_s(shape_of(adam["model"]).params() / adam["S"], A100) == close(adam["value"])
    (stream,) = (case for case in VECTORS["cases"] if case["name"] == "stream_opt_s")
    shape = shape_of(stream["model"])
    cost = state_cost(shape, A100, shards=stream["S"], offload=Offload.STREAM_OPTIMIZER)
    assert cost.optimizer_s - adam_s(shape.params() / stream["S"], A100) == close(stream["value"])


# ------------------------------------------------------------------------------------------------- worked examples


def test_llama_8b_on_eight_a100() -> None:
    shape, lengths = shape_of("Llama-3-8B"), [1536] * 1024
    step = train_step(shape, A100, A100.whole, lengths, tokens=8192)
    assert step.micro_batches == 24
    assert step.compute_s == pytest.approx(97.1, abs=0.05)
    assert step.communication_s == pytest.approx(5.6, abs=0.05)
    assert step.total_s == pytest.approx(step.compute_s + step.first_gather_s + step.optimizer_s)  # hidden
    assert forward_s(shape, A100, 8, lengths) == pytest.approx(19.4, abs=0.05)
    one, two = Replica(shape, A100, 1), Replica(shape, A100, 2)
    assert 1024 * one.decode_step_s(128, 1024) == pytest.approx(24.6, abs=0.05)
    assert one.prefill_s([512] * 128) == pytest.approx(6.4, abs=0.05)
    assert 1024 * two.decode_step_s(256, 1024) + two.prefill_s([512] * 256) == pytest.approx(27.5, abs=0.05)


@pytest.mark.parametrize(("tp", "slots", "seconds", "used"), [(4, 171, 180.7, 0.75), (8, 392, 160.4, 0.65)])
def test_qwen_32b_samples_equal_lengths(tp: int, slots: int, seconds: float, used: float) -> None:
    replica = Replica(shape_of("Qwen2.5-32B"), H100, tp)
    assert replica.max_batch(1024 + 4096) == slots
    found = generate(replica, [1024] * 1024, [4096] * 1024, replicas=16 // tp)
    assert found.decode_s == pytest.approx(seconds, abs=0.05)
    assert found.slot_utilization == pytest.approx(used, abs=0.005)


def test_qwen_32b_in_parts_of_waves_and_training() -> None:
    shape = shape_of("Qwen2.5-32B")
    assert waves_s(Replica(shape, H100, 4), 1024, 4096, 256, max_batch=171) == pytest.approx(159, abs=0.5)
    step = train_step(shape, H100, H100.whole, [5120] * 1024, tokens=10_240)
    assert step.compute_s == pytest.approx(223, abs=0.5)
    assert step.communication_s == pytest.approx(23, abs=0.5)
    parked = state_cost(shape, H100, shards=16, nodes=2, offload=Offload.PARK)
    assert parked.move_s == pytest.approx(1.2, abs=0.05)


def test_llama_70b_fits_eight_a100_only_with_offload() -> None:
    shape = shape_of("Llama-2-70B")
    memory = {
        kind: train_memory(shape, A100, shards=8, tokens=4096, offload=kind, state=state_of(kind)) for kind in Offload
    }
    limit = A100.device.memory_bytes
    assert memory[Offload.NONE].total_bytes > limit
    assert memory[Offload.PARK].total_bytes == memory[Offload.NONE].total_bytes  # it is there while training
    for kind, total in ((Offload.CPU_OPTIMIZER, 52.4), (Offload.STREAM_OPTIMIZER, 54.5), (Offload.STREAM_ALL, 18.7)):
        assert memory[kind].total_bytes / GIB == pytest.approx(total, abs=0.05)
    same_numerics = train_memory(shape, A100, shards=8, tokens=4096, offload=Offload.STREAM_OPTIMIZER)
    assert same_numerics.total_bytes / GIB == pytest.approx(54.5 + 1.05 * 2 * shape.params() / 8 / GIB, abs=0.05)
    assert same_numerics.total_bytes < limit  # fp32 gradients fit too
    assert memory[Offload.CPU_OPTIMIZER].host_bytes / GIB == pytest.approx(771, abs=0.5)
    steps = {kind: train_step(shape, A100, A100.whole, [1024] * 256, tokens=4096, offload=kind) for kind in Offload}
    assert steps[Offload.CPU_OPTIMIZER].optimizer_s == pytest.approx(38.6, abs=0.05)
    assert steps[Offload.STREAM_OPTIMIZER].optimizer_s == pytest.approx(8.4, abs=0.05)
    assert steps[Offload.STREAM_ALL].optimizer_s == pytest.approx(34.5, abs=0.05)
    assert steps[Offload.STREAM_ALL].to_device_s == pytest.approx(44, abs=0.5)
    small = state_cost(shape, A100, shards=8, offload=Offload.CPU_OPTIMIZER, state=ADAM_8BIT)
    assert small.host_bytes / GIB == pytest.approx(385, abs=0.5)
    lora = train_memory(shape.with_lora(16), A100, shards=8, tokens=4096)
    assert lora.state_bytes / GIB == pytest.approx(16.4, abs=0.1)
    assert lora.total_bytes < limit
