"""Iterations beside each other: their pace is the planner's, a mesh does one after the other, memory is that of all of them."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.figures import overlap_line
from flowrl.planner.steps import Plan
from flowrl.planner.tasks import Edge, Hold, Lane, StepKind
from flowrl.viz.axis import RIGHT, WIDTH
from flowrl.viz.html import plan_html
from flowrl.viz.memory import memory_chart
from flowrl.viz.overlap import overlap, spoken, why_apart
from flowrl.viz.scene import scene
from flowrl.viz.stacks import overlapping_stacks, stacks
from flowrl.viz.verdict import figures
from tests.null.viz.cases import GIB, compute, large, move

A, B, F4 = Mesh(0, 4), Mesh(4, 4), Layout.parse("f4")


def split(update_s: float = 12.0, max_staleness: int = 1) -> Plan:
    """Sampling for 10 s on A, training on B."""
    steps = (
        compute("rollout", A, 10.0, role="gen", layout=F4, holds=(Hold("gen cache", 30 * GIB), Hold("gen weights", 4 * GIB))),
        compute("update", B, update_s, "rollout", role="policy", layout=F4, holds=(Hold("policy activations", 20 * GIB),)),
        move("gen.weights", "policy", StepKind.RESHARD, Lane.NVLINK, A, 0.5, 8 * GIB, "update", source=B, layout=F4,
             holds=(Hold("gen weights", 4 * GIB, devices=tuple(A.devices)),)),
        compute("score", A, 0.1, "rollout", lane=Lane.HOST),
    )  # fmt: skip
    resident = (
        Hold("policy parameters", 8 * GIB, devices=tuple(B.devices)),
        Hold("gen weights", 4 * GIB, from_task="gen.weights", from_edge=Edge.END, devices=tuple(A.devices)),
    )
    return Plan.of("split", "ab12", Cluster.named("8xA100-80G"), steps, resident=resident, meshes=(("A", A), ("B", B)),
                   max_staleness=max_staleness)  # fmt: skip


def together() -> Plan:
    """One mesh, whose memory has room for one of sampling and training."""
    cache = Hold("gen cache", 50 * GIB)
    state = Hold(
        "policy optimizer", 40 * GIB, from_task="state.onload", from_edge=Edge.START, until_task="state.offload",
        devices=tuple(A.devices),
    )  # fmt: skip
    steps = (
        compute("rollout", A, 10.0, role="gen", layout=F4, holds=(cache,)),
        move("state.onload", "update", StepKind.ONLOAD, Lane.H2D, A, 1.0, 160 * GIB, "rollout"),
        compute("update", A, 12.0, "state.onload", role="policy", layout=F4),
        move("state.offload", "update", StepKind.OFFLOAD, Lane.D2H, A, 1.0, 160 * GIB, "update"),
    )
    return Plan.of("together", "ab12", Cluster.named("4xA100-80G"), steps, resident=(state,), max_staleness=1)


def test_versions_follow_each_other_as_the_planner_says() -> None:
    for plan in (split(), split(update_s=6.0, max_staleness=2), together()):
        ends_s = overlap(plan, iterations=8).ends_s
        assert ends_s[7] - ends_s[6] == pytest.approx(plan.predicted.seconds, rel=1e-6)


def test_a_mesh_holds_no_two_iterations_at_once() -> None:
    for plan in (split(), together()):
        devices, _ = overlapping_stacks(overlap(plan))
        assert devices[0].usage.peak_bytes == plan.predicted.device_bytes


def test_memory_is_that_of_the_middle_of_a_run() -> None:
    found = overlap(split())
    alone, _ = stacks(split())
    sampling = next(stack for stack in overlapping_stacks(found)[0] if 0 in stack.indices)
    before = next(stack for stack in alone if 0 in stack.indices)
    late_s = 11.0
    assert sum(layer.at(late_s) for layer in before.layers) == 0, "one iteration alone has nothing left to do there"
    assert sum(layer.at(late_s) for layer in sampling.layers) == 34 * GIB, "the next rollout runs"
    held = found.held_bytes()
    assert held["rollout"] == 34 * GIB and held["update"] == 28 * GIB
    assert held["gen.weights"] == 8 * GIB, "between two rollouts and two updates"


def test_what_overlapping_adds_is_said() -> None:
    back = move("values.rows", "score", StepKind.TRANSFER, Lane.NIC, A, 1.0, GIB, "update", source=B,
                holds=(Hold("rows buffers", GIB, devices=tuple(A.devices)),))  # fmt: skip
    plan = split()
    plan = Plan.of("back", "ab12", plan.cluster, [*plan.steps, back], resident=plan.predicted.resident, max_staleness=2)
    said = "Together they take at most 35.0 GiB; the planner counted one alone, with 34.0 GiB"
    assert said in plan_html(plan)
    assert "Together they take" not in plan_html(split()) + plan_html(large())


def test_a_page_of_iterations_that_follow_each_other_says_so() -> None:
    plan = together()
    page = plan_html(plan)
    assert page.count(overlap_line(plan)) == 3, "in the head, at the versions and at the timeline"
    assert "iterations overlap" not in page and "Iterations that overlap" not in page
    assert "critical path, alone" not in page and "between versions, " not in page
    assert "iterations overlap" in plan_html(split()) and not why_apart(split())
    assert not why_apart(split(max_staleness=0))


def test_iterations_may_follow_each_other_on_two_meshes() -> None:
    plan = Plan.of("beside", "ab12", Cluster.named("8xA100-80G"), [
        compute("rollout", A, 10.0, role="gen", layout=F4), compute("judge", B, 3.0, "rollout", role="rm", layout=F4),
        compute("logprobs", A, 5.0, "rollout", role="policy", layout=F4),
        compute("update", A, 10.0, "judge", "logprobs", role="policy", layout=F4),
    ], max_staleness=1)  # fmt: skip
    assert not overlap_line(plan), "there are two meshes, of which one is busy all the time"
    assert "no iteration begins before the one before it is complete" in plan_html(plan)


def test_the_card_and_the_timeline_say_of_what_a_mesh_is_busy() -> None:
    plan = split()
    drawn = scene(plan)
    card = next(one for one in figures(drawn, *stacks(plan)) if one.name == "bottleneck")
    assert card.value == "compute, 96 % busy" and "12.0 s of the 12.5 s between versions" in card.note
    page = plan_html(plan)
    assert "busy for 12.0 s: 96 % of the 12.5 s between versions, 53 % of one iteration alone (predicted)" in page
    assert page.index('<section id="versions"') < page.index('<section id="timeline"'), "the pace before one iteration"
    assert "on the critical path of one iteration alone" in page


def test_the_bottleneck_may_be_the_staleness_allowed() -> None:
    plan = split(update_s=30.0, max_staleness=0)
    assert next(one for one in figures(scene(plan), *stacks(plan)) if one.name == "bottleneck").value.startswith(
        "compute"
    )
    plan = Plan.of("bound", "ab12", Cluster.named("8xA100-80G"), [
        compute("rollout", A, 10.0, role="gen", layout=F4), compute("judge", B, 1.0, "rollout", lane=Lane.HOST),
        compute("update", B, 10.0, "judge", role="policy", layout=F4),
    ], max_staleness=1)  # fmt: skip
    card = next(one for one in figures(scene(plan), *stacks(plan)) if one.name == "bottleneck")
    assert card.value == "staleness allowed" and "2 may be under way" in card.note


def test_parts_of_memory_are_called_as_in_the_legend() -> None:
    page = plan_html(split())
    assert "largest part: gen KV cache with 30.0 GiB" in page and "gen engine weights 4.0 GiB" in page
    assert ">gen cache" not in page and "with gen cache" not in page


def test_the_step_that_moves_most_is_named() -> None:
    plan = split()
    card = next(one for one in figures(scene(plan), *stacks(plan)) if one.name == "moves most")
    assert card.value == "8.0 GiB, gen.weights" and "all steps move 8.0 GiB" in card.note


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_every_layer_is_drawn_to_the_end(max_staleness: int) -> None:
    """Also where what lies below it changes at the very end."""
    plan = split(max_staleness=max_staleness)
    found = overlap(plan)
    devices, _ = overlapping_stacks(found) if max_staleness else stacks(plan)
    trained = next(stack for stack in devices if 4 in stack.indices)
    until_s = max(found.ends_s) if max_staleness else None
    root = ElementTree.fromstring(memory_chart(trained, scene(plan), "mem", until_s=until_s))
    drawn = {one.get("data-c"): one.find("{*}path") for one in root.iter() if one.get("class") == "layer"}
    assert drawn.keys() == {layer.category.name for layer in trained.layers}
    parameters = drawn["parameters"]
    assert parameters is not None and f"{WIDTH - RIGHT:.0f}," in (parameters.get("d") or "")


def test_names_of_tasks_are_spoken() -> None:
    assert spoken("rollout#2") == "rollout of iteration 2"
    assert spoken("a#b") == "a#b" and spoken("update") == "update"
