"""Time from left to right: the frame that the pictures of time share, so that they stand under each other."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.viz import units
from flowrl.viz.svg import Markup, join, line, tag, text

WIDTH = 1120.0
LEFT = 176.0
"""Where the plot begins; names of tracks stand before it."""
RIGHT = 16.0
PLOT = WIDTH - LEFT - RIGHT


@dataclass(frozen=True, slots=True)
class Axis:
    """Seconds to pixels.

    Example:
        Axis(123.1).x(0.0)         # 176.0
    """

    most_s: float

    def x(self, moment_s: float) -> float:
        return LEFT + (moment_s / self.most_s * PLOT if self.most_s > 0 else 0.0)

    def width(self, seconds: float) -> float:
        return seconds / self.most_s * PLOT if self.most_s > 0 else 0.0

    def grid(self, top: float, bottom: float) -> Markup:
        """Vertical lines at round seconds, with their numbers below."""
        found = []
        for tick in units.ticks(self.most_s):
            x = self.x(tick)
            found.append(line(x, top, x, bottom, class_="grid", data_t=f"{tick:.6g}"))
            found.append(text(x, bottom + 15, _tick(tick, self.most_s), class_="tick", text_anchor="middle"))
        return tag("g", join(*found), class_="axis", aria_hidden="true")


def _tick(moment_s: float, most_s: float) -> str:
    if most_s >= 8:
        return f"{moment_s:,.0f} s"
    return f"{moment_s:.3g} s" if most_s >= 0.5 else units.seconds(moment_s)
