"""A plan executed in one process: the numbers of a run without it, its order, its moves, what it refuses, what it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flowrl as fr
from examples.flows.dapo import dapo
from examples.flows.grpo import grpo, grpo_moving_ref
from examples.flows.ppo import ppo, ppo_warm
from flowrl.cost.shapes import ModelShape
from flowrl.engines.null import NullHost
from flowrl.errors import ConfigError, RunError, TraceError
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.measured import compare_run
from flowrl.planner.steps import Plan
from flowrl.planner.tasks import StepKind
from flowrl.recipe import Recipe
from flowrl.runtime.options import Options
from flowrl.runtime.rundir import RunDir
from flowrl.store.rows import RowBatch
from tests.null.flow_cases import FLOWS, MODEL, PROMPTS
from tests.null.runtime.plans import calls, compute, move, numbers, plan_of

MODELS = {"prompts": PROMPTS, "policy": MODEL, "ref": MODEL}
PPO = {**MODELS, "critic": fr.Model(None, head="value"), "judge": fr.Model(None, head="reward")}


@pytest.fixture(autouse=True)
def _plain_math(monkeypatch):
    # math-verify is slow to import and not what is tested here
    monkeypatch.setattr(
        "flowrl_operators.rewards.math.function", lambda response, answer, **_: float(answer in response)
    )


def run(flow: Any, inputs: dict[str, Any], **options: Any) -> fr.Run:
    given = {
        "steps": 3,
        "engine": "null",
        "out": None,
        "progress": "off",
        "batch": 4,
        "max_tokens": 12,
        "reward_workers": 0,
        **options,
    }
    return fr.run_local(flow, **given, **inputs)


def assert_equal_runs(one: fr.Run, other: fr.Run) -> None:
    """Weights, metrics, and every row of the last step, in every column and in the same order."""
    assert {name: host.state() for name, host in one.hosts.items()} == {n: h.state() for n, h in other.hosts.items()}
    assert numbers(one) == numbers(other)
    assert list(one.last) == list(other.last)
    for name in one.last:
        if hasattr(one.last[name], "batch"):
            left, right = one.rows(name), other.rows(name)
            assert left.names == right.names and left.types == right.types
            assert values(left) == values(right), name


def values(rows: RowBatch) -> str:
    """Every value, so that one NaN is like another."""
    return repr(rows.to_arrow().to_pydict())


@pytest.mark.parametrize("turn", ["as written", "backwards"])
@pytest.mark.parametrize(("flow", "config", "inputs"), list(FLOWS.values()), ids=list(FLOWS))
def test_a_planned_run_is_the_run(flow, config, inputs, turn):
    """Also where the plan has every node before what it needs: then the order is put right, and a note says so."""
    graph = flow.graph(**config)
    names = list(calls(fr.run_local(graph, steps=0, engine="null", out=None, progress="off", **inputs).graph))
    plan = plan_of(graph, names if turn == "as written" else names[::-1])
    planned = run(graph, inputs, plan=plan)
    assert_equal_runs(planned, run(graph, inputs))
    is_moved = any(note.startswith("plan: ") for note in planned.notes)
    assert is_moved == (turn == "backwards" and len(names) > 1 and flow.name != "reward_model")


@pytest.mark.parametrize(("flow", "config", "inputs"), list(FLOWS.values()), ids=list(FLOWS))
def test_what_the_planner_makes_is_executed(flow, config, inputs):
    """Every step of every plan: operators, handovers, waits and moves as the planner has them."""
    graph = flow.graph(**config)
    models = {node.name: SHAPE for node in graph.inputs if node["kind"] == "weights"}
    workload = fr.Workload(4, fr.Lengths.fixed(6), fr.Lengths.fixed(12))
    planned = run(graph, inputs, plan=fr.plan(graph, models=models, cluster="cpu", workload=workload))
    assert_equal_runs(planned, run(graph, inputs))
    rarely = {name for node in graph if node.kind == "every" for name in graph.ancestors(node.name)}
    assert all(step.runs == 2 for step in planned.compare().steps if step.node not in rarely and flow is not ppo_warm)


SHAPE = {
    "model_type": "llama", "vocab_size": 258, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def order_of(done: fr.Run) -> list[str]:
    """Steps of the plan in the order in which the last iteration did them."""
    return [e.attributes["plan_step"] for e in done.events if e.step == 2 and "plan_step" in e.attributes]


def test_the_order_is_the_plans_where_columns_allow_it():
    """In the flow each forward pass takes the table of the one before; all of them read only what the rollout gave."""
    names = ["rollout", "values", "old_logprobs", "ref_logprobs", "score", "update_2", "update"]
    assert names != list(calls(ppo.graph()))
    planned = run(ppo, PPO, plan=plan_of(ppo, names))
    assert order_of(planned) == names
    assert not [note for note in planned.notes if note.startswith("plan: ")]
    assert_equal_runs(planned, run(ppo, PPO))


def test_an_operator_may_be_a_step_of_its_own():
    plan = plan_of(grpo, ["rollout", "ref_logprobs", "math", "group_norm", "update"])
    planned = run(grpo, MODELS, plan=plan)
    assert order_of(planned) == ["rollout", "ref_logprobs", "math", "group_norm", "update"]
    assert_equal_runs(planned, run(grpo, MODELS))


def test_a_node_is_not_ahead_of_what_changes_a_column_it_reads():
    """The advantage reads the reward after it was shaped; the plan would have it read the first one."""
    names = ["rollout", "first", "advantage", "ref_logprobs", "shaped", "update"]
    inputs = {"prompts": PROMPTS, "policy": MODEL, "ref": MODEL}
    planned = run(shaping, inputs, plan=plan_of(shaping, names))
    assert (
        "plan: 'ref_logprobs', 'shaped' before 'advantage', which needs it, although the plan has it later"
        in planned.notes
    )
    assert_equal_runs(planned, run(shaping, inputs))


@fr.operator(writes={"reward": fr.SAMPLE.f32})
def first(response_ids: fr.TOKEN.i32):
    return response_ids.lengths.astype(np.float32)


@fr.operator(writes={"reward": fr.SAMPLE.f32})
def shaped(reward: fr.SAMPLE.f32, ref_logprobs: fr.TOKEN.f32):
    return reward + ref_logprobs.sum()


@fr.operator(writes={"advantage": fr.SAMPLE.f32})
def advantage(reward: fr.SAMPLE.f32):
    return reward - reward.mean()


@fr.flow
def shaping(prompts, policy, ref):
    rows = fr.logprobs(ref, first(fr.rollout(policy, prompts, n=2)), out="ref_logprobs")
    rows = advantage(shaped(rows, replace=True))
    fr.log(rows, "advantage")
    return fr.update(policy, rows, loss=reinforce())


def test_what_reads_new_weights_runs_after_they_change():
    """A flow that the checks refuse (FR-W01): without them it runs in the order in which it is written, planned or not."""
    plan = plan_of(reads_late, ["rollout", "late", "update"])
    inputs = {"prompts": PROMPTS, "policy": MODEL}
    planned = run(reads_late, inputs, plan=plan, checks=False)
    assert order_of(planned) == ["rollout", "update", "late"]
    assert_equal_runs(planned, run(reads_late, inputs, checks=False))


@fr.flow
def reads_late(prompts, policy):
    rows = fr.rollout(policy, prompts, n=2)
    new = fr.update(policy, length(rows), loss=reinforce())
    fr.log(fr.logprobs(policy, rows, out="late"), "late")
    return new


def test_an_assignment_of_weights_is_its_nodes_work():
    """A plan has it as a reshard, behind the update; the node gives the reference its weights when it is due."""
    flow = moving.graph()
    steps = ["rollout", "ref_logprobs", "update", move(StepKind.RESHARD, "assign", "assign", "ref"), "seen"]
    inputs = {"prompts": PROMPTS, "policy": MODEL, "ref": MODEL}
    planned = run(flow, inputs, plan=plan_of(flow, steps), steps=4)
    assert [e.node for e in planned.events if e.attributes.get("plan_step") == "assign"] == ["assign"] * 4
    assert not any(e.what == "reshard" for e in planned.events)
    assert planned.hosts["ref"].version == 2  # every second iteration
    assert_equal_runs(planned, run(flow, inputs, steps=4))


@fr.flow
def moving(prompts, policy, ref):
    rows = length(fr.rollout(policy, prompts, n=2))
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    fr.log(rows, "ref_logprobs")
    policy = fr.update(policy, rows, loss=reinforce())
    ref = fr.assign(ref, policy, every=2)
    fr.log(fr.logprobs(ref, rows, out="seen"), "seen")
    return policy, ref


def test_refills_of_one_data_set_draw_in_the_order_of_the_flow():
    """The plan has the second first; what they draw would be another."""
    flow = twice.graph()
    inputs = {"prompts": PROMPTS, "policy": MODEL}
    first, second = (n.name for n in flow if n.kind == "refill")
    plan = plan_of(flow, [f"{second}.rollout", f"{first}.rollout", "update"])
    planned = run(flow, inputs, plan=plan)
    assert any(f"'{first}' before '{second}'" in note for note in planned.notes)
    assert all(step[f"{first}/rounds"] > 1 for step in planned.metrics[:1])
    assert_equal_runs(planned, run(flow, inputs))


@fr.operator(filter=True)
def is_short(response_ids: fr.TOKEN.i32):
    return response_ids.lengths % 3 == 0


@fr.flow
def twice(prompts, policy):
    one = fr.refill(lambda new: fr.rollout(policy, new, n=2), prompts, keep=is_short(), max_rounds=3)
    other = fr.refill(lambda new: fr.rollout(policy, new, n=2), prompts, keep=is_short(), max_rounds=3)
    return fr.update(policy, length(fr.concat(one, other)), loss=reinforce())


@fr.flow
def reads_old_weights(prompts, policy):
    rows = fr.rollout(policy, prompts, n=2)
    fr.log(fr.logprobs(policy, rows, out="start"), "start")
    return fr.update(policy, length(rows), loss=reinforce())


@fr.operator(writes={"advantage": fr.SAMPLE.f32})
def length(response_ids: fr.TOKEN.i32):
    return response_ids.lengths - 4.0


@fr.loss
def reinforce(logprobs: fr.TOKEN.f32, advantage: fr.SAMPLE.f32):
    return -logprobs * advantage


def test_what_reads_old_weights_runs_before_they_change():
    """No edge of the graph says that the log comes before the update, and the plan has it after."""
    plan = plan_of(reads_old_weights, ["rollout", "update", "start"])
    inputs = {"prompts": PROMPTS, "policy": MODEL}
    planned = run(reads_old_weights, inputs, plan=plan)
    assert order_of(planned) == ["rollout", "start", "update"]
    assert "plan: 'start' before 'update', which needs it, although the plan has it later" in planned.notes
    assert_equal_runs(planned, run(reads_old_weights, inputs))


def test_a_step_that_is_not_due_is_skipped():
    """An evaluation in every 50th iteration; an update after two of warm-up."""
    inputs = {**MODELS, "heldout": fr.Data(PROMPTS, batch="all")}
    planned = run(grpo_moving_ref, inputs, plan=plan_of(grpo_moving_ref), steps=50)
    assert [e.step for e in planned.events if e.attributes.get("plan_step") == "rollout_2"] == [49]
    (row,) = (step for step in planned.compare().steps if step.name == "rollout_2")
    assert row.runs == 1 and row.measured_s == pytest.approx(row.seconds / 49)

    warm = ppo_warm.graph(warmup=2)
    planned = run(warm, PPO, plan=plan_of(warm))
    assert [e.step for e in planned.events if e.attributes.get("plan_step") == "update"] == [2]


def test_rounds_of_a_refill_are_one_step():
    flow = dapo.graph(group_size=4)
    planned = run(flow, {"prompts": PROMPTS, "policy": MODEL}, plan=plan_of(flow))
    rounds = [int(step["refill/rounds"]) for step in planned.metrics]
    events = [e for e in planned.events if e.attributes.get("plan_step") == "refill.rollout"]
    assert [e.node for e in events] == ["refill/rollout"] * sum(rounds) and max(rounds) > 1
    (row,) = (step for step in planned.compare().steps if step.name == "refill.rollout")
    assert row.runs == 2 and row.node_kind == "rollout"


# --------------------------------------------------------------------------------------------------------------- moves


def test_a_reshard_publishes_weights_and_other_moves_say_that_there_is_nothing_to_move(monkeypatch):
    published: list[tuple[str, int]] = []
    monkeypatch.setattr(NullHost, "publish", lambda self: published.append((self.name, self.version)) or 24)
    moves = (StepKind.TRANSFER, StepKind.SYNC, StepKind.OFFLOAD, StepKind.ONLOAD)
    steps = [
        "rollout",
        *(move(kind, f"{kind}.rows", "rollout", "response_ids") for kind in moves),
        "ref_logprobs",
        "update",
        move(StepKind.RESHARD, "gen.weights", "policy", "policy"),
    ]
    planned = run(grpo, MODELS, plan=plan_of(grpo, steps))
    assert published == [("policy", 1), ("policy", 2), ("policy", 3)]
    events = {e.what: e for e in planned.events if e.step == 1 and e.what != "compute"}
    assert set(events) == {"transfer", "sync", "offload", "onload", "reshard"}
    assert {what: event.bytes for what, event in events.items()} == {**dict.fromkeys(map(str, moves), 0), "reshard": 24}
    assert all(event.attributes["process_bytes"] > 2**20 for event in events.values())
    said = {what: event.attributes["did"] for what, event in events.items()}
    assert "one memory" in said["transfer"] and "host's memory" in said["offload"]
    assert_equal_runs(planned, run(grpo, MODELS))


def test_a_handover_must_name_a_model_of_the_run():
    plan = plan_of(grpo, ["rollout", "update", move(StepKind.RESHARD, "gen.weights", "policy", "actor")])
    with pytest.raises(
        RunError, match=r"'gen.weights' of the plan hands over the weights of actor; the run has policy, ref"
    ):
        run(grpo, MODELS, plan=plan)


def test_state_that_a_device_keeps_is_not_said_to_be_parked(monkeypatch, tmp_path):
    parked = plan_of(grpo, [compute("rollout"), compute("update", offload="park", park_weights=False)])
    run(grpo, MODELS, plan=parked)  # the null engine has no device to keep it on
    monkeypatch.setattr(NullHost, "device", "cuda:0")
    run(grpo, MODELS, plan=plan_of(grpo, [compute("rollout"), compute("update", offload="none", park_weights=False)]))
    closed: list[str] = []
    monkeypatch.setattr(NullHost, "close", lambda self: closed.append(self.name))
    with pytest.raises(ConfigError, match=r"between cuda:0 and the host \('update' has offload=park\), and this"):
        run(grpo, MODELS, plan=parked, out=str(tmp_path))
    assert sorted(closed) == ["policy", "ref"] and list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"'ref.park' is an offload"):
        run(grpo, MODELS, plan=plan_of(grpo, ["rollout", move(StepKind.OFFLOAD, "ref.park", "ref", "ref")]))


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_plan_of_another_graph_is_refused():
    plan = plan_of(grpo.graph(group_size=4))
    with pytest.raises(
        ConfigError, match=r"plan 'grpo' is for another graph: .* a number or an input of the flow is another"
    ):
        run(grpo.graph(group_size=2), MODELS, plan=plan)
    with pytest.raises(
        ConfigError, match=r"the plan computes 'old_logprobs', which the flow lacks; .*'flowrl_operators"
    ):
        run(grpo, MODELS, plan=plan_of(ppo))
    run(grpo.graph(group_size=4), MODELS, plan=plan)


def test_names_with_dots_are_names():
    """A flow that is used in another one under a prefix has them, and a plan has them for what is inside a refill."""
    flow = dapo.graph(group_size=4).namespace("inner", keep=("prompts", "policy"))
    assert [step.node for step in plan_of(flow).steps] == ["inner.refill.rollout", "inner.update"]
    inputs = {"prompts": PROMPTS, "policy": MODEL}
    planned = run(flow, inputs, plan=plan_of(flow))
    assert {step.name: step.runs for step in planned.compare().steps} == {"inner.refill.rollout": 2, "inner.update": 2}
    assert_equal_runs(planned, run(flow, inputs))
    with pytest.raises(ConfigError, match="for another graph: .* a number or an input of the flow is another one"):
        run(flow, inputs, plan=plan_of(dapo.graph(group_size=2).namespace("inner", keep=("prompts", "policy"))))


def test_pruning_comes_before_the_comparison():
    """beta=0 leaves the reference model out, of the plan as of the run."""
    flow = grpo.graph(beta=0.0)
    plan = plan_of(flow)
    assert [step.node for step in plan.steps] == ["rollout", "update"]
    assert run(flow, MODELS, plan=plan).status == "finished"


def test_operators_that_have_changed_are_refused_unless_allowed(monkeypatch, tmp_path):
    plan = plan_of(grpo)
    name = "flowrl_operators.advantages:group_norm"
    then = dict(plan.operator_hashes)[name]
    hashes = tuple((n, "0" * 12 if n == name else h) for n, h in plan.operator_hashes)
    text = str(run(grpo, MODELS, steps=0).graph).replace(f'"{then}"', f'"{"0" * 12}"')
    old = replace(plan, operator_hashes=hashes, graph_hash=fr.from_text(text).hash)
    with pytest.raises(TraceError, match=rf"'{name}' \(hash 0+ then, {then} now\) has changed since the plan was made"):
        run(grpo, MODELS, plan=old)
    done = run(grpo, MODELS, plan=old, allow_drift=True, out=str(tmp_path))
    info = json.loads((done.path / "run.json").read_text())
    assert info["drift"] == {name: {"then": "0" * 12, "now": then}}
    other = replace(old, graph_hash="f" * 12)  # not only the operator
    with pytest.raises(ConfigError, match="for another graph"):
        run(grpo, MODELS, plan=other, allow_drift=True)


def test_several_devices_need_what_is_not_here():
    wide = plan_of(grpo, [compute("rollout"), compute("update", mesh=Mesh(0, 4))])
    with pytest.raises(
        ConfigError, match=r"uses 4 devices, on the meshes 0, 0 to 3; .*'update' has d4.* start 4 ranks"
    ):
        run(grpo, MODELS, plan=wide)
    apart = plan_of(grpo, [compute("rollout", mesh=Mesh(1, 1)), compute("update")])
    with pytest.raises(ConfigError, match=r"uses 2 devices, on the meshes 0, 1\. run_local is one process"):
        run(grpo, MODELS, plan=apart)
    third = plan_of(grpo, [compute(name, mesh=Mesh(3, 1)) for name in ("rollout", "ref_logprobs", "update")])
    assert run(grpo, MODELS, plan=third).compare().iterations == 2  # one device, whichever it is


def test_a_plan_is_a_plan():
    with pytest.raises(ConfigError, match=r"plan is an fr.Plan .* found str"):
        run(grpo, MODELS, plan="plan.json")
    with pytest.raises(ConfigError, match="has no steps"):
        run(grpo, MODELS, plan=plan_of(grpo, []))
    with pytest.raises(ConfigError, match="computes node 'rolout', which flow 'grpo' does not have"):
        run(grpo, MODELS, plan=plan_of(grpo, ["rolout"]))
    with pytest.raises(RunError, match="had no plan to compare with"):
        run(grpo, MODELS).compare()


def test_a_plan_computes_each_node_once():
    whole = plan_of(grpo)
    dropped = replace(whole, steps=whole.steps[:-1])
    with pytest.raises(ConfigError, match=r"has no step for 'update', which flow 'grpo' computes"):
        run(grpo, MODELS, plan=dropped)
    again = replace(whole, steps=(*whole.steps, replace(whole.steps[0], name="again")))
    with pytest.raises(ConfigError, match=r"computes 'rollout' 2 times, in the steps 'rollout', 'again'"):
        run(grpo, MODELS, plan=again)


@pytest.mark.parametrize(
    ("name", "value"),
    [("offload", "nope"), ("offload", 3), ("micro_batch_tokens", "x"), ("micro_batch_tokens", 0), ("micro_batch_tokens", True),
     ("micro_batch_tokens", 10**5000), ("recompute", "yes"), ("utilization", 0), ("utilization", float("nan")),
     ("park_weights", 1)],
    ids=lambda one: "digits" if isinstance(one, int) and one > 10**9 else None,
)  # fmt: skip
def test_a_setting_that_means_nothing_is_refused(name, value):
    with pytest.raises(ConfigError, match=rf"step 'update' of the plan has {name}=.*; it is "):
        run(grpo, MODELS, plan=plan_of(grpo, ["rollout", compute("update", **{name: value})]))


def test_a_changed_list_of_operators_names_them():
    plan = plan_of(grpo)
    changed = replace(plan, operator_hashes=tuple((name, "0" * 12) for name, _ in plan.operator_hashes))
    with pytest.raises(TraceError, match=r"\(hash 000000000000 then, [0-9a-f]{12} now\)"):
        run(grpo, MODELS, plan=changed)


def test_another_model_than_the_plans_is_said():
    workload = fr.Workload(4, fr.Lengths.fixed(6), fr.Lengths.fixed(12))
    plan = fr.plan(grpo, models={"policy": SHAPE, "ref": SHAPE}, cluster="cpu", workload=workload)
    wide = {**SHAPE, "hidden_size": 128}
    notes = run(grpo, {"prompts": PROMPTS, "policy": fr.Model(SHAPE), "ref": fr.Model(wide)}, plan=plan).notes
    (note,) = (note for note in notes if "another" in note)
    then, now = (ModelShape.from_config(config).params() for config in (SHAPE, wide))
    assert note.startswith(f"plan: was made for another 'ref', with {then:,} parameters, and this one {now:,};")
    assert not any(
        "another" in note for note in run(grpo, MODELS, plan=plan).notes
    )  # nothing tells the shape of a table


def test_staleness_is_zero_in_one_process():
    done = run(grpo, MODELS, plan=plan_of(grpo, max_staleness=1))
    assert "plan: allows a staleness of 1; one process is always synchronous, so it is 0" in done.notes


# ------------------------------------------------------------------------------------------------------------- settings


def test_settings_become_fields_of_the_models():
    plan = plan_of(
        ppo,
        [
            compute("rollout", role="gen", utilization=0.5),
            compute("ref_logprobs", micro_batch_tokens=512),
            compute("old_logprobs", micro_batch_tokens=2048, recompute=True),
            compute(
                "update", micro_batch_tokens=2048, recompute=True, optimizer="adam_fp32", offload="none", flash=True
            ),
        ],
    )
    done = run(ppo, PPO, plan=plan)
    specs = {name: host.spec for name, host in done.hosts.items()}
    assert specs["ref"].sample_batch_tokens == 512
    assert specs["policy"].micro_batch_tokens == 2048 and specs["policy"].gradient_checkpointing
    assert specs["policy"].sample_batch_tokens == MODEL.sample_batch_tokens
    assert specs["critic"].micro_batch_tokens == MODEL.micro_batch_tokens
    assert "plan: model 'policy' has micro_batch_tokens=2048 instead of 16384" in done.notes
    assert_equal_runs(done, run(ppo, PPO))  # the null engine has no micro-batches


def test_what_is_applied_and_what_is_not_is_written_down(tmp_path):
    plan = plan_of(
        grpo, [compute("rollout", utilization=0.5), "ref_logprobs", compute("update", micro_batch_tokens=64)]
    )
    done = run(grpo, MODELS, plan=plan, out=str(tmp_path))
    about = json.loads((done.path / "run.json").read_text())["plan"]
    assert about["hash"] == plan.hash
    assert about["settings"] == {"policy": {"micro_batch_tokens": 64}}
    assert about["not_applied"] == ["rollout: utilization=0.5 (the transformers sampler takes what it needs)"]


def test_an_engine_that_keeps_its_memory_gets_what_the_others_leave():
    """The plan counts on an engine that sleeps while others work; the sampler of this version does not."""
    whole = 80 * 2**30
    steps = [compute("rollout", utilization=0.9), compute("update")]
    vllm = {**MODELS, "policy": replace(MODEL, sampler="vllm", sampler_options={"max_model_len": 64})}

    def share(update_bytes: float) -> float:
        plan = plan_of(grpo, steps)
        peaks = {"rollout": whole, "update": round(update_bytes)}
        held = [replace(s, predicted=replace(s.predicted, memory_bytes=peaks.get(s.name, 0))) for s in plan.steps]
        done = run(grpo, vllm, plan=replace(plan, steps=tuple(held)))
        options = done.hosts["policy"].spec.sampler_options
        assert options["max_model_len"] == 64
        return options["gpu_memory_utilization"]

    assert share(0.05 * whole) == 0.9
    assert share(0.7 * whole) == pytest.approx(0.3)
    with pytest.raises(ConfigError, match="leave 2% of the device to the vLLM sampler of 'policy'"):
        share(0.98 * whole)


def test_nobody_takes_a_share_of_a_machines_own_memory(tmp_path):
    plan = plan_of(grpo, [compute("rollout", utilization=0.9)], cluster=Cluster.named("cpu"))
    done = run(grpo, {**MODELS, "policy": replace(MODEL, sampler="vllm")}, plan=plan, out=str(tmp_path))
    assert done.hosts["policy"].spec.sampler_options == {}
    (left,) = RunDir.open(done.path).info["plan"]["not_applied"]
    assert left == "rollout: utilization=0.9 (on a CPU the vLLM sampler takes what its cache needs)"


def test_numerics_that_no_engine_has_are_refused():
    plan = plan_of(grpo, [compute("update", optimizer="adam_8bit")])
    with pytest.raises(ConfigError, match="optimizer state 'adam_8bit'; the engines have adam_fp32"):
        run(grpo, MODELS, plan=plan)


# -------------------------------------------------------------------------------------------------------------- written


def test_the_run_folder_holds_the_plan_and_what_each_step_took(tmp_path):
    plan = plan_of(grpo)
    done = run(grpo, MODELS, plan=plan, out=str(tmp_path), record=("*",))
    assert Plan.load(done.path / "plan.json") == plan
    folder = RunDir.open(done.path)
    steps = {e.attributes["plan_step"]: e for e in folder.events() if e.step == 1 and "plan_step" in e.attributes}
    assert list(steps) == ["rollout", "ref_logprobs", "update"]
    assert steps["rollout"].rows == 4 * 8 and steps["rollout"].bytes > 0
    assert all(event.attributes["process_bytes"] > 2**20 for event in steps.values())
    assert all(event.end_s >= event.start_s > 0 for event in steps.values())
    assert done.events == [] and compare_run(done.path) == done.compare()
    assert "predicted" in str(done.compare()) and "measured" in str(done.compare())


def test_recorded_rows_are_those_of_the_flow(tmp_path):
    """Also of a node that was computed ahead: what is recorded is its own table."""
    names = ["rollout", "values", "old_logprobs", "ref_logprobs", "score", "update_2", "update"]
    planned = run(ppo, PPO, plan=plan_of(ppo, names), out=str(tmp_path), record=("*",))
    plain = run(ppo, PPO, out=str(tmp_path), record=("*",))
    ours, theirs = RunDir.open(planned.path), RunDir.open(plain.path)
    assert {step: sorted(nodes) for step, nodes in ours.edges().items()} == {
        step: sorted(nodes) for step, nodes in theirs.edges().items()
    }
    for node in ours.edges()[1]:
        assert values(ours.edge(1, node)) == values(theirs.edge(1, node)), node
    assert ours.samples() == theirs.samples()


def test_a_recipe_passes_its_plan_on():
    options = Options(out=None, progress="off", batch=4, max_tokens=12, reward_workers=0)
    done = Recipe(grpo, MODELS, steps=3, engine="null", options=options, plan=plan_of(grpo)).run()
    assert done.compare().iterations == 2
    assert_equal_runs(done, run(grpo, MODELS))


def test_layouts_of_one_device_are_one_wide():
    assert all(step.layout == Layout(dp=1) for step in plan_of(grpo).steps)
