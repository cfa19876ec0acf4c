"""The dataflow of a plan as a drawing: from above to below, a column of its own for every mesh."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flowrl.viz import units
from flowrl.viz.axis import WIDTH
from flowrl.viz.dataflow import CONTROL, DATA, WEIGHTS, Dataflow, Flows, Point
from flowrl.viz.frame import table
from flowrl.viz.layered import Places, place
from flowrl.viz.svg import Box, Markup, are_over, fitted, number, picture, rect, tag, text, width_of

BOX, PITCH = 52.0, 114.0
LEAST, MOST = 118.0, 240.0
"""Width of a column in pixels."""
TOP = 62.0
SIDE = 14.0
LONGEST = 280.0
"""Width of a label on an edge."""
TIGHT = 0.85
"""Of the room in a box: where reckoned letters take more, those of another font may not fit."""
LANE = 15.0
"""Room that an edge to the next iteration takes at the side."""


@dataclass(slots=True)
class _Frame:
    """Where things stand, and the labels that have a place already."""

    places: Places
    column: float
    width: float
    labels: list[Box]
    said: set[tuple[str, tuple[int, ...]]]
    """Ends of edges and moves that have a label: a move to several nodes is named once."""
    top: float
    """Where the first layer begins: below the names of meshes, where there are any."""

    def x(self, row: float) -> float:
        return SIDE + row * self.column

    def y(self, layer: int) -> float:
        return self.top + layer * PITCH

    @property
    def box(self) -> float:
        return self.column - 18


def flowchart(flow: Dataflow) -> Markup:
    """The dataflow as SVG."""
    names = [point.name for point in flow.points]
    forward = [(edge.source, edge.target) for edge in flow.edges if not edge.is_back]
    bands = {point.name: point.band for point in flow.points}
    places = place(names, forward, bands)
    backs = [edge for edge in flow.edges if edge.is_back]
    room = WIDTH - 2 * SIDE - LANE * (len(backs) + 1)
    column = min(MOST, max(LEAST, room / max(1.0, places.width)))
    width = max(WIDTH, SIDE * 2 + column * places.width + LANE * (len(backs) + 1))
    top = TOP if any(name for name, _, _ in places.bands) else SIDE
    frame = _Frame(places, column, width, [], set(), top)
    height = top + max(1, places.num_layers) * PITCH - (PITCH - BOX) + 34
    lines, labels = [], []
    for index, edge in enumerate(flow.edges):
        points = _back(frame, edge, backs.index(edge)) if edge.is_back else _forth(frame, edge)
        lines.append(_line(edge, points, index))
        label = _label(frame, edge, points, index)
        if label is not None:
            labels.append(label)
    boxes = [_box(frame, point) for point in flow.points]
    described = f"{len(flow.points)} nodes and {len(flow.edges)} edges; the table below has the same"
    is_planned = any(point.bars for point in flow.points)
    title = "Dataflow of the plan (predicted bytes and seconds)" if is_planned else "Dataflow"
    return picture(
        "flow", width, height, title, described,
        tag("defs", *(_arrow(kind) for kind in (DATA, WEIGHTS, CONTROL))), *_bands(frame, height), *lines, *boxes, *labels,
    )  # fmt: skip


def words_on(edge: Flows) -> str:
    """What stands on an edge."""
    parts = [edge.what] if edge.kind == WEIGHTS or not edge.num_bytes else []
    if edge.num_bytes:
        parts += [units.size(edge.num_bytes), units.seconds(edge.seconds)]
    elif edge.kind == DATA and edge.columns:
        parts.append(f"{len(edge.columns)} column{'s' if len(edge.columns) > 1 else ''}")
        if edge.carried_bytes:
            parts.append(units.size(edge.carried_bytes))
    return " · ".join(part for part in parts if part)


def _bands(frame: _Frame, height: float) -> Iterator[Markup]:
    for name, first, rows in frame.places.bands:
        if not name:
            continue
        x, width = SIDE + first * frame.column + 3, rows * frame.column - 6
        yield tag(
            "g",
            rect(x, 4, width, height - 8, rx=8, class_="band"),
            text(x + 10, 23, fitted(name, width - 16), class_="bandname"),
        )


def _box(frame: _Frame, point: Point) -> Markup:
    layer, row = frame.places.nodes[point.name]
    width = frame.box
    x, y = frame.x(row) - width / 2, frame.y(layer)
    rounded = {"weights": BOX / 2, "model": 12.0, "table": 0.0, "choice": 14.0}.get(point.sort, 5.0)
    first, *rest = point.lines
    shown = [text(x + 12, y + 21, fitted(first, width - 20, size=14.5), class_="node")]
    if point.bars:
        took = units.seconds(point.seconds)
        layout = next((f" · {bar.step.layout}" for bar in point.bars if bar.step.layout is not None), "")
        shown.append(_second(x, y, took + layout, width))
    elif point.why_pruned:
        shown.append(_second(x, y, "left out", width))
    elif rest or point.sort in ("model", "table"):
        words = rest[0] if rest else {"model": "model", "table": "data"}[point.sort]
        shown.append(_second(x, y, words, width))
    look = "pruned" if point.why_pruned else f"f{point.hue}" if point.hue is not None else f"sort-{point.sort}"
    bars = " ".join(str(bar.index) for bar in point.bars)
    is_critical = any(bar.is_critical for bar in point.bars)
    return tag(
        "g",
        tag("title", _tip(point)),
        rect(x, y, width, BOX, rx=min(rounded, 18.0), class_=f"box {look}"),
        *shown,
        class_=f"point{' crit' if is_critical else ''}",
        tabindex=0,
        role="listitem",
        data_k=bars or None,
        data_r=point.bars[0].role if point.bars else None,
    )


def _second(x: float, y: float, words: str, width: float) -> Markup:
    """The second line of a box. What fills it is held to its reckoned width: letters of a reader's font may be wider."""
    room = width - 20
    shown = fitted(words, room, size=11)
    wide = width_of(shown, size=11)
    return text(x + 12, y + 39, shown, class_="sub", textlength=wide if wide > TIGHT * room else None)


def _tip(point: Point) -> str:
    lines = [*point.lines, *([point.band] if point.band else [])]
    if point.why_pruned:
        lines.append(f"left out: {point.why_pruned}")
    for bar in point.bars:
        lines.append(f"{bar.step.name}: {units.seconds(bar.end_s - bar.start_s)} (predicted)")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- edges


def _forth(frame: _Frame, edge: Flows) -> list[tuple[float, float]]:
    """Points of an edge: out of the source's bottom, past the bends, into the target's top."""
    (layer, row), (last, end_row) = frame.places.nodes[edge.source], frame.places.nodes[edge.target]
    points = [(frame.x(row), frame.y(layer) + BOX)]
    for at, bend in frame.places.bends[edge.source, edge.target]:
        points += [(frame.x(bend), frame.y(at)), (frame.x(bend), frame.y(at) + BOX)]
    return [*points, (frame.x(end_row), frame.y(last) - 5)]


def _back(frame: _Frame, edge: Flows, index: int) -> list[tuple[float, float]]:
    """Around the right side, where no node stands."""
    (layer, row), (last, end_row) = frame.places.nodes[edge.source], frame.places.nodes[edge.target]
    x = SIDE + frame.column * frame.places.width + LANE * (index + 0.5)
    y, end_y = frame.y(layer) + BOX + 14 + 5 * index, frame.y(last) - 16 - 5 * index
    start_x, end_x = frame.x(row) + frame.box / 4, frame.x(end_row) + frame.box / 4
    return [
        (start_x, frame.y(layer) + BOX),
        (start_x, y),
        (x, y),
        (x, end_y),
        (end_x, end_y),
        (end_x, frame.y(last) - 5),
    ]


def _line(edge: Flows, points: list[tuple[float, float]], index: int) -> Markup:
    d = _straight(points) if edge.is_back else _curved(points)
    classes = f"edge {edge.kind}{' pruned' if edge.is_pruned else ''}{' back' if edge.is_back else ''}"
    return tag(
        "g",
        tag("title", tip_of(edge)),
        tag("path", d=d, class_="touch"),
        tag("path", d=d, class_="line", marker_end=f"url(#arrow-{edge.kind})"),
        class_=classes,
        data_edge=index,
        data_k=_moved_by(edge),
    )


def _moved_by(edge: Flows) -> str | None:
    return " ".join(str(bar.index) for bar in edge.moves) or None


def _curved(points: list[tuple[float, float]]) -> str:
    (x, y), *rest = points
    d = f"M{number(x)},{number(y)}"
    for end_x, end_y in rest:
        if end_x == x:
            d += f"V{number(end_y)}"
        else:
            middle = number((y + end_y) / 2)
            d += f"C{number(x)},{middle} {number(end_x)},{middle} {number(end_x)},{number(end_y)}"
        x, y = end_x, end_y
    return d


def _straight(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{number(x)},{number(y)}" for x, y in points)


def _label(frame: _Frame, edge: Flows, points: list[tuple[float, float]], index: int) -> Markup | None:
    """The label on the first free place along the edge; None where there is none (the table has it)."""
    words = words_on(edge)
    moves = tuple(bar.index for bar in edge.moves)
    ends = {(end, moves) for end in (edge.source, edge.target) if moves}
    if not words or edge.is_pruned or ends & frame.said:
        return None
    frame.said |= ends
    words = fitted(words, LONGEST, size=11)
    wide = width_of(words, size=11) + 12
    spots = list(_spots(edge, points))
    beside = wide / 2 + 8
    for x, y in [*spots, *((x - beside, y) for x, y in spots), *((x + beside, y) for x, y in spots)]:
        x = min(max(x, SIDE + wide / 2), frame.width - 4 - wide / 2)
        box = (x - wide / 2, y - 8, x + wide / 2, y + 8)
        if not any(are_over(box, other) for other in frame.labels):
            frame.labels.append(box)
            return tag(
                "g",
                tag("title", tip_of(edge)),
                rect(box[0], box[1], wide, 16, rx=8, class_="chip"),
                text(x, y + 4, words, class_="chiptext", text_anchor="middle"),
                class_=f"edgelabel {edge.kind}",
                data_edge=index,
                data_k=_moved_by(edge),
            )
    return None


def _spots(edge: Flows, points: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    if edge.is_back:
        (x, y), (end_x, _) = points[1], points[2]
        for part in (0.5, 0.7, 0.3):
            yield x + (end_x - x) * part, y
        return
    # boxes stand between the pairs: only the stretches from one layer to the next are free
    for (x, y), (end_x, end_y) in list(zip(points[::2], points[1::2], strict=True))[::-1]:
        for part in (0.5, 0.3, 0.7):
            bow = part * part * (3 - 2 * part)  # about where a curve with level ends is
            yield x + (end_x - x) * bow, y + (end_y - y) * part


def tip_of(edge: Flows) -> str:
    """What there is to say about an edge, in lines."""
    lines = [f"{edge.source} → {edge.target}{', next iteration' if edge.is_back else ''}"]
    lines.append(edge.kind + (f": {edge.what}" if edge.what else ""))
    if edge.is_pruned:
        lines.append("left out: nothing needs it")
    if edge.num_bytes:
        lines.append(f"moves {units.size(edge.num_bytes)} in {units.seconds(edge.seconds)} (predicted)")
    if edge.carried_bytes:
        lines.append(f"{units.size(edge.carried_bytes)} of rows (predicted)")
    if edge.columns:
        lines.append(f"carries {', '.join(edge.columns)}")
    if edge.pruned:
        lines.append(f"pruned: {', '.join(edge.pruned)}")
    return "\n".join(lines)


def _arrow(kind: str) -> Markup:
    head = tag("path", d="M0,0 L7,3.5 L0,7 Z", class_=f"head {kind}")
    return tag("marker", head, id=f"arrow-{kind}", viewbox="0 0 7 7", refx=6, refy=3.5, markerwidth=7, markerheight=7,
               markerunits="userSpaceOnUse", orient="auto")  # fmt: skip


def edge_table(flow: Dataflow) -> Markup:
    """All edges as an HTML table, with the columns that were pruned. Bytes and time are predicted."""
    head = ("from", "to", "kind", "rows", "moved", "time", "carries", "pruned")
    rows = []
    for index, edge in enumerate(flow.edges):
        pruned = tag("span", ", ".join(edge.pruned), class_="struck") if edge.pruned else ""
        cells = [
            tag("td", edge.source),
            tag("td", edge.target + (" (next iteration)" if edge.is_back else "")),
            tag("td", edge.kind + (f": {edge.what}" if edge.what else "") + (" (left out)" if edge.is_pruned else "")),
            tag("td", units.size(edge.carried_bytes) if edge.carried_bytes else "", class_="num"),
            tag("td", units.size(edge.num_bytes) if edge.num_bytes else "", class_="num"),
            tag("td", units.seconds(edge.seconds) if edge.seconds else "", class_="num"),
            tag("td", ", ".join(edge.columns), class_="wrap"),
            tag("td", pruned, class_="wrap"),
        ]
        rows.append(tag("tr", *cells, data_edge=index, class_="pruned" if edge.is_pruned else None))
    return table(head, rows)
