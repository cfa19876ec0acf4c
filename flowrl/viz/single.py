"""One picture of a plan as an SVG file of its own: for a pull request, a slide, a README."""

from __future__ import annotations

from collections.abc import Callable

from flowrl.errors import ConfigError
from flowrl.graph.flows import Flow
from flowrl.graph.nodes import Graph
from flowrl.planner.steps import Plan
from flowrl.schema.columns import nearest
from flowrl.viz.dataflow import dataflow
from flowrl.viz.devices import device_map
from flowrl.viz.flowchart import flowchart
from flowrl.viz.frame import asset
from flowrl.viz.gantt import gantt
from flowrl.viz.html import Measurements
from flowrl.viz.measured import Seen, seen
from flowrl.viz.memory import memory_chart
from flowrl.viz.palette import css, hatches
from flowrl.viz.scene import Scene, scene
from flowrl.viz.stacks import stacks
from flowrl.viz.svg import Markup
from flowrl.viz.versions import version_lane, versions
from flowrl.viz.why import pareto

Draw = Callable[[Scene, "Flow | Graph | None", tuple[Seen, ...]], "Markup | None"]


def _memory(drawn: Scene, graph: Flow | Graph | None, spans: tuple[Seen, ...]) -> Markup | None:
    on_devices, _ = stacks(drawn.plan)
    return memory_chart(on_devices[0], drawn, "memory", spans) if on_devices else None


PICTURES: dict[str, Draw] = {
    "timeline": lambda drawn, graph, spans: gantt(drawn, spans),
    "devices": lambda drawn, graph, spans: device_map(drawn, stacks(drawn.plan)[0]),
    "memory": _memory,
    "dataflow": lambda drawn, graph, spans: flowchart(dataflow(drawn, graph)),
    "pareto": lambda drawn, graph, spans: pareto(drawn.plan),
    "versions": lambda drawn, graph, spans: version_lane(drawn, versions(drawn)),
}
"""`memory` is of the devices that hold most; `pareto` needs a plan that was searched for."""


def plan_svg(
    plan: Plan, picture: str = "timeline", graph: Flow | Graph | None = None, measured: Measurements | None = None
) -> str:
    """One of `PICTURES` as an SVG document that needs nothing else. Light or dark as the reader has it.

    Raises `ConfigError` for a picture that is not there, or of which the plan has nothing to show.
    """
    if picture not in PICTURES:
        raise ConfigError(f"no picture of a plan is named '{picture}'; {nearest(picture, PICTURES)}")
    drawing = PICTURES[picture](scene(plan), graph, seen(plan, measured))
    if drawing is None:
        raise ConfigError(f"plan '{plan.name}' has nothing to show as '{picture}'; see PICTURES for what each needs")
    style = f"<style>{css()}{asset('page.css')}svg[role=img]{{background:var(--card);min-width:0}}</style>"
    return drawing.replace(">", f">{style}{hatches()}", 1) + "\n"
