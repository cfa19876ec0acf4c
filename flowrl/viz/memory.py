"""How full devices and hosts are over time, stacked by category, under the line of what there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from flowrl.viz import units
from flowrl.viz.axis import LEFT, WIDTH, Axis
from flowrl.viz.measured import Seen
from flowrl.viz.palette import hatch
from flowrl.viz.scene import Bar, Scene
from flowrl.viz.stacks import Layer, Stack
from flowrl.viz.svg import Markup, fitted, join, line, number, picture, rect, tag, text, width_of

TALL, FLAT = 168.0, 64.0
"""Height of the plot; of one in which nothing changes."""
TOP, BOTTOM = 34.0, 24.0
LABEL = 13.0
"""The least height of a layer that carries its name."""
HEADROOM = 1.04
SMALL = 0.4
"""Where the peak is a smaller part of what there is, the line of what there is lies above the picture."""


def memory_chart(
    stack: Stack, scene: Scene, name: str, seen: Sequence[Seen] = (), *, until_s: float | None = None
) -> Markup:
    """The memory of a stack's first device or host as SVG.

    Args:
        name: makes its ids.
        seen: what was measured; of a device, the memory of steps is drawn as dashed lines.
        until_s: end of what is drawn, where the stack is of several iterations. Then its time is its own, and is not stretched
            together with that of the timeline.
    """
    makespan_s = scene.makespan_s if until_s is None else until_s
    axis = Axis(makespan_s)
    usage = stack.usage
    whole = "one iteration" if until_s is None else "iterations that overlap"
    is_small = usage.peak_bytes < SMALL * stack.cap_bytes
    held = [] if stack.is_host else [one for one in seen if _is_on(scene.bar(one.step), stack)]
    measured = max((one.device_bytes or 0 for one in held), default=0)
    most = max(usage.peak_bytes * 1.5 if is_small else stack.cap_bytes, usage.peak_bytes, measured) * HEADROOM
    tall = FLAT if len(stack.moments) <= 2 else TALL
    bottom = TOP + tall
    scale = tall / most if most else 0.0
    moments = [moment_s for moment_s in stack.moments if moment_s < makespan_s or not moment_s]
    below = [0.0] * len(moments)
    areas: list[Markup] = []
    names: list[Markup] = []
    for layer in stack.layers:
        above = [level + layer.at(moment_s) for level, moment_s in zip(below, moments, strict=True)]
        areas.append(_area(axis, stack, layer, moments, below, above, bottom, scale))
        names.append(_name(axis, layer, moments, below, above, bottom, scale))
        below = above
    measured_lines = [_held(axis, scene.bar(one.step), one, bottom, scale) for one in held]
    free = stack.cap_bytes - usage.peak_bytes
    words = (
        f"peak {units.size(usage.peak_bytes)} of {units.size(stack.cap_bytes)} (predicted), {units.size(abs(free))} "
        f"{'free' if free >= 0 else 'too much'}{', ' if stack.when else ''}{stack.when}"
    )
    most_of = max(stack.layers, key=lambda layer: layer.at(usage.peak_s), default=None)
    if most_of is not None and len(stack.layers) > 1:  # also where its stretch is too short for its name
        words += f"; largest: {most_of.category.name}, {units.size(most_of.at(usage.peak_s))}"
    cap_y = TOP if is_small else bottom - stack.cap_bytes * scale
    cap_words = f"all there is: {units.size(stack.cap_bytes)}{', far above this picture ↑' if is_small else ''}"
    peak_x, peak_y = axis.x(usage.peak_s), bottom - usage.peak_bytes * scale
    clip = tag("clipPath", rect(LEFT - 1, 0, WIDTH - LEFT + 1, bottom + 20), id=f"{name}-clip")
    return picture(
        name, WIDTH, bottom + BOTTOM, f"Predicted memory of {stack.name} over {whole}", f"{stack.name}: {words}",
        tag("defs", clip),
        text(8, 16, fitted(stack.name, 420, size=13), class_="group"),
        text(WIDTH - 16, 16, fitted(words, 660), class_="over-cap" if free < 0 else "note", text_anchor="end"),
        _scale(stack, most, bottom, scale), axis.grid(TOP, bottom),
        tag("g", join(*areas, *names, *measured_lines), clip_path=f"url(#{name}-clip)"),
        line(LEFT, cap_y, WIDTH - 16, cap_y, class_="cap far" if is_small else "cap"),
        text(WIDTH - 16, cap_y - 4, cap_words, class_="capname", text_anchor="end"),
        tag("g", tag("circle", cx=peak_x, cy=peak_y, r=3.5, class_="peak"), data_x=f"{usage.peak_s:.9g}"),
        class_="mem", data_most=f"{makespan_s:.9g}" if until_s is None else None,
    )  # fmt: skip


def _area(
    axis: Axis,
    stack: Stack,
    layer: Layer,
    moments: Sequence[float],
    below: Sequence[float],
    above: Sequence[float],
    bottom: float,
    scale: float,
) -> Markup:
    """A band between two step lines; only where it has a height."""
    d = "".join(
        _band([(axis.x(moment_s), bottom - low * scale, bottom - high * scale) for moment_s, low, high in run])
        for run in _runs(moments, axis.most_s, below, above)
    )
    peak = max((level for _, level in layer.levels), default=0)
    at_peak = layer.at(stack.usage.peak_s)
    tip = f"{layer.category.name}: at most {units.size(peak)}, {units.size(at_peak)} at the peak (predicted)"
    hatched = hatch(layer.category.hatch, layer.category.hue)
    return tag(
        "g",
        tag("title", tip),
        tag("path", d=d, class_=f"area f{layer.category.hue}"),
        tag("path", d=d, fill=hatched, class_="area over") if hatched else None,
        class_="layer",
        data_c=layer.category.name,
    )


def _runs(
    moments: Sequence[float], most_s: float, below: Sequence[float], above: Sequence[float]
) -> Iterator[list[tuple[float, float, float]]]:
    """Stretches in which the layer has a height: (seconds, lower and upper edge from then on), closed by their end."""
    run: list[tuple[float, float, float]] = []
    for moment_s, low, high in zip(moments, below, above, strict=True):
        if high > low and (not run or run[-1][1:] != (low, high)):
            run.append((moment_s, low, high))
        elif high <= low and run:
            yield [*run, (moment_s, *run[-1][1:])]
            run = []
    if run and run[-1][0] < most_s:
        yield [*run, (most_s, *run[-1][1:])]


def _band(corners: Sequence[tuple[float, float, float]]) -> str:
    """A path along the upper steps and back along the lower ones; corners are (x, y below, y above)."""
    upper: list[tuple[float, float]] = []
    lower: list[tuple[float, float]] = []
    for (x, low, high), (following, _, _) in pairwise(corners):
        upper += [(x, high), (following, high)]
        lower += [(x, low), (following, low)]
    points = [*upper, *lower[::-1]]
    return "M" + "L".join(f"{number(float(x))},{number(float(y))}" for x, y in points) + "Z"


def _name(
    axis: Axis,
    layer: Layer,
    moments: Sequence[float],
    below: Sequence[float],
    above: Sequence[float],
    bottom: float,
    scale: float,
) -> Markup:
    """The name of a layer, once, in its longest even stretch that is high enough."""
    best: tuple[float, float, float] | None = None  # width, x, y
    start = 0
    count = len(moments)
    for index in range(1, count + 1):
        is_end = index == count or (below[index], above[index]) != (below[start], above[start])
        if not is_end:
            continue
        end_s = axis.most_s if index == count else moments[index]
        width = axis.width(end_s - moments[start])
        height = (above[start] - below[start]) * scale
        if height >= LABEL and (best is None or width > best[0]):
            best = (width, axis.x(moments[start]), bottom - (above[start] + below[start]) / 2 * scale)
        start = index
    name = layer.category.name
    if best is None or width_of(name, size=11) + 12 > best[0]:
        return Markup("")
    return text(best[1] + 6, best[2] + 4, name, class_="label small", data_c=name)


def _is_on(bar: Bar, stack: Stack) -> bool:
    """Of a move between meshes nobody knows which of the two it was measured on."""
    return bar.step.source is None and bool(set(bar.step.devices) & set(stack.indices))


def _held(axis: Axis, bar: Bar, one: Seen, bottom: float, scale: float) -> Markup | None:
    """The most that a device held during a step, as it was measured."""
    if one.device_bytes is None:
        return None
    y = bottom - one.device_bytes * scale
    predicted = units.size(bar.step.predicted.memory_bytes)
    tip = f"{one.step}: measured {units.size(one.device_bytes)} on a device, {predicted} predicted"
    box = rect(axis.x(bar.start_s), y, max(2.0, axis.width(bar.end_s - bar.start_s)), 0.4, class_="measured")
    return tag("g", tag("title", tip), box, class_="held", data_s=f"{bar.start_s:.9g}", data_e=f"{bar.end_s:.9g}")


def _scale(stack: Stack, most: float, bottom: float, scale: float) -> Markup:
    found = []
    for tick in units.ticks(most / units.GIB, 5 if most * scale > FLAT + 1 else 2):
        y = bottom - tick * units.GIB * scale
        found.append(line(LEFT - 4, y, WIDTH - 16, y, class_="grid"))
        found.append(text(LEFT - 8, y + 4, f"{tick:,.4g} GiB", class_="tick", text_anchor="end"))
    return tag("g", join(*found), aria_hidden="true")
