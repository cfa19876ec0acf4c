"""Iterations that overlap: which version of the weights each mesh works for, and how stale the rows of an update are.

The steps of several iterations are simulated together (`flowrl.viz.overlap`). Rows are as stale as the versions that were
published between the start of their iteration's first step and the start of its last computation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.planner.tasks import StepKind
from flowrl.viz import units
from flowrl.viz.axis import LEFT, WIDTH, Axis
from flowrl.viz.overlap import overlap
from flowrl.viz.palette import HATCHES, hatch as hatch_of
from flowrl.viz.scene import GREY, Scene
from flowrl.viz.svg import Markup, fitted, line, picture, rect, tag, text

ROW, BAR = 27.0, 21.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One step of one iteration."""

    iteration: int
    step: int
    """Index in the plan."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Versions:
    """Several iterations of a plan."""

    turns: tuple[Turn, ...]
    published_s: tuple[float, ...]
    """When each iteration was complete: its version of the weights is there."""
    began_s: tuple[float, ...]
    staleness: tuple[int, ...]
    """Of each iteration's rows when they are used."""

    @property
    def histogram(self) -> dict[int, int]:
        """Staleness -> iterations."""
        return dict(sorted(Counter(self.staleness).items()))


def versions(scene: Scene, iterations: int | None = None) -> Versions:
    """Which iteration each step works on, and how old the rows are that it uses."""
    together = overlap(scene.plan, iterations)
    found, count = together.schedule, together.iterations
    turns = tuple(
        Turn(index, bar.index, found.starts[name], found.ends[name])
        for index in range(count)
        for bar in scene.bars
        if (name := f"{bar.step.name}#{index}")
    )
    of = [[turn for turn in turns if turn.iteration == index] for index in range(count)]
    published = tuple(max((turn.end_s for turn in mine), default=0.0) for mine in of)
    began = tuple(min((turn.start_s for turn in mine), default=0.0) for mine in of)
    computing = {bar.index for bar in scene.bars if bar.step.kind is StepKind.COMPUTE}
    stale = []
    for index, mine in enumerate(of):
        used_s = max((turn.start_s for turn in mine if turn.step in computing), default=0.0)
        stale.append(sum(began[index] < moment_s <= used_s for moment_s in published[:index]))
    return Versions(turns, published, began, tuple(stale))


def version_lane(scene: Scene, found: Versions) -> Markup:
    """Iterations on each group of devices as SVG: colour, hatch and number say which iteration."""
    axis = Axis(max((turn.end_s for turn in found.turns), default=0.0))
    y = 30.0
    pieces: list[Markup] = []
    groups = [group for group in scene.groups if any(track.busy_s for track in group.tracks)]
    bottom = y + len(groups) * ROW
    for index, moment_s in enumerate(found.published_s):
        x = axis.x(moment_s)
        pieces.append(line(x, 22, x, bottom, class_="publish"))
        following = found.published_s[index + 1] if index + 1 < len(found.published_s) else None
        if following is None or axis.x(following) - x > 24:  # else the name of the next one says it
            pieces.append(text(x - 4, 17, f"v{index + 1}", class_="tick", text_anchor="end"))
    for group in groups:
        pieces.append(
            text(LEFT - 10, y + 15, fitted(group.name, LEFT - 18, size=11.5), class_="lane", text_anchor="end")
        )
        indices = {bar.index for track in group.tracks for bar in track.bars}
        for turn in found.turns:
            if turn.step in indices:
                pieces.append(_turn(axis, scene, turn, y))
        y += ROW
    described = f"{len(found.published_s)} iterations; a version is published every {units.seconds(scene.plan.predicted.seconds)}"
    return picture(
        "versions", WIDTH, bottom + 24, "Which iteration each mesh works on (predicted)", described,
        axis.grid(22, bottom), text(8, 17, "weights published", class_="tick"), *pieces,
    )  # fmt: skip


def _turn(axis: Axis, scene: Scene, turn: Turn, y: float) -> Markup:
    x, width = axis.x(turn.start_s), max(1.0, axis.width(turn.end_s - turn.start_s))
    hue, hatched = turn.iteration % GREY, HATCHES[turn.iteration // GREY % len(HATCHES)]
    name = scene.bars[turn.step].step.name
    words = fitted(f"{turn.iteration} {name}", width - 6, size=11)
    tip = f"{name} of iteration {turn.iteration}\nfrom {units.seconds(turn.start_s)} to {units.seconds(turn.end_s)} (predicted)"
    return tag(
        "g",
        tag("title", tip),
        rect(x, y, width, BAR, class_=f"box f{hue}"),
        rect(x, y, width, BAR, fill=hatch_of(hatched, hue), class_="over") if hatched else None,
        text(x + 4, y + 15, words or (str(turn.iteration) if width > 12 else ""), class_="label small"),
        class_="turn",
    )


def histogram(found: Versions, max_staleness: int) -> Markup:
    """How often rows are how stale, as SVG."""
    counts: Sequence[int] = [found.histogram.get(index, 0) for index in range(max(max_staleness, *found.staleness) + 1)]
    most = max(counts)
    width, pieces = 360.0, []
    for index, number in enumerate(counts):
        y = 26 + index * 24
        words = f"{number} iteration{'s' if number != 1 else ''}"
        bar = (width - 190) * number / most
        over = " over" if index > max_staleness else ""
        pieces += [
            text(84, y + 13, f"{index} version{'s' if index != 1 else ''}", class_="lane", text_anchor="end"),
            rect(92, y, bar, 17, class_=f"box f0{over}", rx=2),
            text(96 + bar, y + 13, words, class_="tick"),
        ]
    described = "; ".join(f"{number} iterations with {index}" for index, number in enumerate(counts))
    return picture(
        "staleness", width, 34 + len(counts) * 24, "Staleness of the rows of an update (predicted)", described,
        text(8, 14, f"staleness of rows when used; allowed: {max_staleness}", class_="tick"), *pieces,
        class_="little",
    )  # fmt: skip
