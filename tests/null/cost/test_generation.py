"""Sampling: the event-driven count equals a step-by-step one, and what lengths, slots and experts change."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from flowrl.cost.generation import EngineConstants, Replica, generate, waves_s, weights_read
from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster

A100 = Cluster.named("8xA100-80G")
REPLICA = Replica(ModelShape.of("Qwen2.5-0.5B"), A100)
MOE = ModelShape.of("Qwen3-30B-A3B")


def step_by_step(replica: Replica, prompts: list[int], responses: list[int], slots: int) -> tuple[float, int]:
    """Seconds and steps, one token of each running sequence at a time; contexts are taken in the middle of a step."""
    waiting = list(zip(prompts, responses, strict=True))
    running: list[list[float]] = []
    seconds, steps = 0.0, 0
    while waiting or running:
        while waiting and len(running) < slots:
            prompt, response = waiting.pop(0)
            running.append([prompt, response])
        context = sum(one[0] for one in running) / len(running) + 0.5
        seconds += replica.decode_step_s(len(running), context)
        steps += 1
        running = [[context + 1, left - 1] for context, left in running if left > 1]
    return seconds, steps


batches = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), min_size=1, max_size=25)


@given(batches, st.integers(1, 8))
@settings(max_examples=60)
def test_events_count_what_single_steps_count(batch: list[tuple[int, int]], slots: int) -> None:
    prompts, responses = [one[0] for one in batch], [one[1] for one in batch]
    found = generate(REPLICA, prompts, responses, max_batch=slots)
    seconds, steps = step_by_step(REPLICA, prompts, responses, slots)
    assert found.steps == steps
    assert found.decode_s == pytest.approx(seconds)
    assert found.slot_utilization == pytest.approx(sum(responses) / (slots * steps))
    assert max(found.finish_s) == found.decode_s and min(found.finish_s) > 0


@given(batches, st.integers(1, 4))
@settings(max_examples=40)
def test_replicas_share_the_batch(batch: list[tuple[int, int]], replicas: int) -> None:
    prompts, responses = [one[0] for one in batch], [one[1] for one in batch]
    found = generate(REPLICA, prompts, responses, replicas=replicas, max_batch=4)
    alone = [
        generate(REPLICA, prompts[first::replicas], responses[first::replicas], max_batch=4)
        for first in range(min(replicas, len(prompts)))
    ]
    assert found.decode_s == max(one.decode_s for one in alone)
    assert found.steps == max(one.steps for one in alone)
    assert found.prefill_s == max(one.prefill_s for one in alone)
    assert found.finish_s[0] == alone[0].finish_s[0]


@given(batches)
@settings(max_examples=40)
def test_with_a_slot_for_each_the_order_does_not_matter(batch: list[tuple[int, int]]) -> None:
    ordered = sorted(batch)
    one, two = (
        generate(REPLICA, [row[0] for row in rows], [row[1] for row in rows], max_batch=len(batch))
        for rows in (batch, ordered)
    )
    assert one.steps == two.steps == max(row[1] for row in batch)
    assert one.decode_s == pytest.approx(two.decode_s)


@given(st.integers(1, 512), st.floats(0, 8000), st.sampled_from([1, 2, 4, 8]))
def test_a_step_grows_with_batch_and_context(batch: int, context: float, tp: int) -> None:
    for shape in (MOE, ModelShape.of("Qwen2.5-7B"), ModelShape.of("gemma-3-1b-pt"), ModelShape.of("DeepSeek-V2-Lite")):
        replica = Replica(shape, A100, tp)
        step = replica.decode_step_s(batch, context)
        assert EngineConstants().step_overhead_s < step <= replica.decode_step_s(batch, context + 100)
        assert step <= replica.decode_step_s(2 * batch, context) < 2 * step
    assert REPLICA.decode_step_s(0, 100) == 0


def test_a_window_ends_the_growth_of_a_step() -> None:
    shape = ModelShape.of("gemma-3-1b-pt")  # 22 of 26 layers look back 512 tokens
    assert len(shape.windowed_layers) == 22
    full = Replica(replace(shape, window=None, windowed_layers=()), A100)
    windowed = Replica(shape, A100)
    assert windowed.decode_step_s(64, 500) == full.decode_step_s(64, 500)
    grown = windowed.decode_step_s(64, 9512) - windowed.decode_step_s(64, 512)
    assert grown == pytest.approx(4 / 26 * (full.decode_step_s(64, 9512) - full.decode_step_s(64, 512)))


def test_a_spread_of_lengths_costs_time_at_the_same_mean() -> None:
    replica = Replica(ModelShape.of("Qwen2.5-32B"), Cluster.named("16xH100"), 4)
    draw = random.Random(0)
    raw = [draw.lognormvariate(0, 0.5) for _ in range(1024)]
    spread = [max(1, min(16_384, round(4096 * value * 1024 / sum(raw)))) for value in raw]
    assert sum(spread) / 1024 == pytest.approx(4096, rel=0.01)
    equal = generate(replica, [1024] * 1024, [4096] * 1024, replicas=4)
    uneven = generate(replica, [1024] * 1024, spread, replicas=4)
    assert 1.4 < uneven.decode_s / equal.decode_s < 2.2
    assert uneven.slot_utilization < 0.5 < equal.slot_utilization


def test_parts_of_waves_are_a_lower_estimate() -> None:
    for sequences in (10, 64, 100, 128, 200):
        closed = waves_s(REPLICA, 100, 50, sequences, max_batch=64)
        counted = generate(REPLICA, [100] * sequences, [50] * sequences, max_batch=64).decode_s
        assert closed <= counted * (1 + 1e-12)
        if sequences in (10, 64, 128):
            assert closed == pytest.approx(counted)


def test_few_tokens_read_few_experts() -> None:
    assert weights_read(MOE, 1) == pytest.approx(MOE.matmul_params())
    everything = MOE.params() - MOE.embedding_params()
    assert MOE.matmul_params() < weights_read(MOE, 8) < weights_read(MOE, 64) < everything
    assert weights_read(MOE, 10_000) == pytest.approx(everything)
    dense = ModelShape.of("Qwen2.5-7B")
    assert weights_read(dense, 1) == weights_read(dense, 100) == dense.matmul_params()


def test_a_smaller_cache_element_holds_more() -> None:
    shape = ModelShape.of("Qwen2.5-7B")
    full, half = (Replica(shape, A100, 1, EngineConstants(cache_bytes=size)) for size in (2, 1))
    assert half.capacity_tokens() == 2 * full.capacity_tokens()
    assert half.decode_step_s(64, 8000) < full.decode_step_s(64, 8000)
    assert half.max_batch(1000) == min(1024, int(half.capacity_tokens() // 1000))


def test_what_does_not_fit_is_said() -> None:
    big = Replica(ModelShape.of("Llama-2-70b-hf"), A100)
    with pytest.raises(ConfigError, match="holds 0 tokens, a sequence has 1024; use more tensor parallelism"):
        generate(big, [512], [512])
    with pytest.raises(ConfigError, match="1 to 8 devices"):
        replace(big, tensor_parallel=16)
    with pytest.raises(ConfigError, match="at least one slot"):
        generate(REPLICA, [1], [1], max_batch=0)
    for prompts, responses in (([], []), ([1], []), ([1], [0])):
        with pytest.raises(ConfigError, match="at least one token"):
            generate(REPLICA, prompts, responses)
