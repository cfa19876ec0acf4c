"""From measured numbers to a cluster: nothing is measured here, and nothing imports torch."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrl.cost.collectives import Ring
from flowrl.cost.compute import train_compute_s
from flowrl.cost.flops import forward_flops, train_flops
from flowrl.cost.memory import activation_token_bytes
from flowrl.cost.offload import adam_s
from flowrl.cost.shapes import ModelShape
from flowrl.engines.calibrate.assemble import assemble, rounded
from flowrl.engines.calibrate.fit import Sample, fit
from flowrl.engines.calibrate.processes import Results, read
from flowrl.errors import ConfigError, FlowError
from flowrl.mesh import Cluster

HOST_BYTES = 256 * 2**30
H200 = {"name": "NVIDIA H200", "memory_bytes": 150_000_000_000}


def measured(**values: Any) -> Results:
    """Two processes with equal values, unless a list of two is given as `both_...`."""
    base: dict[str, Any] = {"device": H200, "products": [[1e12, 2e-3], [1e12, 1.6e-3], [1e10, 2e-5]], "copy": 4.32e12}
    base |= values
    return Results({name: value if name.startswith("both_") else [value, value] for name, value in base.items()})


def made(results: Results) -> Cluster:
    return assemble(results, host_bytes=HOST_BYTES, calibrated_at="2026-01-31T12:00:00")


@pytest.mark.parametrize(("per_flop", "per_byte"), [(2e-15, 1e-12), (2e-15, 0.0)])
def test_two_prices_are_found_again(per_flop: float, per_byte: float) -> None:
    work = [(1e12, 1e9), (4e12, 2e9), (16e12, 4e9)]
    samples = [Sample(flops, moved, flops * per_flop + moved * per_byte) for flops, moved in work]
    assert fit(samples) == pytest.approx((per_flop, per_byte), rel=1e-9, abs=1e-20)


def test_no_product_is_faster_than_the_peak() -> None:
    samples = [Sample(1e12, 1e9, 2e-3), Sample(4e12, 2e9, 2.1e-3)]  # hardly more time for four times the work
    per_flop, per_byte = fit(samples, least_per_flop=1e-16)
    assert per_flop == 1e-16 and per_byte > 0


def test_what_is_moved_never_saves_time() -> None:
    samples = [Sample(1e12, 4e9, 1e-3), Sample(4e12, 1e9, 4.4e-3)]
    per_flop, per_byte = fit(samples)
    assert per_byte == 0 and 1e-15 < per_flop < 1.1e-15


def test_one_sample_is_all_products() -> None:
    assert fit([Sample(1e12, 1e9, 2e-3)]) == (2e-15, 0.0)


def test_a_step_of_the_measured_layers_takes_the_measured_time() -> None:
    names = ("Qwen2.5-0.5B", "Qwen2.5-7B")
    rate, bandwidth = 0.6 * 989e12, 4.32e12
    rows = []
    for name in names:
        shape = ModelShape.of(name)
        kept = shape.layers * activation_token_bytes(shape) * 4096
        flops = train_flops(shape, [4096])
        attending = 4 * forward_flops(shape, [4096]).attention
        took = (flops - attending) / rate + attending / (0.3 * 989e12) + 8 * kept / bandwidth
        rows.append([flops - attending, attending, kept, took])
    attention = {"train": [1e12, 1 / 296.7], "forward": [1e12, 1 / 400.0]}
    cluster = made(measured(layers={"train": rows, "forward": rows}, attention=attention))
    assert cluster.efficiency.train == pytest.approx(0.6)
    assert cluster.efficiency.train_attention == pytest.approx(0.3)
    assert cluster.overheads.train_passes == pytest.approx(8)
    for name, (*_, took) in zip(names, rows, strict=True):
        assert train_compute_s(ModelShape.of(name), cluster, 1, [4096]) == pytest.approx(took)


def test_a_loss_has_bytes_of_its_own() -> None:
    rows = [[4e14, 0.0, 1e9, 4e14 / 494.5e12]]
    # products of the head are slower than those of layers, which says nothing of bytes
    train = [[flops, 1e9, flops / 400e12 + 30e9 / 4.32e12] for flops in (1e12, 1e13)]
    cluster = made(measured(layers={"train": rows, "forward": rows}, loss={"train": train, "forward": train}))
    assert cluster.overheads.train_logit_bytes == pytest.approx(30)
    assert cluster.efficiency.train == pytest.approx(0.5)


def test_published_peaks_stay_and_the_reached_part_is_measured() -> None:
    cluster = made(
        measured(
            decode=[[1, 4e8, 1.25e-4], [32, 5e8, 1.25e-4], [256, 1e9, 1e-3]], starts={"train": 3e-3, "forward": 1e-3}
        )
    )
    assert (cluster.device.name, cluster.device.peak_flops, cluster.device.memory_bytes) == (
        "H200",
        989e12,
        150_000_000_000,
    )
    assert cluster.efficiency.hbm == pytest.approx(0.9)
    assert cluster.efficiency.decode_flops == pytest.approx(5e14 / 989e12)
    assert cluster.efficiency.decode_hbm == pytest.approx(3.2e12 / 4.8e12)
    assert (cluster.overheads.train_layer_s, cluster.overheads.forward_layer_s) == (3e-3, 1e-3)
    assert (cluster.num_devices, cluster.host.memory_bytes) == (2, HOST_BYTES)
    assert cluster.calibrated_at == "2026-01-31T12:00:00"


def test_adam_and_sharded_weights_are_parts_of_the_bandwidth() -> None:
    results = measured(adam=3.36e12)
    results.values["sharded"] = [{"train": 8e-12, "forward": 2e-12}, {"train": 1e-11, "forward": 1e-12}]
    cluster = made(results)
    assert cluster.efficiency.adam == pytest.approx(0.7)
    assert adam_s(1e9, cluster) == pytest.approx(28e9 / 3.36e12)
    assert cluster.overheads.train_shard_bytes == pytest.approx(43.2)
    assert cluster.overheads.forward_shard_bytes == pytest.approx(8.64)


def test_the_slowest_process_counts() -> None:
    results = measured()
    results.values["copy"] = [4.32e12, 3.84e12]
    results.values["products"][1] = [[1e12, 4e-3], [1e12, 4e-3], [1e10, 4e-5]]
    cluster = made(results)
    assert cluster.efficiency.hbm == pytest.approx(0.8)
    assert cluster.efficiency.decode_flops == pytest.approx(2.5e14 / 989e12)


def test_an_unknown_device_has_its_measured_peaks() -> None:
    cluster = made(measured(device={"name": "ACME 3000", "memory_bytes": 10**10}))
    assert (cluster.device.name, cluster.device.peak_flops, cluster.device.hbm_bytes_s) == (
        "ACME 3000",
        pytest.approx(1.25 * 6.25e14),  # room for runs that are faster
        pytest.approx(1.25 * 4.32e12),
    )
    assert any("no published figures for 'ACME 3000'" in note for note in cluster.notes)
    nothing = Results({"device": [{"name": "ACME 3000", "memory_bytes": 10**10}]})
    with pytest.raises(FlowError, match="ACME 3000"):
        made(nothing)


def test_different_devices_are_refused() -> None:
    results = measured()
    results.values["device"] = [H200, {"name": "ACME 3000", "memory_bytes": 10**10}]
    with pytest.raises(ConfigError, match="a cluster has equal devices"):
        made(results)


def test_a_cpu_has_its_measured_peaks_and_processes_share_its_memory() -> None:
    cluster = made(measured(device={"name": "cpu", "memory_bytes": 0}, copy=1e10))
    assert (cluster.device.peak_flops, cluster.device.hbm_bytes_s) == pytest.approx((1.25 * 6.25e14, 1.25e10))
    assert cluster.efficiency.hbm == pytest.approx(0.8)
    assert cluster.num_devices == 2
    assert cluster.device.memory_bytes == HOST_BYTES // 4


def layers(train_s: float, forward_s: float = 1e-3) -> dict[str, list[list[float]]]:
    """(FLOP of products, of attention, bytes kept, seconds) of a small layer and a large one: the same bytes in both."""
    return {
        "train": [[1e12, 0.0, 1e9, train_s], [8e12, 0.0, 1e9, 0.032]],
        "forward": [[25e10, 0.0, 1e9, forward_s], [2e12, 0.0, 1e9, 8e-3]],
    }


def test_the_peak_of_an_unknown_device_is_above_all_that_was_measured() -> None:
    fast = {"train": (4e12, 4e-3), "forward": (1e12, 5e-4)}  # 2e15 FLOP/s
    cluster = made(
        measured(device={"name": "ACME 3000", "memory_bytes": 10**10}, attention=fast, layers=layers(4e-3), adam=8e12)
    )
    assert cluster.device.peak_flops == pytest.approx(1.25 * 2e15) and cluster.device.hbm_bytes_s == pytest.approx(1e13)
    parts = cluster.efficiency
    assert (
        max(parts.train, parts.forward, parts.forward_attention, parts.hbm, parts.adam, parts.decode_flops)
        <= 0.8 + 1e-9
    )


def test_figures_of_a_busy_machine_are_refused_with_a_remedy() -> None:
    """As measured while other processes ran: a small layer that takes 250 times as long."""
    cluster = made(measured(layers=layers(1.0), starts={"train": 0.0566, "forward": 0.01}))
    assert cluster.overheads.train_passes == 0 and cluster.overheads.train_layer_s == 0
    for text in ("train_passes came out as", "train_layer_s came out as 0.0566"):
        note = next(one for one in cluster.notes if one.startswith(text))
        assert "measure again while nothing else runs" in note
    quiet = made(measured(layers=layers(5e-3), starts={"train": 4e-3, "forward": 1e-3}))
    assert 0 < quiet.overheads.train_passes < 100 and quiet.overheads.train_layer_s == 4e-3
    assert not any("came out as" in note for note in quiet.notes)


def test_starts_that_vanish_are_no_measurement() -> None:
    cluster = made(measured(starts={"train": 0.0, "forward": 1e-3}))
    assert (cluster.overheads.train_layer_s, cluster.overheads.forward_layer_s) == (0, 0)
    assert any("more layers took no longer" in note for note in cluster.notes)


def test_a_file_has_no_more_digits_than_come_back() -> None:
    cluster = made(measured(**{"all_gather/2": [[1e6, 1 / 3e5], [2**30, 1 / 7]]}))
    short = rounded(cluster)
    assert short.measured[0].times_s == (3.333e-6, 0.1429)
    assert short.host.memory_bytes == HOST_BYTES and short.device.memory_bytes == 150_000_000_000
    assert short.efficiency.hbm == pytest.approx(cluster.efficiency.hbm, rel=1e-3)
    assert rounded(short) == short


def test_tables_go_before_formulas() -> None:
    rows = [[1e6, 4e-5], [1e9, 2e-3]]
    results = measured(**{"all_gather/2": rows, "all_reduce/2": rows})
    results.values["all_gather/2"][1] = [[1e6, 5e-5], [1e9, 2.5e-3]]
    cluster = made(results)
    ring = Ring(cluster, 2)
    assert ring.all_gather_s(1e9) == pytest.approx(2.5e-3)
    assert ring.all_reduce_s(1e6) == pytest.approx(4e-5)
    assert cluster.inside.bytes_s == pytest.approx(0.5 * 1e9 / 2.5e-3)
    assert cluster.alpha_s == pytest.approx(5e-5 / 1.25)
    assert {note.split(" ")[0] for note in cluster.notes} >= {"reduce_scatter/2", "broadcast/2", "all_to_all/2"}


def test_links_faster_than_published_raise_the_published_figure() -> None:
    cluster = made(measured(**{"all_gather/2": [[1e6, 4e-6], [1e9, 1e-3]]}))
    assert (cluster.nvlink_bytes_s, cluster.efficiency.nvlink) == (pytest.approx(5e11), 1.0)


def test_host_figures_are_those_while_all_copy() -> None:
    copies = {"to_device": [[1e6, 1e-4], [1e9, 0.02]], "to_host": [[1e6, 1e-4], [1e9, 0.025]]}
    cluster = made(measured(host_copies=copies, host_adam=6e8))
    assert cluster.host_link.bytes_s == pytest.approx(4e10)
    assert cluster.host.cpu_adam_params_s == pytest.approx(1.2e9)
    assert {(one.operation, one.ranks) for one in cluster.measured} == {("to_device", 2), ("to_host", 2)}


def test_what_is_missing_keeps_its_figure_with_a_note() -> None:
    results = Results(
        {"device": [H200]}, {"copy": "OutOfMemoryError: no memory (process 0)"}, "process 0 ended with code -9"
    )
    cluster = made(results)
    named = Cluster.named("H200")
    assert (cluster.efficiency, cluster.overheads, cluster.measured) == (named.efficiency, named.overheads, ())
    notes = "\n".join(cluster.notes)
    for text in (
        "products was not",
        "layers was not",
        "copy: OutOfMemoryError",
        "ended early: process 0 ended with code -9",
    ):
        assert text in notes


def test_a_calibrated_cluster_survives_its_file(tmp_path: Path) -> None:
    cluster = made(measured(**{"all_gather/2": [[1e6, 4e-6], [1e9, 1e-3]]}))
    cluster.to_toml(tmp_path / "cluster.toml")
    assert Cluster.from_toml(tmp_path / "cluster.toml") == cluster


def test_lines_of_all_processes_are_read(tmp_path: Path) -> None:
    lines = [{"name": "copy", "value": 1.0}, {"name": "decode", "error": "RuntimeError: no"}]
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "1.jsonl").write_text(json.dumps({"name": "copy", "value": 2.0}) + "\n")
    results = read(tmp_path, 3)
    assert results.values == {"copy": [1.0, 2.0]}
    assert results.errors == {"decode": "RuntimeError: no (process 0)"}


def test_reading_about_calibration_imports_no_torch() -> None:
    assert "torch" not in sys.modules
