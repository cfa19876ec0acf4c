"""The dataflow of a plan for Graphviz, with a cluster for each mesh."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.graph.flows import Flow
from flowrl.graph.nodes import Graph
from flowrl.planner.steps import Plan
from flowrl.viz import units
from flowrl.viz.dataflow import CONTROL, DATA, NOWHERE, WEIGHTS, Dataflow, Point, dataflow
from flowrl.viz.flowchart import words_on
from flowrl.viz.palette import LIGHT
from flowrl.viz.scene import scene
from flowrl.viz.svg import clean

STYLES = {DATA: "solid", WEIGHTS: "dashed", CONTROL: "dotted"}


def to_dot(plan: Plan, graph: Flow | Graph | None = None) -> str:
    """The plan as DOT text. Arguments and errors as of `flowrl.viz.dataflow.dataflow`."""
    flow = dataflow(scene(plan), graph)
    return "\n".join(["digraph plan {", *(f"  {line}" for line in _lines(plan, flow)), "}"]) + "\n"


def _lines(plan: Plan, flow: Dataflow) -> Iterator[str]:
    yield f"label={_quoted(f'plan {plan.name}: {units.seconds(plan.predicted.seconds)} predicted')}; labelloc=t;"
    yield 'node [shape=box, style=filled, fillcolor=white, fontname="sans-serif"]; edge [fontname="sans-serif", fontsize=10];'
    ids = {point.name: f"n{index}" for index, point in enumerate(flow.points)}
    for index, (band, points) in enumerate(flow.bands.items()):
        inside = [f"{ids[point.name]} [{_look(point)}];" for point in points]
        if band == NOWHERE:
            yield from inside
        else:
            yield f"subgraph cluster_{index} {{ label={_quoted(band)};"
            yield from (f"  {line}" for line in inside)
            yield "}"
    for edge in flow.edges:
        label = words_on(edge)
        more = ", constraint=false" if edge.is_back else ""
        grey = ', color="#999999"' if edge.is_pruned else ""
        yield f"{ids[edge.source]} -> {ids[edge.target]} [label={_quoted(label)}, style={STYLES[edge.kind]}{more}{grey}];"


def _look(point: Point) -> str:
    lines = [point.name]
    if point.bars:
        layout = next((f", {bar.step.layout}" for bar in point.bars if bar.step.layout is not None), "")
        lines.append(f"{units.seconds(point.seconds)} predicted{layout}")
    if point.why_pruned:
        return f'label={_quoted(*lines, "left out")}, style=dashed, fontcolor="#777777"'
    fill = LIGHT[point.hue][0] if point.hue is not None else "#ffffff"
    return f'label={_quoted(*lines)}, fillcolor="{fill}"'


def _quoted(*lines: str) -> str:
    """A string of DOT: quotes and backslashes are escaped, lines are joined with its own line break."""
    escaped = (clean(line).replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") for line in lines)
    return '"' + "\\n".join(escaped) + '"'
