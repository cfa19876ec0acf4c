"""The plan in a line of figures: how long, how fast, what holds it up, how full, how near to the best, how sure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from flowrl.graph.flows import Flow
from flowrl.graph.nodes import Graph
from flowrl.mesh.devices import Efficiency
from flowrl.planner.figures import tails
from flowrl.planner.roles import rows_of
from flowrl.planner.simulate import period
from flowrl.planner.steps import Step
from flowrl.planner.tasks import Lane
from flowrl.viz import units
from flowrl.viz.palette import KINDS, LANES, named
from flowrl.viz.scene import Scene, called
from flowrl.viz.stacks import Stack
from flowrl.viz.svg import Markup, join, tag

_UNIT = re.compile(r" (%|s|ms|B|KiB|MiB|GiB|tok/s)(?!\w)")
"""A number and its unit stay on one line."""
UNCOUNTED = "what models gather and reduce inside a step"
"""Bytes that no step is said to move: they are part of the seconds of what computes."""
LEAST_GAP = 5e-4
"""A gap that is printed as 0.0 %."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the strip.

    Example:
        Figure("iteration", "123.1 s", "predicted")
    """

    name: str
    value: str
    note: str = ""
    part: float | None = None
    """Of what there is; drawn as a gauge."""
    since: str = ""
    """A day, as 2026-01-31: the script says how long ago that was."""


def figures(
    scene: Scene, devices: tuple[Stack, ...], hosts: tuple[Stack, ...], graph: Flow | Graph | None = None
) -> tuple[Figure, ...]:
    """The figures of the verdict strip, in the order in which they are shown."""
    plan, outlook = scene.plan, scene.plan.predicted
    note = (
        "predicted, from one version of the weights to the next"
        if plan.max_staleness
        else "predicted, of one iteration"
    )
    found = [Figure("step time", units.seconds(outlook.seconds), note)]
    tokens = sampled_tokens(scene, graph)
    if tokens is not None and outlook.seconds:
        rate = tokens / outlook.seconds
        per_device = rate / plan.cluster.num_devices
        found.append(
            Figure(
                "sampled",
                f"{units.count(rate)} tok/s",
                f"response tokens, predicted; {units.count(per_device)} per device",
            )
        )
    found.append(_bottleneck(scene))
    found += _slots(scene)
    device_cap, host_cap = plan.cluster.device.memory_bytes, plan.cluster.host.memory_bytes
    found.append(_memory("device memory", devices, device_cap))
    found.append(_memory("host memory", hosts, host_cap))
    if (moved := _moves(scene)) is not None:
        found.append(moved)
    found.append(_optimality(scene))
    found.append(_calibration(scene))
    return tuple(found)


def sampled_tokens(scene: Scene, graph: Flow | Graph | None) -> float | None:
    """Response tokens that an iteration samples; None where the number of responses is not known."""
    workload = scene.plan.workload
    if workload is None:
        return None
    mean = workload.response_lengths.mean
    if graph is None:
        count = workload.group_size
        return workload.prompts * count * workload.rounds * mean if count else None
    whole = graph.graph() if isinstance(graph, Flow) else graph
    rows = rows_of(whole, workload)
    sampled = [rows[name] for name, kind in _kinds(whole) if kind == "rollout" and name in rows]
    return sum(sampled) * mean if sampled else None


def _kinds(graph: Graph, prefix: str = "") -> Iterator[tuple[str, str]]:
    for node in graph:
        yield prefix + node.name, node.kind
        if node.body is not None:
            yield from _kinds(node.body, f"{prefix}{node.name}.")


def _bottleneck(scene: Scene) -> Figure:
    """The lane that is busy for most of the time; where iterations overlap and none is busy throughout, how old rows may be."""
    tracks = [(track, group.name) for group in scene.groups for track in group.tracks]
    plan = scene.plan
    whole_s = plan.predicted.seconds
    if not any(track.bars for track, _ in tracks) or not whole_s:
        return Figure("bottleneck", "none", "nothing takes time")
    track, name = max(tracks, key=lambda one: one[0].busy_s)
    busy_s, lane = track.busy_s, track.lane
    part = min(1.0, busy_s / whole_s)
    what = LANES[lane] if lane is not Lane.HOST else "the CPUs"
    most_of = max(track.bars, key=lambda bar: bar.end_s - bar.start_s)
    longest = f"longest is {most_of.step.name} with {units.seconds(most_of.end_s - most_of.start_s)}"
    if lane is Lane.COMPUTE:  # of a mesh whose nodes differ in what they send, the track is that of one of them
        name = called(plan, most_of.step.mesh.devices)
    if not plan.max_staleness:
        return Figure("bottleneck", f"{what}, {units.percent(part)} busy", f"predicted, of {name}; {longest}", part)
    if _is_bound_by_staleness(scene):
        latency, most = units.seconds(plan.predicted.latency_s), plan.max_staleness + 1
        note = (
            f"predicted: an iteration takes {latency} and {most} may be under way; {what} of {name} is busy for "
            f"{units.percent(part)} of the time"
        )
        return Figure("bottleneck", "staleness allowed", note, part)
    note = f"predicted, of {name}: {units.seconds(busy_s)} of the {units.seconds(whole_s)} between versions; {longest}"
    return Figure("bottleneck", f"{what}, {units.percent(part)} busy", note, part)


def _slots(scene: Scene) -> Iterator[Figure]:
    """Sampling whose slots mostly wait."""
    for step, used, why in tails(scene.plan):
        note = f"predicted, part of the time that slots of {step.name} work; {why}"
        yield Figure("slots at work", units.percent(used), note, used)


def _is_bound_by_staleness(scene: Scene) -> bool:
    plan = scene.plan
    pace = period(
        plan.tasks,
        max_staleness=plan.max_staleness,
        devices_per_node=plan.cluster.devices_per_node,
        order=[task.name for task in plan.tasks],
    )
    return pace.is_bound_by_staleness


def _moves(scene: Scene) -> Figure | None:
    """The step that moves most bytes."""
    total = sum(bar.step.predicted.num_bytes for bar in scene.bars)
    if not total:
        return None
    most = max(scene.bars, key=lambda bar: (bar.step.predicted.num_bytes, -bar.index))
    num_bytes, took_s = most.step.predicted.num_bytes, most.end_s - most.start_s
    kind = KINDS[most.step.kind][1]
    as_many = [bar.step.name for bar in scene.bars if bar is not most and bar.step.predicted.num_bytes == num_bytes]
    others = f", and as many by {', '.join(as_many)}" if as_many else ""
    note = (
        f"{kind}, predicted, over all devices, in {units.seconds(took_s)}{others}; all steps move {units.size(total)}"
    )
    streamed = [bar.step.name for bar in scene.bars if _streams(bar.step)]
    left_out = [UNCOUNTED] * any(talks(bar.step) for bar in scene.bars)
    left_out += [f"what {', '.join(streamed)} streams while it computes"] * bool(streamed)
    if left_out:
        note += f", without {' and '.join(left_out)}"
    return Figure("moves most", f"{units.size(num_bytes)}, {most.step.name}", note)


def talks(step: Step) -> bool:
    """Whether a computation's devices send to each other what is not counted in its bytes."""
    return Lane.COMPUTE in step.lanes and step.layout is not None and step.layout.size > 1


def _streams(step: Step) -> bool:
    """Whether it keeps a link busy for which no bytes are counted, as an optimizer does that is streamed through the device."""
    return Lane.COMPUTE in step.lanes and len(set(step.lanes) - {Lane.HOST}) > 1 and not step.predicted.num_bytes


def _memory(name: str, stacks: tuple[Stack, ...], capacity: int) -> Figure:
    if not stacks:
        return Figure(name, "none held", f"of {units.size(capacity)}", 0.0)
    fullest = stacks[0]
    peak = fullest.usage.peak_bytes
    when = f", {fullest.when}" if fullest.when else ""
    note = f"predicted peak of {fullest.name}{when}"
    if fullest.usage.parts:
        what, num_bytes = fullest.usage.parts[0]
        note += f"; largest part: {named(what)} with {units.size(num_bytes)}"
    return Figure(name, f"{units.size(peak)} of {units.size(capacity)}", note, peak / capacity)


def _optimality(scene: Scene) -> Figure:
    searched = scene.plan.searched
    if searched is None:
        return Figure("optimality", "not searched", "written by hand: compared with no other plan")
    gap = searched.gap(scene.plan.predicted.seconds)
    within, bound = f"within {units.percent(gap)}", f"no plan is below {units.seconds(searched.bound_s)}"
    if not searched.is_exhaustive:
        return Figure(
            "optimality", within, f"of the best there is: {bound}; by a seeded random search, under the cost model"
        )
    if gap < LEAST_GAP:
        return Figure("optimality", "best there is", "no plan of the search space is faster, under the cost model")
    return Figure("optimality", within, f"of the best there is: {bound}, under the cost model")


def _calibration(scene: Scene) -> Figure:
    cluster = scene.plan.cluster
    if cluster.calibrated_at:
        day = cluster.calibrated_at[:10]
        note = "; ".join(("this kind of cluster, by flowrl calibrate", *cluster.notes))
        return Figure("calibration", f"measured {day}", note, since=day)
    assumed = cluster.efficiency == Efficiency()
    value = "assumed" if assumed else "set for this cluster"
    links = (
        f"{len(cluster.measured)} tables of measured collectives" if cluster.measured else "no collective was measured"
    )
    said = "efficiencies are FlowRL's defaults" if assumed else "efficiencies differ from the defaults"
    said += "" if cluster.is_published else ", peaks and links were given"
    return Figure("calibration", value, f"{said}; {links}")


def strip(found: tuple[Figure, ...]) -> Markup:
    """The figures as HTML."""
    return tag("dl", join(*(_card(figure) for figure in found)), class_="strip")


def _card(figure: Figure) -> Markup:
    gauge = None
    if figure.part is not None:
        over = " over" if figure.part > 1 else ""
        width = f"width:{100 * min(1.0, figure.part):.1f}%"
        gauge = tag("span", tag("span", style=width), class_=f"meter{over}", aria_hidden="true")
    value = tag("strong", _UNIT.sub("\u00a0\\1", figure.value))
    note = tag("small", figure.note, data_since=figure.since or None)
    return tag("div", tag("dt", figure.name), tag("dd", value, gauge, note))
