"""Who works when: a track for every lane of devices that have the same steps, with the critical path and the gaps explained."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.planner.tasks import Lane
from flowrl.viz import units
from flowrl.viz.axis import LEFT, WIDTH, Axis
from flowrl.viz.measured import Seen
from flowrl.viz.overlap import why_apart
from flowrl.viz.palette import KINDS, LANES, hatch
from flowrl.viz.scene import Bar, Gap, Group, Scene, Track, place_of
from flowrl.viz.svg import Markup, fitted, join, line, picture, rect, tag, text, width_of

ROW, BAR, HEAD = 27.0, 21.0, 25.0
THIN = 2.0
"""The least width of a bar in pixels: what takes milliseconds is to be seen beside what takes minutes."""


def gantt(scene: Scene, seen: Sequence[Seen] = ()) -> Markup:
    """The timeline of one iteration as SVG.

    Args:
        seen: what was measured of steps; drawn as dashed outlines.
    """
    ends = [one.end_s for one in seen if one.end_s is not None]
    axis = Axis(max([scene.makespan_s, *ends]))
    y = 8.0
    rows: list[Markup] = []
    chain = tuple(bar for bar in scene.bars if bar.is_critical)
    if chain:
        rows.append(_critical(axis, chain, y, is_overlapped=_overlaps(scene)))
        y += ROW + 6
    spans = {one.step: one for one in seen}
    for group in scene.groups:
        rows.append(_head(scene, group, y))
        y += HEAD
        for track in group.tracks:
            rows.append(_track(scene, axis, track, y, spans))
            y += ROW
        y += 7
    bottom = y
    longest = max(scene.bars, key=lambda bar: bar.end_s - bar.start_s, default=None)
    described = f"{len(scene.bars)} steps in {units.seconds(scene.makespan_s)} (predicted)"
    if longest is not None:
        described += f"; the longest is {longest.step.name} with {units.seconds(longest.end_s - longest.start_s)}"
    clip = tag("clipPath", rect(LEFT - 1, 0, WIDTH - LEFT + 1, bottom + 20), id="gantt-clip")
    return picture(
        "gantt", WIDTH, bottom + 24, "Predicted timeline of one iteration", described, tag("defs", clip),
        axis.grid(4, bottom), *rows, data_most=f"{axis.most_s:.9g}",
    )  # fmt: skip


def _critical(axis: Axis, chain: Sequence[Bar], y: float, *, is_overlapped: bool) -> Markup:
    label = text(
        LEFT - 10,
        y + 15,
        "critical path, alone" if is_overlapped else "critical path",
        class_="lane strong",
        text_anchor="end",
    )
    bars = [_bar(axis, bar, y, is_main=True, room=(axis.width(bar.end_s - bar.start_s), 0.0)) for bar in chain]
    return tag("g", label, _plot(*bars), class_="critical")


def _head(scene: Scene, group: Group, y: float) -> Markup:
    busy = next((track.busy_s for track in group.tracks if track.lane in (Lane.COMPUTE, Lane.HOST)), 0.0)
    part = busy / scene.makespan_s if scene.makespan_s else 0.0
    words = f"busy {units.percent(part)} of the iteration (predicted)"
    plan = scene.plan
    if _overlaps(scene) and plan.predicted.seconds:
        pace = units.percent(min(1.0, busy / plan.predicted.seconds))
        words = (
            f"busy for {units.seconds(busy)}: {pace} of the {units.seconds(plan.predicted.seconds)} between versions, "
            f"{units.percent(part)} of one iteration alone (predicted)"
        )
    return tag(
        "g",
        line(8, y + 19, WIDTH - 16, y + 19, class_="rule"),
        text(8, y + 13, fitted(group.name, 400, size=13), class_="group"),
        text(WIDTH - 16, y + 13, words, class_="note", text_anchor="end"),
    )


def _overlaps(scene: Scene) -> bool:
    return bool(scene.plan.max_staleness) and not why_apart(scene.plan)


def _track(scene: Scene, axis: Axis, track: Track, y: float, spans: dict[str, Seen]) -> Markup:
    name = text(LEFT - 10, y + 15, LANES[track.lane], class_="lane", text_anchor="end")
    pieces = [_gap(axis, gap, y) for gap in track.gaps]
    for index, bar in enumerate(track.bars):
        before = track.bars[index - 1].end_s if index else 0.0
        after = track.bars[index + 1].start_s if index + 1 < len(track.bars) else axis.most_s
        gaps = [gap for gap in track.gaps if gap.end_s == bar.start_s or gap.start_s == bar.end_s]
        room = (0.0, 0.0) if gaps else (axis.width(after - bar.end_s), axis.width(bar.start_s - before))
        pieces.append(_bar(axis, bar, y, is_main=bar.step.lanes[0] is track.lane, room=room, scene=scene))
        if bar.step.name in spans and bar.step.lanes[0] is track.lane:
            pieces.append(_outline(axis, bar, spans[bar.step.name], y))
    return tag("g", name, _plot(*pieces))


def _plot(*pieces: Markup) -> Markup:
    return tag("g", join(*pieces), clip_path="url(#gantt-clip)")


def _bar(
    axis: Axis, bar: Bar, y: float, *, is_main: bool, room: tuple[float, float], scene: Scene | None = None
) -> Markup:
    """A step. `room`: pixels that are free behind and before it, for a name that does not fit inside.

    In the line of the critical path the room is the bar itself: names that do not fit are left out.
    """
    x, width = axis.x(bar.start_s), max(THIN, axis.width(bar.end_s - bar.start_s))
    hatched = KINDS[bar.step.kind][0] or bar.hatch
    pieces = [rect(x, y, width, BAR, rx=2.5 if width > 8 else 0.0, class_=f"box f{bar.hue}")]
    if hatched:
        pieces.append(rect(x, y, width, BAR, rx=2.5 if width > 8 else 0.0, fill=hatch(hatched, bar.hue), class_="over"))
    if is_main or width < 8:
        pieces.append(_label(bar, x, width, y, (0.0, 0.0) if scene is None else room))
    tip = None if scene is None else tag("title", tip_of(scene, bar, is_main=is_main))
    classes = ["bar", f"kind-{bar.step.kind}", *(["crit"] if bar.is_critical else []), *([] if is_main else ["also"])]
    return tag(
        "g", tip, *pieces, class_=" ".join(classes), data_s=f"{bar.start_s:.9g}", data_e=f"{bar.end_s:.9g}", data_k=bar.index,
        data_r=bar.role or "(no model)", tabindex=None if scene is None or not is_main else 0,
        role=None if scene is None or not is_main else "listitem",
    )  # fmt: skip


def _label(bar: Bar, x: float, width: float, y: float, room: tuple[float, float]) -> Markup:
    """The name, inside where it fits whole; else beside it where there is room; else as much of it as fits."""
    name, took = bar.step.name, units.seconds(bar.end_s - bar.start_s)
    full = f"{name} · {took}"
    at: dict[str, str | float | int | bool | None] = {"class_": "label", "data_l": name, "data_m": took}
    for words in (full, name):
        if width_of(words) + 10 <= width:
            return text(x + 6, y + 15, words, **at)
    behind, before = room
    if width < 40 and width_of(full) + 10 <= behind:
        return text(x + width + 5, y + 15, full, **at)
    if width < 40 and width_of(full) + 10 <= before:
        return text(x - 5, y + 15, full, text_anchor="end", **at)
    return text(x + 5, y + 15, fitted(name, width - 8), **at)


def _gap(axis: Axis, gap: Gap, y: float) -> Markup:
    x, width = axis.x(gap.start_s), axis.width(gap.end_s - gap.start_s)
    words = f"idle: {gap.reason}"
    shown = fitted(words, width - 14, size=11.5)
    plate = rect(x + 5, y + 4, width_of(shown, size=11.5) + 6, BAR - 8, class_="plate") if shown else None
    return tag(
        "g",
        tag("title", f"idle for {units.seconds(gap.end_s - gap.start_s)} (predicted)\n{gap.reason}"),
        rect(x, y, width, BAR, class_="idle"),
        plate,
        text(x + 8, y + 14.5, shown, class_="why", data_l=words),
        class_="gap",
        data_s=f"{gap.start_s:.9g}",
        data_e=f"{gap.end_s:.9g}",
    )


def _outline(axis: Axis, bar: Bar, seen: Seen, y: float) -> Markup:
    start_s = bar.start_s if seen.start_s is None else seen.start_s
    end_s = start_s + seen.seconds
    words = f"{bar.step.name}: measured {units.seconds(seen.seconds)}, predicted {units.seconds(bar.step.predicted.seconds)}"
    return tag(
        "g",
        tag("title", words),
        rect(axis.x(start_s), y - 2, max(THIN, axis.width(seen.seconds)), BAR + 4, class_="measured", rx=3),
        class_="span",
        data_s=f"{start_s:.9g}",
        data_e=f"{end_s:.9g}",
    )


def tip_of(scene: Scene, bar: Bar, *, is_main: bool = True) -> str:
    """What there is to say about a step, in lines."""
    step, predicted = bar.step, bar.step.predicted
    lines = [step.name if is_main else f"{step.name} (also keeps this lane busy)"]
    lines.append(f"{KINDS[step.kind][1]} of node {step.node}, {place_of(scene.plan, step)}")
    lines.append(f"predicted: {units.seconds(predicted.seconds)}, from {units.seconds(bar.start_s)} to "
                 f"{units.seconds(bar.end_s)}{' (critical path)' if bar.is_critical else ''}")  # fmt: skip
    if predicted.num_bytes:
        lines.append(f"moves {units.size(predicted.num_bytes)} over all devices (predicted)")
    if predicted.memory_bytes:
        lines.append(f"at most {units.size(predicted.memory_bytes)} per device while it runs (predicted)")
    if step.layout is not None:
        lines.append(f"layout {step.layout}")
    if step.reads:
        lines.append(f"{'moves' if step.source else 'reads'} {', '.join(step.reads)}")
    if step.after:
        lines.append(f"after {', '.join(step.after)}")
    lines += [f"{name} = {value}" for name, value in step.settings if name != "role"]
    return "\n".join(lines)
