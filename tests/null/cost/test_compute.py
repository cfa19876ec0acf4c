"""Compute time: products and traffic add; without measured traffic one efficiency stands for both."""

from dataclasses import replace

import pytest

from flowrl.cost.compute import forward_s, train_compute_s
from flowrl.cost.flops import forward_flops, train_flops
from flowrl.cost.memory import activation_token_bytes
from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster, Efficiency, Overheads

SHAPE = ModelShape.of("Qwen2.5-0.5B")
CLUSTER = Cluster.named("2xH200")
LENGTHS = [512, 1024]


def measured(**overheads: float) -> Cluster:
    return replace(CLUSTER, overheads=Overheads(**overheads))


def test_without_traffic_time_is_work_over_the_part_of_the_peak():
    rate = CLUSTER.device.peak_flops * CLUSTER.efficiency.forward
    assert forward_s(SHAPE, CLUSTER, 1, LENGTHS) == pytest.approx(forward_flops(SHAPE, LENGTHS).total / rate)
    rate = CLUSTER.device.peak_flops * CLUSTER.efficiency.train
    assert train_compute_s(SHAPE, CLUSTER, 2, LENGTHS) == pytest.approx(train_flops(SHAPE, LENGTHS) / rate / 2)


def test_traffic_adds_bytes_over_bandwidth():
    bandwidth = CLUSTER.device.hbm_bytes_s * CLUSTER.efficiency.hbm
    layers = SHAPE.layers * activation_token_bytes(SHAPE) * sum(LENGTHS)
    logits = SHAPE.vocab * sum(LENGTHS)
    train = measured(train_passes=7.0, train_logit_bytes=30.0)
    extra = train_compute_s(SHAPE, train, 1, LENGTHS) - train_compute_s(SHAPE, CLUSTER, 1, LENGTHS)
    assert extra == pytest.approx((7 * layers + 30 * logits) / bandwidth)
    forward = measured(forward_passes=2.0, forward_logit_bytes=6.0)
    extra = forward_s(SHAPE, forward, 1, LENGTHS) - forward_s(SHAPE, CLUSTER, 1, LENGTHS)
    assert extra == pytest.approx((2 * layers + 6 * logits) / bandwidth)
    without = forward_s(SHAPE, forward, 1, LENGTHS, with_logits=False) - forward_s(SHAPE, CLUSTER, 1, LENGTHS)
    assert without == pytest.approx(2 * layers / bandwidth)


@pytest.mark.parametrize(("shape", "part"), [(SHAPE, 3 / 4), (SHAPE.with_lora(8), 2 / 3)])
def test_without_recomputation_traffic_goes_down_with_the_products(shape, part):
    bandwidth = CLUSTER.device.hbm_bytes_s * CLUSTER.efficiency.hbm
    layers = shape.layers * activation_token_bytes(shape) * sum(LENGTHS)
    extra = train_compute_s(shape, measured(train_passes=8.0), 1, LENGTHS, recompute=False)
    extra -= train_compute_s(shape, CLUSTER, 1, LENGTHS, recompute=False)
    assert extra == pytest.approx(part * 8 * layers / bandwidth)


@pytest.mark.parametrize("recompute", [True, False])
def test_training_takes_what_it_was_measured_to_take_whatever_a_forward_pass_takes(recompute):
    train = {"train_passes": 7.0, "train_layer_s": 2e-3, "train_logit_bytes": 30.0}

    def seconds(**others):
        return train_compute_s(SHAPE, measured(**(train | others)), 1, LENGTHS, recompute=recompute)

    for passes, layer_s in ((0.5, 1e-4), (2.0, 1e-3), (20.0, 1e-1)):
        assert seconds(forward_passes=passes, forward_layer_s=layer_s, forward_logit_bytes=passes) == seconds()
    for name, value in train.items():  # and what is slower takes no less
        assert seconds(**{name: 2 * value}) >= seconds() >= seconds(**{name: value / 2})
    assert seconds(train_passes=14.0, train_layer_s=4e-3) > seconds()


def test_a_score_head_has_no_logits():
    critic = replace(SHAPE, head="value")
    plain, with_logits = measured(train_passes=1.0), measured(train_passes=1.0, train_logit_bytes=30.0)
    assert train_compute_s(critic, plain, 1, LENGTHS) == train_compute_s(critic, with_logits, 1, LENGTHS)


def test_the_smaller_model_reaches_a_smaller_part_of_the_peak():
    cluster = measured(train_passes=6.0, train_logit_bytes=30.0)
    parts = []
    for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B"):
        shape = ModelShape.of(name)
        seconds = train_compute_s(shape, cluster, 1, LENGTHS)
        parts.append(train_flops(shape, LENGTHS) / (seconds * cluster.device.peak_flops))
    assert parts == sorted(parts) and parts[-1] < cluster.efficiency.train


def test_few_tokens_take_as_long_as_their_kernels_take_to_start():
    starts = measured(train_layer_s=4e-3, forward_layer_s=1e-3)
    critic = replace(SHAPE, head="value")  # nothing after the layers
    assert forward_s(critic, starts, 1, [8]) == pytest.approx(SHAPE.layers * 1e-3)
    assert train_compute_s(critic, starts, 1, [8, 8], micro_batches=2) == pytest.approx(2 * SHAPE.layers * 4e-3)
    assert train_compute_s(critic, starts, 1, [8], recompute=False) == pytest.approx(SHAPE.layers * 3 / 4 * 4e-3)
    assert train_compute_s(critic, starts, 2, [8], pipeline=2) == pytest.approx(SHAPE.layers * 2e-3)
    many = [4096] * 64
    assert train_compute_s(critic, starts, 1, many) == train_compute_s(critic, CLUSTER, 1, many)


def test_the_head_is_not_hidden_by_starts():
    starts = measured(train_layer_s=1.0, train_logit_bytes=30.0)
    bandwidth = CLUSTER.device.hbm_bytes_s * CLUSTER.efficiency.hbm
    head = 4 * 2.0 * SHAPE.vocab * SHAPE.hidden / (CLUSTER.device.peak_flops * CLUSTER.efficiency.train)
    assert train_compute_s(SHAPE, starts, 1, [100]) == pytest.approx(
        SHAPE.layers + 100 * (head + 30 * SHAPE.vocab / bandwidth)
    )


def test_each_device_moves_what_is_gathered():
    sharded = measured(train_shard_bytes=40.0)
    bandwidth = CLUSTER.device.hbm_bytes_s * CLUSTER.efficiency.hbm
    each = 40 * SHAPE.params() / bandwidth
    for devices, count, parts in ((1, 1, 1), (2, 3, 1), (2, 3, 2)):
        extra = train_compute_s(SHAPE, sharded, devices, LENGTHS, micro_batches=count, tensor_parallel=parts)
        extra -= train_compute_s(SHAPE, CLUSTER, devices, LENGTHS)
        assert extra == pytest.approx(count * each / parts)


def test_a_forward_pass_gathers_where_weights_are_sharded():
    sharded = measured(forward_shard_bytes=16.0)
    bandwidth = CLUSTER.device.hbm_bytes_s * CLUSTER.efficiency.hbm
    plain = forward_s(SHAPE, CLUSTER, 2, LENGTHS)
    assert forward_s(SHAPE, sharded, 2, LENGTHS) == plain
    extra = forward_s(SHAPE, sharded, 2, LENGTHS, micro_batches=3, tensor_parallel=2, is_sharded=True) - plain
    assert extra == pytest.approx(3 * 16 * SHAPE.params() / 2 / bandwidth)


def test_attention_has_a_part_of_its_own():
    slow = replace(CLUSTER, efficiency=Efficiency(train_attention=0.2, forward_attention=0.25))
    attention = forward_flops(SHAPE, LENGTHS).attention / CLUSTER.device.peak_flops
    extra = train_compute_s(SHAPE, slow, 1, LENGTHS) - train_compute_s(SHAPE, CLUSTER, 1, LENGTHS)
    assert extra == pytest.approx(4 * attention * (1 / 0.2 - 1 / 0.4))
    extra = forward_s(SHAPE, slow, 1, LENGTHS) - forward_s(SHAPE, CLUSTER, 1, LENGTHS)
    assert extra == pytest.approx(attention * (1 / 0.25 - 1 / 0.5))


def test_negative_overheads_are_refused():
    with pytest.raises(ConfigError, match="Overheads needs a finite number of at least 0 for train_passes"):
        Overheads(train_passes=-1.0)
