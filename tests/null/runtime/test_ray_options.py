"""What is known of ranks on Ray without Ray."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flowrl as fr
from flowrl.engines.launch.ray_options import RayOptions, gpus_of_rank, hosts_of
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster

from . import rank_jobs

GPUS = Cluster.named("16xA100-80G")
CPUS = replace(GPUS, device=replace(GPUS.device, name="cpu"))


def test_what_a_rank_asks_for() -> None:
    here, there = fr.Model(None, device="cpu"), fr.Model(None)
    assert gpus_of_rank("torch", [here, there], GPUS) == 1
    assert gpus_of_rank("torch", [there], CPUS) == 0
    assert gpus_of_rank("torch", [here, here], GPUS) == 0
    assert gpus_of_rank("null", [there], GPUS) == 0


def test_ranks_are_on_the_hosts_of_their_devices() -> None:
    plan = replace(rank_jobs.plan_of(rank_jobs.FLOWS["raft"][0].graph(), 4), cluster=GPUS)
    assert [hosts_of(plan, ranks) for ranks in (4, 8, 9, 16)] == [(4,), (8,), (8, 1), (8, 8)]
    pairs = replace(plan, cluster=replace(GPUS, nodes=3, devices_per_node=2))
    assert hosts_of(pairs, 5) == (2, 2, 1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"cpus": 0.0}, "a part of a CPU or GPU at least; found cpus=0, gpus=0"),
        ({"gpus": -1.0}, "found cpus=1, gpus=-1"),
        ({"gpus": 0.5}, "a rank has whole GPUs, or none; found gpus=0.5"),
        ({"address": "ray://head:10001"}, "not through a client; found ray://head:10001"),
        ({"place_s": 0.0}, "place_s is in seconds, more than 0; found 0.0"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, float | str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        RayOptions(**options)  # type: ignore[arg-type]
