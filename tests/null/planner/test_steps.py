"""Plans: what they print, that they are read back equal, and what their hash names."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from flowrl.errors import ConfigError
from flowrl.mesh import Cluster, Layout, Measured, Mesh
from flowrl.planner.simulate import Edge, Hold, Lane, StepKind, Task, lower_bound, schedule
from flowrl.planner.steps import VERSION, Outlook, Plan, Predicted, Step
from flowrl.planner.workload import Lengths, Workload
from tests.null.planner.task_cases import task_sets

GIB = 2**30
SAMPLE, TRAIN = Mesh.of(0, Layout.parse("d2t2")), Mesh.of(4, Layout.parse("f4"))
ENGINE = Hold("engine weights", 8 * GIB, devices=tuple(SAMPLE.devices))
STATE = Hold("training state", 30 * GIB, 16 * GIB, devices=tuple(TRAIN.devices))


def steps() -> tuple[Step, ...]:
    compute, lane = StepKind.COMPUTE, (Lane.COMPUTE,)
    return (
        Step(
            "rollout",
            "rollout",
            compute,
            SAMPLE,
            lane,
            Predicted(31.0, holds=(Hold("cache", 40 * GIB),)),
            layout=Layout.parse("d2t2"),
            reads=("prompt",),
            settings=(("utilization", 0.9), ("graphs", True)),
        ),
        Step(
            "rows",
            "update",
            StepKind.TRANSFER,
            TRAIN,
            (Lane.NVLINK,),
            Predicted(2e-4, num_bytes=5 * 2**20),
            ("rollout",),
            SAMPLE,
            reads=("response", "rollout_logprobs", "response_mask", "reward"),
        ),
        Step(
            "onload",
            "update",
            StepKind.ONLOAD,
            TRAIN,
            (Lane.H2D,),
            Predicted(1.5, num_bytes=60 * GIB),
            reads=("optimizer",),
        ),
        Step(
            "update",
            "update",
            compute,
            TRAIN,
            lane,
            Predicted(52.0, holds=(Hold("optimizer", 15 * GIB, from_task="onload"), Hold("activations", 9.5 * GIB))),
            ("rows", "onload"),
            layout=Layout.parse("f4"),
            settings=(("micro_batch_tokens", 8192), ("offload", "park")),
        ),
        Step(
            "weights",
            "update",
            StepKind.RESHARD,
            SAMPLE,
            (Lane.NVLINK,),
            Predicted(0.0264, num_bytes=16 * GIB),
            ("update",),
            TRAIN,
            Layout.parse("d2t2"),
            ("policy",),
        ),
    )


def made(**others: Any) -> Plan:
    settings: dict[str, Any] = {
        "resident": (ENGINE, STATE),
        "operator_hashes": (("grpo_advantage", "ab12"),),
        "meshes": (("sample", SAMPLE), ("train", TRAIN)),
        "workload": Workload(128, Lengths.fixed(512), Lengths.lognormal(1024, 0.6, 4096)),
    }
    return Plan.of("grpo", "9c1f", Cluster.named("8xA100-80G"), steps(), **(settings | others))


TABLE = """\
plan grpo: 5 steps on 8xA100-80G, sync; graph 9c1f, plan db5e21a82e4d
predicted: 83.0 s per iteration, no order below 83.0 s; at most 54.5 GiB of 80.0 GiB per device, 16.0 GiB of 1024.0 GiB per host

step  node     kind      mesh                   layout  reads                              start  seconds     moved    memory
  *0  rollout  compute   sample[4]              d2t2    prompt                             0.0 s   31.0 s            48.0 GiB
   1  update   onload    train[4]                       optimizer                          0.0 s    1.5 s  60.0 GiB  45.0 GiB
  *2  update   transfer  sample[4] -> train[4]          response, rollout_logprobs, r...  31.0 s   0.2 ms   5.0 MiB  45.0 GiB
  *3  update   compute   train[4]               f4                                        31.0 s   52.0 s            54.5 GiB
  *4  update   reshard   train[4] -> sample[4]  d2t2    policy                            83.0 s  26.4 ms  16.0 GiB  30.0 GiB

* on the critical path; start, seconds, moved and memory are predicted"""


def test_a_plan_prints_as_a_table() -> None:
    assert str(made()) == TABLE


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_small_work_on_rows_is_one_line_from_four_on(count: int) -> None:
    first, *rest = steps()
    small = [
        Step(f"op{index}", f"op{index}", StepKind.COMPUTE, SAMPLE, (Lane.HOST,), Predicted(1e-3),
             (f"op{index - 1}" if index else "rollout",)) for index in range(count)
    ]  # fmt: skip
    last = [replace(step, after=(*step.after, small[-1].name)) if step.name == "update" else step for step in rest]
    plan = Plan.of("p", "0", Cluster.named("8xA100-80G"), [first, *small, *last])
    lines = str(plan).splitlines()
    assert f"plan p: {5 + count} steps" in lines[0]
    if count < 3:  # with the transfer that starts at the same moment
        assert (
            sum(line.split()[1].startswith("op") for line in lines if " compute " in line and " 0-3[4]" in line)
            == count
        )
        return
    shown = next(line for line in lines if "operators, 1 transfer" in line)
    assert shown.strip().startswith(f"*2-{2 + count}  {count} operators, 1 transfer  rows")
    assert f"{count}.2 ms" in shown and "5.0 MiB" in shown
    assert not any(" transfer " in line for line in lines if line != shown)


def test_steps_come_in_the_order_of_starting() -> None:
    plan = made()
    assert [step.name for step in plan.steps] == ["rollout", "onload", "rows", "update", "weights"]
    assert [step.name for step in plan.column(0)] == ["rollout", "rows", "weights"]
    assert [step.name for step in plan.column(7)] == ["onload", "rows", "update", "weights"]
    assert plan.predicted.critical_path == ("rollout", "rows", "update", "weights")
    assert plan.predicted.seconds == plan.predicted.latency_s == plan.predicted.bound_s == 83.0266


def test_memory_of_a_step_is_that_of_its_fullest_device() -> None:
    memory = {step.name: step.predicted.memory_bytes / GIB for step in made().steps}
    assert memory == {"onload": 45.0, "rollout": 48.0, "rows": 45.0, "update": 54.5, "weights": 30.0}
    assert made().predicted.device_bytes == 54.5 * GIB and made().predicted.host_bytes == 16 * GIB


def test_a_plan_simulates_to_what_it_predicts() -> None:
    plan = made()
    found, used = plan.simulated()
    assert found.makespan_s == plan.predicted.latency_s
    assert {step.name: step.predicted.start_s for step in plan.steps} == found.starts
    assert used.excess(plan.cluster) is None
    over = used.excess(plan.cluster.with_memory(device_bytes=50 * GIB))
    assert str(over).startswith(
        "memory of device 4 during update: 54.5 > 50.0 GiB (training state 30.0, optimizer 15.0, "
    )


def test_async_is_predicted_by_its_period() -> None:
    plan = made(max_staleness=1)
    # the optimizer comes in, then the update uses it, then the weights go: the next one cannot come in before
    assert plan.predicted.seconds == pytest.approx(1.5 + 52.0 + 0.0264)
    assert plan.predicted.latency_s == 83.0266
    assert "async, staleness up to 1" in str(plan) and "83.0 s from its first step to its last" in str(plan)


def test_an_order_is_kept() -> None:
    plan = made(order=["rollout", "rows", "onload", "update", "weights"])
    # onload has a lane of its own, and so still starts first
    assert plan == made()


@pytest.mark.parametrize("allowed", [0, 1])
def test_seconds_are_those_of_the_order(allowed: int) -> None:
    # the shorter task first: what waits for it starts early
    one, two = Mesh(0, 1), Mesh(1, 1)
    listed = [
        Step("a", "a", StepKind.COMPUTE, one, (Lane.COMPUTE,), Predicted(5.0)),
        Step("b", "b", StepKind.COMPUTE, one, (Lane.COMPUTE,), Predicted(1.0)),
        Step("then", "then", StepKind.COMPUTE, two, (Lane.COMPUTE,), Predicted(9.0), ("b",)),
    ]
    cluster = Cluster.named("2xH200")
    worse = Plan.of("p", "0", cluster, listed, order=["a", "b", "then"], max_staleness=allowed)
    better = Plan.of("p", "0", cluster, listed, max_staleness=allowed)
    assert (worse.predicted.latency_s, better.predicted.latency_s) == (15.0, 10.0)
    assert (worse.predicted.seconds, better.predicted.seconds) == ((15.0, 10.0) if not allowed else (9.0, 9.0))
    assert worse.predicted.bound_s == better.predicted.bound_s == 10.0


@settings(max_examples=40)
@given(task_sets())
def test_any_tasks_make_a_plan_that_simulates_to_its_schedule(tasks: tuple[Task, ...]) -> None:
    cluster = replace(Cluster.named("4xH200"), nodes=2, devices_per_node=2)
    listed = []
    for task in tasks:
        # as a mesh and the mesh it moves from
        first, last = (task.devices or (0,))[0], (task.devices or (0,))[-1]
        after = tuple(task.after)
        listed.append(
            Step(task.name, "n", task.kind, Mesh(first, 1), task.lanes, Predicted(task.seconds), after, Mesh(last, 1))
        )
    plan = Plan.of("any", "0", cluster, listed)
    again = [step.task for step in listed]
    assert plan.predicted.latency_s == schedule(again, devices_per_node=2).makespan_s
    assert plan.predicted.bound_s == lower_bound(again, devices_per_node=2)
    assert plan.simulated()[0].starts == {step.name: step.predicted.start_s for step in plan.steps}
    assert Plan.from_json(plan.to_json()) == plan


# ------------------------------------------------------------------------------------------------------------- files


def test_a_plan_is_read_back_equal(tmp_path: Any) -> None:
    measured = (Measured("all_gather", 2, 1, (1e6, 1e9), (3e-5, 2.1e-3)),)
    plan = made(max_staleness=2)
    plan = replace(plan, cluster=replace(plan.cluster, measured=measured))
    held = replace(plan.steps[0].predicted, holds=(Hold("a", 1, 2, "rows", Edge.END, "update", Edge.START, (0, 1)),))
    plan = replace(plan, steps=(replace(plan.steps[0], predicted=held), *plan.steps[1:]))
    text = plan.to_json(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.hash == plan.hash and again.to_json() == text
    assert type(again.steps[0].settings[1][1]) is bool and type(again.steps[3].settings[0][1]) is int


def test_whole_numbers_of_seconds_are_written_as_floats() -> None:
    one, other = (Step("a", "a", StepKind.COMPUTE, Mesh(0, 1), (), Predicted(seconds)) for seconds in (1, 1.0))
    cluster = Cluster.named("cpu")
    assert Plan("p", "0", cluster, (one,)).to_json() == Plan("p", "0", cluster, (other,)).to_json()


def edited(**changes: Any) -> str:
    values = json.loads(made().to_json())
    for path, value in changes.items():
        *outer, last = (int(key) if key.isdigit() else key for key in path.split("__"))
        place = values
        for key in outer:
            place = place[key]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return json.dumps(values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": VERSION + 1}, "version 2 of the format, and this FlowRL reads up to 1; update FlowRL"),
        ({"version": "1"}, "a whole number from 1; found '1'"),
        ({"version": None}, "a whole number from 1; found None"),
        ({"format": "another"}, 'with "format": "flowrl plan"; this is none'),
        ({"stepps": []}, "'plan' has no key 'stepps'; did you mean 'steps'?"),
        ({"graph_hash": None}, "'plan' lacks graph_hash"),
        ({"steps__0__kind": "comput"}, r"'plan.steps\[0\].kind' is 'comput'; did you mean 'compute'?"),
        ({"steps__0__layout": "d2q2"}, r"'plan.steps\[0\].layout': "),
        ({"steps__0__layout": "d2t4"}, "has the layout d2t4, which is for 8 devices, on a mesh of devices 0 to 3"),
        ({"steps__0__mesh__size": 4.0}, r"'plan.steps\[0\].mesh.size' is int; found 4.0"),
        ({"steps__0__predicted__seconds": "1"}, r"'plan.steps\[0\].predicted.seconds' is float; found '1'"),
        ({"steps__0__settings__0": ["utilization"]}, r"settings\[0\]' is a list of 2; found \['utilization'\]"),
        ({"steps__0__settings__0__1": []}, r"settings\[0\]\[1\]' is str or int or float or bool; found \[\]"),
        ({"cluster__device__memory_bytes": -1}, "'plan.cluster.device': Device needs a finite number above 0"),
        ({"steps__3__after": ["weights"]}, "'update' waits for 'weights', which comes behind it in the plan"),
        ({"steps__3__after": ["none"]}, "'update' waits for 'none', which is no step"),
        ({"steps__0__name": "onload"}, "two steps of the plan are named 'onload'"),
        ({"steps__1__mesh__first": 5}, "uses device 8; the cluster has devices 0 to 7"),
        ({"max_staleness": -1}, "max_staleness is a whole number of at least 0; found -1"),
        ({"steps__0__settings__0__1": 0.8}, "it was changed after it was written"),
        ({"hash": "0"}, "and the file says 0"),
    ],
)
def test_what_is_not_a_plan_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan.from_json(edited(**changes))


def test_errors_of_a_file_name_it(tmp_path: Any) -> None:
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ConfigError, match=r"plan.json: a plan is a JSON file; "):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match="this is none"):
        Plan.from_json("[]")


def test_numbers_that_json_has_not_are_refused() -> None:
    plan = replace(made(), predicted=Outlook(seconds=float("inf")))
    with pytest.raises(ConfigError, match="a plan holds finite numbers; found inf"):
        plan.to_json()


# -------------------------------------------------------------------------------------------------------------- hash


def test_predictions_and_what_they_were_made_from_are_not_in_the_hash() -> None:
    plan = made()
    faster = replace(plan.cluster, nvlink_bytes_s=1e12).with_memory(host_bytes=GIB)
    other = replace(plan, name="other", cluster=faster, workload=None, predicted=Outlook(), meshes=())
    assert other.hash == plan.hash
    timed = replace(plan.steps[0], predicted=Predicted(9.0))
    assert replace(plan, steps=(timed, *plan.steps[1:])).hash == plan.hash


@pytest.mark.parametrize(
    "change",
    [
        {"graph_hash": "9c20"},
        {"operator_hashes": ()},
        {"max_staleness": 1},
        {"cluster": Cluster.named("8xH100-80G")},
        {"cluster": Cluster.named("16xA100-80G")},
        {"steps": made().steps[:-1]},
        {"steps": (made().steps[1], made().steps[0], *made().steps[2:])},
    ],
)
def test_what_is_done_is_in_the_hash(change: dict[str, Any]) -> None:
    assert replace(made(), **change).hash != made().hash


@pytest.mark.parametrize(
    "change",
    [
        {"node": "ref"},
        {"kind": StepKind.SYNC},
        {"lanes": (Lane.NIC,)},
        {"after": ()},
        {"layout": Layout.parse("f4")},
        {"reads": ()},
        {"settings": (("utilization", 0.8),)},
        {"mesh": Mesh(4, 4)},
        {"source": Mesh(4, 4)},
    ],
)
def test_every_part_of_a_step_is_in_the_hash(change: dict[str, Any]) -> None:
    plan = made()
    one = plan.steps[2] if "after" in change else plan.steps[0]
    steps = tuple(replace(step, **change) if step is one else step for step in plan.steps)
    assert replace(plan, steps=steps).hash != plan.hash


def test_the_hash_is_the_same_everywhere() -> None:
    # another hash for the same plan is another format: then VERSION rises
    assert made().hash == "db5e21a82e4d"
