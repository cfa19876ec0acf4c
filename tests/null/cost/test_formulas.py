"""Laws the formulas keep whatever the numbers: growth, sums, limits, and scaling of units."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from flowrl.cost.collectives import Ring
from flowrl.cost.compute import forward_s
from flowrl.cost.flops import forward_flops, train_flops
from flowrl.cost.memory import Stage, activation_token_bytes, cache_capacity_tokens, logit_bytes, train_memory
from flowrl.cost.offload import (
    ADAM_8BIT,
    ADAM_BF16,
    ADAM_FP32,
    ADAM_MASTER,
    Offload,
    OptimizerState,
    megatron_state_bytes,
    state_cost,
)
from flowrl.cost.shapes import ModelShape
from flowrl.cost.train import TrainConstants, train_step
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster, Measured, Mesh

A100 = Cluster.named("16xA100-80G")
SMALL, MOE = ModelShape.of("Qwen2.5-0.5B"), ModelShape.of("Qwen3-30B-A3B")
WINDOWED = ModelShape.of("gemma-3-1b-pt")
BASES = [SMALL, MOE, WINDOWED, ModelShape.of("DeepSeek-V2-Lite"), SMALL.with_head("value"), SMALL.with_lora(8)]
lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=20)
bases = st.sampled_from(BASES)
states = st.sampled_from([ADAM_FP32, ADAM_MASTER, ADAM_BF16, ADAM_8BIT])


def faster(cluster: Cluster, k: float) -> Cluster:
    """The same cluster with every rate k times as high and every start k times as short."""
    device = replace(
        cluster.device, peak_flops=cluster.device.peak_flops * k, hbm_bytes_s=cluster.device.hbm_bytes_s * k
    )
    host = replace(
        cluster.host,
        pcie_bytes_s=cluster.host.pcie_bytes_s * k,
        cpu_adam_params_s=cluster.host.cpu_adam_params_s * k,
    )
    return replace(
        cluster,
        device=device,
        host=host,
        nvlink_bytes_s=cluster.nvlink_bytes_s * k,
        nic_bytes_s=cluster.nic_bytes_s * k,
        alpha_s=cluster.alpha_s / k,
    )


# ------------------------------------------------------------------------------------------------------------ FLOPs


@given(bases, lengths, lengths)
def test_work_adds_up_over_sequences(shape: ModelShape, first: list[int], second: list[int]) -> None:
    both = forward_flops(shape, first + second).total
    assert both == pytest.approx(forward_flops(shape, first).total + forward_flops(shape, second).total)
    assert train_flops(shape, first + second) > train_flops(shape, first)


@given(bases, lengths)
def test_recomputation_costs_one_forward_pass(shape: ModelShape, sizes: list[int]) -> None:
    forward = forward_flops(shape, sizes).total
    kept = train_flops(shape, sizes, recompute=False)
    assert train_flops(shape, sizes) - kept == pytest.approx(forward)
    if shape.lora is None:
        assert kept == pytest.approx(3 * forward)
    else:
        assert 2 * forward < kept < 3 * forward


@given(st.integers(1, 3000))
def test_a_window_saves_work_only_beyond_itself(length: int) -> None:
    full = replace(WINDOWED, window=None, windowed_layers=())
    assert WINDOWED.window == 512
    with_window, without = forward_flops(WINDOWED, [length]), forward_flops(full, [length])
    assert with_window.matmul == without.matmul
    if length <= 512:
        assert with_window.attention == without.attention
    else:
        assert with_window.attention < without.attention
        pairs = sum(min(token, 512) for token in range(1, length + 1))
        windowed = with_window.attention - without.attention * (26 - len(WINDOWED.windowed_layers)) / 26
        exact = 4 * WINDOWED.heads * WINDOWED.head_dim * len(WINDOWED.windowed_layers) * pairs
        assert windowed == pytest.approx(exact, rel=0.003)  # the diagonal is counted by halves


# ----------------------------------------------------------------------------------------------------- collectives


@given(st.integers(2, 16), st.floats(1, 1e12), st.floats(1.1, 10))
def test_collectives_grow_with_size_and_scale_with_rates(ranks: int, size: float, k: float) -> None:
    ring = Ring.neighbours(A100, ranks)
    quick = Ring.neighbours(faster(A100, k), ranks)
    for name in ("all_gather_s", "reduce_scatter_s", "all_reduce_s", "broadcast_s", "all_to_all_s"):
        seconds = getattr(ring, name)(size)
        assert 0 < seconds < getattr(ring, name)(size * k)
        assert getattr(quick, name)(size) == pytest.approx(seconds / k)
        assert getattr(Ring(A100, 1), name)(size) == 0
        assert getattr(ring, name)(0) == 0


def test_large_messages_reach_the_bus() -> None:
    for ranks in (2, 8, 16):
        ring, size = Ring.neighbours(A100, ranks), 1e15
        part = (ranks - 1) / ranks
        assert ring.all_gather_s(size) == pytest.approx(part * size / ring.bus_bytes_s, rel=1e-6)
        assert ring.all_reduce_s(size) == pytest.approx(2 * ring.all_gather_s(size), rel=1e-6)
        assert ring.broadcast_s(size) == pytest.approx(size / ring.bus_bytes_s, rel=1e-6)


def test_the_bus_over_nodes_has_a_ring_for_each_card() -> None:
    assert Ring.neighbours(A100, 8).bus_bytes_s == 240e9
    assert Ring.neighbours(A100, 16).bus_bytes_s == pytest.approx(8 * 25e9 * 0.85)
    assert Ring(A100, ranks=2, nodes=2).bus_bytes_s == pytest.approx(25e9 * 0.85)
    uneven = Ring.of(A100, Mesh(6, 6))
    assert (uneven.nodes, uneven.fewest) == (2, 2)
    for mesh in (Mesh(0, 3), Mesh(4, 8), Mesh(0, 16), Mesh(6, 6)):
        assert Ring.of(A100, mesh).bus_bytes_s == A100.bus_bytes_s(mesh)


def test_a_measured_time_goes_before_the_formula() -> None:
    table = Measured("all_gather", ranks=8, nodes=1, sizes_bytes=(1e6, 1e8), times_s=(1e-3, 1e-2))
    ring = Ring.neighbours(replace(A100, measured=(table,)), 8)
    assert ring.all_gather_s(1e7) == pytest.approx(10**-2.5)
    assert ring.all_reduce_s(1e7) == Ring.neighbours(A100, 8).all_reduce_s(1e7)
    with pytest.raises(ConfigError, match="a rank on each of its nodes"):
        Ring(A100, ranks=1, nodes=2)


def test_starts_and_cards_by_hand() -> None:
    two_nodes = Ring.neighbours(A100, 16)
    assert two_nodes.broadcast_s(1) == pytest.approx(16 * 8e-6, rel=1e-6)
    assert two_nodes.all_to_all_s(1e9) == pytest.approx(8 / 16 * 1e9 / (25e9 * 0.85) + 8e-6)
    assert Ring.neighbours(A100, 8).all_to_all_s(1e9) == pytest.approx(7 / 8 * 1e9 / 240e9 + 8e-6)


# --------------------------------------------------------------------------------------------------------- offload


@given(bases, st.integers(1, 64), states)
def test_state_is_conserved(shape: ModelShape, shards: int, state: OptimizerState) -> None:
    none, park, everything, cpu, stream = (
        state_cost(shape, A100, shards=shards, offload=kind, state=state) for kind in Offload
    )
    assert park.train_bytes == none.train_bytes == none.idle_bytes
    assert park.idle_bytes == everything.train_bytes == everything.idle_bytes == none.host_bytes == 0
    assert park.host_bytes == everything.host_bytes == pytest.approx(shards * none.train_bytes)
    # Adam in fp32 has no bf16 weights of its own: with the optimizer elsewhere they are a copy besides
    copy_bytes = 2 * shape.trainable_params() if state is ADAM_FP32 else 0
    assert shards * cpu.train_bytes + cpu.host_bytes == pytest.approx(shards * none.train_bytes + copy_bytes)
    assert cpu.host_bytes == stream.host_bytes == state.optimizer_bytes * shape.trainable_params()
    assert stream.train_bytes - cpu.train_bytes == pytest.approx(2 * 2**30)
    assert cpu.idle_bytes < cpu.train_bytes
    assert stream.optimizer_s > none.optimizer_s


@given(st.floats(1.1, 10))
def test_copies_scale_with_their_link(k: float) -> None:
    wide = replace(A100, host=replace(A100.host, pcie_bytes_s=A100.host.pcie_bytes_s * k))
    for kind in Offload:
        slow = state_cost(SMALL, A100, shards=8, offload=kind)
        quick = state_cost(SMALL, wide, shards=8, offload=kind)
        assert quick.move_s == pytest.approx(slow.move_s / k)
        assert quick.to_device_s == pytest.approx(slow.to_device_s / k)
        assert quick.to_host_s == pytest.approx(slow.to_host_s / k)
        assert quick.optimizer_s <= slow.optimizer_s


def test_parking_the_rest_leaves_nothing_behind() -> None:
    params = SMALL.params()
    for kind in (Offload.CPU_OPTIMIZER, Offload.STREAM_OPTIMIZER):
        plain = state_cost(SMALL, A100, shards=8, offload=kind)
        parked = state_cost(SMALL, A100, shards=8, offload=kind, park_weights=True)
        assert (parked.idle_bytes, parked.train_bytes) == (0, plain.train_bytes)
        assert parked.host_bytes == plain.host_bytes + 2 * params
        assert parked.move_s == pytest.approx(2 * 2 * params / 8 / 12.5e9)
    with pytest.raises(ConfigError, match="park_weights goes with offload 'opt' or 'sopt'"):
        state_cost(SMALL, A100, shards=8, park_weights=True)
    with pytest.raises(ConfigError, match="at least one shard"):
        state_cost(SMALL, A100, shards=0)


def test_streamed_copies_by_hand() -> None:
    params = SMALL.params()
    full = state_cost(SMALL, A100, shards=8, offload=Offload.STREAM_ALL)
    assert full.to_device_s == pytest.approx(8 * params / 8 / 12.5e9)
    assert full.to_host_s == pytest.approx(4 * params / 8 / 12.5e9)
    adapted = SMALL.with_lora(8)
    lora = state_cost(adapted, A100, shards=8, offload=Offload.STREAM_ALL)
    trained = adapted.lora_params()
    assert lora.to_device_s == pytest.approx(2 * (2 * params + 4 * trained) / 8 / 12.5e9)
    assert lora.host_bytes == 2 * params + 16 * trained


def test_the_cpu_rate_is_per_node() -> None:
    one = state_cost(SMALL, A100, shards=16, offload=Offload.STREAM_ALL)
    two = state_cost(SMALL, A100, shards=16, nodes=2, offload=Offload.STREAM_ALL)
    assert one.optimizer_s == 2 * two.optimizer_s == SMALL.params() / 2e9


def test_megatron_cuts_only_the_optimizer_over_replicas() -> None:
    assert megatron_state_bytes(1e9, data=1) == 18e9
    assert megatron_state_bytes(1e9, data=4, tensor=2, pipeline=2) == 9e9 / 4
    assert megatron_state_bytes(1e9, data=10**9) == pytest.approx(6e9)


# ---------------------------------------------------------------------------------------------------------- memory


@given(bases, st.integers(1, 32), st.integers(1, 20_000), st.sampled_from(list(Offload)), st.booleans())
@settings(max_examples=60)
def test_memory_grows_with_tokens_and_shrinks_with_shards(
    shape: ModelShape, shards: int, tokens: int, offload: Offload, recompute: bool
) -> None:
    def total(shards: int, tokens: int) -> float:
        found = train_memory(shape, A100, shards=shards, tokens=tokens, offload=offload, recompute=recompute)
        parts = (
            found.state_bytes + found.gather_bytes + found.gradient_bytes + found.activation_bytes + found.logit_bytes
        )
        assert found.total_bytes == pytest.approx(1.05 * parts + 2 * 2**30)
        return found.total_bytes

    assert total(2 * shards, tokens) <= total(shards, tokens) < total(shards, 2 * tokens)


@given(bases, st.integers(1, 20_000))
@settings(max_examples=40)
def test_recomputation_never_needs_more(shape: ModelShape, tokens: int) -> None:
    again = train_memory(shape, A100, shards=8, tokens=tokens)
    kept = train_memory(shape, A100, shards=8, tokens=tokens, recompute=False)
    assert again.activation_bytes < kept.activation_bytes
    assert kept.activation_bytes == pytest.approx(shape.layers * activation_token_bytes(shape) * tokens)


@given(bases, st.sampled_from([1, 2, 4, 8]))
def test_what_is_split_is_divided(shape: ModelShape, ranks: int) -> None:
    one = activation_token_bytes(shape)
    split = activation_token_bytes(shape, tensor_parallel=ranks)
    all_split = activation_token_bytes(shape, tensor_parallel=ranks, sequence_parallel=True)
    assert one / ranks <= all_split <= split <= one
    inputs = 4 * shape.hidden + (shape.experts.num_active * 4 * shape.hidden if shape.experts else 0)
    inputs += 2 * 8 * 7 if shape.lora else 0
    assert all_split == pytest.approx((one - inputs) / ranks + inputs)
    whole = train_memory(shape, A100, shards=8, tokens=4096)
    cut = train_memory(shape, A100, shards=8, tokens=4096, tensor_parallel=ranks)
    assert cut.state_bytes == pytest.approx(whole.state_bytes / ranks)
    assert cut.gather_bytes == pytest.approx(whole.gather_bytes / ranks)
    assert cut.logit_bytes == pytest.approx(whole.logit_bytes / ranks)


def test_what_a_layer_keeps_by_hand() -> None:
    qwen3 = ModelShape.of("Qwen3-8B")  # norms over the heads of queries and keys
    plain = 16 * 4096 + 4 * 4096 + 4 * 1024 + 4 * 32 + 8 * 12_288 + 8
    assert activation_token_bytes(qwen3) == plain + 6 * (4096 + 1024) + 4 * (32 + 8)
    gemma = ModelShape.of("gemma-2b")  # norms that keep an fp32 factor
    assert activation_token_bytes(gemma) == 20 * 2048 + 4 * 2048 + 4 * 256 + 4 * 8 + 8 * 16_384 + 8
    experts = 16 * 2048 + 4 * 4096 + 4 * 512 + 4 * 32 + 8 * 8 * 768 + 8 + 4 * 8 * 2048
    assert activation_token_bytes(MOE) == experts + 6 * (4096 + 512) + 4 * (32 + 4)


def test_adapters_and_contexts_and_heads_in_training_memory() -> None:
    lora = SMALL.with_lora(8)
    found = train_memory(lora, A100, shards=8, tokens=4096)
    assert found.gradient_bytes == 6 * lora.lora_params() / 24
    assert found.state_bytes == (2 * SMALL.params() + 16 * lora.lora_params()) / 8
    halves = train_memory(SMALL, A100, shards=8, tokens=4096, context_parallel=2, chunk=None)
    whole = train_memory(SMALL, A100, shards=8, tokens=4096, chunk=None)
    assert 2 * halves.activation_bytes == whole.activation_bytes and 2 * halves.logit_bytes == whole.logit_bytes
    lm = ModelShape.of("Qwen2.5-7B")
    lm_bytes, value_bytes = (
        train_memory(shape, A100, shards=8, tokens=1).gather_bytes for shape in (lm, lm.with_head("value"))
    )
    assert lm_bytes - value_bytes == 2 * lm.embedding_params()


def test_logits_by_loss_and_chunk() -> None:
    assert logit_bytes(SMALL, 4096, chunk=None) == 14 * 151_936 * 4096
    assert logit_bytes(SMALL, 4096) == logit_bytes(SMALL, 1024, chunk=None)
    assert logit_bytes(SMALL, 10) == 14 * 151_936 * 10
    assert logit_bytes(SMALL, 4096, loss="logsumexp_no_grad", chunk=None) == 2 * 151_936 * 4096
    assert logit_bytes(SMALL.with_head("value"), 4096) == 0
    with pytest.raises(ConfigError, match="a loss is one of cross_entropy"):
        logit_bytes(SMALL, 1, loss="mse")


def test_a_tied_head_is_gathered_once() -> None:
    untied = replace(SMALL, tied=False)
    tied_bytes = train_memory(SMALL, A100, shards=8, tokens=1).gather_bytes
    assert train_memory(untied, A100, shards=8, tokens=1).gather_bytes - tied_bytes == 2 * SMALL.embedding_params()


def test_pipeline_stages_hold_less_toward_the_end() -> None:
    assert [Stage(index, 4, 8).in_flight for index in range(4)] == [4, 3, 2, 1]
    assert [Stage(index, 4, 2).in_flight for index in range(4)] == [2, 2, 2, 1]
    with pytest.raises(ConfigError, match="stages 0 to 3"):
        Stage(4, 4, 8)
    shape = ModelShape.of("Qwen2.5-7B")
    whole = train_memory(shape, A100, shards=2, tokens=1024, recompute=False)
    first, middle, _, last = (
        train_memory(shape, A100, shards=2, tokens=1024, recompute=False, stage=Stage(index, 4, 8))
        for index in range(4)
    )
    assert 4 * first.state_bytes == whole.state_bytes
    assert first.activation_bytes == whole.activation_bytes == 4 * last.activation_bytes
    assert first.logit_bytes == middle.logit_bytes == 0 and last.logit_bytes == whole.logit_bytes
    assert first.gather_bytes - middle.gather_bytes == last.gather_bytes - middle.gather_bytes == 2 * 152_064 * 3584


def test_cache_grows_more_than_in_proportion_to_devices() -> None:
    shape = ModelShape.of("Qwen2.5-7B")
    found = [cache_capacity_tokens(shape, A100, tensor_parallel=tp) for tp in (1, 2, 4, 8)]
    assert found[1] > 2 * found[0] and found[2] > 2 * found[1]
    assert found[3] < 1.2 * found[2]  # 4 key-value heads: each is held twice by 8 devices
    assert cache_capacity_tokens(ModelShape.of("Llama-2-70b-hf"), A100) == 0
    pool = 0.9 * A100.device.memory_bytes - 2 * shape.params() / 4 - 3 * 2**30
    assert cache_capacity_tokens(shape, A100, tensor_parallel=2, pipeline=2) == pytest.approx(4 * pool / 57_344)


# ---------------------------------------------------------------------------------------------------- training step


@given(lengths, st.integers(1, 8192), st.sampled_from(list(Offload)), st.floats(1.1, 10))
@settings(max_examples=60)
def test_a_step_scales_with_all_rates(sizes: list[int], tokens: int, offload: Offload, k: float) -> None:
    one = train_step(SMALL, A100, A100.whole, sizes, tokens=tokens, offload=offload)
    quick = faster(A100, k)
    two = train_step(SMALL, quick, quick.whole, sizes, tokens=tokens, offload=offload)
    assert two.total_s == pytest.approx(one.total_s / k)
    terms = (one.compute_s, one.communication_s, one.to_device_s, one.to_host_s)
    assert max(terms) <= one.overlapped_s <= 1.13 * max(terms) + 1e-12
    assert one.total_s >= one.overlapped_s + one.optimizer_s
    more = train_step(SMALL, A100, A100.whole, [*sizes, 100], tokens=tokens, offload=offload)
    assert more.compute_s > one.compute_s and more.micro_batches >= one.micro_batches


def test_larger_micro_batches_communicate_less() -> None:
    sizes = [2048] * 256
    small, large = (train_step(SMALL, A100, A100.whole, sizes, tokens=tokens) for tokens in (2048, 16_384))
    assert small.micro_batches == 16 and large.micro_batches == 2
    assert small.communication_s == pytest.approx(8 * large.communication_s)
    assert small.compute_s == large.compute_s


def test_competing_communication_slows_compute_down() -> None:
    step = train_step(SMALL, A100, A100.whole, [512] * 16, tokens=512)
    assert step.communication_s > 0.3 * step.compute_s and step.slowdown == 1.13
    free = TrainConstants(overlap_slowdown=1.0)
    assert train_step(SMALL, A100, A100.whole, [512] * 16, tokens=512, constants=free).total_s < step.total_s
    alone = train_step(SMALL, A100, Mesh(0, 1), [512], tokens=512)
    assert alone.communication_s == alone.first_gather_s == 0 and alone.slowdown == 1


def test_replicas_of_shards_talk_over_nodes_less() -> None:
    shape, sizes = ModelShape.of("Qwen2.5-7B"), [4096] * 64
    whole = train_step(shape, A100, A100.whole, sizes, tokens=4096)
    per_node = train_step(shape, A100, A100.whole, sizes, tokens=4096, shards=8)
    slow = replace(A100, nic_bytes_s=1e9)
    slow_whole, slow_per_node = (
        train_step(shape, slow, slow.whole, sizes, tokens=4096, shards=shards) for shards in (16, 8)
    )
    assert slow_per_node.communication_s < slow_whole.communication_s  # an eighth of the gradients crosses, no weights
    assert per_node.optimizer_s == pytest.approx(2 * whole.optimizer_s)
    ring = Ring.neighbours(A100, 8)
    gradients = 4.0 * shape.params()
    each = (
        2 * ring.all_gather_s(2.0 * shape.params())
        + ring.reduce_scatter_s(gradients)
        + Ring(A100, 2, 2).all_reduce_s(gradients / 8)
    )
    assert per_node.communication_s == pytest.approx(per_node.micro_batches * each)
    with pytest.raises(ConfigError, match="shards that divide"):
        train_step(shape, A100, A100.whole, sizes, tokens=4096, shards=3)


def test_adapters_reduce_next_to_nothing() -> None:
    shape, sizes = ModelShape.of("Qwen2.5-7B"), [4096] * 64
    full = train_step(shape, A100, A100.whole, sizes, tokens=4096)
    lora = train_step(shape.with_lora(16), A100, A100.whole, sizes, tokens=4096)
    assert 0.7 * full.compute_s < lora.compute_s < 0.8 * full.compute_s
    assert lora.communication_s < 0.6 * full.communication_s
    assert lora.optimizer_s < 0.01 * full.optimizer_s


def test_nothing_hides_the_first_gather() -> None:
    shape = ModelShape.of("Qwen2.5-7B")
    step = train_step(shape, A100, A100.whole, [4096], tokens=4096)
    first = shape.root_params() + shape.layer_params(0)
    assert step.first_gather_s == Ring.neighbours(A100, 16).all_gather_s(2.0 * first)


def test_adapters_work_besides_their_matrices() -> None:
    lora = SMALL.with_lora(8)
    assert forward_flops(lora, [100]).total - forward_flops(SMALL, [100]).total == 2 * 100 * lora.lora_params()


def test_scoring_is_divided_over_devices() -> None:
    assert forward_s(SMALL, A100, 8, [100, 200]) == pytest.approx(2 * forward_s(SMALL, A100, 16, [100, 200]))
