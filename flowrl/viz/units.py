"""Seconds, bytes and counts in words for people: the same in every picture."""

from __future__ import annotations

import math

from flowrl.cost.text import size_text as size, time_text

__all__ = ["GIB", "count", "percent", "ranges", "seconds", "size", "step_of", "ticks"]

GIB = 2**30


def seconds(value: float) -> str:
    """As everywhere else; what is too short for that, such as 12 µs, is not shown as nothing."""
    if 0 < abs(value) < 1e-6:
        return "< 1 µs"
    return f"{value * 1e6:.0f} µs" if 0 < abs(value) < 1e-4 else time_text(value)


def percent(part: float, *, signed: bool = False) -> str:
    """As "31 %", "+4.2 %"."""
    shown = part * 100
    if 0 < shown < 0.05 and not signed:
        return "< 0.1 %"
    digits = 0 if abs(shown) >= 10 or shown == 0 else 1
    return f"{shown:+.{digits}f} %" if signed else f"{shown:.{digits}f} %"


def count(number: float) -> str:
    """As "12,345"."""
    return f"{number:,.0f}"


def ranges(numbers: list[int] | tuple[int, ...] | range) -> str:
    """As "0–7, 16"."""
    found: list[list[int]] = []
    for one in sorted(numbers):
        if found and one == found[-1][1] + 1:
            found[-1][1] = one
        else:
            found.append([one, one])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in found)


def ticks(most: float, wanted: int = 8) -> list[float]:
    """Round numbers from 0 to at most `most`, about `wanted` of them."""
    step = step_of(most, wanted)
    return [index * step for index in range(int(most / step + 1e-9) + 1)] if step else [0.0]


def step_of(span: float, wanted: int = 8) -> float:
    """A round number of which about `wanted` fit into a span; 0 where there is none."""
    if not span > 0:
        return 0.0
    rough = span / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
