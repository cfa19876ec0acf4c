"""`flowrl calibrate`: what it writes and prints. Nothing is measured here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flowrl.mesh import Cluster, Measured

MEASURED = replace(
    Cluster.named("2xH200"),
    alpha_s=2.5e-5,
    measured=(Measured("all_gather", 2, 1, (1e6, 1e9), (3e-5, 2.1e-3)),),
    calibrated_at="2026-01-31T12:00:00",
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each calibration; it answers with `MEASURED`."""
    found: list[dict[str, Any]] = []

    def answer(**given: Any) -> Cluster:
        found.append(given)
        return MEASURED

    monkeypatch.setattr("flowrl.engines.calibrate.calibrate", answer)
    return found


def test_the_cluster_is_written_and_summed_up(cli: Any, folder: Path, asked: list[dict[str, Any]]) -> None:
    done = cli("calibrate")
    assert done.code == 0, done.err
    assert asked == [{"devices": None, "quick": False}]
    assert Cluster.from_toml(folder / "cluster.toml") == MEASURED
    assert "2 x H200, 139.0 GiB each" in done.out
    assert "360 GB/s a device, 25 us to start a message" in done.out
    assert done.out.endswith("written to cluster.toml\n")


def test_one_device_has_no_links(
    cli: Any, folder: Path, asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrl.engines.calibrate.calibrate", lambda **_: Cluster.named("H200"))
    assert "links" not in cli("calibrate").out


def test_options_are_handed_on(cli: Any, folder: Path, asked: list[dict[str, Any]]) -> None:
    assert cli("calibrate", "--devices", "1", "--quick", "--out", "here.toml").code == 0
    assert asked == [{"devices": 1, "quick": True}]
    assert (folder / "here.toml").exists()


def test_what_was_not_measured_is_a_problem(cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = replace(MEASURED, notes=("decode was not measured; its efficiency is assumed",))
    monkeypatch.setattr("flowrl.engines.calibrate.calibrate", lambda **_: lacking)
    done = cli("calibrate")
    assert done.code == 1
    assert "note: decode was not measured; its efficiency is assumed" in done.out
    assert Cluster.from_toml(folder / "cluster.toml") == lacking


def test_a_folder_that_is_not_there_is_told_before_anything_is_measured(
    cli: Any, folder: Path, asked: list[dict[str, Any]]
) -> None:
    done = cli("calibrate", "--out", "nowhere/cluster.toml")
    assert done.code == 2 and "there is no folder 'nowhere'" in done.err
    assert asked == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--out", "x.json"), "is written as TOML, and read by a name that ends in .toml; found x.json; name it x.toml"),
        (("--out", "cluster"), "found cluster; name it cluster.toml"),
        (("--out", ""), "a name that ends in .toml; found ''"),
        (("--devices", "0"), "--devices is how many GPUs are measured, at least 1; found 0"),
        (("--devices", "-1"), "at least 1; found -1"),
    ],
)  # fmt: skip
def test_wrong_usage_is_told_before_anything_is_measured(
    cli: Any, folder: Path, asked: list[dict[str, Any]], more: tuple[str, ...], message: str
) -> None:
    done = cli("calibrate", *more)
    assert done.code == 2 and message in done.err
    assert asked == []
