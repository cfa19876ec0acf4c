"""Graphs, tables and metrics as notebooks show them. Each stands in a frame or in plain elements: no style leaks either way."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.errors import FlowError
from flowrl.graph.flows import Flow
from flowrl.graph.nodes import Graph
from flowrl.schema.ragged import Ragged
from flowrl.store.rows import RowBatch
from flowrl.store.table import ExperienceTable
from flowrl.viz.dataflow import of_graph
from flowrl.viz.flowchart import edge_table, flowchart
from flowrl.viz.frame import data_script, document, folded, in_frame
from flowrl.viz.run.curves import charts, data_of, gallery
from flowrl.viz.svg import Markup, join, tag

ROWS = 5
"""Rows of a table that are shown."""
CHARS = 80
"""Of a text."""
ITEMS = 6
"""Of a list."""
ROOM = 150
"""Pixels that a frame needs beside its picture."""
CHARTS = 640
_HEIGHT = re.compile(r'viewBox="0 0 [\d.]+ ([\d.]+)"')


def graph_html(graph: Graph) -> str:
    """Nodes and what flows between them; what is never computed is crossed out."""
    try:
        flow = of_graph(graph)
        drawing = flowchart(flow)
    except FlowError as error:  # a graph with mistakes: its text shows where, and check() says what
        return join(tag("pre", str(graph)), tag("p", f"It cannot be drawn: {error}"))
    name = f"graph {graph.name}"
    words = f"{len(graph)} nodes. Click an edge for its columns; crossed out is what nothing needs."
    body = join(
        tag("nav", tag("div", tag("strong", name), tag("span", words, class_="lead")), aria_label="The graph"),
        tag("main", tag("figure", drawing), folded("Edges, with columns", edge_table(flow)),
            folded("As text", tag("pre", str(graph), class_="said mono"))),
    )  # fmt: skip
    found = _HEIGHT.search(drawing)
    height = int(float(found[1])) if found else 400
    page = document(name, body, styles=("run.css",), scripts=("page.js",))
    return in_frame(page, name, height=height + ROOM)


def flow_html(flow: Flow) -> str:
    """The graph of its default configuration; its signature where there is none."""
    try:
        return graph_html(flow.graph())
    except FlowError:  # it has configuration without a default
        return tag("code", repr(flow))


def rows_html(rows: RowBatch) -> str:
    """Types and the first rows."""
    return _rows(rows.slice(0, min(ROWS, len(rows))), f"{len(rows):,} rows of {len(rows.names)} columns")


def table_html(table: ExperienceTable) -> str:
    """The same of an experience table; of columns that have a value in every row."""
    try:
        first = table.take(list(range(min(ROWS, len(table)))))
    except FlowError as error:  # it is closed, or its columns are being filled
        return join(tag("p", tag("code", repr(table))), tag("p", str(error)))
    head = repr(table).partition("(")[2].partition(":")[0]
    return _rows(first, head)


def metrics_html(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Curves of a run that has no folder."""
    shown = charts([{"step": step, **row} for step, row in enumerate(metrics)])
    if not shown:
        return tag("p", "no steps yet")
    body = join(
        tag("nav", tag("div", tag("strong", f"{len(metrics)} steps")), aria_label="The run"),
        tag("main", gallery(shown)),
    )
    data = (data_script("chart-data", data_of(shown)),)
    return in_frame(
        document("metrics", body, styles=("run.css",), scripts=("page.js", "run.js"), data=data),
        "metrics",
        height=CHARTS,
    )


def _rows(rows: RowBatch, head: str) -> Markup:
    types = rows.types
    names = tag("tr", *(tag("th", name, scope="col") for name in rows.names))
    kinds = tag("tr", *(tag("td", tag("small", str(types[name]))) for name in rows.names))
    lines = (
        tag("tr", *(tag("td", _cell(rows[name], place), dir="auto") for name in rows.names))
        for place in range(len(rows))
    )
    return join(tag("p", head), tag("table", tag("thead", names, kinds), tag("tbody", *lines)))


def _cell(values: np.ndarray | Ragged, place: int) -> str:
    value = values[place]
    if isinstance(value, np.ndarray):
        flat = value.reshape(-1)
        items = ", ".join(_plain(one) for one in flat[:ITEMS])
        more = f", … {len(flat):,} in all" if len(flat) > ITEMS else ""
        return f"[{items}{more}]"
    return _plain(value)


def _plain(value: Any) -> str:
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= CHARS else f"{text[:CHARS]}… {len(text):,} characters"
