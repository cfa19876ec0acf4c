"""Weights that wait: who may work beside them, and orders that leave room for them."""

from dataclasses import replace

import pytest

from flowrl.cost.offload import ADAM_MASTER, Offload
from flowrl.cost.shapes import ModelShape
from flowrl.errors import PlanError
from flowrl.mesh import Cluster
from flowrl.planner.lower import plan_of
from flowrl.planner.options import Choices
from flowrl.planner.problem import Problem, work_of
from flowrl.planner.roles import Call, Role
from flowrl.planner.search import search
from flowrl.planner.tasks import StepKind
from flowrl.planner.waiting import handovers_of
from flowrl.planner.workload import Lengths, Workload
from tests.null.planner.lower_cases import candidates, graph_of
from tests.null.planner.search_cases import CASES, CRITICS, GROUPS, TINY, WORK, cluster, critic_roles

IN_ORDER = ("critic_in_order", "critic_in_order_4")


def named(roles):
    """What each piece of work is called."""
    return [f"to {roles[r].name}" if call is None else roles[r].calls[call].node for r, call, _ in work_of(roles)]


def test_who_may_work_meanwhile():
    (one,) = handovers_of(work_of(CRITICS), CRITICS)
    names = named(CRITICS)
    assert names[one.at] == "to gen"
    assert [names[at] for at in one.updates] == ["update"] and [names[at] for at in one.samples] == ["rollout"]
    assert one.edge.between == one.edge.beside == {"critic"}


def test_nobody_may_where_all_comes_between_sample_and_update():
    (one,) = handovers_of(work_of(GROUPS), GROUPS)
    assert not one.edge.between and not one.edge.beside


def test_what_waits_for_nothing_may_come_before_the_sample():
    """A score of a fixed data set, which the update needs: the engine's weights may wait beside it."""
    free = replace(GROUPS[2], calls=(Call("score", "ref", "forward", 128),))
    roles = (*GROUPS[:2], free)
    (one,) = handovers_of(work_of(roles), roles)
    assert one.edge.beside == {"ref"} and not one.edge.between


@pytest.mark.parametrize("name", IN_ORDER)
def test_the_order_makes_it_fit(name):
    """The critic's update would find no room beside the weights: it comes before the policy's, which the handover follows."""
    problem = CASES[name]
    best = candidates(name)[0]
    assert any(one.is_ordered for one in best.combinations)
    names = named(problem.roles)
    order = [names[at] for at in best.order]
    plan = plan_of(problem, best, graph_of(problem))
    assert plan.simulated()[1].excess(problem.cluster) is None
    assert order.index("update_2") < order.index("update") and order[-2:] == ["update", "to gen"]


def test_another_order_would_not_fit():
    problem = CASES["critic_in_order"]
    best = candidates("critic_in_order")[0]
    names = named(problem.roles)
    late = names.index("update_2")
    order = [one for one in best.order if one != late]
    with pytest.raises(PlanError, match="would not fit: memory of device 0 during update_2"):
        plan_of(problem, replace(best, order=(*order, late)), graph_of(problem))
    # between the update and the handover the shards would have to leave, and to come back: time that the search never counts
    plan = plan_of(problem, replace(best, order=(*order[:-1], late, order[-1])), graph_of(problem))
    moved = [step.name for step in plan.steps if step.node == "policy" and step.kind is StepKind.ONLOAD]
    assert moved and plan.predicted.seconds > plan_of(problem, best, graph_of(problem)).predicted.seconds


def test_it_takes_no_longer():
    """On one mesh an order costs nothing: as fast as with a GiB for everything at once, and the same options."""
    tight = CASES["critic_in_order"]
    roomy = replace(tight, cluster=cluster("1xA100-80G", 60), only=(("gen", "utilization", 0.6),))
    best = search(replace(tight, tie=0.0)).best
    settings = tuple((one.role, *said) for c in best.combinations for one in c.options for said in one.settings)
    free = search(replace(roomy, tie=0.0, only=settings)).best
    assert free is not None and not any(one.is_ordered for one in free.combinations)
    assert free.seconds <= best.seconds <= free.seconds * 1.1  # a larger device has a larger cache


@pytest.mark.parametrize("gib", range(11, 32, 4))
@pytest.mark.parametrize("devices", ["1xA100-80G", "2xA100-80G", "4xA100-80G"])
def test_every_plan_that_is_found_passes_the_simulator(devices, gib):
    choices = replace(TINY, offload=(Offload.NONE, Offload.PARK, Offload.STREAM_OPTIMIZER))
    problem = Problem(CRITICS, cluster(devices, gib), WORK, choices=choices)
    found = search(problem)
    for candidate in filter(None, (found.best, found.fastest, *found.others)):
        plan = plan_of(problem, candidate, graph_of(problem))
        assert plan.simulated()[1].excess(problem.cluster) is None
        if not any(dict(o.settings).get("offload") == "park" for one in candidate.combinations for o in one.options):
            # parked state stays where there is room
            assert plan.predicted.device_bytes <= candidate.peak_bytes + 64


def test_four_large_models_on_one_node():
    """Policy, critic, reward model and reference of 70B on eight 80 GiB devices: one mesh does, in the right order."""
    shape = ModelShape.of("meta-llama/Llama-2-70b-hf")
    judge = Role("judge", "judge", shape.with_head("reward"), (Call("reward", "judge", "forward", 256, ("rollout",)),))
    roles = (*critic_roles(shape, shape.with_head("value"), 256), judge)
    machine = Cluster.named("8xA100-80G").with_memory(host_bytes=2 * 10**12)
    work = Workload(256, Lengths.fixed(512), Lengths.fixed(512))
    found = search(Problem(roles, machine, work, choices=Choices(optimizers=(ADAM_MASTER,))))
    assert found.best is not None and len(found.best.meshes) == 1
    assert all(one.is_ordered for one in found.best.combinations)
    assert 440 < found.best.seconds < 480 and found.bound_s <= found.best.seconds
