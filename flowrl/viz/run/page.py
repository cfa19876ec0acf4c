"""The page of a run: one file that opens from anywhere, without a network, and can be read without JavaScript.

Example:
    Path("run.html").write_text(run_html(RunDir.open("runs/grpo-1")), encoding="utf-8")

Numbers are drawn here, in Python; responses lie in the page compressed, and the script unpacks those that are looked at.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any

from flowrl.engines import REMARKS
from flowrl.errors import FlowError
from flowrl.graph.nodes import Graph
from flowrl.graph.text import from_text
from flowrl.planner.measured import PLAN_FILE, Comparison, compare
from flowrl.planner.steps import Plan
from flowrl.trace import RANK, Event
from flowrl.viz import units
from flowrl.viz.dataflow import Dataflow, dataflow, of_graph
from flowrl.viz.flowchart import flowchart
from flowrl.viz.frame import (
    LIVE_POLICY,
    POLICY,
    Part,
    data_script,
    document,
    folded,
    in_frame,
    navigation,
    section,
    table,
)
from flowrl.viz.html import predicted_and_measured, timeline
from flowrl.viz.measured import Seen, seen
from flowrl.viz.run.curves import Chart, charts, data_of, gallery
from flowrl.viz.run.responses import Held, Pieces, Responses, hold, packed_json
from flowrl.viz.run.source import RunFolder
from flowrl.viz.scene import scene
from flowrl.viz.svg import Markup, clean, join, tag
from flowrl.viz.verdict import Figure, strip

MOST_BYTES = 48 * 2**20
"""Of compressed responses in a page: browsers open such a file in a second or two."""
FEW = 12
"""Responses that are in the page as plain text, for those who read it without a script."""
FEW_CHARS = 2000
LAST = 10
"""Steps whose mean the figures at the top give."""
STEPS_SHOWN = 12
VOLATILE = frozenset(
    {"name", "status", "started_s", "ended_s", "pid", "host", "error", "resumed_at", "plan", "operators"}
)
"""Of run.json, what says nothing of how a run was set up."""


def run_html(
    folder: RunFolder, *, pieces: Pieces | None = None, most_bytes: int = MOST_BYTES, is_live: bool = False
) -> str:
    """The page.

    Args:
        folder: the run, as `RunDir.open` gives it.
        pieces: what token ids are as text; without it tokens are shown as numbers.
        most_bytes: of compressed responses. What a page has no room for is left out by whole steps, and said.
        is_live: for a server that gives responses when they are asked for; none are in the page.
    """
    found = Responses(folder, pieces)
    held = Held(recorded_steps=len(found.steps)) if is_live else hold(found, most_bytes)
    metrics = _merged(folder.metrics(), held.metrics)
    shown = charts(metrics)
    parts = [section("curves", "Curves", _curves(shown)), *_time_parts(folder)]
    parts.append(section("responses", "Responses", _responses(folder, found, held, pieces, is_live=is_live)))
    if notes := folder.notes():
        parts.append(section("notes", "Notes", _notes(notes)))
    parts += [section("metrics", "Metrics as a table", _metrics_table(metrics)), *_flow_parts(folder)]
    parts.append(section("settings", "Settings", _settings(folder.info)))
    body = join(
        _head(folder, metrics, found), navigation(parts), tag("main", *(one.markup for one in parts)), _foot(is_live)
    )
    data = [data_script("chart-data", data_of(shown)), *_blocks(held)]
    return document(
        f"run {folder.path.name}", body, styles=("run.css",), scripts=("page.js", "run.js"), data=data,
        policy=LIVE_POLICY if is_live else POLICY, facts={"data-live": "yes"} if is_live else None,
        more_head=Markup('<noscript><meta http-equiv="refresh" content="10"></noscript>') if is_live else None,
    )  # fmt: skip


def run_notebook(folder: RunFolder, *, height: int = 760) -> str:
    """The page in a frame, with a few responses: a notebook keeps what it shows."""
    return in_frame(run_html(folder, most_bytes=2 * 2**20), f"run {folder.path.name}", height=height)


def _merged(metrics: Sequence[Mapping[str, Any]], more: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    by_step: dict[int, dict[str, Any]] = {int(row["step"]): dict(row) for row in metrics}
    for row in more:
        by_step.setdefault(int(row["step"]), {"step": row["step"]}).update(row)
    return [by_step[step] for step in sorted(by_step)]


def _blocks(held: Held) -> list[Markup]:
    if not held.index:
        return []
    blocks = {"index": packed_json(list(held.index)), **held.blocks}
    return [
        Markup(f'<script type="text/plain" id="block-{name}">{base64.b64encode(block).decode("ascii")}</script>')
        for name, block in blocks.items()
    ]


# -------------------------------------------------------------------------------------------------------------- head


def _head(folder: RunFolder, metrics: Sequence[Mapping[str, Any]], found: Responses) -> Markup:
    info = folder.info
    models = ", ".join(f"{name} {model.get('source')}" for name, model in dict(info.get("models", {})).items())
    remark = REMARKS.get(str(info.get("engine")), "")
    lead = f"Flow {info.get('flow', '?')}, engine {info.get('engine', '?')}{f' ({remark})' if remark else ''}"
    lead += f"{f', models {models}' if models else ''}. Everything here is measured unless it is called predicted."
    error = tag("p", f"Error: {info['error']}", class_="bad") if info.get("error") else None
    figures = strip(tuple(_figures(folder, info, metrics, found)))
    return tag("header", tag("h1", f"Run {folder.path.name}"), tag("p", lead, class_="lead"), error,
               tag("div", figures, data_fresh="figures"))  # fmt: skip


def _figures(
    folder: RunFolder, info: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]], found: Responses
) -> Iterable[Figure]:
    wanted = info.get("steps")
    last = int(metrics[-1]["step"]) + 1 if metrics else 0
    of = f" of {wanted}" if isinstance(wanted, int) and wanted else ""
    yield Figure("status", folder.status, _when(info), last / wanted if of and isinstance(wanted, int) else None)
    yield Figure("steps", f"{last}{of}", "" if found.steps else "no responses were kept")
    for name, metric, shape in (
        ("reward", "reward/mean", "{:.3g}"), ("response length", "response_length/mean", "{:,.0f} tokens"),
        ("throughput", "tokens_per_s", "{:,.0f} tok/s"), ("step time", "time/step_s", ""),
    ):  # fmt: skip
        values = [value for row in metrics if (value := _finite(row.get(metric))) is not None]
        if not values:
            continue
        count = min(LAST, len(values))
        now, before = sum(values[-count:]) / count, sum(values[:count]) / count
        said = [_one(shape.format(one)) if shape else units.seconds(one) for one in (now, before)]
        yield Figure(name, said[0], _mean_words(len(values), said[1]))


def _one(words: str) -> str:
    return "1 token" if words == "1 tokens" else words


def _mean_words(count: int, before: str) -> str:
    """Of how many steps a figure is the mean. A run's first step warms up and is among them, which its median leaves out."""
    if count > LAST:
        return f"mean of the last {LAST} steps; of the first {LAST}: {before}"
    return f"mean of all {count} steps, with the first" if count > 1 else "of the one step"


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


def _when(info: Mapping[str, Any]) -> str:
    started, ended = info.get("started_s"), info.get("ended_s")
    if not isinstance(started, int | float):
        return ""
    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(started))
    took = f", took {units.seconds(ended - started)}" if isinstance(ended, int | float) and ended >= started else ""
    return f"started {day}{took}"


def _foot(is_live: bool) -> Markup:
    how = (
        "This page is served by flowrl view and follows the run; it can be read only."
        if is_live
        else "This file needs no network and no other file: responses lie in it, compressed, and are unpacked when looked at."
    )
    return tag("footer", tag("p", f"{how} Keys: t turns the theme, Escape lets go."))


# ------------------------------------------------------------------------------------------------------------ curves


def _curves(shown: Sequence[Chart]) -> Markup:
    if not shown:
        return tag("p", "No step has ended yet.", class_="lead")
    main = [one for one in shown if one.is_main]
    rest = [one for one in shown if not one.is_main]
    words = "By step; the number beside a name is its last value. A band is one standard deviation over the step's responses, "
    words += "within their least and greatest. "
    words += (
        "Long curves are thin, with the mean of neighbouring steps drawn over them. Point at a chart to read a step."
    )
    more = folded(f"{len(rest)} more metrics", gallery(rest, first=len(main))) if rest else None
    return tag("div", tag("p", words, class_="lead"), gallery(main), more, data_fresh="curves")


def _metrics_table(metrics: Sequence[Mapping[str, Any]]) -> Markup:
    if not metrics:
        return tag("p", "None yet.", class_="lead")
    count = min(STEPS_SHOWN, len(metrics))
    picks = sorted({round(i * (len(metrics) - 1) / max(1, count - 1)) for i in range(count)})
    rows = [metrics[place] for place in picks]
    names = sorted({name for row in metrics for name in row if name != "step"})
    lines = [
        tag("tr", tag("th", name, scope="row"), *(tag("td", _short(row.get(name)), class_="num") for row in rows))
        for name in names
    ]
    every = (
        "All steps." if len(rows) == len(metrics) else f"{len(rows)} of {len(metrics)} steps; all are in metrics.jsonl."
    )
    head = ("metric", *(f"step {row['step']}" for row in rows))
    return tag(
        "div", tag("p", every, class_="lead"), folded("Show the table", table(head, lines)), data_fresh="metrics"
    )


def _short(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    return f"{value:.4g}"


# -------------------------------------------------------------------------------------------------------------- time


@dataclass(frozen=True, slots=True)
class Planned:
    """A run's plan beside what was measured of it."""

    plan: Plan
    comparison: Comparison
    spans: tuple[Seen, ...]


def _time_parts(folder: RunFolder) -> list[Part]:
    events = folder.events()
    try:
        planned = _planned(folder, events)
    except FlowError as error:  # a plan of another version of FlowRL: the rest of the run is still worth seeing
        return [
            section(
                "time", "Where the time went", join(tag("p", f"plan.json cannot be drawn: {error}"), _by_node(events))
            )
        ]
    if planned is None:
        return [section("time", "Where the time went", _by_node(events))] if events else []
    drawn = scene(planned.plan)
    if not planned.spans:
        words = "Nothing to compare yet: the first step warms up and does not count."
        return [section("time", "Where the time went", join(tag("p", words, class_="lead"), _by_node(events)))]
    said = planned.comparison
    sums = [
        f"Of an iteration: {units.seconds(said.measured_s or 0.0)} measured ({_median_words(said.iterations)}; from the start of "
        f"its first event to the end of its last), {units.seconds(said.predicted_s)} predicted."
    ]
    if said.processes > 1:
        sums.append(
            f"A step's seconds are those of the slowest of {said.processes} processes, which are in different steps at the same "
            "time: steps overlap."
        )
    if said.processes > 1 and said.overlapped_s:
        sums.append(f"Together they are {units.seconds(said.overlapped_s)} more than the iteration.")
    elif said.unplanned_s is not None:
        sums.append(f"Outside of the plan's steps: {units.seconds(said.unplanned_s)} measured.")
    lead = tag("p", " ".join(sums))
    return [
        section("timeline", "Timeline", timeline(drawn, planned.spans)),
        section("measured", "Predicted and measured", join(lead, predicted_and_measured(drawn, planned.spans, said))),
        section("time", "Where the time went", _by_node(events)),
    ]


def _planned(folder: RunFolder, events: Sequence[Event]) -> Planned | None:
    path = folder.path / PLAN_FILE
    if not path.is_file():
        return None
    plan = Plan.load(path)
    comparison = compare(plan, events)
    return Planned(plan, comparison, seen(plan, comparison))


def _by_node(events: Sequence[Event]) -> Markup:
    """Median seconds of a step by node, without the first step where there are more; processes work at the same time, so the
    slowest of them counts, and each tells of the rows of all."""
    counted = sorted((one for one in events if one.step >= 0), key=lambda one: one.step)
    steps = [list(one) for _, one in groupby(counted, key=lambda one: one.step)]
    is_warm = len(steps) > 1
    steps = steps[1:] or steps
    if not steps:
        return tag("p", "Nothing was traced.", class_="lead")
    names = list(dict.fromkeys(event.node for step in steps for event in step))
    took = {name: median(_most(step, name, lambda one: one.seconds) for step in steps) for name in names}
    rows_of = {name: median(_most(step, name, lambda one: one.rows) for step in steps) for name in names}
    most = max(took.values()) or 1.0
    lines = []
    for name in sorted(names, key=lambda one: -took[one]):
        bar = tag(
            "span", tag("span", style=f"width:{100 * took[name] / most:.1f}%"), class_="meter", aria_hidden="true"
        )
        cells = (
            tag("td", units.seconds(took[name]), class_="num"),
            tag("td", units.count(rows_of[name]), class_="num"),
        )
        lines.append(tag("tr", tag("th", name, scope="row"), *cells, tag("td", bar, class_="meters")))
    ranks = len({event.attributes.get(RANK, 0) for step in steps for event in step})
    words = f"Median seconds of {_steps_words(len(steps), is_warm)}, by node of the flow; operators between the models' calls, "
    words += "too."
    if ranks > 1:
        words += (
            f" {ranks} processes work at the same time: seconds are of the slowest in each step, rows of all together."
        )
    whole = tag("div", table(("node", "seconds", "rows", ""), lines), class_="scroll")
    return tag("div", tag("p", words, class_="lead"), whole, data_fresh="time")


def _most(step: Sequence[Event], node: str, number: Callable[[Event], float]) -> float:
    """What a node's events in a step add up to, of the process that has most."""
    by_rank: dict[int, float] = {}
    for event in step:
        if event.node == node:
            rank = int(event.attributes.get(RANK, 0))
            by_rank[rank] = by_rank.get(rank, 0.0) + number(event)
    return max(by_rank.values(), default=0.0)


def _median_words(count: int) -> str:
    return f"median of {count}, the first step left out" if count > 1 else "the second step, as the first warms up"


def _steps_words(count: int, is_warm: bool) -> str:
    if not is_warm:
        return "the one step, which warms up"
    return f"{count} step{'s' if count > 1 else ''}, the first of the run left out as it warms up"


# --------------------------------------------------------------------------------------------------------- responses


def _responses(folder: RunFolder, found: Responses, held: Held, pieces: Pieces | None, *, is_live: bool) -> Markup:
    said = _held_words(found, held, is_live=is_live)
    if found.is_recorded and pieces is None and (is_live or held.steps_with_tokens):
        said += (
            " No tokenizer of the run is on this machine, so coloured tokens are shown as their ids, such as ⟨17⟩; with "
            "flowrl view --tokenizer FOLDER they are text."
        )
    words = tag("p", said, class_="lead", data_fresh="held")
    samples = folder.samples()
    picks = samples[-FEW:]
    plain = [_sample(one) for one in picks]
    said = f"The last {len(plain)} of the samples that the run kept:" if plain else "The run kept no samples."
    needs = "Advantages, parts of rewards, tokens and the other responses need JavaScript, which is off."
    off = tag("noscript", tag("p", needs, class_="lead")) if found.is_recorded else None
    static = tag("div", off, tag("p", said, class_="lead"), *plain, id="samples")
    return join(words, tag("div", id="viewer"), static)


def _held_words(found: Responses, held: Held, *, is_live: bool) -> str:
    how = (
        "Only a few samples of each step were kept (log_samples=), without tokens. With record=('NODE',), or ('*',) for all, a "
        "run keeps every response with its tokens, log-probs and advantages."
    )
    if not found.is_recorded:
        return how if found.steps else f"No responses yet. {how}"
    if is_live:
        return "All recorded responses; they are read from the run's folder when you look at them."
    size = units.size(sum(len(one) for one in held.blocks.values()))
    said = f"{units.count(held.num_rows)} responses of {len(held.steps)} steps, {size} compressed."
    if len(held.steps) < held.recorded_steps:
        said += f" {held.recorded_steps} steps were recorded; these were chosen evenly, as a page holds only so much (--most-mb)."
    if held.steps_with_tokens < len(held.steps):
        said += f" Tokens are here of {held.steps_with_tokens} steps."
    if len(held.steps) < held.recorded_steps or held.steps_with_tokens < len(held.steps):
        said += " flowrl view --serve shows all."
    return said


def _sample(one: Mapping[str, Any]) -> Markup:
    reward = one.get("reward")
    head = f"step {one.get('step')}" + (f" · reward {reward:.4g}" if isinstance(reward, int | float) else "")
    if one.get("finish_reason"):
        head += f" · {one['finish_reason']}"
    names = [name for name in ("prompt", "response", "answer", "row_error") if one.get(name)]
    inside = join(
        *(join(tag("h3", name), tag("pre", _cut(str(one[name])), dir="auto", class_="said")) for name in names)
    )
    return tag("details", tag("summary", head), inside)


def _cut(words: str) -> str:
    return words if len(words) <= FEW_CHARS else f"{words[:FEW_CHARS]}… ({len(words) - FEW_CHARS:,} more characters)"


# -------------------------------------------------------------------------------------------------- notes, flow, settings


def _notes(notes: Sequence[tuple[int, str]]) -> Markup:
    items = [tag("li", tag("b", f"step {step}"), f" {words}") for step, words in notes[-200:]]
    left = tag("p", f"The last 200 of {len(notes)}.", class_="lead") if len(notes) > 200 else None
    return tag("div", left, tag("ul", *items, class_="plainlist"), data_fresh="notes")


def _flow_parts(folder: RunFolder) -> list[Part]:
    try:
        words = folder.graph_text()
    except FlowError:  # a run that was killed before it wrote its graph
        return []
    try:
        graph = from_text(words)
        drawing = tag("figure", flowchart(_drawn_flow(folder, graph))) if len(graph) else None
    except FlowError:  # operators that are not installed here: the text is there in any case
        drawing = None
    return [section("flow", "Flow", join(drawing, tag("pre", words, class_="said mono")))]


def _drawn_flow(folder: RunFolder, graph: Graph) -> Dataflow:
    path = folder.path / PLAN_FILE
    return dataflow(scene(Plan.load(path)), graph) if path.is_file() else of_graph(graph)


def _settings(info: Mapping[str, Any]) -> Markup:
    rows = [
        tag("tr", tag("th", name, scope="row"), tag("td", value, class_="wrap mono"))
        for name, value in flat(info).items()
    ]
    return tag("div", table(("setting", "value"), rows), class_="scroll")


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings of run.json by dotted name, as text; without what differs between any two runs."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if not prefix and name in VOLATILE:
            continue
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = clean(str(value))
    return found
