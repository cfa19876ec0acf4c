"""The page of a plan: one file that opens from anywhere, without a network, and can be read without JavaScript.

Example:
    Path("plan.html").write_text(plan_html(plan, graph=grpo), encoding="utf-8")

The pictures are drawn here, in Python. The script only adds what a finger or a mouse asks for. Nothing is fetched: the policy
in the head forbids it, and all texts are escaped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from flowrl.graph.flows import Flow
from flowrl.graph.nodes import Graph
from flowrl.planner.figures import tie_line
from flowrl.planner.measured import Comparison
from flowrl.planner.placed import idle_text
from flowrl.planner.steps import Plan
from flowrl.viz import units
from flowrl.viz.dataflow import CONTROL, DATA, WEIGHTS, Dataflow, dataflow
from flowrl.viz.devices import device_map
from flowrl.viz.flowchart import edge_table, flowchart
from flowrl.viz.frame import data_script, document, folded, in_frame, legend, navigation, section, table
from flowrl.viz.gantt import gantt
from flowrl.viz.measured import Seen, seen
from flowrl.viz.memory import memory_chart
from flowrl.viz.overlap import Overlap, overlap, why_apart
from flowrl.viz.palette import KINDS, named, swatch
from flowrl.viz.residuals import residuals, sentence, table as residual_table, terms
from flowrl.viz.scene import GREY, Scene, place_of, scene
from flowrl.viz.stacks import Stack, overlapping_stacks, stacks, used
from flowrl.viz.svg import Markup, join, tag
from flowrl.viz.verdict import UNCOUNTED, Figure, figures, strip, talks
from flowrl.viz.versions import histogram, version_lane, versions
from flowrl.viz.why import looked_at, pareto, table as rival_table
from flowrl.viz.words import layout_words, offload_words

MOST_CHARTS = 6
"""Memory charts of each sort; the fullest are drawn and the others are named."""

Measurements = Comparison | Iterable[Any]


def plan_html(plan: Plan, graph: Flow | Graph | None = None, measured: Measurements | None = None) -> str:
    """The page.

    Args:
        graph: the flow that was planned; with it the dataflow has its nodes and columns, what was pruned included.
        measured: what a run of the plan took; see `flowrl.viz.measured.seen`.

    Raises `ConfigError` for a graph or measurements of another plan.
    """
    drawn, spans = scene(plan), seen(plan, measured)
    on_devices, on_hosts = stacks(plan)
    shown = figures(drawn, on_devices, on_hosts, graph)
    if isinstance(measured, Comparison) and measured.measured_s is not None:
        shown = (shown[0], _measured_figure(measured), *shown[1:])
    together = overlap(plan) if plan.max_staleness and not why_apart(plan) else None
    parts = [
        section("timeline", "Timeline", timeline(drawn, spans)),
        section("devices", "Devices", _devices(drawn, on_devices)),
        section("memory", "Memory", _memory(drawn, on_devices, on_hosts, spans, together)),
        section("dataflow", "Dataflow", _dataflow(dataflow(drawn, graph))),
        section("why", "Why this plan", _why(plan)),
    ]
    if spans:
        parts.append(section("measured", "Predicted and measured", predicted_and_measured(drawn, spans, measured)))
    if plan.max_staleness:
        parts.insert(0, section("versions", "Versions of the weights", _versions(drawn)))
    parts.append(section("steps", "Steps", _steps(drawn, together)))
    body = [_head(plan, shown), navigation(parts), tag("main", *(part.markup for part in parts)), _foot(plan)]
    facts = {
        "data-makespan-s": repr(drawn.makespan_s),
        "data-device-bytes": str(max((one.usage.peak_bytes for one in on_devices), default=0)),
        "data-host-bytes": str(max((one.usage.peak_bytes for one in on_hosts), default=0)),
    }
    data = data_script("plan", json.loads(plan.to_json()))
    return document(f"plan {plan.name}", join(*body), scripts=("page.js",), data=(data,), facts=facts)


def notebook_html(plan: Plan, graph: Flow | Graph | None = None, *, height: int = 760) -> str:
    """The page in a frame of its own, for notebooks: neither's style reaches the other."""
    return in_frame(plan_html(plan, graph), f"plan {plan.name}", height=height)


# ---------------------------------------------------------------------------------------------------------- sections


def _head(plan: Plan, shown: tuple[Figure, ...]) -> Markup:
    cluster = plan.cluster
    how = f"asynchronous, staleness up to {plan.max_staleness}" if plan.max_staleness else "synchronous"
    apart = f" But {why}." if (why := why_apart(plan)) else ""
    idle = f" ({text})" if (text := idle_text(plan)) else ""
    lead = (
        f"{len(plan.steps)} steps on {cluster.num_devices} × {cluster.device.name} in {cluster.nodes} "
        f"node{'s' if cluster.nodes > 1 else ''}{idle}, {how}.{apart} "
        "Times and memory are predicted unless they are called measured."
    )
    return tag("header", tag("h1", f"Plan {plan.name}"), tag("p", lead, class_="lead"), strip(shown))


def _measured_figure(measured: Comparison) -> Figure:
    took, count = measured.measured_s or 0.0, measured.iterations
    counted = "of one iteration" if count == 1 else f"median of {count} iterations"
    off = f", {units.percent(measured.ratio - 1, signed=True)} against predicted" if measured.ratio else ""
    return Figure("step time, measured", units.seconds(took), f"{counted}{off}")


def _foot(plan: Plan) -> Markup:
    words = (
        f"Plan {plan.hash} of graph {plan.graph_hash}. The plan itself is in this file, as JSON in the element “plan”. "
        "Keys: + and − stretch time, 0 shows all of it, comma and full stop move it, arrows go from mark to mark, "
        "t turns the theme, Escape lets go."
    )
    return tag("footer", tag("p", words))


def timeline(drawn: Scene, spans: tuple[Seen, ...]) -> Markup:
    plan = drawn.plan
    chain = "A thick outline is the critical path"
    if apart := why_apart(plan):
        chain = f"One iteration is drawn, as the next begins when it is complete: {apart}. A thick outline is the critical path"
    elif plan.max_staleness:
        chain = (
            "One iteration alone is drawn. A thick outline is its critical path, which says how old its rows get. How fast "
            "versions follow each other depends on the busiest mesh: iterations overlap, and one version follows another every "
            f"{units.seconds(plan.predicted.seconds)} (predicted), as Versions of the weights shows. A mesh may be idle here and "
            "work on another iteration meanwhile"
        )
    outlines = " Dashed outlines are measured." if spans else ""
    if any(one.start_s is None for one in spans):
        outlines += " Where no start was measured, they begin at the predicted one."
    words = (
        f"Predicted: {units.seconds(drawn.makespan_s)} from the first step to the last. {chain}; hatched grey is idle, with "
        f"what it waits for.{outlines}"
    )
    kinds = dict.fromkeys(bar.step.kind for bar in drawn.bars if KINDS[bar.step.kind][0])
    roles = [legend(swatch(hue, hatched), name, "r", name) for name, hue, hatched in drawn.roles]
    if any(not bar.role for bar in drawn.bars):
        roles.append(legend(swatch(GREY), "no model", "r", "(no model)"))
    moves = [legend(swatch(GREY, KINDS[kind][0]), KINDS[kind][1]) for kind in kinds]
    return join(
        tag("p", words, class_="lead"), tag("ul", *roles, *moves, class_="legend"), tag("figure", gantt(drawn, spans))
    )


def _devices(drawn: Scene, on_devices: tuple[Stack, ...]) -> Markup:
    words = (
        "A stripe is a role that computes on these devices, with its layout and its predicted part of the iteration; "
        "stripes of one device take turns. Below them: the predicted peak of the device's memory. Point at a device for its "
        "ranks and bytes."
    )
    if said := layout_words(drawn.plan):
        words += f" {said}"
    return join(tag("p", words, class_="lead"), tag("figure", device_map(drawn, on_devices)))


def _memory(
    drawn: Scene,
    on_devices: tuple[Stack, ...],
    on_hosts: tuple[Stack, ...],
    spans: tuple[Seen, ...],
    together: Overlap | None,
) -> Markup:
    words = "Predicted by the simulator that decided whether the plan fits. Devices whose memory is the same are drawn once."
    until_s = None
    if together is not None:
        alone = max((one.usage.peak_bytes for one in on_devices), default=0)
        on_devices, on_hosts = overlapping_stacks(together)
        most = max((one.usage.peak_bytes for one in on_devices), default=0)
        until_s = max(together.ends_s, default=0.0)
        words += " Iterations that overlap are drawn, over the same time as in Versions of the weights."
        if most != alone:
            words += f" Together they take at most {units.size(most)}; the planner counted one alone, with {units.size(alone)}."
    elif any(one.device_bytes is not None for one in spans):
        words += " Dashed lines are measured: the most that a device held during a step."
    kinds = [legend(swatch(one.hue, one.hatch), one.name, "c", one.name) for one in used(drawn.plan)]
    measured = () if together is not None else spans
    drawings: list[Markup] = []
    for name, found in (("devices", on_devices), ("hosts", on_hosts)):
        for index, stack in enumerate(found[:MOST_CHARTS]):
            drawings.append(tag("figure", memory_chart(stack, drawn, f"mem-{name}-{index}", measured, until_s=until_s)))
        if len(found) > MOST_CHARTS:
            rest = "; ".join(f"{one.name}: {units.size(one.usage.peak_bytes)}" for one in found[MOST_CHARTS:])
            drawings.append(tag("p", f"Not drawn, as they are less full (predicted peaks): {rest}.", class_="lead"))
    if not on_hosts:
        drawings.append(tag("p", "The plan keeps nothing in the memory of hosts.", class_="lead"))
    return join(
        tag("p", words, class_="lead"), tag("ul", *kinds, class_="legend"), *drawings, _peaks((*on_devices, *on_hosts))
    )


def _peaks(found: tuple[Stack, ...]) -> Markup:
    head = ("where", "predicted peak", "of", "at", "when", "consists of")
    rows = []
    for stack in found:
        usage = stack.usage
        parts = ", ".join(f"{named(what)} {units.size(num_bytes)}" for what, num_bytes in usage.parts)
        cells = (
            tag("td", units.size(usage.peak_bytes), class_="num"),
            tag("td", units.size(stack.cap_bytes), class_="num"),
            tag("td", units.seconds(usage.peak_s), class_="num"),
            tag("td", stack.when),
            tag("td", parts, class_="wrap"),
        )
        rows.append(tag("tr", tag("th", stack.name, scope="row"), *cells))
    return folded("Peaks as a table", table(head, rows))


def _dataflow(flow: Dataflow) -> Markup:
    said = {
        DATA: "rows; the label says their columns and predicted bytes, or, where they move, predicted bytes and time",
        WEIGHTS: "versions of weights",
        CONTROL: "order alone" if flow.has_graph else "waits for its end; rows may stay on the same devices",
    }
    kinds = {edge.kind for edge in flow.edges}
    items = [tag("li", _sample(kind), tag("span", f"{kind}: {words}")) for kind, words in said.items() if kind in kinds]
    words = (
        "Nodes of the flow, by the mesh they run on. Crossed out is what nothing needs: it is not computed, and columns "
        "that nothing reads are not moved. Click an edge for its columns."
        if flow.has_graph
        else "Computations of the plan, by the mesh they run on. The file of a plan has no flow: flowrl plan FILE --html PAGE, "
        "with what it was planned from, draws nodes and columns too; in Python, plan.to_html(graph=flow)."
    )
    return join(
        tag("p", words, class_="lead"), tag("ul", *items, class_="legend"), tag("figure", flowchart(flow)),
        folded("Edges as a table, with columns", edge_table(flow)),
    )  # fmt: skip


def _sample(kind: str) -> Markup:
    path = tag("path", d="M1,7 H27", class_="line")
    return tag(
        "svg",
        tag("g", path, class_=f"edge {kind}"),
        width=28,
        height=14,
        viewbox="0 0 28 14",
        class_="swatch",
        aria_hidden="true",
    )


def _why(plan: Plan) -> Markup:
    scatter = pareto(plan)
    words = looked_at(plan)
    if plan.searched is not None and scatter is None:
        words += " No other plan came close enough to be kept."
    if said := offload_words(plan):
        words += f" {said}"
    figure = None if scatter is None else tag("figure", scatter)
    tied = plan.searched is not None and (plan.searched.tie or plan.searched.why_simpler)
    tie = tag("p", f"A tie: {line}.", class_="lead") if tied and (line := tie_line(plan)) else None
    return join(tag("p", words, class_="lead"), tie, tag("div", rival_table(plan), class_="scroll"), figure)


def predicted_and_measured(drawn: Scene, spans: tuple[Seen, ...], measured: Measurements | None) -> Markup:
    return join(
        tag("p", sentence(drawn, spans)), tag("figure", residuals(drawn, spans)),
        terms(drawn, measured) if isinstance(measured, Comparison) else None,
        folded("Steps, predicted and measured, as a table", residual_table(drawn, spans)),
    )  # fmt: skip


def _versions(drawn: Scene) -> Markup:
    found = versions(drawn)
    apart = why_apart(drawn.plan)
    pace = (
        f"They follow each other: {apart}."
        if apart
        else (
            "A mesh ends one iteration before it computes for the next; iterations overlap between meshes. Devices whose weights "
            "change compute nothing meanwhile."
        )
    )
    words = (
        f"{len(found.published_s)} iterations simulated together. The number in a bar is its iteration; a dashed line is the "
        f"moment at which an iteration is complete and its version of the weights is there. {pace} All predicted."
    )
    return join(
        tag("p", words, class_="lead"), tag("figure", version_lane(drawn, found)),
        tag("figure", histogram(found, drawn.plan.max_staleness)),
    )  # fmt: skip


HEAD = ("", "step", "kind", "where", "layout", "start", "seconds", "moved", "memory", "waits for", "reads or moves")


def _steps(drawn: Scene, together: Overlap | None) -> Markup:
    held = {bar.step.name: bar.step.predicted.memory_bytes for bar in drawn.bars}
    words = (
        "In the order in which they start; * is on the critical path. Start, seconds, moved and memory are predicted."
    )
    if together is not None:
        held = together.held_bytes()
        words = (
            "Of one iteration, in the order in which they start; * is on the critical path of one iteration alone. Start, "
            "seconds, moved and memory are predicted; memory is the most that a device holds meanwhile, for other iterations too."
        )
    if any(talks(bar.step) for bar in drawn.bars):
        words += f" Moved is without {UNCOUNTED}."
    rows = []
    for bar in drawn.bars:
        step, predicted = bar.step, bar.step.predicted
        node = tag("small", f" of {step.node}") if step.node != step.name else None
        cells = (
            tag("td", str(bar.index) + ("*" if bar.is_critical else ""), class_="num"),
            tag("th", step.name, node, scope="row", class_="name"),
            tag("td", str(step.kind)),
            tag("td", place_of(drawn.plan, step), class_="where"),
            tag("td", "" if step.layout is None else str(step.layout), class_="mono"),
            tag("td", units.seconds(bar.start_s), class_="num"),
            tag("td", units.seconds(bar.end_s - bar.start_s), class_="num"),
            tag("td", units.size(predicted.num_bytes) if predicted.num_bytes else "", class_="num"),
            tag("td", units.size(held[step.name]) if held[step.name] else "", class_="num"),
            tag("td", ", ".join(step.after), class_="list"),
            tag("td", ", ".join(step.reads), class_="list"),
        )
        rows.append(tag("tr", *cells, data_k=bar.index))
    return join(tag("p", words, class_="lead"), tag("div", table(HEAD, rows), class_="scroll steps"))
