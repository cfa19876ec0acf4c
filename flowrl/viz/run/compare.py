"""Runs over each other: their curves in the same charts, what differs in their settings and their flows.

Example:
    compare_html([RunDir.open("runs/grpo-1"), RunDir.open("runs/grpo-2")])
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.engines import REMARKS
from flowrl.errors import ConfigError, FlowError
from flowrl.viz.frame import data_script, document, folded, navigation, section, table
from flowrl.viz.run.curves import compared, data_of, gallery, look, sample, told
from flowrl.viz.run.page import flat
from flowrl.viz.run.source import RunFolder
from flowrl.viz.svg import Markup, join, tag

LAST = 10
MOST_DIFF_LINES = 400


def compare_html(folders: Sequence[RunFolder]) -> str:
    """The page. Raises ConfigError for fewer than two runs, or the same one twice."""
    paths = [folder.path.resolve() for folder in folders]
    if len(set(paths)) != len(paths):
        raise ConfigError(f"a run is compared with other runs; {', '.join(map(str, paths))} names one twice")
    if len(folders) < 2:
        raise ConfigError("to compare takes at least two runs; view shows one")
    names = _names(folders)
    metrics = {name: folder.metrics() for name, folder in zip(names, folders, strict=True)}
    shown = compared(metrics)
    main = [one for one in shown if one.is_main]
    rest = [one for one in shown if not one.is_main]
    words = "A line for each run, by step; the number beside a name is its last value. Point at a chart to read a step."
    curves = join(
        tag("p", words, class_="lead"),
        gallery(main) if shown else tag("p", "No run has ended a step yet.", class_="lead"),
        folded(f"{len(rest)} more metrics", gallery(rest, first=len(main))) if rest else None,
    )
    parts = [
        section("curves", "Curves", curves),
        section("last", "Last steps", _last(metrics)),
        section("settings", "Settings that differ", _settings(names, folders)),
    ]
    if flows := _flows(names, folders):
        parts.append(section("flows", "Flows that differ", flows))
    head = tag(
        "header",
        tag("h1", " · ".join(names)),
        tag("p", f"{len(names)} runs over each other. Everything is measured.", class_="lead"),
        tag("ul", *(_run(place, names[place], folder) for place, folder in enumerate(folders)), class_="legend"),
    )
    foot = tag(
        "footer", tag("p", "This file needs no network and no other file. Keys: t turns the theme, Escape lets go.")
    )
    body = join(head, navigation(parts), tag("main", *(one.markup for one in parts)), foot)
    data = [data_script("chart-data", data_of(shown))]
    return document("runs " + " and ".join(names), body, styles=("run.css",), scripts=("page.js", "run.js"), data=data)


def _names(folders: Sequence[RunFolder]) -> list[str]:
    """The folders' names, with those above them where two are called the same."""
    short = [folder.path.name for folder in folders]
    return [name if short.count(name) == 1 else str(f.path) for name, f in zip(short, folders, strict=True)]


def _run(place: int, name: str, folder: RunFolder) -> Markup:
    info = folder.info
    remark = REMARKS.get(str(info.get("engine")), "")
    words = f"{name}: {info.get('flow', '?')}, {folder.status}{f' ({remark})' if remark else ''}"
    return tag("li", sample(*look(place), width=28), tag("span", words))


def _last(metrics: Mapping[str, Sequence[Mapping[str, Any]]]) -> Markup:
    """Means of the last steps, and the difference from the first run's."""
    names = list(dict.fromkeys(name for rows in metrics.values() for row in rows for name in row if name != "step"))
    means = {run: {name: _mean(rows, name) for name in names} for run, rows in metrics.items()}
    lines = []
    for name in names:
        values = [means[run][name] for run in metrics]
        base = values[0]
        cells = [tag("td", "" if base is None else told(base), class_="num")]
        for value in values[1:]:
            words = "" if value is None else told(value)
            if value is not None and base is not None:
                words += f"  ({'+' if value >= base else '−'}{told(abs(value - base))})"
            cells.append(tag("td", words, class_="num"))
        lines.append(tag("tr", tag("th", name, scope="row"), *cells))
    words = f"Means of each run's last {LAST} steps; in brackets the difference from the first run. Runs differ by chance, too."
    return join(tag("p", words, class_="lead"), tag("div", table(("metric", *metrics), lines), class_="scroll"))


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    found = [float(row[name]) for row in rows if isinstance(row.get(name), int | float) and math.isfinite(row[name])][
        -LAST:
    ]
    return sum(found) / len(found) if found else None


def _settings(names: Sequence[str], folders: Sequence[RunFolder]) -> Markup:
    found = [flat(folder.info) for folder in folders]
    keys = list(dict.fromkeys(key for one in found for key in one))
    differ = [key for key in keys if len({one.get(key) for one in found}) > 1]
    if not differ:
        return tag("p", "None: every setting in run.json is the same.", class_="lead")
    lines = [
        tag(
            "tr",
            tag("th", key, scope="row"),
            *(tag("td", one.get(key, "not there"), class_="wrap mono") for one in found),
        )
        for key in differ
    ]
    words = f"{len(keys) - len(differ)} others are the same."
    return join(tag("p", words, class_="lead"), tag("div", table(("setting", *names), lines), class_="scroll"))


def _flows(names: Sequence[str], folders: Sequence[RunFolder]) -> Markup | None:
    """The flows' texts, line by line, against that of the first run."""
    texts = []
    for folder in folders:
        try:
            texts.append(folder.graph_text())
        except FlowError:  # killed before it was written
            texts.append("")
    pieces = []
    for name, text in zip(names[1:], texts[1:], strict=True):
        if text == texts[0]:
            continue
        made = list(difflib.unified_diff(texts[0].splitlines(), text.splitlines(), names[0], name, lineterm="", n=2))
        lines = (
            tag("span", one + "\n", class_={"+": "plus", "-": "minus"}.get(one[:1])) for one in made[:MOST_DIFF_LINES]
        )
        more = (
            tag("p", f"{len(made) - MOST_DIFF_LINES} more lines.", class_="lead")
            if len(made) > MOST_DIFF_LINES
            else None
        )
        pieces.append(join(tag("pre", *lines, class_="said mono diff"), more))
    return join(*pieces) if pieces else None
