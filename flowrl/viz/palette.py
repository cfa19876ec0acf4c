"""Colours, hatches and the names beside them. Never colour alone: what is coloured has a label, a hatch or both.

Hues are those of Okabe and Ito, which people with the common kinds of colour blindness tell apart, lightened for a light page
and darkened for a dark one so that text on them keeps a contrast of at least 4.5 to 1. Each is a pair of CSS variables,
`--f3` (fill) and `--s3` (stroke).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flowrl.planner.tasks import Hold, Lane, StepKind
from flowrl.viz.svg import Markup, join, tag

_WORD = re.compile("[a-z]+")
HUES = ("blue", "orange", "green", "purple", "yellow", "vermilion", "sky", "grey")
LIGHT = (
    ("#a9cdf3", "#1b5c99"), ("#f8c987", "#8f5200"), ("#97d9bb", "#0a6446"), ("#dfb5d7", "#87377a"),
    ("#efe493", "#6d5f00"), ("#f5ae97", "#9c3a17"), ("#b0e4ee", "#156273"), ("#d3d6dc", "#4d535d"),
)  # fmt: skip
DARK = (
    ("#1d4a76", "#86bdf0"), ("#6f430b", "#f2ba66"), ("#12533c", "#68cfa3"), ("#5d2b57", "#dfa0d6"),
    ("#565010", "#e6d75f"), ("#712d16", "#f09a7b"), ("#134c58", "#7ad6e6"), ("#424852", "#b2b9c5"),
)  # fmt: skip
"""(fill, stroke) of each hue."""

HATCHES = ("", "up", "down", "dots", "cross", "bars")
"""Drawn over a fill in the colour of its stroke."""

KINDS: dict[StepKind, tuple[str, str]] = {
    StepKind.COMPUTE: ("", "compute"),
    StepKind.TRANSFER: ("dots", "transfer of rows"),
    StepKind.RESHARD: ("cross", "reshard of weights"),
    StepKind.OFFLOAD: ("down", "offload to the host"),
    StepKind.ONLOAD: ("up", "onload from the host"),
    StepKind.SYNC: ("bars", "wait for each other"),
}
"""Hatch and name of each kind of step."""

LANES: dict[Lane, str] = {
    Lane.COMPUTE: "compute",
    Lane.NVLINK: "links in a node",
    Lane.H2D: "PCIe in (H2D)",
    Lane.D2H: "PCIe out (D2H)",
    Lane.NIC: "network (NIC)",
    Lane.HOST: "CPUs",
}


@dataclass(frozen=True, slots=True)
class Category:
    """A sort of memory.

    Example:
        Category("optimizer", hue=3, hatch="", words=("optimizer",))
    """

    name: str
    hue: int
    hatch: str
    words: tuple[str, ...]
    """The last of these words in the name of a hold is its category: "policy optimizer, parked" is of the optimizer."""


OTHER = Category("other", 7, "cross", ())
CATEGORIES = (
    Category("context", 7, "", ("context",)),
    Category("buffers", 7, "dots", ("buffers",)),
    Category("engine weights", 0, "up", ("weights",)),
    Category("KV cache", 6, "", ("cache",)),
    Category("gathered layers", 2, "dots", ("gathered", "layers")),
    Category("parameters", 0, "", ("parameters",)),
    Category("gradients", 1, "", ("gradients",)),
    Category("optimizer", 3, "", ("optimizer",)),
    Category("activations", 2, "", ("activations",)),
    Category("logits", 4, "", ("logits",)),
    OTHER,
)
"""From below. The words are those of `flowrl.planner.holds`, and what people write in a plan by hand."""


def category_of(hold: Hold) -> Category:
    """By the last word of its name that is one of a category."""
    known = {word: one for one in CATEGORIES for word in one.words}
    return next((known[word] for word in reversed(_WORD.findall(hold.what.lower())) if word in known), OTHER)


def named(what: str) -> str:
    """The name of a hold with the words of its category: "gen cache" is "gen KV cache", as legends have it."""
    found = next((one for one in CATEGORIES for word in one.words if what.endswith(f" {word}")), None)
    if found is None or found.name in what:
        return what
    return f"{what.rpartition(' ')[0]} {found.name}"


def css() -> str:
    """The variables, for a light and a dark page, and a class for each hue."""
    light = "".join(f"--f{i}:{fill};--s{i}:{stroke};" for i, (fill, stroke) in enumerate(LIGHT))
    dark = "".join(f"--f{i}:{fill};--s{i}:{stroke};" for i, (fill, stroke) in enumerate(DARK))
    classes = "".join(
        f".f{i}{{fill:var(--f{i});stroke:var(--s{i})}}.h{i}{{background:var(--f{i});border-color:var(--s{i})}}"
        f".k{i}{{stroke:var(--s{i})}}.d{i}{{fill:var(--s{i})}}"
        for i in range(len(HUES))
    )
    return (
        f":root{{{light}}}@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f":root[data-theme=dark]{{{dark}}}{classes}"
    )


_MARKS = {
    "up": ("M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4", "line"),
    "down": ("M-2,6 l4,4 M0,0 l8,8 M6,-2 l4,4", "line"),
    "cross": ("M0,4 h8 M4,0 v8", "line"),
    "bars": ("M0,2 h8 M0,6 h8", "line"),
    "dots": ("M1,2 a1,1 0 1,0 2,0 a1,1 0 1,0 -2,0 M5,6 a1,1 0 1,0 2,0 a1,1 0 1,0 -2,0", "dot"),
}


def hatches() -> Markup:
    """Definitions of the hatches, once per page: `hatch-up-3` in the stroke of hue 3, and `hatch-idle`."""
    made = [
        _pattern(f"hatch-{name}-{hue}", path, f"k{hue} hl" if sort == "line" else f"d{hue} hd")
        for name, (path, sort) in _MARKS.items()
        for hue in range(len(HUES))
    ]
    idle = _pattern("hatch-idle", _MARKS["up"][0], "hatch-line")
    return tag("svg", tag("defs", join(*made, idle)), width=0, height=0, aria_hidden="true", class_="defs")


def _pattern(name: str, path: str, class_: str) -> Markup:
    return tag("pattern", tag("path", d=path, class_=class_), id=name, width=8, height=8, patternunits="userSpaceOnUse")


def hatch(name: str, hue: int) -> str | None:
    """Value of `fill` for a hatch; None without one."""
    return f"url(#hatch-{name}-{hue})" if name else None


def swatch(hue: int, hatched: str = "") -> Markup:
    """A small square for legends."""
    inside = [tag("rect", x=0.5, y=0.5, width=13, height=13, rx=2, class_=f"f{hue}")]
    if hatched:
        inside.append(tag("rect", x=0.5, y=0.5, width=13, height=13, rx=2, fill=hatch(hatched, hue)))
    return tag("svg", *inside, width=14, height=14, viewbox="0 0 14 14", class_="swatch", aria_hidden="true")
