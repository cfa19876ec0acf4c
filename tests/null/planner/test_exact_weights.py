"""Weights in plans: exact bytes, the order of ranks, waits."""

import pytest

from examples.flows.grpo import grpo, grpo_moving_ref
from flowrl.cost.shapes import ModelShape
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.boxes import Holding
from flowrl.planner.lower import plan_of
from flowrl.planner.passes.weights import MOST_DEVICES, exact
from flowrl.planner.planning import problem_of
from flowrl.planner.reshard import reshard
from flowrl.planner.search import search
from flowrl.planner.tasks import Lane, StepKind
from flowrl.planner.workload import Lengths, Workload

LLAMA_8B = ModelShape.of("meta-llama/Meta-Llama-3-8B")
QWEN_7B = ModelShape.of("Qwen/Qwen2.5-7B")
WORK = Workload(64, Lengths.fixed(256), Lengths.lognormal(512, 0.6, cap=2048), group_size=4)
NODE, TWO = Cluster.named("8xA100-80G"), Cluster.named("16xA100-80G")


def plan_with(placement, cluster, flow=grpo):
    models = {"policy": QWEN_7B, "ref": QWEN_7B}
    problem, graph = problem_of(flow.graph(), models=models, cluster=cluster, workload=WORK, placement=placement)
    best = search(problem).best
    assert best is not None
    return plan_of(problem, best, graph)


def test_bytes_are_those_of_all_moves():
    """Of eight shards into tp 2: the order that moves least, each device's part added."""
    found = exact(LLAMA_8B, NODE, Mesh(0, 8), Layout.parse("f8"), Mesh(0, 8), Layout.parse("d4t2"), False)
    assert found is not None and str(found.layout) == "d4t2@div"
    assert found.received_bytes == 6_324_952_064
    moves = reshard(
        LLAMA_8B.modules(),
        Holding(Layout.parse("f8"), range(8)),
        Holding(Layout.parse("d4t2@div"), range(8), kv_heads=8),
    )
    assert found.total_bytes == sum(one.num_bytes for one in moves.moves) and found.across_bytes == 0
    assert found.seconds == pytest.approx(moves.time_s(NODE, is_copied=True), rel=0.01)


def test_no_order_of_ranks_across_nodes():
    found = exact(LLAMA_8B, TWO, Mesh(0, 16), Layout.parse("f16"), Mesh(0, 16), Layout.parse("d4t4"), False)
    assert found is not None and found.layout.tp_order == "mod" and found.across_bytes > 0


def test_shards_on_hosts_come_in_first():
    there = exact(LLAMA_8B, NODE, Mesh(0, 8), Layout.parse("f8"), Mesh(0, 8), Layout.parse("t8"), True)
    here = exact(LLAMA_8B, NODE, Mesh(0, 8), Layout.parse("f8"), Mesh(0, 8), Layout.parse("t8"), False)
    assert there is not None and here is not None
    load_s = 4 * LLAMA_8B.params() / 8 / NODE.host_link.bytes_s
    assert there.seconds - here.seconds == pytest.approx(load_s, rel=0.01)


def test_the_step_says_what_moves_and_how():
    plan = plan_with("(gen:d4t2 + policy:f8 + ref:f8)", NODE)
    steps = {step.name: step for step in plan.steps}
    step = steps["gen.weights"]
    settings = dict(step.settings)
    assert (settings["role"], settings["from"]) == ("gen", "policy")
    assert settings["buckets"] >= 1 and settings["bucket_bytes"] == 128 * 2**20
    assert str(step.layout) == "d4t2@div" == str(steps["rollout"].layout), (
        "one order of ranks for all of the engine's steps"
    )
    assert step.lanes == (Lane.COMPUTE, Lane.NVLINK)
    assert step.predicted.num_bytes == plan_with("(gen:d4t2 + policy:f8 + ref:f8)", NODE).steps[-1].predicted.num_bytes
    wait = steps["gen.weights.sync"]
    assert wait.kind is StepKind.SYNC and wait.lanes == () and step.after == ("gen.weights.sync",)
    assert "update" in wait.after and wait.predicted.seconds == pytest.approx(3 * NODE.alpha_s)


def test_across_nodes_the_network_is_taken_too():
    plan = plan_with("gen:d4t2 | (policy:f8 + ref:f8)", TWO)
    step = next(step for step in plan.steps if step.name == "gen.weights")
    assert Lane.NIC in step.lanes and len(step.devices) == 16
    assert len(next(step for step in plan.steps if step.name == "gen.weights.sync").devices) == 16


def test_many_devices_have_the_closed_form():
    many = Mesh(0, 2 * MOST_DEVICES)
    assert exact(QWEN_7B, TWO, many, Layout(fsdp=many.size), Mesh(0, 8), Layout(dp=8), False) is None
    plan = plan_with("(gen:d32t4 + policy:f128 + ref:f128)", "128xH100-80G")
    step = next(step for step in plan.steps if step.name == "gen.weights")
    assert dict(step.settings)["bytes"] == "closed form" and step.predicted.num_bytes > 0


def test_sixty_four_devices_are_counted_box_by_box():
    cluster, whole = Cluster.named("64xH100-80G"), Mesh(0, 64)
    found = exact(QWEN_7B, cluster, whole, Layout(fsdp=64), whole, Layout(dp=16, tp=4), False)
    assert found is not None and found.total_bytes > found.across_bytes > 0
    # each node lacks seven eighths of the model, and gets them once
    assert found.across_bytes == pytest.approx(8 * 7 / 8 * 2 * QWEN_7B.params(), rel=0.01)


def test_plans_that_are_only_compared_differ_by_milliseconds():
    problem, graph = problem_of(grpo.graph(), models={"policy": QWEN_7B, "ref": QWEN_7B}, cluster=NODE, workload=WORK)
    best = search(problem).best
    assert best is not None
    one, other = plan_of(problem, best, graph), plan_of(problem, best, graph, is_exact=False)
    assert one.predicted.seconds == pytest.approx(other.predicted.seconds, abs=0.01)


def test_a_reference_that_follows_the_policy():
    """On one mesh in one layout nothing goes over a wire; every 200th step is a two-hundredth of the seconds."""
    plan = plan_with("(gen:d4t2 + policy:f8 + ref:f8)", NODE, grpo_moving_ref)
    step = next(step for step in plan.steps if step.name == "assign")
    assert step.kind is StepKind.RESHARD and step.predicted.num_bytes == 0
    whole = exact(QWEN_7B, NODE, Mesh(0, 8), Layout.parse("f8"), Mesh(0, 8), Layout.parse("f8"), False)
    assert whole is not None
    assert step.predicted.seconds == pytest.approx(whole.seconds / 200)


def test_a_parked_reference_gets_its_weights_on_the_hosts():
    """Neither model comes in for it: the memory that the search left is enough."""
    models = {"policy": LLAMA_8B, "ref": LLAMA_8B}
    small = Cluster.named("2xA100-80G").with_memory(device_bytes=29 * 2**30)
    problem, graph = problem_of(grpo_moving_ref.graph(), models=models, cluster=small, workload=WORK)
    found = search(problem)
    parked = [
        one
        for one in (found.best, *found.others)
        if one is not None and dict(one.option("ref").settings)["offload"] == "park"
    ]
    assert parked
    for one in parked:
        step = next(step for step in plan_of(problem, one, graph).steps if step.name == "assign")
        assert Lane.D2H in step.lanes and step.predicted.seconds > 0
