"""Predicted against measured: for every step how far it is off, and what that says."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.planner.corrected import corrected
from flowrl.planner.measured import Comparison
from flowrl.viz import units
from flowrl.viz.frame import folded, table as html_table
from flowrl.viz.measured import Seen
from flowrl.viz.scene import Bar, Scene
from flowrl.viz.svg import Markup, fitted, join, line, picture, rect, tag, text

WIDTH, NAME, ROW = 1120.0, 190.0, 26.0
MIDDLE = 620.0
HALF = 330.0


def errors(scene: Scene, seen: Sequence[Seen]) -> tuple[tuple[Bar, Seen, float], ...]:
    """Steps with both, and measured minus predicted seconds; the largest error first."""
    found = [(scene.bar(one.step), one) for one in seen]
    listed = [(bar, one, one.seconds - bar.step.predicted.seconds) for bar, one in found]
    return tuple(sorted(listed, key=lambda error: (-abs(error[2]), error[0].index)))


def sentence(scene: Scene, seen: Sequence[Seen]) -> str:
    """The largest error in words."""
    found = errors(scene, seen)
    if not found:
        return "Nothing was measured."
    bar, one, error_s = found[0]
    if not error_s:
        return "All measured steps took exactly what was predicted."
    predicted = bar.step.predicted.seconds
    share = f" ({units.percent(error_s / predicted, signed=True)})" if predicted else ""
    more = "longer" if error_s > 0 else "less"
    missing = len(scene.bars) - len(seen)
    rest = f" {missing} of {len(scene.bars)} steps were not measured." if missing else ""
    return (
        f"Largest error: {one.step} took {units.seconds(abs(error_s))} {more} than predicted{share}: "
        f"{units.seconds(one.seconds)} measured, {units.seconds(predicted)} predicted.{rest}"
    )


def residuals(scene: Scene, seen: Sequence[Seen]) -> Markup:
    """A bar for each measured step, to the right where it took longer than predicted, as SVG."""
    found = errors(scene, seen)
    most = max((abs(error_s) for *_, error_s in found), default=0.0) or 1.0
    bottom = 30 + len(found) * ROW
    pieces = [
        text(MIDDLE - 8, 16, "← took less than predicted", class_="tick", text_anchor="end"),
        text(MIDDLE + 8, 16, "took longer than predicted →", class_="tick"),
        line(MIDDLE, 22, MIDDLE, bottom, class_="rule"),
    ]
    for index, (bar, one, error_s) in enumerate(found):
        y = 28 + index * ROW
        wide = abs(error_s) / most * HALF * 0.72
        x = MIDDLE if error_s >= 0 else MIDDLE - wide
        predicted = bar.step.predicted.seconds
        share = f" ({units.percent(error_s / predicted, signed=True)})" if predicted else ""
        words = f"{'+' if error_s >= 0 else '−'}{units.seconds(abs(error_s))}{share}"
        tip = f"{one.step}\nmeasured {units.seconds(one.seconds)}\npredicted {units.seconds(predicted)}\n{words}"
        beside = x + wide + 6 if error_s >= 0 else x - 6
        pieces.append(
            tag(
                "g",
                tag("title", tip),
                text(NAME - 8, y + 14, fitted(one.step, NAME - 16), class_="lane", text_anchor="end"),
                rect(x, y, max(1.0, wide), ROW - 6, class_=f"box f{1 if error_s >= 0 else 2}", rx=2),
                text(beside, y + 14, words, class_="tick", text_anchor=None if error_s >= 0 else "end"),
                class_="residual",
                data_k=bar.index,
            )
        )
    return picture("residuals", WIDTH, bottom + 8, "Measured minus predicted seconds", sentence(scene, seen), *pieces)


def table(scene: Scene, seen: Sequence[Seen]) -> Markup:
    """The comparison as HTML, in the order of the plan."""
    by_name = {one.step: one for one in seen}
    head = ("step", "predicted", "measured", "error", "predicted memory", "measured memory")
    rows = []
    for bar in scene.bars:
        one, predicted = by_name.get(bar.step.name), bar.step.predicted
        share = (
            ""
            if one is None or not predicted.seconds
            else units.percent(one.seconds / predicted.seconds - 1, signed=True)
        )
        cells = [
            units.seconds(predicted.seconds),
            "not measured" if one is None else units.seconds(one.seconds),
            share,
            units.size(predicted.memory_bytes),
            "" if one is None or one.device_bytes is None else units.size(one.device_bytes),
        ]
        rows.append(
            tag(
                "tr",
                tag("th", bar.step.name, scope="row"),
                *(tag("td", cell, class_="num") for cell in cells),
                data_k=bar.index,
            )
        )
    return html_table(head, rows)


def terms(scene: Scene, measured: Comparison) -> Markup | None:
    """By how much each term of the cost model is off, as HTML, and the figures under which it would have been right; None where
    nothing was measured that a term stands for."""
    cluster = scene.plan.cluster
    found = corrected(measured, cluster)
    if not found.ratios:
        return None
    rows = []
    for work, ratio in found.ratios:
        off = f"{units.percent(ratio - 1, signed=True)} ({ratio:.2f} of what was predicted)"
        rows.append(tag("tr", tag("th", work, scope="row"), tag("td", off, class_="num")))
    figures = [
        tag("tr", tag("th", name, scope="row"), tag("td", f"{before:.4g}", class_="num"), tag("td", f"{after:.4g}", class_="num"))
        for name, before, after in found.changed
    ]  # fmt: skip
    words = (
        "By term of the cost model: work of models, all steps of a kind together. The figures beside it are those of the cluster "
        "under which this would have been predicted (flowrl.planner.corrected)."
    )
    left = tag("ul", *(tag("li", line) for line in found.left))
    return join(
        tag("p", words, class_="lead"),
        _scrolled(html_table(("term", "measured against predicted"), rows)),
        _scrolled(html_table(("figure of the cluster", "in the plan", "would fit"), figures)) if figures else None,
        folded("What no term stands for", left) if found.left else None,
    )


def _scrolled(inside: Markup) -> Markup:
    return tag("div", inside, class_="scroll")
