"""The dataflow of a plan as a Mermaid flowchart, with a frame for each mesh."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.graph.flows import Flow
from flowrl.graph.nodes import Graph
from flowrl.planner.steps import Plan
from flowrl.viz import units
from flowrl.viz.dataflow import DATA, NOWHERE, WEIGHTS, Dataflow, Flows, Point, dataflow
from flowrl.viz.flowchart import words_on
from flowrl.viz.mermaid import label_of
from flowrl.viz.palette import LIGHT
from flowrl.viz.scene import scene
from flowrl.viz.svg import clean

_ARROWS = {DATA: ("-->", "-- {} -->"), WEIGHTS: ("-.->", "-. {} .->")}


def plan_mermaid(plan: Plan, graph: Flow | Graph | None = None) -> str:
    """The plan as Mermaid text (`flowchart LR`). Arguments and errors as of `flowrl.viz.dataflow.dataflow`."""
    return "\n".join(["flowchart LR", *(f"    {line}" for line in _lines(dataflow(scene(plan), graph)))]) + "\n"


def _lines(flow: Dataflow) -> Iterator[str]:
    ids = {point.name: f"n{index}" for index, point in enumerate(flow.points)}
    for index, (band, points) in enumerate(flow.bands.items()):
        inside = [f"{ids[point.name]}[{_label(point)}]" for point in points]
        if band == NOWHERE:
            yield from inside
        else:
            yield f"subgraph m{index}[{label_of([clean(band)])}]"
            yield from (f"    {line}" for line in inside)
            yield "end"
    for edge in flow.edges:
        yield f"{ids[edge.source]} {_arrow(edge)} {ids[edge.target]}"
    used = sorted({point.hue for point in flow.points if point.hue is not None})
    for hue in used:
        fill, stroke = LIGHT[hue]
        names = ",".join(ids[point.name] for point in flow.points if point.hue == hue)
        yield f"classDef h{hue} fill:{fill},stroke:{stroke},color:#111"
        yield f"class {names} h{hue}"
    pruned = [ids[point.name] for point in flow.points if point.why_pruned]
    if pruned:
        yield "classDef pruned fill:#f4f4f4,stroke:#999,color:#777,stroke-dasharray:4 3"
        yield f"class {','.join(pruned)} pruned"


def _label(point: Point) -> str:
    lines = [point.name]
    lines += [f"{units.seconds(point.seconds)} predicted"] if point.bars else []
    lines += ["left out"] if point.why_pruned else []
    return label_of([clean(line) for line in lines])


def _arrow(edge: Flows) -> str:
    plain, labelled = _ARROWS.get(edge.kind, _ARROWS[WEIGHTS])
    words = [words_on(edge), "next iteration" if edge.is_back else "", "left out" if edge.is_pruned else ""]
    said = [clean(one) for one in words if one]
    return labelled.format(label_of(said)) if said else plain
