"""Timeline and memory of a plan in letters: for a terminal, a log, a comment. No colour is needed to read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from flowrl.planner.measured import Comparison
from flowrl.planner.steps import Plan
from flowrl.viz import units
from flowrl.viz.measured import Seen, seen
from flowrl.viz.palette import LANES
from flowrl.viz.residuals import sentence
from flowrl.viz.scene import Scene, Track, scene
from flowrl.viz.stacks import Stack, stacks
from flowrl.viz.svg import clean

LEAST = 60
NAME = 16
TOO_SHORT = 1e-3
"""Part of the iteration: an idle time up to it is not listed."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
SHADES = "█▓▒░▚▞▤▥▦▧▨"
"""One for each category of memory."""


def plan_text(plan: Plan, width: int = 100, measured: Comparison | Iterable[Any] | None = None) -> str:
    """The plan as lines of at most `width` letters (at least 60)."""
    wide = max(LEAST, width)
    drawn, spans = scene(plan), seen(plan, measured)
    on_devices, on_hosts = stacks(plan)
    lines = [
        _cut(f"plan {plan.name}: predicted {units.seconds(plan.predicted.seconds)} per iteration", wide),
        "",
        *_timeline(drawn, wide),
        "",
        "memory at its peak (predicted)",
        *_memory((*on_devices, *on_hosts), wide),
    ]
    if spans:
        lines += ["", *_measured(drawn, spans, wide)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _letter(index: int) -> str:
    return LETTERS[index] if index < len(LETTERS) else "+"


def _timeline(drawn: Scene, wide: int) -> Iterator[str]:
    plot = wide - NAME - 2
    yield f"{'predicted':<{NAME + 2}}{_scale(drawn.makespan_s, plot)}"
    for group in drawn.groups:
        yield _cut(group.name, wide)
        for track in group.tracks:
            yield f"  {LANES[track.lane]:<{NAME}}{_track(track, drawn.makespan_s, plot)}"
    yield ""
    for bar in drawn.bars:
        critical = "*" if bar.is_critical else " "
        took = units.seconds(bar.end_s - bar.start_s)
        yield _cut(f"  {_letter(bar.index)}{critical} {clean(bar.step.name):<28} {bar.step.kind!s:<9} {took:>10}", wide)
    for group in drawn.groups:
        gaps = [gap for track in group.tracks for gap in track.gaps]
        for gap in (gap for gap in gaps if gap.end_s - gap.start_s > TOO_SHORT * drawn.makespan_s):
            yield _cut(f"  idle {units.seconds(gap.end_s - gap.start_s):>9} {group.name}: {gap.reason}", wide)
    yield _cut("  * on the critical path; dots are idle; | is a step too short for a letter", wide)


def _track(track: Track, makespan_s: float, plot: int) -> str:
    cells = [" "] * plot

    def at(moment_s: float) -> int:
        return min(plot, round(moment_s / makespan_s * plot)) if makespan_s else 0

    for gap in track.gaps:
        for place in range(at(gap.start_s), at(gap.end_s)):
            cells[place] = "·"
    for bar in track.bars:
        first, last = at(bar.start_s), at(bar.end_s)
        if first == last:
            cells[min(first, plot - 1)] = "|"
        for place in range(first, last):
            cells[place] = _letter(bar.index)
    return "".join(cells)


def _scale(makespan_s: float, plot: int) -> str:
    end = units.seconds(makespan_s)
    middle = units.seconds(makespan_s / 2)
    line = "0 s".ljust(plot // 2 - len(middle) // 2) + middle
    return line.ljust(plot - len(end)) + end


def _memory(found: tuple[Stack, ...], wide: int) -> Iterator[str]:
    order: dict[str, str] = {}
    plot = wide - NAME - 34
    for stack in found:
        peak, cap = stack.usage.peak_bytes, stack.cap_bytes
        most = max(peak, cap)
        bar = ""
        done = 0
        for layer in stack.layers:
            shade = order.setdefault(layer.category.name, SHADES[len(order) % len(SHADES)])
            done += layer.at(stack.usage.peak_s)
            bar += shade * (round(done / most * plot) - len(bar))
        rest = "·" * (round(cap / most * plot) - len(bar))
        said = f"{units.size(peak)} of {units.size(cap)}{' TOO MUCH' if peak > cap else ''}"
        yield _cut(f"  {_cut(stack.name, NAME):<{NAME}}{bar}{rest} {said}", wide)
    line = "  "
    for name, shade in order.items():
        item = f"{shade} {name}  "
        if len(line) + len(item) > wide:
            yield line
            line = "  "
        line += item
    yield line


def _measured(drawn: Scene, spans: tuple[Seen, ...], wide: int) -> Iterator[str]:
    yield "predicted and measured"
    for one in spans:
        predicted = drawn.bar(one.step).step.predicted.seconds
        off = units.percent(one.seconds / predicted - 1, signed=True) if predicted else ""
        yield _cut(
            f"  {clean(one.step):<28} {units.seconds(predicted):>10} {units.seconds(one.seconds):>10} {off:>8}", wide
        )
    yield _cut(f"  {sentence(drawn, spans)}", wide)


def _cut(words: str, most: int) -> str:
    words = clean(words).replace("\n", " ")
    return words if len(words) <= most else words[: most - 1] + "…"
