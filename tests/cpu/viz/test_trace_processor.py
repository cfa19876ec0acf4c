"""What Perfetto's own trace processor makes of the traces of plans and runs, asked in SQL, beside the plan's JSON."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import flowrl as fr
from flowrl.planner.measured import Comparison
from flowrl.planner.steps import Plan
from flowrl.viz.html import plan_html
from flowrl.viz.measured import Seen
from flowrl.viz.svg import clean
from flowrl.viz.trace_json import trace_json
from tests.cpu.viz.trace_processor import TraceProcessor, missing
from tests.null.flow_cases import FLOWS
from tests.null.planner.golden.cases import CASES
from tests.null.viz.cases import hostile, large

SLICES = """
    select p.name as process, t.name as thread, s.name as name, s.ts as ts, s.dur as dur, s.depth as depth,
        extract_arg(s.arg_set_id, 'args.bytes') as bytes, extract_arg(s.arg_set_id, 'args.measured_s') as measured_s
    from slice s join thread_track on s.track_id = thread_track.id join thread t using (utid) join process p using (upid)
"""
COUNTERS = """
    select t.name as name, c.ts as ts, c.value as value, p.name as process
    from counter c join process_counter_track t on c.track_id = t.id join process p using (upid)
"""
FLOW = """
    select a.name as source, b.name as target, a.ts + a.dur as ends, b.ts as begins, f.arg_set_id as args
    from flow f join slice a on f.slice_out = a.id join slice b on f.slice_in = b.id
"""
DROPPED = "select name, value from stats where severity in ('error', 'data_loss') and value != 0"
LANES = {"compute": "compute", "nvlink": "links in a node", "h2d": "PCIe in (H2D)", "d2h": "PCIe out (D2H)",
         "nic": "network (NIC)", "host": "CPUs"}  # fmt: skip


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceProcessor]:
    why = missing()
    if why:
        pytest.skip(f"Perfetto's trace processor: {why}")
    with TraceProcessor(tmp_path_factory.mktemp("trace_processor") / "log") as started:
        yield started


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def devices(step: dict[str, Any]) -> list[int]:
    """Of a step in a plan's JSON: those it runs on, and those it moves from."""
    meshes = [mesh for mesh in (step["mesh"], step["source"]) if mesh is not None]
    return sorted({mesh["first"] + one for mesh in meshes for one in range(mesh["size"])})


def expected_slices(plan: dict[str, Any]) -> Counter[tuple[str, str, str, int]]:
    """How often a process and thread has a step, with its start."""
    per_node = plan["cluster"]["devices_per_node"]
    found: Counter[tuple[str, str, str, int]] = Counter()
    for step in plan["steps"]:
        start = ns(step["predicted"]["start_s"])
        for lane in step["lanes"]:
            name = clean(step["name"])
            if lane == "host":
                for node in {device // per_node for device in devices(step)}:
                    found[f"predicted: node {node}", LANES[lane], name, start] += 1
                continue
            for device in devices(step):
                found[f"predicted: node {device // per_node}", f"device {device} {LANES[lane]}", name, start] += 1
    return found


def expected_flows(plan: dict[str, Any]) -> Counter[tuple[str, str]]:
    """From each step to those that wait for it, also through a step that takes no time or no lane: it has no slice."""
    steps = {step["name"]: step for step in plan["steps"]}

    def has_slice(name: str) -> bool:
        return bool(steps[name]["lanes"]) and ns(steps[name]["predicted"]["seconds"]) > 0

    def sources(name: str) -> set[str]:
        before = steps[name]["after"]
        return {one for each in before for one in ({each} if has_slice(each) else sources(each))}

    return Counter((clean(one), clean(name)) for name in steps if has_slice(name) for one in sources(name))


def agrees(processor: TraceProcessor, plan: Plan, trace: str) -> list[dict[str, Any]]:
    """What was loaded is what the plan's JSON says. Returns the slices of what was measured."""
    processor.load(trace)
    wrong = processor.query(
        "select name, idx, value from stats where severity in ('error', 'data_loss') and value != 0"
    )
    assert wrong == [], "nothing was refused or dropped"

    said = json.loads(plan.to_json())
    slices = processor.query(SLICES)
    assert all(one["depth"] == 0 for one in slices), "steps of a lane stand beside each other"
    predicted = [one for one in slices if one["process"].startswith("predicted")]
    assert Counter((s["process"], s["thread"], s["name"], s["ts"]) for s in predicted) == expected_slices(said)
    assert min(s["ts"] for s in predicted) == 0
    assert abs(max(s["ts"] + s["dur"] for s in predicted) - ns(said["predicted"]["latency_s"])) <= 1, "the makespan"
    moved = {clean(step["name"]): step["predicted"]["num_bytes"] for step in said["steps"] if step["lanes"]}
    assert {s["name"]: s["bytes"] for s in predicted} == moved

    flows = processor.query(FLOW)
    assert Counter((one["source"], one["target"]) for one in flows) == expected_flows(said)
    assert all(one["ends"] <= one["begins"] for one in flows)

    counters = processor.query(COUNTERS)
    assert all(one["process"].startswith("predicted") for one in counters)
    for noun, peak_bytes in (("device", said["predicted"]["device_bytes"]), ("host", said["predicted"]["host_bytes"])):
        peaks = [one["value"] for one in counters if one["name"].startswith(f"peak of {noun}")]
        assert max(peaks, default=0) == peak_bytes
        together: Counter[tuple[str, int]] = Counter()
        for one in counters:
            if one["name"].startswith(f"memory of {noun}"):
                together[one["name"].partition(",")[0], one["ts"]] += one["value"]
        assert max(together.values(), default=0) == peak_bytes, "the layers of the fullest add up to its peak"
    measured = [one for one in slices if one["process"].startswith("measured")]
    assert len(measured) + len(predicted) == len(slices)
    return measured


SMALL = ("grpo-135m-1xH100", "grpo-8b-8xA100", "grpo-32b-16xH100-async", "grpo-70b-8xA100", "ppo-32b-64xH100")
MADE: dict[str, Callable[[], Plan]] = {
    "by hand": large,
    "by hand, async": lambda: large(max_staleness=2),
    "hostile": hostile,  # its names have quotes, a backslash, an emoji and a dash
}


@pytest.mark.parametrize("name", SMALL)
def test_pinned_plans(processor: TraceProcessor, name: str) -> None:
    """The page says the same makespan and peaks as JSON and trace."""
    plan = CASES[name].plan
    assert plan is not None
    assert agrees(processor, plan, trace_json(plan)) == []
    said = json.loads(plan.to_json())["predicted"]
    facts = dict(re.findall(r' data-(makespan-s|device-bytes|host-bytes)="([^"]+)"', plan_html(plan)))
    assert ns(float(facts["makespan-s"])) == ns(said["latency_s"])
    assert (int(facts["device-bytes"]), int(facts["host-bytes"])) == (said["device_bytes"], said["host_bytes"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in SMALL])
def test_the_other_pinned_plans(processor: TraceProcessor, name: str) -> None:
    plan = CASES[name].plan
    if plan is not None:  # None: pinned as what fits nowhere
        assert agrees(processor, plan, trace_json(plan)) == []


@pytest.mark.parametrize("name", MADE)
def test_made_up_plans(processor: TraceProcessor, name: str) -> None:
    plan = MADE[name]()
    assert agrees(processor, plan, trace_json(plan)) == []


@pytest.mark.parametrize("longer", [0.2, 1.0, 7.3])
def test_predicted_and_measured_are_two_processes(processor: TraceProcessor, longer: float) -> None:
    """Measured steps may be as long as they like: none is dropped, and none changes what was predicted."""
    plan = large()
    spans = [Seen(step.name, step.predicted.seconds * longer) for step in plan.steps]
    measured = agrees(processor, plan, trace_json(plan, spans))
    processes = {one["name"] for one in processor.query("select name from process where name is not null")}
    assert processes == {f"{what}: node {node}" for what in ("predicted", "measured") for node in range(8)}
    lanes = Counter(one[1:3] for one in expected_slices(json.loads(plan.to_json())).elements())
    assert Counter((one["thread"], one["name"]) for one in measured) == lanes
    took = {span.step: ns(span.seconds) for span in spans}
    assert all(one["dur"] == took[one["name"]] for one in measured)
    assert all(ns(one["measured_s"]) == took[one["name"]] for one in measured)


def test_a_run(processor: TraceProcessor) -> None:
    """A run that carried out its plan: what it measured stands beside what was predicted."""
    flow, config, inputs = FLOWS["grpo"]
    graph = flow.graph(**config)
    shape = {"model_type": "llama", "vocab_size": 258, "hidden_size": 64, "intermediate_size": 192,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
             "max_position_embeddings": 64, "tie_word_embeddings": True}  # fmt: skip
    workload = fr.Workload(4, fr.Lengths.fixed(6), fr.Lengths.fixed(12))
    models = {node.name: shape for node in graph.inputs if node["kind"] == "weights"}
    plan = fr.plan(graph, models=models, cluster="cpu", workload=workload)
    run = fr.run_local(graph, plan=plan, steps=3, batch=4, max_tokens=12, engine="null", out=None, progress="off",
                       reward_workers=0, **inputs)  # fmt: skip
    found: Comparison = run.compare()
    measured = agrees(processor, plan, trace_json(plan, found))
    on_a_lane = {step.name for step in plan.steps if step.lanes}
    took = {step.name: ns(step.measured_s or 0) for step in found.ran if step.name in on_a_lane}
    assert took.keys() == on_a_lane and {one["name"]: one["dur"] for one in measured} == took


def test_the_processor_finds_what_is_wrong(processor: TraceProcessor) -> None:
    """What the tests above rely on: a step over another is counted as dropped, an arrow that hangs on nothing is no row, and
    a name with the escapes of an emoji is refused."""
    events = json.loads(trace_json(large()))["traceEvents"]
    first = next(event for event in events if event["ph"] == "X")
    over = {**first, "ts": first["ts"] + first["dur"] / 2, "name": "over"}
    processor.load(json.dumps({"traceEvents": [*events, over]}))
    assert processor.query(DROPPED) == [{"name": "slice_drop_overlapping_complete_event", "value": 1}]
    start = next(event for event in events if event["ph"] == "s")
    processor.load(json.dumps({"traceEvents": [{**event, "ts": 9e9} if event is start else event for event in events]}))
    assert len(processor.query(FLOW)) == sum(event["ph"] == "s" for event in events) - 1
    with pytest.raises(ValueError, match="escape"):
        processor.load(json.dumps({"traceEvents": [{**first, "name": '"😀"'}]}))
