"""The closed form of a handover against the exact moves."""

import pytest

from flowrl.cost.shapes import ModelShape
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner import handover
from flowrl.planner.boxes import Holding, even_stages
from flowrl.planner.handover import Side, far_bytes, handover_s, kept_bytes, need_bytes
from flowrl.planner.reshard import aligned, received_bytes, reshard

LLAMA_8B = ModelShape.of("meta-llama/Meta-Llama-3-8B")
CASES = {
    "8B f8 to tp2": (LLAMA_8B, 8, 2),
    "8B f8 to tp8": (LLAMA_8B, 8, 8),
    "0.5B f4 to tp2": (ModelShape.of("Qwen/Qwen2.5-0.5B"), 4, 2),
    "7B f8 to tp4": (ModelShape.of("Qwen/Qwen2.5-7B"), 8, 4),
    "7B f8 to tp8, more than heads": (ModelShape.of("Qwen/Qwen2.5-7B"), 8, 8),
}


@pytest.mark.parametrize("name", [name for name in CASES if "tp4" in name or "8B" in name or "0.5B" in name])
def test_received_on_one_mesh(name):
    shape, size, tp = CASES[name]
    source = Holding(Layout(fsdp=size), range(size))
    target = Holding(Layout(dp=size // tp, tp=tp), range(size), kv_heads=shape.kv_heads)
    exact = max(received_bytes(shape.modules(), aligned(source, target), target).values())
    assert need_bytes(shape, tp) - kept_bytes(shape, size, tp) == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("name", CASES)
def test_received_apart(name):
    shape, size, tp = CASES[name]
    source = Holding(Layout(fsdp=size), range(size, 2 * size))
    target = Holding(Layout(dp=size // tp, tp=tp), range(size), kv_heads=shape.kv_heads)
    exact = max(received_bytes(shape.modules(), source, target).values())
    assert need_bytes(shape, tp) == pytest.approx(exact, rel=2e-3)


@pytest.mark.parametrize("trainer, engine", [("f4t2", "d4t2"), ("f2t4", "d2t4"), ("d2f2t2", "d4t2"), ("f8", "p2t4"),
                                             ("f4t2", "d2t4"), ("f2t4", "d4t2"), ("t8", "t8")])  # fmt: skip
@pytest.mark.parametrize("apart", [False, True])
def test_received_from_tensor_parallel_trainers_and_by_stages(trainer, engine, apart):
    given, taken = Layout.parse(trainer), Layout.parse(engine)
    stages = even_stages(LLAMA_8B.layers, taken.pp) if taken.pp > 1 else ()
    source = Holding(given, range(8 * apart, 8 * apart + 8), kv_heads=8)
    target = Holding(taken, range(8), kv_heads=8, stage_layers=stages)
    if given.tp == 1 and not apart:
        source = aligned(source, target)
    exact = max(received_bytes(LLAMA_8B.modules(), source, target).values())
    closed = handover.received_bytes(LLAMA_8B, Side(Mesh(8 * apart, 8), given), Side(Mesh(0, 8), taken))
    assert closed == pytest.approx(exact, rel=2e-3, abs=1e6)  # norms stay too where both are cut alike


def test_from_another_node():
    cluster = Cluster.named("16xH100-80G")
    source, target = Side(Mesh(0, 8), Layout(fsdp=8)), Side(Mesh(8, 8), Layout(dp=4, tp=2))
    moves = reshard(
        LLAMA_8B.modules(),
        Holding(source.layout, source.mesh.devices),
        Holding(target.layout, target.mesh.devices, kv_heads=8),
        devices_per_node=8,
    )
    received, sent = far_bytes(LLAMA_8B, cluster, source, target)
    assert received == sent == pytest.approx(moves.across_bytes / 8, rel=1e-3)
    assert handover_s(LLAMA_8B, cluster, source, target) == pytest.approx(
        moves.time_s(cluster, is_copied=True), rel=0.15
    )


def test_a_copy_on_each_node_stays_there():
    cluster = Cluster.named("16xH100-80G")
    mesh = Mesh(0, 16)
    cut, copied = Layout(fsdp=16), Layout(dp=2, fsdp=8)
    engine = Side(mesh, Layout(dp=4, tp=4))
    assert far_bytes(LLAMA_8B, cluster, Side(mesh, copied), engine) == (0, 0)
    assert far_bytes(LLAMA_8B, cluster, Side(mesh, cut), engine)[0] == pytest.approx(LLAMA_8B.params() / 8)


def test_shards_on_the_host_are_loaded_first():
    cluster = Cluster.named("8xA100-80G")
    source, target = Side(Mesh(0, 8), Layout(fsdp=8)), Side(Mesh(0, 8), Layout(dp=4, tp=2))
    less = handover_s(LLAMA_8B, cluster, source, target)
    more = handover_s(LLAMA_8B, cluster, source, target, is_on_host=True)
    assert more - less == pytest.approx(4 * LLAMA_8B.params() / 8 / cluster.host_link.bytes_s)


@pytest.mark.parametrize(
    "first, size, layout",
    [(4, 4, "d4"), (4, 4, "d2t2"), (8, 8, "d4t2"), (8, 16, "d4t4"), (8, 24, "d3t8")],
)
def test_time_of_few_trainers_and_many_engines(first, size, layout):
    """Seconds of the exact moves: two, or eight, devices send to more."""
    cluster = Cluster.named("32xH100-80G")
    trainers = 2 if first < 8 else 8
    source, target = Side(Mesh(0, trainers), Layout(fsdp=trainers)), Side(Mesh(first, size), Layout.parse(layout))
    moves = reshard(
        LLAMA_8B.modules(),
        Holding(source.layout, source.mesh.devices),
        Holding(target.layout, target.mesh.devices, kv_heads=8),
        devices_per_node=8,
    )
    exact = moves.time_s(cluster, is_copied=True)
    assert handover_s(LLAMA_8B, cluster, source, target) == pytest.approx(exact, rel=0.1)
