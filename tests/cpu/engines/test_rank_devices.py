"""Which device a rank takes and what carries weights between ranks, on a machine that is told of GPUs it does not have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowrl.engines.launch.board import Alone
from flowrl.engines.launch.protocol import Site
from flowrl.engines.launch.torch_devices import (
    BOTH,
    GLOO,
    NCCL,
    PEERS,
    Devices,
    Seat,
    gpu_of,
    refuse_shared,
    wire_between,
)
from flowrl.engines.launch.torch_edges import Edges
from flowrl.errors import ConfigError, EngineError
from flowrl.mesh import Layout
from flowrl.model import Model

ON_GPU, ON_CPU, THIRD = Model("m"), Model("m", device="cpu"), Model("m", device="cuda:2")


class Job(Alone):
    """A board of two ranks, of which the other has posted already."""

    world = 2

    def __init__(self, rank: int, *others: bytes) -> None:
        super().__init__()
        self.rank = rank  # type: ignore[misc]
        self.host_of = (0, 0)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    told: dict[str, Any] = {"count": 2, "current": 0}
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: told["count"] > 0)
    monkeypatch.setattr(cuda, "device_count", lambda: told["count"])
    monkeypatch.setattr(cuda, "current_device", lambda: told["current"])
    monkeypatch.setattr(cuda, "set_device", lambda device: told.update(current=torch.device(device).index))
    monkeypatch.setattr(cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu-{index}"))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return told


def test_a_rank_takes_the_gpu_of_its_number(gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(Job(1))
    assert devices.take() == torch.device("cpu") and devices.backend == GLOO  # no model was looked at
    assert devices.look_at(ON_CPU) == "" and devices.take() == torch.device("cpu")
    assert devices.look_at(ON_GPU) == ""
    assert devices.take() == torch.device("cuda", 1) and gpus["current"] == 1 and devices.backend == BOTH
    monkeypatch.setenv("LOCAL_RANK", "0")  # the first rank of a second host
    assert devices.take() == torch.device("cuda", 0)


def test_models_go_to_the_ranks_own_gpu(gpus: dict[str, Any]) -> None:
    devices = Devices(Job(1))
    devices.look_at(ON_GPU)
    assert [devices.placed(one).device for one in (ON_GPU, THIRD, ON_CPU)] == ["cuda:1", "cuda:1", "cpu"]
    alone = Devices(Alone())
    alone.look_at(THIRD)
    assert alone.placed(THIRD) is THIRD


def test_more_ranks_than_gpus_are_refused_unless_all_is_on_the_cpu(
    gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    devices = Devices(Job(1))
    assert devices.look_at(ON_CPU) == "" and devices.own() == torch.device("cpu")
    found = devices.look_at(ON_GPU)
    assert found.startswith(
        "rank 1 is number 3 on its host, which has 2 GPUs (0 to 1); start at most 2 ranks there, or keep"
    )
    with pytest.raises(ConfigError, match="rank 1 is number 3"):
        devices.own()


def test_a_rank_that_sees_one_gpu_takes_it() -> None:
    assert gpu_of({"LOCAL_RANK": "5"}, 5, 1) == 0
    assert gpu_of({}, 5, 8) == 5
    assert gpu_of({"LOCAL_RANK": "1"}, 9, 8) == 1


def test_two_ranks_on_one_gpu_are_refused(gpus: dict[str, Any]) -> None:
    seats = [Seat(rank, "here", "cuda:0", "gpu-7") for rank in range(2)]
    with pytest.raises(
        EngineError, match=r"ranks 0 and 1 both work on GPU gpu-7 of here, and NCCL needs one for each; start fewer"
    ):
        refuse_shared(seats)
    refuse_shared([Seat(0, "here", "cpu"), Seat(1, "here", "cpu")])


def test_ranks_learn_where_the_others_work(gpus: dict[str, Any]) -> None:
    import pickle

    board = Job(0)
    devices = Devices(board)
    devices.look_at(ON_GPU)
    board.post(
        "run0/torch/seat/1", pickle.dumps(Seat(1, devices._seat().host, "cuda:1", "gpu-1", frozenset({"gpu-0"})))
    )
    devices.meet(1.0)
    assert devices.wire((0, 1)) == PEERS and devices.wire((0,)) == PEERS
    cpu = Devices(board)
    cpu.look_at(ON_CPU)
    cpu.meet(1.0)  # asks nobody
    assert cpu.wire((0, 1)) == GLOO


@pytest.mark.parametrize(
    ("second", "wire"),
    [
        (Seat(1, "here", "cuda:1", "b", frozenset({"a"})), PEERS),
        (Seat(1, "there", "cuda:1", "b", frozenset({"a"})), NCCL),
        (Seat(1, "here", "cuda:1", "b", frozenset()), NCCL),  # a GPU that does not reach the other
    ],
)
def test_weights_go_by_copy_engines_where_all_reach_all(second: Seat, wire: str) -> None:
    assert wire_between([Seat(0, "here", "cuda:0", "a", frozenset({"b"})), second]) == wire


def test_mapped_memory_is_let_go_before_any_rank_frees_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: done.append("collect"))
    sites = [Site("policy", (0, 1), Layout.parse(text), frozenset()) for text in ("f2", "d2", "t2")]
    first, second = (sites[0], sites[1]), (sites[0], sites[2])
    edges: Any = Edges(Job(0), Devices(Job(0)))
    for edge in (first, second):
        edges._mapped[edge] = SimpleNamespace(close=lambda: done.append("close"))
        edges._wires[edge], edges._groups[edge], edges._spare[edge] = PEERS, "of gloo", "of nccl"
    assert edges._let_go(first) and done == ["close"]
    assert (edges._wires[first], edges._groups[first]) == (NCCL, "of nccl")  # what is parked must not be mapped again
    assert not edges._let_go(first)
    assert edges.how(*first).endswith(", by nccl") and edges.how(*second).endswith(", by copy engines")
    edges.close(lambda: done.append("meet"))
    assert done == ["close", "close", "meet", "collect"]
    edges.close(lambda: done.append("meet again"))
    assert len(done) == 4
