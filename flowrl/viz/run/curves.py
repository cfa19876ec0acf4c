"""Metrics of a run as small charts: one for each thing a person asks about, and the rest behind a fold.

Example:
    for chart in charts(folder.metrics()):
        chart.title, [line.name for line in chart.lines]      # "KL", ["update/kl", "update/approx_kl"]
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from flowrl.viz import units
from flowrl.viz.svg import Markup, fitted, join, line, picture, tag, text

WIDTH, HEIGHT = 372.0, 176.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 10.0, 10.0, 24.0
MOST_POINTS = 600
"""Of a line; of more, the least and the greatest of each part are kept."""
SMOOTHED_FROM = 60
"""Points from which a line gets the mean of its neighbours drawn over it."""
LEAST_TURNS = 0.1
"""Of a line's points, those at which it turns: with fewer it is no noise, but a schedule, say."""
WINDOW_PART = 25
"""A smoothed point is the mean of as many points as a line has, divided by this."""
HUES = 7
DASHES = ("", "6 3", "2 3", "9 3 2 3")
"""A line that has the hue of another one has another dash; so has each of a few lines, as hue alone says too little."""

FAMILIES: tuple[tuple[str, str, str], ...] = (
    ("Reward", "", r"(.+\.)?reward(/[^/]+)?/mean"),
    ("Advantage", "", r"(.+\.)?advantages?/mean"),
    ("Response length", "tokens", r"(.+\.)?response_length/(mean|max)"),
    ("How responses ended", "share", r"(.+\.)?finish_reason/.+"),
    ("Loss", "", r".+/loss"),
    ("KL", "nats", r".+/(.+_)?kl(_.+)?"),
    ("Entropy", "nats", r".+/(.+_)?entropy(_.+)?"),
    ("Clip fraction", "share", r".+/(.+_)?clip(ped)?_fraction(_.+)?"),
    ("Ratio", "", r".+/(.+_)?ratio(_.+)?"),
    ("Sampler against trainer", "nats", r"(.+/)?(.+_)?mismatch(_.+)?(/mean)?|.+/rollout_gap"),
    ("Staleness", "versions", r"(.+[/.])?(.+_)?staleness(/.+|_.+)?"),
    ("Gradient norm", "", r".+/(.+_)?grad_norm"),
    ("Learning rate", "", r".+/lr"),
    ("Throughput", "tokens/s", r"(.+[/_])?tokens_per_s"),
    ("Time of a step", "s", r"time/.+_s"),
)
"""Title, unit, and the metrics that belong to it: the first that fits the whole name wins."""
_PATTERNS = tuple((title, unit, re.compile(pattern)) for title, unit, pattern in FAMILIES)

Point = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Line:
    """One metric over the steps that have it.

    Example:
        Line("reward/mean", ((0, 0.1), (1, 0.15)), spread=((0, 0.3), (1, 0.31)))
    """

    name: str
    points: tuple[Point, ...]
    """(step, value), finite, by step."""
    spread: tuple[Point, ...] = ()
    """Standard deviation at steps; drawn as a band around the line."""
    least: tuple[Point, ...] = ()
    most: tuple[Point, ...] = ()
    """Of the values whose mean the line is; the band ends there, as a deviation below rewards that are never below 0 is none."""
    label: str = ""
    """What it is called in the legend; empty: its name."""
    hue: int | None = None
    """None: by its place in the chart."""

    def band(self) -> dict[int, tuple[float, float]]:
        """Step -> from where to where the band reaches."""
        spread, least, most = dict(self.spread), dict(self.least), dict(self.most)
        found = {}
        for step, value in self.points:
            off = spread.get(step, 0.0)
            low, high = max(value - off, least.get(step, -math.inf)), min(value + off, most.get(step, math.inf))
            found[step] = (
                min(low, value),
                max(high, value),
            )  # a mean is rounded, and may be beside a least value that equals it
        return found


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines that share axes."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    is_main: bool = True
    """Among the charts that are seen at once."""
    note: str = field(default="", compare=False)


def charts(metrics: Sequence[Mapping[str, Any]]) -> tuple[Chart, ...]:
    """Every metric of a run in a chart: the families first, then what is left, a chart for each name.

    Args:
        metrics: a dict for each step with `step` and numbers, as `RunFolder.metrics` gives.
    """
    points = columns(metrics)
    found: dict[str, list[Line]] = {}
    rest: list[str] = []
    for name in points:
        title = next((title for title, _, pattern in _PATTERNS if pattern.fullmatch(name)), None)
        if title is None:
            rest.append(name)
        else:
            base = name.removesuffix("/mean")
            has_spread = name.endswith("/mean") and f"{base}/std" in points and name.count("/") == 1
            std, least, most = (points.get(f"{base}/{one}", ()) if has_spread else () for one in ("std", "min", "max"))
            found.setdefault(title, []).append(Line(name, points[name], std, least=least, most=most))
    made = [Chart(title, unit, tuple(found[title])) for title, unit, _ in _PATTERNS if title in found]
    made += [Chart(name, "", (Line(name, points[name]),), is_main=False) for name in sorted(rest)]
    return tuple(made)


def compared(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[Chart, ...]:
    """A chart for each metric with a line for each run that has it; those of the families first."""
    all_points = {run: columns(metrics) for run, metrics in runs.items()}
    names = list(dict.fromkeys(name for points in all_points.values() for name in points))

    def rank(name: str) -> int:
        return next((i for i, (_, _, pattern) in enumerate(_PATTERNS) if pattern.fullmatch(name)), len(_PATTERNS))

    made = []
    for name in sorted(names, key=lambda one: (rank(one), names.index(one))):
        lines = tuple(
            Line(name, points[name], label=run, hue=index)
            for index, (run, points) in enumerate(all_points.items())
            if name in points
        )
        place = rank(name)
        made.append(Chart(name, FAMILIES[place][1] if place < len(FAMILIES) else "", lines, place < len(FAMILIES)))
    return tuple(made)


def columns(metrics: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Point, ...]]:
    """Metric -> its finite points, by step."""
    found: dict[str, list[Point]] = {}
    for row in metrics:
        for name, value in row.items():
            if name == "step" or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            kept = found.setdefault(name, [])
            if math.isfinite(value):
                kept.append((int(row["step"]), float(value)))
    return {name: tuple(points) for name, points in found.items() if points}


def data_of(shown: Iterable[Chart]) -> dict[str, dict[str, list[Any]]]:
    """The points as they are drawn, for the script: chart -> lines with steps and values."""
    found = {}
    for index, chart in enumerate(shown):
        lines = [[(one.label or one.name), *map(list, zip(*thinned(one.points), strict=True))] for one in chart.lines]
        found[str(index)] = {"lines": lines}
    return found


def gallery(shown: Sequence[Chart], *, first: int = 0) -> Markup:
    """The charts side by side, as HTML."""
    return tag("div", *(_card(chart, first + index) for index, chart in enumerate(shown)), class_="charts")


def _card(chart: Chart, number: int) -> Markup:
    title = chart.title + (f" ({chart.unit})" if chart.unit else "")
    items = [
        tag(
            "li",
            sample(*_look(place, one), width=22),
            tag("span", one.label or one.name),
            tag("b", told(one.points[-1][1])),
        )
        for place, one in enumerate(chart.lines)
    ]
    return tag(
        "figure", tag("figcaption", title), _drawing(chart, number), tag("ul", *items, class_="keys"), class_="chart"
    )


def sample(hue: int, dash: str, *, width: int) -> Markup:
    """A short piece of a line, for legends."""
    drawn = line(1, 6, width - 1, 6, class_=f"curve k{hue}", stroke_dasharray=dash or None)
    return tag("svg", drawn, width=width, height=12, viewbox=f"0 0 {width} 12", class_="swatch", aria_hidden="true")


def look(place: int) -> tuple[int, str]:
    """Hue and dash of the line at a place."""
    return place % HUES, DASHES[(place + place // HUES) % len(DASHES)]


def _look(place: int, one: Line) -> tuple[int, str]:
    return look(place if one.hue is None else one.hue)


def _drawing(chart: Chart, number: int) -> Markup:
    frame = _Frame.around(chart)
    pieces: list[Markup] = [frame.grid()]
    for place, one in enumerate(chart.lines):
        pieces += _line(frame, one, *_look(place, one))
    cursor = line(0, TOP, 0, HEIGHT - BOTTOM, class_="cursor", visibility="hidden")
    last = "; ".join(f"{one.label or one.name} {told(one.points[-1][1])}" for one in chart.lines[:6])
    return picture(
        f"chart-{number}", WIDTH, HEIGHT, chart.title, f"Steps {frame.first} to {frame.last}. Last: {last}", *pieces, cursor,
        class_="little plot", data_chart=number, data_first=frame.first, data_last=frame.last,
    )  # fmt: skip


def _line(frame: _Frame, one: Line, hue: int, dash: str) -> Iterator[Markup]:
    points = thinned(one.points)
    if one.spread and len(points) > 1:
        band = one.band()
        upper = [frame.place(step, band[step][1]) for step, _ in points]
        lower = [frame.place(step, band[step][0]) for step, _ in reversed(points)]
        yield tag("path", d=f"{_path(upper)}{_path(lower).replace('M', 'L', 1)}Z", class_=f"band-of d{hue}")
    smooth = smoothed(one.points)
    faint = " faint" if smooth else ""
    if len(points) == 1:
        x, y = frame.place(*points[0])
        yield tag("circle", cx=x, cy=y, r=3, class_=f"d{hue}")
    else:
        path = _path([frame.place(*point) for point in points])
        yield tag("path", d=path, class_=f"curve k{hue}{faint}", stroke_dasharray=None if smooth else dash or None)
    if smooth:
        path = _path([frame.place(*point) for point in thinned(smooth)])
        yield tag("path", d=path, class_=f"curve k{hue}", stroke_dasharray=dash or None)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "".join(f"{'L' if index else 'M'}{x:.1f},{y:.1f}" for index, (x, y) in enumerate(points))


@dataclass(frozen=True, slots=True)
class _Frame:
    """Steps and values to pixels."""

    first: int
    last: int
    low: float
    high: float

    @classmethod
    def around(cls, chart: Chart) -> _Frame:
        points = [point for one in chart.lines for point in one.points]
        values = [value for _, value in points]
        for one in chart.lines:
            values += [edge for edges in one.band().values() for edge in edges]
        low, high = min(values), max(values)
        if low > 0 and low < 0.5 * high:
            low = 0.0
        if high - low <= 1e-12 * max(abs(high), abs(low)):  # a flat line stands in the middle
            room = abs(high) * 0.1 or 1.0
            low, high = low - room, high + room
        steps = [step for step, _ in points]
        return cls(min(steps), max(steps), low, high)

    def place(self, step: int, value: float) -> tuple[float, float]:
        part = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        height = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return LEFT + part * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - height * (HEIGHT - BOTTOM - TOP)

    def step(self) -> float:
        """Between the ticks of values: few of them, and two at least, as one gives no scale."""
        found = [units.step_of(self.high - self.low, wanted) or 1.0 for wanted in (3, 4, 5, 6)]
        two = (one for one in found if math.floor(self.high / one + 1e-9) - math.ceil(self.low / one - 1e-9) >= 1)
        return next(two, found[-1])

    def grid(self) -> Markup:
        pieces: list[Markup] = []
        step = self.step()
        at = math.ceil(self.low / step - 1e-9)
        while at * step <= self.high + 1e-9 * step:
            _, y = self.place(self.first, at * step)
            pieces.append(line(LEFT, y, WIDTH - RIGHT, y, class_="grid"))
            words = fitted(_short(at * step), LEFT - 6, size=11)
            pieces.append(text(LEFT - 6, y + 4, words, class_="tick", text_anchor="end"))
            at += 1
        for number in _round_steps(self.first, self.last):
            x, _ = self.place(number, self.low)
            pieces.append(line(x, HEIGHT - BOTTOM, x, HEIGHT - BOTTOM + 4, class_="rule"))
            pieces.append(text(x, HEIGHT - BOTTOM + 16, units.count(number), class_="tick", text_anchor="middle"))
        return tag("g", join(*pieces), aria_hidden="true")


def _round_steps(first: int, last: int) -> list[int]:
    step = max(1, math.ceil(units.step_of(last - first, 5) or 1))
    return list(range(math.ceil(first / step) * step, last + 1, step))


def told(value: float) -> str:
    """A value in four digits or, where it is large, without decimals: "0.2266", "70,526"."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"


def _short(value: float) -> str:
    """As "0.25", "12k", "2.5e-4"."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    if abs(value) >= 1e4:
        return f"{value / 1e3:,.4g}k"
    return f"{value:.4g}"


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> tuple[Point, ...]:
    """At most about `most` points: of each part of the line its least and its greatest, so that no spike is lost."""
    if len(points) <= most:
        return tuple(points)
    kept: list[Point] = [points[0]]
    parts = most // 2
    for part in range(parts):
        some = points[part * len(points) // parts : (part + 1) * len(points) // parts]
        kept += sorted({min(some, key=lambda one: one[1]), max(some, key=lambda one: one[1])})
    kept.append(points[-1])
    return tuple(sorted(set(kept)))


def smoothed(points: Sequence[Point]) -> tuple[Point, ...]:
    """The mean of each point's neighbours; nothing for lines that are short, or go their way without going back and forth."""
    moves = [after - before for (_, before), (_, after) in pairwise(points) if after != before]
    turns = sum(one * other < 0 for one, other in pairwise(moves))
    if len(points) < SMOOTHED_FROM or turns < LEAST_TURNS * len(points):
        return ()
    half = max(1, len(points) // WINDOW_PART // 2)
    sums = [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    found = []
    for index, (step, _) in enumerate(points):
        low, high = max(0, index - half), min(len(points), index + half + 1)
        found.append((step, (sums[high] - sums[low]) / (high - low)))
    return tuple(found)
