"""What the search finds, as a plan: the simulator agrees about its seconds and its memory."""

import math
from dataclasses import replace

import pytest

import flowrl as fr
from examples.flows.dapo import dapo
from examples.flows.grpo import grpo, grpo_moving_ref
from examples.flows.ppo import ppo
from flowrl.cost.offload import Offload
from flowrl.cost.shapes import ModelShape
from flowrl.errors import FlowError, PlanError
from flowrl.graph.drift import code_in
from flowrl.graph.schedule import Async
from flowrl.mesh import Cluster
from flowrl.planner.draft import Draft
from flowrl.planner.lower import PASSES, lowered, plan_of
from flowrl.planner.passes.check import check, run
from flowrl.planner.planning import problem_of
from flowrl.planner.problem import Candidate, Problem, work_of
from flowrl.planner.search import search
from flowrl.planner.simulate import period, schedule, unroll
from flowrl.planner.steps import Plan
from flowrl.planner.tasks import Hold, Lane, StepKind
from flowrl.planner.workload import Lengths, Workload
from tests.null.planner.lower_cases import candidates, graph_of
from tests.null.planner.search_cases import CASES

WORK = Workload(64, Lengths.fixed(256), Lengths.lognormal(512, 0.6, cap=2048), group_size=4)
SMALL = ModelShape.of("Qwen/Qwen2.5-1.5B")
GIB = 2**30


def added_s(plan: Plan, problem: Problem, candidate: Candidate) -> float:
    """Seconds of what the search did not count: operators, rows, waits, and what the exact bytes of a handover add."""
    new = sum(
        step.predicted.seconds
        for step in plan.steps
        if step.kind in (StepKind.TRANSFER, StepKind.SYNC) or step.lanes == (Lane.HOST,)
    )
    exact = sum(step.predicted.seconds for step in plan.steps if step.kind is StepKind.RESHARD)
    work = work_of(problem.roles)
    closed = sum(candidate.work_s[at] for at, (_, call, _) in enumerate(work) if call is None)
    return new + max(0.0, exact - closed)


@pytest.mark.parametrize("name", CASES)
def test_every_plan_passes_the_simulator(name):
    problem = CASES[name]
    for candidate in candidates(name):
        plan = plan_of(problem, candidate, graph_of(problem))
        times, used = plan.simulated()
        assert used.excess(problem.cluster) is None
        assert times.makespan_s == plan.predicted.latency_s
        assert plan.predicted.seconds <= candidate.seconds + added_s(plan, problem, candidate) + 1e-9
        assert max(one.peak_bytes for one in used.devices.values()) <= problem.cluster.device.memory_bytes
        assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("critic")])
def test_nothing_parked_takes_what_the_search_says(name):
    problem = CASES[name]
    for candidate in candidates(name):
        if any(dict(o.settings).get("offload") == "park" for one in candidate.combinations for o in one.options):
            continue
        plan = plan_of(problem, candidate, graph_of(problem))
        assert plan.predicted.seconds == pytest.approx(candidate.seconds, abs=added_s(plan, problem, candidate) + 1e-6)
        # the sum over a set is what its devices hold at the worst moment, give or take whole bytes
        assert plan.predicted.device_bytes <= candidate.peak_bytes + 64


@pytest.mark.parametrize("asked", [None, Async(1)])
def test_a_flow_to_a_plan_and_back(asked):
    models = {"policy": SMALL, "ref": SMALL, "critic": SMALL.with_head("value"), "judge": SMALL.with_head("reward")}
    problem = Problem.of(ppo.graph(), models, Cluster.named("4xA100-80G"), WORK, schedule=asked)
    best = search(problem).best
    assert best is not None
    plan = plan_of(problem, best, ppo.graph())
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.hash == plan.hash
    steps = {step.name: step for step in plan.steps}
    calls = {"rollout", "score", "ref_logprobs", "old_logprobs", "values", "update", "update_2"}
    assert calls | {"kl_shaped", "gae", "gen.weights", "gen.weights.sync"} <= set(steps)
    assert all(steps[name].reads for name in calls)
    assert steps["kl_shaped"].reads == ("loss_mask", "old_logprobs", "ref_logprobs", "reward")
    assert steps["gae"].settings == (("seconds", "assumed"),)
    assert str(plan).endswith("predicted, seconds of operators assumed")
    assert steps["gae"].lanes == (Lane.HOST,) and "gae" in steps["update"].after


def test_every_node_that_works_is_a_step():
    problem, graph = problem_of(
        dapo.graph(), models={"policy": SMALL}, cluster="2xA100-80G", workload=replace(WORK, rounds=2.0)
    )
    best = search(problem).best
    plan = plan_of(problem, best, graph)
    work = {step.name: step for step in plan.steps if step.kind is StepKind.COMPUTE}
    assert set(work) == {"refill.rollout", "refill.math", "refill.overlong", "refill", "group_norm", "update"}
    order = [step.name for step in plan.steps]
    assert order.index("refill.rollout") < order.index("refill.math") < order.index("refill") < order.index("update")


def test_code_is_recorded():
    plan = fr.plan(grpo, models={"policy": SMALL, "ref": SMALL}, cluster="1xH200", workload=WORK)
    assert plan.operator_hashes == code_in(grpo.graph())
    assert {name.rpartition(":")[2] for name, _ in plan.operator_hashes} == {"math", "group_norm", "ppo_clip", "kl"}
    assert replace(plan, operator_hashes=()).hash != plan.hash


def test_assigned_weights_are_a_step():
    models = {"policy": SMALL, "ref": SMALL}
    problem, graph = problem_of(grpo_moving_ref.graph(), models=models, cluster="4xA100-80G", workload=WORK)
    plan = plan_of(problem, search(problem).best, graph)
    moved = {step.name: step for step in plan.steps if step.kind is StepKind.RESHARD}
    assert set(moved) == {"gen.weights", "assign"}
    assert moved["assign"].source is not None
    order = [step.name for step in plan.steps]
    assert order.index("update") < order.index("assign") and "assign.sync" in moved["assign"].after


def test_less_memory_would_not_do():
    """The peak is no slack estimate: one GiB less on each device, and the same plan is over."""
    problem = CASES["tight"]
    best = candidates("tight")[0]
    plan = plan_of(problem, best, graph_of(problem))
    smaller = problem.cluster.with_memory(device_bytes=plan.predicted.device_bytes - GIB)
    excess = plan.simulated()[1].excess(smaller)
    assert excess is not None and "memory of device" in str(excess)
    with pytest.raises(PlanError, match="would not fit: memory of device 0 during"):
        plan_of(replace(problem, cluster=smaller), best, graph_of(problem))


def test_weights_that_wait_are_counted():
    """From the handover to the next sample the engine's weights are there, over the end of the iteration too."""
    problem = CASES["critic"]
    best = candidates("critic")[0]
    draft = lowered(problem, best, graph_of(problem))
    waiting = [hold for hold in draft.resident if hold.what == "gen weights"]
    assert [(hold.from_task, hold.until_task) for hold in waiting] == [("gen.weights", "")]
    assert waiting[0].device_bytes == math.ceil(best.option("gen").handover_bytes) > 0
    assert waiting[0].devices == tuple(best.meshes[0].devices)


def test_steps_that_copy_take_the_lanes_to_the_host():
    problem = CASES["tight"]
    choices = replace(problem.choices, offload=(Offload.STREAM_OPTIMIZER,))
    problem = replace(problem, choices=choices)
    best = search(problem).best
    plan = plan_of(problem, best, graph_of(problem))
    update = next(step for step in plan.steps if step.name == "update")
    assert set(update.lanes) == {Lane.COMPUTE, Lane.H2D, Lane.D2H}
    assert plan.predicted.host_bytes > 0


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("async")])
def test_iterations_that_overlap_take_no_less_than_the_period(name):
    """Many of them, simulated step by step. A list schedule of them may be longer; for most plans it is as long."""
    problem = CASES[name]
    per_node = problem.cluster.devices_per_node
    ratios = []
    for candidate in candidates(name):
        plan = plan_of(problem, candidate, graph_of(problem))
        tasks = [replace(task, holds=()) for task in plan.tasks]
        twelve, six = (
            schedule(unroll(tasks, count, max_staleness=plan.max_staleness), devices_per_node=per_node).makespan_s
            for count in (12, 6)
        )
        found = period(tasks, max_staleness=plan.max_staleness, devices_per_node=per_node).seconds
        assert found == plan.predicted.seconds
        ratios.append((twelve - six) / 6 / found)
    assert min(ratios) >= 1 - 1e-4
    assert sum(ratio < 1.001 for ratio in ratios) >= len(ratios) / 2


# ------------------------------------------------------------------------------------------------------------ passes


def test_each_pass_gives_a_draft_that_holds_together():
    problem = CASES["critic_tight"]
    draft = Draft(problem, candidates("critic_tight")[0], graph_of(problem))
    for one in PASSES:
        after = one(draft)
        check(after, one.__name__)
        known = {step.name for step in draft.steps}
        assert known <= {step.name for step in after.steps}, "a pass never takes a step away"
        assert one(draft) == after, "a pass gives the same again"
        draft = after
    assert draft == lowered(problem, draft.candidate, draft.graph)


def test_a_pass_that_breaks_a_draft_is_named():
    problem = CASES["plenty"]
    draft = Draft(problem, candidates("plenty")[0], graph_of(problem))

    def twice(draft: Draft) -> Draft:
        return draft.with_steps(draft.steps[:1])

    def lost(draft: Draft) -> Draft:
        return replace(draft, resident=(*draft.resident, Hold("x", 1, from_task="nowhere", devices=(0,))))

    with pytest.raises(
        FlowError, match="pass 'twice' of the planner broke the plan of 'grouped'; please report this: every"
    ):
        run((PASSES[0], twice), draft)
    with pytest.raises(FlowError, match="pass 'lost' .* hold 'x' names the step 'nowhere', which is not there"):
        run((PASSES[0], lost), draft)
