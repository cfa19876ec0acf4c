"""Why this plan: what else was looked at, by how much it lost and to what, and how time trades for memory."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from flowrl.planner.steps import Plan
from flowrl.viz import units
from flowrl.viz.frame import table as html_table
from flowrl.viz.svg import Box, Markup, are_over, fitted, join, line, picture, rect, tag, text, width_of

WIDTH, HEIGHT = 1120.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 78.0, 24.0, 30.0, 44.0
LEAST_CHANGE = 5e-4
"""A part that is printed as 0.0 %."""
LEAST_SPREAD, MOST_SPREAD = 0.02, 2.0
"""Of the axis of memory: the least that it spans, as a part of the peak; and how far above the peaks, in spans, the capacity is
at most where the picture has it."""

TOGETHER = 6.0
"""Pixels: marks that are nearer to each other in both directions cannot be told apart."""

_FIGURES = re.compile(r"^[\d.,]+ m?s \([^)]*\)(?:; |$)")


@dataclass(frozen=True, slots=True)
class Rival:
    """A plan in the comparison; the first is the chosen one."""

    name: str
    placement: str
    seconds: float
    device_bytes: int
    host_bytes: int
    why: str
    is_best: bool
    """Whether none of the compared plans is both faster and smaller, or equal in one and better in the other."""


def rivals(plan: Plan) -> tuple[Rival, ...]:
    """The chosen plan, then the others, the best first."""
    outlook = plan.predicted
    found = [("chosen", placement_of(plan), outlook.seconds, outlook.device_bytes, outlook.host_bytes, "")]
    others = () if plan.searched is None else plan.searched.alternatives
    found += [
        (str(index), one.placement, one.seconds, one.device_bytes, one.host_bytes, one.why)
        for index, one in enumerate(others, 1)
    ]
    points = [(one[2], one[3]) for one in found]
    return tuple(
        Rival(*one, is_best=not any(_beats(other, point) for other in points))
        for one, point in zip(found, points, strict=True)
    )


def _beats(one: tuple[float, int], other: tuple[float, int]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def placement_of(plan: Plan) -> str:
    """Roles and layouts by mesh, as a placement is written: "gen:d4t2 | policy:f8 + ref:f8"."""
    by_mesh: dict[tuple[int, int], dict[str, str]] = {}
    for step in plan.steps:
        if step.layout is not None and step.source is None:
            role = str(dict(step.settings).get("role", step.node))
            by_mesh.setdefault((step.mesh.first, step.mesh.size), {})[role] = str(step.layout)
    return " | ".join(" + ".join(f"{role}:{layout}" for role, layout in roles.items()) for roles in by_mesh.values())


def looked_at(plan: Plan) -> str:
    """What the search did, in a sentence."""
    one = plan.searched
    if one is None:
        return "This plan was written by hand. No other was compared with it."
    how = (
        "all of its search space"
        if one.is_exhaustive
        else f"a part of its search space, at random with the seed {one.seed}"
    )
    shown = " What is shown beside the chosen plan was looked for afterwards, and these numbers are without it."
    return (
        f"To find the fastest plan the search went through {how}: {_counted(one.placements, 'split')} of the devices into "
        f"meshes, {_counted(one.simulated, 'plan')} simulated, {_counted(one.pruned, 'branch', 'branches')} left out because a "
        f"bound showed that the best of them loses, {_counted(one.unfit, 'split')} where nothing fits."
        f"{shown if one.alternatives else ''} All seconds and bytes are predicted."
    )


def _counted(number: int, one: str, more: str = "") -> str:
    return f"{units.count(number)} {one if number == 1 else more or one + 's'}"


def table(plan: Plan) -> Markup:
    """The comparison as HTML."""
    found = rivals(plan)
    head = ("", "placement", "step time", "against chosen", "device peak", "host peak", "why it lost")
    rows = []
    for one in found:
        delta = one.seconds / found[0].seconds - 1 if found[0].seconds else 0.0
        rows.append(
            tag(
                "tr",
                tag("th", one.name, scope="row"),
                tag("td", one.placement, class_="mono wrap"),
                tag("td", units.seconds(one.seconds), class_="num"),
                tag("td", "" if one is found[0] else _against(delta), class_="num"),
                tag("td", units.size(one.device_bytes), class_="num"),
                tag("td", units.size(one.host_bytes), class_="num"),
                tag("td", "this plan" if one is found[0] else _reason(one) or _no_reason(delta, plan), class_="wrap"),
                class_="chosen" if one is found[0] else None,
            )
        )
    return html_table(head, rows)


def _reason(one: Rival) -> str:
    """Why it lost, without the placement and the seconds, which have columns of their own."""
    return _FIGURES.sub("", one.why.removeprefix(f"{one.placement}: ")).replace("->", "→")


def _against(delta: float) -> str:
    return "as fast" if abs(delta) < LEAST_CHANGE else units.percent(delta, signed=True)


def _no_reason(delta: float, plan: Plan) -> str:
    """Of a plan whose steps and settings are those of the chosen one, but for the placement.

    Args:
        delta: its seconds over those of the chosen one, less 1.
    """
    tie = 0.0 if plan.searched is None else plan.searched.tie
    if delta > tie:
        return "no single step or setting says why: the sum of its steps takes longer"
    return "equal under the cost model; of equals the simplest is chosen"


def pareto(plan: Plan) -> Markup | None:
    """Seconds against peak memory of a device; None where there is nothing to compare with."""
    found = rivals(plan)
    if len(found) < 2:
        return None
    capacity = plan.cluster.device.memory_bytes
    most_s = max(one.seconds for one in found) * 1.06
    least_s = min(one.seconds for one in found) * 0.94
    least, most = _bounds([one.device_bytes for one in found], capacity)
    plot_w, plot_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def up(num_bytes: float) -> float:
        return TOP + plot_h * (1 - (num_bytes - least) / (most - least))

    def at(one: Rival) -> tuple[float, float]:
        return LEFT + (one.seconds - least_s) / ((most_s - least_s) or 1.0) * plot_w, up(one.device_bytes)

    is_far = capacity > most
    cap_y = TOP if is_far else up(capacity)
    cap_words = f"all there is: {units.size(capacity)}{', far above this picture ↑' if is_far else ''}"
    cap_box = (WIDTH - RIGHT - width_of(cap_words, size=11), cap_y - 16, WIDTH - RIGHT, cap_y)
    frame = [
        line(LEFT, TOP + plot_h, WIDTH - RIGHT, TOP + plot_h, class_="rule"),
        line(LEFT, TOP, LEFT, TOP + plot_h, class_="rule"),
        line(LEFT, cap_y, WIDTH - RIGHT, cap_y, class_="cap far" if is_far else "cap"),
        text(WIDTH - RIGHT, cap_y - 5, cap_words, class_="capname", text_anchor="end"),
        text(WIDTH - RIGHT, HEIGHT - 8, "step time, predicted →", class_="tick", text_anchor="end"),
        text(8, TOP - 8, "peak of the fullest device, predicted; neither axis begins at 0", class_="tick"),
    ]
    step = units.step_of((most - least) / units.GIB, 5)
    for index in range(math.ceil(least / units.GIB / step), math.floor(most / units.GIB / step) + 1):
        y = up(index * step * units.GIB)
        frame.append(line(LEFT, y, WIDTH - RIGHT, y, class_="grid"))
        frame.append(text(LEFT - 8, y + 4, f"{index * step:,.4g} GiB", class_="tick", text_anchor="end"))
    gap = units.step_of(most_s - least_s)
    for index in range(math.ceil(least_s / gap) if gap else 0, math.floor(most_s / gap) + 1 if gap else 0):
        x = LEFT + (index * gap - least_s) / (most_s - least_s) * plot_w
        frame.append(text(x, TOP + plot_h + 16, f"{index * gap:,.5g} s", class_="tick", text_anchor="middle"))
    best = sorted((at(one) for one in found if one.is_best), key=lambda point: point[0])
    front = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in best)
    described = (
        f"{len(found)} plans; {sum(one.is_best for one in found)} of them are not beaten in both time and memory"
    )
    return picture(
        "pareto", WIDTH, HEIGHT, "Step time against peak memory of the plans that were compared (predicted)", described,
        *frame, tag("path", d=front, class_="front"), *_dots(found, [at(one) for one in found], cap_box),
    )  # fmt: skip


def _bounds(peaks: list[int], capacity: int) -> tuple[float, float]:
    """Bytes at the lower and the upper edge: peaks are apart, with the capacity where that leaves them so."""
    low, high = min(peaks), max(peaks)
    spread = max(high - low, LEAST_SPREAD * high, 1.0)
    top = capacity if high < capacity <= high + MOST_SPREAD * spread else high
    return max(0.0, low - 0.15 * spread), top + 0.12 * (top - low + spread)


def _dots(found: tuple[Rival, ...], places: list[tuple[float, float]], cap_box: Box) -> list[Markup]:
    """A mark for each plan, its name beside it where that hides no other name. Plans in one place are named together there."""
    taken: list[Box] = [cap_box, *((x - 7, y - 7, x + 7, y + 7) for x, y in places)]
    made = []
    named: set[str] = set()
    for one, (x, y) in zip(found, places, strict=True):
        near = [
            other for other, at in zip(found, places, strict=True) if max(abs(at[0] - x), abs(at[1] - y)) < TOGETHER
        ]
        here = [other for other in near if other is one or other.name not in named]
        tip = "\n\n".join(map(_tip, near))  # all of them: one mark hides the others
        is_chosen = one is found[0]
        mark = (
            tag("path", d=f"M{x - 7:.1f},{y:.1f} l7,-7 l7,7 l-7,7 Z", class_="dot chosen")
            if is_chosen
            else tag("circle", cx=x, cy=y, r=5.0, class_=f"dot{' best' if one.is_best else ''}")
        )
        label: Markup | None = None
        together = ", ".join(other.name for other in here)
        alone = (fitted(f"{one.name}: {one.placement}", 330, size=11), one.name)
        for words in () if one.name in named else (together,) if len(here) > 1 else alone:
            box = _free(x, y, width_of(words, size=11), taken)
            if box is not None:
                taken.append(box)
                plate = rect(box[0] - 2, box[1], box[2] - box[0] + 4, box[3] - box[1], class_="plate")  # over lines
                label = join(plate, text(box[0], box[1] + 11, words, class_="dotname"))
                break
        named |= {other.name for other in here}
        made.append(tag("g", tag("title", tip), mark, label, class_="rival", tabindex=0, role="listitem"))
    return made


def _tip(one: Rival) -> str:
    said = f"{one.name}: {one.placement}\n{units.seconds(one.seconds)}, {units.size(one.device_bytes)} per device (predicted)"
    return f"{said}\n{one.why}" if one.why else said


def _free(x: float, y: float, wide: float, taken: list[Box]) -> Box | None:
    """Where a name has room beside, above or below its mark."""
    middle = min(max(x - wide / 2, LEFT + 2), WIDTH - RIGHT - wide - 2)
    for left, top in ((x + 11, y - 7), (x - 11 - wide, y - 7), (middle, y - 24), (middle, y + 10)):
        box = (left, top, left + wide, top + 14)
        is_inside = left > LEFT and box[2] < WIDTH - RIGHT and top > 0 and box[3] < HEIGHT - BOTTOM
        if is_inside and not any(are_over(box, other) for other in taken):
            return box
    return None
