"""Tensor parallelism and stages: of trainers, forward passes and engines. By hand, and what must grow or shrink."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from flowrl.cost.collectives import Ring
from flowrl.cost.compute import forward_s
from flowrl.cost.generation import EngineConstants, Replica, generate
from flowrl.cost.memory import Stage, cache_pool_bytes, train_memory
from flowrl.cost.shapes import ModelShape
from flowrl.cost.train import TrainStep, can_split, forward_pass_s, train_step
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster, Measured, Mesh
from tests.null.cost.test_formulas import faster

A100 = Cluster.named("16xA100-80G")
SHAPE = ModelShape.of("Qwen2.5-7B")  # 28 layers and heads, 4 key-value heads
LLAMA = ModelShape.of("Meta-Llama-3-8B")  # 8 key-value heads
SIZES = [4096] * 64
degrees = st.sampled_from([1, 2, 4, 8])


# ------------------------------------------------------------------------------------------------------------ rings


def test_a_ring_of_the_same_place_in_each_group() -> None:
    ring = Ring.strided(A100, 0, ranks=8, step=2)
    assert (ring.ranks, ring.nodes, ring.fewest) == (8, 2, 4)
    assert ring.bus_bytes_s == pytest.approx(4 * 25e9 * 0.85)  # the other ring of the two uses the other four cards
    assert Ring.strided(A100, 0, ranks=4, step=2) == Ring(A100, 4)
    assert Ring.strided(A100, 0, ranks=2, step=8).bus_bytes_s == pytest.approx(25e9 * 0.85)
    for ranks in (1, 4, 8, 16):
        assert Ring.strided(A100, 0, ranks, 1) == Ring.of(A100, Mesh(0, ranks))


@pytest.mark.parametrize("has_table", [False, True])
def test_many_all_reduces_at_once(has_table: bool) -> None:
    table = Measured("all_reduce", ranks=4, nodes=1, sizes_bytes=(1e3, 1e8), times_s=(1e-5, 1e-2))
    ring = Ring(replace(A100, measured=(table,) if has_table else ()), 4)
    sizes = np.array([0.0, 1.0, 1e4, 1e9])
    assert ring.all_reduces_s(sizes).tolist() == pytest.approx([ring.all_reduce_s(size) for size in sizes])
    assert Ring(A100, 1).all_reduces_s(sizes).tolist() == [0, 0, 0, 0]


# --------------------------------------------------------------------------------------------------------- trainers


def test_a_tensor_parallel_step_by_hand() -> None:
    step = train_step(LLAMA, A100, Mesh(0, 8), SIZES, tokens=16_384, tensor_parallel=4, sequence_parallel=False)
    plain = train_step(LLAMA, A100, Mesh(0, 8), SIZES, tokens=4096)
    assert step.micro_batches == plain.micro_batches == 8  # two ranks with 16k each, or eight with 4k
    assert step.compute_s == plain.compute_s
    pair = Ring(A100, 2)  # devices 0 and 4 hold the same block
    gathers = 2 * pair.all_gather_s(2 * LLAMA.params() / 4) + pair.reduce_scatter_s(4 * LLAMA.params() / 4)
    assert step.communication_s == pytest.approx(8 * gathers)
    activations = 2 * 4096 * 16_384  # bf16, hidden, tokens of the group
    assert step.exchange_s == pytest.approx(8 * (2 * 32 * 3 + 2) * Ring(A100, 4).all_reduce_s(activations))
    assert step.optimizer_s == pytest.approx(plain.optimizer_s)  # N over all eight devices either way
    assert step.total_s == pytest.approx(
        step.compute_s + step.exchange_s + step.first_gather_s + step.optimizer_s
    )  # gathers hide behind products, exchanges do not
    kept = train_step(LLAMA, A100, Mesh(0, 8), SIZES, tokens=16_384, tensor_parallel=4, recompute=False)
    ring = Ring(A100, 4)
    both = ring.reduce_scatter_s(activations) + ring.all_gather_s(activations)
    assert kept.exchange_s == pytest.approx(8 * (2 * 32 * 2 + 2) * both)


@given(degrees, st.integers(1, 40), st.sampled_from([1024, 8192]), st.booleans(), st.floats(1.1, 10))
@settings(max_examples=50, deadline=None)
def test_a_step_of_any_degree(tp: int, count: int, tokens: int, sequence_parallel: bool, k: float) -> None:
    def step(cluster: Cluster, sizes: list[int], tokens: int) -> TrainStep:
        return train_step(LLAMA, cluster, cluster.whole, sizes, tokens=tokens * tp, tensor_parallel=tp,
                          sequence_parallel=sequence_parallel)  # fmt: skip

    sizes = [1024] * count
    one, more = step(A100, sizes, tokens), step(A100, [*sizes, 1024], tokens)
    assert step(faster(A100, k), sizes, tokens).total_s == pytest.approx(one.total_s / k)
    assert more.compute_s > one.compute_s
    assert more.overlapped_s / more.slowdown >= one.overlapped_s / one.slowdown * (1 - 1e-12)
    assert (one.exchange_s > 0) == (tp > 1)
    longest = max(one.compute_s, one.communication_s) + one.exchange_s
    assert one.overlapped_s == pytest.approx(one.slowdown * longest)
    wide = replace(A100, nvlink_bytes_s=A100.nvlink_bytes_s * k)
    assert step(wide, sizes, tokens).exchange_s <= one.exchange_s
    assert one.compute_s == pytest.approx(step(replace(A100, nodes=4), sizes, tokens).compute_s * 2)


def test_higher_degrees_gather_less_over_slow_links() -> None:
    slow = replace(A100, nic_bytes_s=2e9)
    steps = [train_step(LLAMA, slow, slow.whole, SIZES, tokens=4096 * tp, tensor_parallel=tp) for tp in (1, 2, 4, 8)]
    # as many micro-batches, and each device's card carries its part of the same ring
    assert {one.micro_batches for one in steps} == {4}
    assert all(a.exchange_s < b.exchange_s for a, b in pairwise(steps))
    assert all(a.communication_s > b.communication_s for a, b in pairwise(steps[1:]))
    assert steps[0].communication_s > steps[0].compute_s and steps[3].total_s < steps[0].total_s


def test_what_must_divide() -> None:
    assert can_split(LLAMA, 8) and not can_split(SHAPE, 8)
    assert not can_split(ModelShape.of("Qwen2.5-0.5B"), 4)  # 14 heads
    assert can_split(SHAPE, 4) and can_split(ModelShape.of("Qwen2.5-72B"), 8)
    moe = ModelShape.of("Qwen3-30B-A3B")  # experts of 768, 4 key-value heads
    assert can_split(moe, 4) and can_split(moe, 8, repeats_kv=True) and not can_split(moe, 8)
    odd = replace(moe, experts=replace(moe.experts, ffn=770))
    assert not can_split(odd, 4)
    for tp in (3, 8, 16):
        with pytest.raises(ConfigError, match="divide"):
            train_step(SHAPE, A100, A100.whole, SIZES, tokens=4096, tensor_parallel=tp)
    with pytest.raises(ConfigError, match="needs a layer"):
        train_step(SHAPE, replace(A100, nodes=8), Mesh(0, 64), SIZES, tokens=4096, pipeline=32)
    with pytest.raises(ConfigError, match="stays inside a node"):
        train_step(LLAMA, replace(A100, devices_per_node=4), Mesh(0, 8), SIZES, tokens=4096, tensor_parallel=8)


def test_stages_wait_while_the_pipeline_fills() -> None:
    steps = [
        train_step(SHAPE, A100, A100.whole, [4096] * 256, tokens=4096, pipeline=4, shards=shards) for shards in (4, 1)
    ]
    for step, shards in zip(steps, (4, 1), strict=True):
        assert step.micro_batches == 64
        assert step.bubble_s == pytest.approx(3 / 64 * step.compute_s)
        link = A100.across.time_s(2 * 3584 * 4096) if shards == 4 else A100.inside.time_s(2 * 3584 * 4096)
        assert step.send_s == pytest.approx(2 * (64 + 3) * link)
        gathers = 2.0 * SHAPE.params() / 4
        ring, across = Ring.strided(A100, 0, shards, 1), Ring.strided(A100, 0, 4 // shards, 4 * shards)
        reduce_s = ring.reduce_scatter_s(2 * gathers) + across.all_reduce_s(2 * gathers / shards)
        assert step.communication_s == pytest.approx(64 * (2 * ring.all_gather_s(gathers) + reduce_s))
        assert step.total_s > step.overlapped_s + step.bubble_s + step.send_s
    few, many = (train_step(SHAPE, A100, A100.whole, [4096] * count, tokens=4096, pipeline=4) for count in (16, 256))
    assert few.bubble_s / few.compute_s == pytest.approx(16 * many.bubble_s / many.compute_s)


@given(degrees, st.sampled_from([512, 4096, 20_000]), st.booleans())
@settings(deadline=None)
def test_memory_of_any_degree(tp: int, tokens: int, sequence_parallel: bool) -> None:
    """On the same eight devices, with the same tokens for a group: never more, and state stays as it is."""
    whole = train_memory(LLAMA, A100, shards=8, tokens=tokens)
    cut = train_memory(
        LLAMA, A100, shards=8 // tp, tokens=tokens, tensor_parallel=tp, sequence_parallel=sequence_parallel and tp > 1
    )
    assert cut.state_bytes == whole.state_bytes and cut.idle_bytes == whole.idle_bytes
    assert cut.gather_bytes == pytest.approx(whole.gather_bytes / tp)
    assert cut.gradient_bytes == pytest.approx(whole.gradient_bytes / tp)
    assert cut.logit_bytes == pytest.approx(whole.logit_bytes / tp)
    assert whole.activation_bytes / tp <= cut.activation_bytes <= whole.activation_bytes
    assert cut.total_bytes <= whole.total_bytes
    stage = train_memory(LLAMA, A100, shards=4, tokens=tokens, stage=Stage(0, 2, 8))
    assert stage.state_bytes == whole.state_bytes


def test_a_mixture_gathers_all_experts_of_a_layer() -> None:
    moe = ModelShape.of("Qwen3-30B-A3B")
    found = train_memory(moe, A100, shards=8, tokens=4096)
    experts = moe.expert_params() / moe.layers
    assert moe.layer_params() > experts > 0.9 * moe.layer_params()
    assert found.gather_bytes == 4 * moe.layer_params() + 2 * moe.root_params() - 2 * moe.hidden


# --------------------------------------------------------------------------------------------------- forward passes


@given(degrees, st.integers(1, 40), st.floats(1.1, 10))
@settings(deadline=None)
def test_a_forward_pass_of_any_degree(tp: int, count: int, k: float) -> None:
    sizes = [1024] * count

    def seconds(cluster: Cluster, tokens: int = 4096) -> float:
        return forward_pass_s(LLAMA, cluster, cluster.whole, sizes, tokens=tokens * tp, tensor_parallel=tp)

    assert seconds(faster(A100, k)) == pytest.approx(seconds(A100) / k)
    assert seconds(A100) > forward_s(LLAMA, A100, 16, sizes)
    assert seconds(A100, 8192) <= seconds(A100, 1024)


def test_a_forward_pass_by_hand() -> None:
    found = forward_pass_s(LLAMA, A100, Mesh(0, 8), SIZES, tokens=8192, tensor_parallel=2, sequence_parallel=False)
    ring, activations = Ring(A100, 4), 2 * 4096 * 8192
    exchanges = 8 * (2 * 32 + 1) * Ring(A100, 2).all_reduce_s(activations)
    first = ring.all_gather_s(LLAMA.root_params() + LLAMA.layer_params(0))
    assert found == pytest.approx(forward_s(LLAMA, A100, 8, SIZES) + exchanges + first)


# ---------------------------------------------------------------------------------------------------------- engines


def test_a_cycle_of_stages_by_hand() -> None:
    one, two = Replica(LLAMA, A100, 4), Replica(LLAMA, A100, 4, pipeline=2)
    # 64 sequences in two micro-batches: a cycle is a step of 32 with the whole model, a second overhead, and two sends
    sends = 2 * A100.inside.time_s(4 * 4096 * 32)
    extra = EngineConstants().step_overhead_s + sends
    assert two.decode_step_s(64, 1000) == pytest.approx(one.decode_step_s(32, 1000) + extra)
    assert two.decode_step_s(63, 1000) == two.decode_step_s(64, 1000)
    lone = two.decode_step_s(1, 1000)
    assert lone > one.decode_step_s(1, 1000)  # stages do not shorten the way of one token
    across = Replica(LLAMA, A100, 8, pipeline=2)
    assert across.decode_step_s(64, 0) - Replica(LLAMA, A100, 8).decode_step_s(32, 0) == pytest.approx(
        EngineConstants().step_overhead_s + 2 * A100.across.time_s(4 * 4096 * 32)
    )


def test_reading_prompts_in_stages() -> None:
    one, two = Replica(LLAMA, A100, 4), Replica(LLAMA, A100, 4, pipeline=2)
    sizes = [1024] * 64  # 8 times 8,192 tokens
    sends = 2 * A100.inside.time_s(4 * 4096 * 8192)
    assert two.prefill_s(sizes) == pytest.approx(one.prefill_s(sizes) / 2 * (1 + 1 / 8) + sends)
    assert two.prefill_s([16]) > one.prefill_s([16])  # at once through all stages: nothing is gained


@given(st.sampled_from([1, 2, 4]), st.integers(1, 300), st.integers(0, 8000), st.floats(1.1, 10))
@settings(deadline=None)
def test_stages_of_an_engine(stages: int, batch: int, context: int, k: float) -> None:
    replica = Replica(LLAMA, A100, 4, pipeline=stages)
    step = replica.decode_step_s(batch, context)
    assert step <= replica.decode_step_s(batch + 1, context) and step <= replica.decode_step_s(batch, context + 1)
    calm = EngineConstants(step_overhead_s=EngineConstants().step_overhead_s / k)
    quick = Replica(LLAMA, faster(A100, k), 4, calm, stages)
    assert quick.decode_step_s(batch, context) == pytest.approx(step / k)
    assert quick.prefill_s([100] * batch) == pytest.approx(replica.prefill_s([100] * batch) / k)
    found = generate(replica, [10] * batch, [1 + row % 7 for row in range(batch)])
    assert found.decode_s > 0 and found.steps == min(7, batch)


def test_stages_hold_more() -> None:
    big = ModelShape.of("DeepSeek-V3")
    h200 = Cluster.named("32xH200")
    whole = [Replica(big, h200, 8, pipeline=stages).capacity_tokens() for stages in (1, 2, 4)]
    assert whole[0] == 0 and 0 < whole[1] < whole[2] / 2
    pool = cache_pool_bytes(LLAMA, A100, tensor_parallel=2, pipeline=2)
    assert pool == pytest.approx(0.9 * A100.device.memory_bytes - 2 * LLAMA.params() / 4 - 3 * 2**30)
    assert Replica(LLAMA, A100, 2, pipeline=2).capacity_tokens() == pytest.approx(4 * pool / LLAMA.kv_token_bytes())
    half = Replica(LLAMA, A100, 1, EngineConstants(weight_bytes=1)).capacity_tokens()
    more = half - Replica(LLAMA, A100, 1).capacity_tokens()
    assert more == pytest.approx(LLAMA.params() / LLAMA.kv_token_bytes())
    with pytest.raises(ConfigError, match="a layer for each stage"):
        Replica(ModelShape.of("Llama-3.2-1B"), replace(A100, nodes=4), 1, pipeline=17)
