"""Why this plan: what else was looked at, by how much it lost and to what, and how time trades for memory."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from flowrl.planner.steps import Plan
from flowrl.viz import units
from flowrl.viz.svg import Markup, fitted, join, line, picture, tag, text, width_of

WIDTH, HEIGHT = 1120.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 78.0, 24.0, 18.0, 44.0

_FIGURES = re.compile(r"^[\d.,]+ m?s \([^)]*\); (?=.)")


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
    return (
        f"The search went through {how}: {units.count(one.placements)} placements, {units.count(one.simulated)} plans simulated, "
        f"{units.count(one.pruned)} branches left out because a bound showed they lose, {units.count(one.unfit)} placements that "
        "fit no memory. All seconds and bytes are predicted."
    )


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
                tag("td", "" if one is found[0] else units.percent(delta, signed=True), class_="num"),
                tag("td", units.size(one.device_bytes), class_="num"),
                tag("td", units.size(one.host_bytes), class_="num"),
                tag("td", _reason(one) or ("this plan" if one is found[0] else ""), class_="wrap"),
                class_="chosen" if one is found[0] else None,
            )
        )
    return tag(
        "table", tag("thead", tag("tr", *(tag("th", word, scope="col") for word in head))), tag("tbody", join(*rows))
    )


def _reason(one: Rival) -> str:
    """Why it lost, without the placement and the seconds, which have columns of their own."""
    return _FIGURES.sub("", one.why.removeprefix(f"{one.placement}: "))


def pareto(plan: Plan) -> Markup | None:
    """Seconds against peak memory of a device; None where there is nothing to compare with."""
    found = rivals(plan)
    if len(found) < 2:
        return None
    capacity = plan.cluster.device.memory_bytes
    most_s = max(one.seconds for one in found) * 1.06
    least_s = min(one.seconds for one in found) * 0.94
    most = max(capacity, *(one.device_bytes for one in found)) * 1.08
    plot_w, plot_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(one: Rival) -> tuple[float, float]:
        x = LEFT + (one.seconds - least_s) / ((most_s - least_s) or 1.0) * plot_w
        return x, TOP + plot_h * (1 - one.device_bytes / most)

    cap_y = TOP + plot_h * (1 - capacity / most)
    frame = [
        line(LEFT, TOP + plot_h, WIDTH - RIGHT, TOP + plot_h, class_="rule"),
        line(LEFT, TOP, LEFT, TOP + plot_h, class_="rule"),
        line(LEFT, cap_y, WIDTH - RIGHT, cap_y, class_="cap"),
        text(WIDTH - RIGHT, cap_y - 5, f"all there is: {units.size(capacity)}", class_="capname", text_anchor="end"),
        text(WIDTH - RIGHT, HEIGHT - 8, "step time, predicted →", class_="tick", text_anchor="end"),
        text(8, TOP - 4, "peak of the fullest device, predicted", class_="tick"),
    ]
    for tick in units.ticks(most / units.GIB, 5):
        y = TOP + plot_h * (1 - tick * units.GIB / most)
        frame.append(line(LEFT, y, WIDTH - RIGHT, y, class_="grid"))
        frame.append(text(LEFT - 8, y + 4, f"{tick:,.4g} GiB", class_="tick", text_anchor="end"))
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
        *frame, tag("path", d=front, class_="front"), *_dots(found, [at(one) for one in found]),
    )  # fmt: skip


def _dots(found: tuple[Rival, ...], places: list[tuple[float, float]]) -> list[Markup]:
    """A mark for each plan, its name beside it where that hides no other name."""
    taken: list[tuple[float, float, float, float]] = [(x - 7, y - 7, x + 7, y + 7) for x, y in places]
    made = []
    for one, (x, y) in zip(found, places, strict=True):
        tip = f"{one.name}: {one.placement}\n{units.seconds(one.seconds)}, {units.size(one.device_bytes)} per device (predicted)"
        tip += f"\n{one.why}" if one.why else ""
        is_chosen = one is found[0]
        mark = (
            tag("path", d=f"M{x - 7:.1f},{y:.1f} l7,-7 l7,7 l-7,7 Z", class_="dot chosen")
            if is_chosen
            else tag("circle", cx=x, cy=y, r=5.0, class_=f"dot{' best' if one.is_best else ''}")
        )
        words = fitted(f"{one.name}: {one.placement}", 330, size=11)
        wide = width_of(words, size=11)
        label: Markup | None = text(x, y - 11, one.name, class_="tick", text_anchor="middle")
        for left, top in ((x + 11, y - 7), (x - 11 - wide, y - 7), (x - wide / 2, y - 24), (x - wide / 2, y + 10)):
            box = (left, top, left + wide, top + 14)
            inside = box[0] > LEFT and box[2] < WIDTH - RIGHT and box[1] > 0 and box[3] < HEIGHT - BOTTOM
            if inside and not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken):
                taken.append(box)
                label = text(left, top + 11, words, class_="dotname")
                break
        made.append(tag("g", tag("title", tip), mark, label, class_="rival", tabindex=0, role="listitem"))
    return made
