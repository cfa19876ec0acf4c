"""Clusters: published figures, files, links, and what a driver reports."""

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from flowrl.errors import ConfigError
from flowrl.mesh import Cluster, Device, Efficiency, Host, Link, Measured, Mesh, Overheads
from flowrl.mesh.cluster import _cluster_from
from flowrl.mesh.detect import of_cpu, of_gpus


def test_named_clusters_have_published_figures() -> None:
    one = Cluster.named("8xA100-80G")
    assert (one.nodes, one.devices_per_node, one.num_devices) == (1, 8, 8)
    assert (one.device.memory_bytes, one.device.peak_flops, one.device.hbm_bytes_s) == (80 * 2**30, 312e12, 2.039e12)
    assert one.host.pcie_per_device_bytes_s == 12.5e9  # two devices share an uplink
    two = Cluster.named("16xH100-80G")
    assert (two.nodes, two.devices_per_node, two.nvlink_bytes_s, two.nic_bytes_s) == (2, 8, 450e9, 50e9)
    assert Cluster.named("2xH200").devices_per_node == 2
    assert Cluster.named("cpu").num_devices == 1
    assert Cluster.named("8xA100") == one


@pytest.mark.parametrize("name", ["8xA100-80", "12xH200", "0xH200", "", "8x", "8xcuda"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        Cluster.named(name)


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(ConfigError, match="did you mean 'A100-80G'"):
        Cluster.named("8xA100-80")


def test_bus_of_a_mesh() -> None:
    cluster = Cluster.named("16xA100-80G")
    assert cluster.bus_bytes_s(Mesh(0, 8)) == 300e9 * 0.80
    assert cluster.bus_bytes_s(cluster.whole) == pytest.approx(8 * 25e9 * 0.85)
    # the node with the fewest rings is the narrow place
    assert cluster.bus_bytes_s(Mesh(6, 3)) == pytest.approx(25e9 * 0.85)
    wide = replace(cluster, nic_bytes_s=1e12)
    assert wide.bus_bytes_s(wide.whole) == 300e9 * 0.80


def test_all_gather_of_one_gigabyte_from_these_links() -> None:
    """`(n-1)/n * S / B_bus + alpha * (1 + (n-1)/4)` gives the worked vectors."""
    cluster = Cluster.named("16xA100-80G")
    for ranks, seconds in (
        (2, 0.0020933333333333333),
        (4, 0.003139),
        (8, 0.0036678333333333337),
        (16, 0.005552705882352941),
    ):
        bus = cluster.bus_bytes_s(Mesh(0, ranks))
        assert (ranks - 1) / ranks * 1e9 / bus + cluster.alpha_s * (1 + (ranks - 1) / 4) == pytest.approx(
            seconds, rel=1e-12
        )


TABLE = Measured("all_gather", ranks=2, nodes=1, sizes_bytes=(1e6, 1e8, 1e9), times_s=(3e-5, 3e-4, 2.1e-3))


def test_file_and_back(tmp_path: Path) -> None:
    cluster = replace(
        Cluster.named("16xH100-80G"),
        efficiency=Efficiency(train=0.37),
        measured=(TABLE, replace(TABLE, ranks=4)),
        device=Device('an "odd"\\name\n', 80 * 2**30, 1e15, 3e12),
    )
    path = tmp_path / "cluster.toml"
    cluster.to_toml(path)
    assert Cluster.from_toml(path) == cluster


@given(st.text(max_size=12), st.floats(1e-9, 1e18), st.integers(1, 2**60))
def test_any_figures_survive_the_file(name: str, rate: float, memory: int) -> None:
    name = name.encode("utf-8", "ignore").decode()
    cluster = replace(Cluster.named("cpu"), device=Device(name, memory, rate, rate))
    assert _cluster_from(tomllib.loads(cluster.to_toml())) == cluster


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("nodes = 1", "nodes = 1.5"), "'cluster.nodes' is int"),
        (("nodes = 1", "node = 1"), "no key 'node'; did you mean 'nodes'"),
        (("nodes = 1\n", ""), "lacks nodes"),
        (("train = 0.4", "train = 1.4"), "a fraction"),
        (("peak_flops = ", "peak_flops = -"), "above 0 for peak_flops"),
        (("[device]", "[device"), "not a TOML file"),
        (("[device]", "[devices]"), "no key 'devices'; did you mean 'device"),
    ],
)
def test_a_wrong_file_says_where(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    text = Cluster.named("8xA100-80G").to_toml()
    assert change[0] in text
    path = tmp_path / "cluster.toml"
    path.write_text(text.replace(*change))
    with pytest.raises(ConfigError, match=message) as caught:
        Cluster.from_toml(path)
    assert str(path) in str(caught.value)


def test_efficiencies_may_be_left_out(tmp_path: Path) -> None:
    text = Cluster.named("2xH200").to_toml()
    path = tmp_path / "cluster.toml"
    path.write_text(text[: text.index("[efficiency]")])
    assert Cluster.from_toml(path) == Cluster.named("2xH200")


def test_measured_times_pass_through_their_points() -> None:
    for size, seconds in zip(TABLE.sizes_bytes, TABLE.times_s, strict=True):
        assert TABLE.time_s(size) == pytest.approx(seconds)
    assert TABLE.time_s(0) == 0
    assert TABLE.time_s(10) == 3e-5
    assert TABLE.time_s(4e9) == pytest.approx(4 * 2.1e-3)
    assert TABLE.time_s(1e7) == pytest.approx(math.sqrt(3e-5 * 3e-4))
    assert TABLE.time_s(math.sqrt(1e8 * 1e9)) == pytest.approx(math.sqrt(3e-4 * 2.1e-3))


@given(st.floats(1, 1e12), st.floats(1, 1e12))
def test_more_bytes_never_take_less_time(one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert TABLE.time_s(small) <= TABLE.time_s(large) * (1 + 1e-12)
    link = Link("nvlink", 3e11, 8e-6)
    assert link.time_s(small) <= link.time_s(large)


def test_measured_are_found_by_their_ranks() -> None:
    cluster = replace(Cluster.named("8xA100-80G"), measured=(TABLE,))
    assert cluster.measured_s("all_gather", 2, 1, 1e9) == pytest.approx(2.1e-3)
    assert cluster.measured_s("all_gather", 4, 1, 1e9) is None
    with pytest.raises(ConfigError, match="measured twice"):
        replace(cluster, measured=(TABLE, TABLE))


@pytest.mark.parametrize(
    ("sizes", "times"), [((), ()), ((2.0, 1.0), (1.0, 1.0)), ((1.0,), (1.0, 2.0)), ((1.0,), (0.0,))]
)
def test_wrong_tables_are_refused(sizes: tuple[float, ...], times: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError):
        Measured("p2p", 2, 1, sizes, times)


def test_slices_are_buddies() -> None:
    cluster = Cluster.named("16xH100-80G")
    assert [mesh.first for mesh in cluster.slices(4)] == [0, 4, 8, 12]
    assert [mesh.first for mesh in cluster.slices(16)] == [0]
    assert cluster.slices(3) == cluster.slices(12) == cluster.slices(32) == ()
    assert [mesh.first for mesh in Cluster.named("64xH100").slices(24)] == [0, 8, 16, 24, 32, 40]


def test_what_a_driver_reports() -> None:
    one = of_gpus([("NVIDIA A100-SXM4-80GB", 85_000_000_000), ("NVIDIA A100-SXM4-80GB", 84_000_000_000)], 10**12)
    assert (one.num_devices, one.device.name, one.device.memory_bytes) == (2, "A100-80G", 84_000_000_000)
    assert one.host.memory_bytes == 10**12
    assert of_gpus([("NVIDIA H200", 150 * 10**9)], 10**12).device.hbm_bytes_s == 4.8e12
    with pytest.raises(ConfigError, match="no published figures"):
        of_gpus([("NVIDIA H100 PCIe", 85 * 10**9)], 10**12)  # other figures than the SXM one
    with pytest.raises(ConfigError, match="equal devices"):
        of_gpus([("NVIDIA H200", 150 * 10**9), ("NVIDIA A100-SXM4-80GB", 85 * 10**9)], 10**12)
    assert of_cpu(64 * 2**30).device.memory_bytes == 32 * 2**30


def test_figures_make_sense() -> None:
    with pytest.raises(ConfigError, match="pcie_shared_by"):
        Host(2**40, 25e9, pcie_shared_by=0)
    with pytest.raises(ConfigError, match="hbm_bytes_s"):
        Device("x", 1, 1.0, math.inf)
    with pytest.raises(ConfigError, match="has devices 0 to 7; found 8"):
        Cluster.named("8xH200").node_of(8)


def test_what_a_measured_cluster_has_beside_published_figures_is_kept_in_its_file(tmp_path: Path) -> None:
    cluster = replace(
        Cluster.named("2xH200"),
        overheads=Overheads(train_passes=6.5, forward_logit_bytes=4.0),
        efficiency=Efficiency(decode_hbm=0.8),
        calibrated_at="2026-01-31T12:00:00",
        notes=('to_host: "pinned" memory is refused', "broadcast: timed out"),
    )
    cluster.to_toml(tmp_path / "cluster.toml")
    assert Cluster.from_toml(tmp_path / "cluster.toml") == cluster
    assert (Cluster.named("2xH200").calibrated_at, Cluster.named("2xH200").notes) == ("", ())


def test_a_date_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="calibrated_at is a date such as 2026-01-31 or empty; found 'yesterday'"):
        replace(Cluster.named("2xH200"), calibrated_at="yesterday")


def test_notes_are_texts(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("notes = [1]\n" + Cluster.named("cpu").to_toml().replace("notes = []\n", ""))
    with pytest.raises(ConfigError, match="notes"):
        Cluster.from_toml(tmp_path / "cluster.toml")


def test_names_are_taken_in_any_case() -> None:
    assert Cluster.named("8xa100-80g") == Cluster.named("8xA100-80G") == Cluster.named("8xa100")
    assert Cluster.named("rtx4090") == Cluster.named("4090") and Cluster.named("8xl40s").num_devices == 8


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80G"),
    ],
)
def test_what_a_driver_calls_known_devices(driver: str, name: str) -> None:
    cluster = of_gpus([(driver, 10**10)] * 2, 2**36)
    assert (cluster.device.name, cluster.num_devices) == (name, 2)
    for other in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA L40"):
        with pytest.raises(ConfigError, match="no published figures"):
            of_gpus([(other, 10**10)], 2**36)


def test_a_file_or_a_name(tmp_path: Path) -> None:
    path = str(tmp_path / "cluster.toml")
    Cluster.named("2xL40S").to_toml(path)
    assert Cluster.of(path) == Cluster.of("2xL40S")
    with pytest.raises(ConfigError, match=r"the cluster file .*nowhere.toml cannot be read: No such file"):
        Cluster.of(str(tmp_path / "nowhere.toml"))
    with pytest.raises(ConfigError, match="Cluster.from_toml"):
        Cluster.named("cluster.toml")


@pytest.mark.parametrize(
    ("line", "wrong", "said"),
    [
        ("peak_flops = 312000000000000.0", "peak_flops = 312", "device.peak_flops is in FLOP/s, and 312 is too little"),
        ("memory_bytes = 85899345920", "memory_bytes = 80", "device.memory_bytes is in bytes, and 80 is too little"),
        (
            "nvlink_bytes_s = 300000000000.0",
            "nvlink_bytes_s = 300.0",
            "cluster.nvlink_bytes_s is in bytes/s, and 300.0",
        ),
        ("pcie_bytes_s = 25000000000.0", "pcie_bytes_s = 25", "host.pcie_bytes_s is in bytes/s, and 25"),
        ("cpu_adam_params_s = 2000000000.0", "cpu_adam_params_s = 2", "host.cpu_adam_params_s is in parameters/s"),
    ],
)
def test_figures_in_another_unit_are_refused(tmp_path: Path, line: str, wrong: str, said: str) -> None:
    text = Cluster.named("8xA100-80G").to_toml()
    assert line in text
    path = tmp_path / "cluster.toml"
    path.write_text(text.replace(line, wrong))
    with pytest.raises(ConfigError, match=said):
        Cluster.from_toml(path)


def test_whose_figures_they_are() -> None:
    named = Cluster.named("8xA100-80G")
    assert named.is_published and named.with_memory(device_bytes=2**35, host_bytes=2**40).is_published
    assert not replace(named, nvlink_bytes_s=1e11).is_published
    assert not replace(named, device=replace(named.device, peak_flops=1e14)).is_published
    assert not replace(named, device=replace(named.device, name="ACME")).is_published
