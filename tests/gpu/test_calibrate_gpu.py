"""Calibration of real GPUs: everything is measured, and the figures are those of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.cost.collectives import Ring
from flowrl.engines.calibrate import calibrate
from flowrl.engines.calibrate.links import OPERATIONS
from flowrl.mesh import Cluster

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device on this machine")
    return calibrate(quick=True)


def test_everything_is_measured(cluster: Cluster) -> None:
    assert cluster.notes == ()
    assert cluster.num_devices == torch.cuda.device_count()
    assert cluster.device.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    part = cluster.efficiency
    for value in (part.train, part.forward, part.hbm, part.decode_hbm, part.decode_flops):
        assert 0.1 < value <= 1.0
    beside = cluster.overheads
    assert beside.train_passes > beside.forward_passes > 0
    assert beside.train_logit_bytes > beside.forward_logit_bytes > 0
    assert 0 < beside.forward_layer_s < beside.train_layer_s < 1
    assert cluster.host_link.bytes_s > 1e9 and cluster.host.cpu_adam_params_s > 1e7


def test_larger_transfers_take_longer(cluster: Cluster) -> None:
    if cluster.num_devices == 1:
        pytest.skip("one device has no links")
    tables = {(one.operation, one.ranks): one for one in cluster.measured}
    for name in OPERATIONS:
        table = tables[name, cluster.num_devices]
        assert table.times_s[-1] > table.times_s[0]
    assert Ring(cluster, cluster.num_devices).all_gather_s(2**30) < 1


def test_the_file_gives_the_cluster_again(cluster: Cluster, tmp_path: Path) -> None:
    cluster.to_toml(tmp_path / "cluster.toml")
    assert Cluster.from_toml(tmp_path / "cluster.toml") == cluster
    assert cluster.calibrated_at


def test_the_caller_keeps_no_memory_of_a_device(cluster: Cluster) -> None:
    assert torch.cuda.memory_reserved(0) == 0
