"""What a plan can be shown as. The planner draws nothing, and knows nobody who does: what draws says so in `VIEWS`.

`flowrl.viz` fills it when it is imported, with names only; the module of a view is imported when something is to be drawn.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.errors import ConfigError
from flowrl.graph.flows import Flow
from flowrl.graph.nodes import Graph
from flowrl.schema.files import write_file

if TYPE_CHECKING:
    from flowrl.planner.measured import Comparison

VIEWS: dict[str, str] = {}
"""Name of a view -> `module:function`, called with the plan and keyword arguments; it returns text."""


def view(name: str, plan: Any, **options: Any) -> str:
    """Draw a plan. Raises `ConfigError` where nothing draws such a view."""
    if name not in VIEWS:
        known = ", ".join(sorted(VIEWS)) or "none"
        raise ConfigError(
            f"nothing that was imported draws a plan as '{name}' (there are: {known}); import flowrl.viz first"
        )
    graph = options.get("graph")
    if graph is not None and not isinstance(graph, Flow | Graph):
        raise ConfigError(f"a picture needs the flow or graph that was planned as graph; found {graph!r}")
    module, _, function = VIEWS[name].partition(":")
    return str(getattr(importlib.import_module(module), function)(plan, **options))


class Viewed:
    """The pictures of a plan. Everything in them that was not measured is predicted.

    `graph` is the flow that was planned: with it, drawings have its nodes and columns, what was pruned included. `measured` is
    what a run of the plan took (`flowrl.planner.measured.compare_run`).
    """

    __slots__ = ()

    def to_html(
        self,
        path: str | Path | None = None,
        *,
        graph: Flow | Graph | None = None,
        measured: Comparison | Iterable[Any] | None = None,
    ) -> str:
        """One page that opens from a file, without a network: times, devices, memory, dataflow, why this plan."""
        return _kept(view("html", self, graph=graph, measured=measured), path)

    def to_svg(
        self,
        path: str | Path | None = None,
        *,
        picture: str = "timeline",
        graph: Flow | Graph | None = None,
        measured: Comparison | Iterable[Any] | None = None,
    ) -> str:
        """One picture of the page alone: `timeline`, `devices`, `memory`, `dataflow`, `pareto` or `versions`."""
        return _kept(view("svg", self, picture=picture, graph=graph, measured=measured), path)

    def to_mermaid(self, path: str | Path | None = None, *, graph: Flow | Graph | None = None) -> str:
        """The dataflow as a Mermaid flowchart with a frame for each mesh."""
        return _kept(view("mermaid", self, graph=graph), path)

    def to_dot(self, path: str | Path | None = None, *, graph: Flow | Graph | None = None) -> str:
        """The dataflow for Graphviz, with a cluster for each mesh."""
        return _kept(view("dot", self, graph=graph), path)

    def to_trace(self, path: str | Path | None = None, *, measured: Comparison | Iterable[Any] | None = None) -> str:
        """JSON that Perfetto and chrome://tracing open: a track for each lane, memory as counters, moves as arrows."""
        return _kept(view("trace", self, measured=measured), path)

    def to_text(self, *, width: int = 100, measured: Comparison | Iterable[Any] | None = None) -> str:
        """Timeline and memory in letters, for a terminal."""
        return view("text", self, width=width, measured=measured)

    def _repr_html_(self) -> str:
        return view("notebook", self)


def _kept(text: str, path: str | Path | None) -> str:
    if path is not None:
        write_file(path, text)
    return text
