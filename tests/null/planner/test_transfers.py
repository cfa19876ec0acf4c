"""Rows on their way between meshes."""

from dataclasses import replace

import pytest

from examples.flows.grpo import grpo
from examples.flows.ppo import ppo
from flowrl.cost.shapes import ModelShape
from flowrl.mesh import Cluster, Mesh
from flowrl.planner.choices import Choices
from flowrl.planner.lower import plan_of
from flowrl.planner.passes.transfers import transfer_s
from flowrl.planner.planning import problem_of
from flowrl.planner.rows import RowConstants
from flowrl.planner.search import search
from flowrl.planner.tasks import Lane, StepKind
from flowrl.planner.workload import Lengths, Workload

SMALL = ModelShape.of("Qwen/Qwen2.5-1.5B")
WORK = Workload(32, Lengths.fixed(512), Lengths.fixed(1024), group_size=8)
TWO_NODES = replace(Cluster.named("2xA100-80G"), nodes=2, devices_per_node=1)


def plan_with(placement: str, cluster, flow=grpo, models=("policy", "ref"), **others):
    given = dict.fromkeys(models, SMALL)
    problem, graph = problem_of(
        flow.graph(), models=given, cluster=cluster, workload=WORK, placement=placement, **others
    )
    best = search(problem).best
    assert best is not None
    return plan_of(problem, best, graph)


def rows(plan):
    return {step.name: step for step in plan.steps if step.kind is StepKind.TRANSFER}


def test_on_one_mesh_nothing_moves():
    assert rows(plan_with("(gen:d2 + policy:f2 + ref:f2)", "2xA100-80G")) == {}


def test_what_one_mesh_made_and_another_reads():
    plan = plan_with("gen:d1 | (policy:d1 + ref:d1)", "2xA100-80G")
    moved = rows(plan)
    assert set(moved) == {"rollout.rows", "group_norm.rows", "data.rows"}
    rollout = moved["rollout.rows"]
    assert rollout.reads == ("loss_mask", "max_policy_version", "min_policy_version", "response_ids", "temperature")
    assert moved["group_norm.rows"].reads == ("advantage",) and moved["group_norm.rows"].predicted.num_bytes == 256 * 4
    assert moved["data.rows"].reads == ("prompt_ids",) and moved["data.rows"].after == ()
    assert rollout.after == ("rollout",) and rollout.lanes == (Lane.HOST,)
    # ids i32, mask of one byte, three numbers of a row
    assert rollout.predicted.num_bytes == 256 * (1024 * (4 + 1) + 3 * 4)
    steps = {step.name: step for step in plan.steps}
    assert {"rollout.rows", "group_norm.rows"} <= set(steps["update"].after)
    assert steps["ref_logprobs"].after.count("rollout.rows") == 1


def test_between_nodes_rows_take_the_network():
    moved = rows(plan_with("gen:d1 | (policy:d1 + ref:d1)", TWO_NODES))
    step = moved["rollout.rows"]
    assert step.lanes == (Lane.NIC,)
    assert step.predicted.seconds == pytest.approx(step.predicted.num_bytes / TWO_NODES.across.bytes_s + 8e-6)


def test_each_mesh_gets_its_own_columns():
    plan = plan_with(
        "gen:d1 | (policy:d1 + ref:d1) | (critic:d1 + judge:d1)",
        "3xA100-80G",
        ppo,
        ("policy", "ref", "critic", "judge"),
    )
    moved = rows(plan)
    there = [step for name, step in moved.items() if name.startswith("rollout.rows.")]
    assert len(there) == 2 and len({step.mesh for step in there}) == 2
    # the judge stands by the critic, log-probabilities and the shaped reward by the policy
    assert {name: step.reads for name, step in moved.items() if not name.startswith(("rollout", "data"))} == {
        "score.rows": ("reward",), "kl_shaped.rows": ("token_rewards",), "gae.rows": ("advantages",),
    }  # fmt: skip
    for step in moved.values():
        assert step.source is not None and step.source != step.mesh


def test_the_speed_of_a_host_is_a_choice():
    slow = Choices(rows=RowConstants(host_memory_bytes_s=1e6))
    step = rows(plan_with("gen:d1 | (policy:d1 + ref:d1)", "2xA100-80G", choices=slow))["rollout.rows"]
    assert step.predicted.seconds == pytest.approx(step.predicted.num_bytes / 1e6)


CLUSTER = Cluster.named("32xH100-80G")
CARD = CLUSTER.across.bytes_s


@pytest.mark.parametrize(
    ("source", "target", "far", "cards"),
    [
        (Mesh(0, 4), Mesh(4, 4), 0.0, 1),  # one node
        (Mesh(0, 8), Mesh(8, 8), 1.0, 8),  # from one node to another
        (Mesh(0, 16), Mesh(0, 32), 0.5, 16),  # two of four nodes have theirs
        (Mesh(0, 32), Mesh(0, 8), 0.75, 8),  # all into one node
        (Mesh(0, 16), Mesh(16, 16), 1.0, 16),
    ],
)
def test_what_goes_to_other_nodes(source, target, far, cards):
    size = 1e9
    seconds, is_far = transfer_s(CLUSTER, source, target, size)
    assert is_far == (far > 0)
    near_s = size * (1 - far) / RowConstants().host_memory_bytes_s
    assert seconds == pytest.approx(max(near_s / max(1, len(set(source.nodes(8)) & set(target.nodes(8)))),
                                        far * size / (cards * CARD) + CLUSTER.alpha_s if far else 0.0))  # fmt: skip
