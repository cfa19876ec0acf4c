"""The trace by the rules of Perfetto's importer of JSON, which drops what breaks them without a word.

The rules that are held here, where there is no trace processor: known phases with the fields they need, times that are whole
nanoseconds, slices of a thread that nest, arrows whose both ends hang on an open slice. What Perfetto's own trace processor makes
of traces is asked in tests/cpu/viz/test_trace_processor.py.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from flowrl.planner.measured import compare
from flowrl.planner.steps import Plan
from flowrl.trace import Event
from flowrl.viz.measured import Seen
from tests.null.viz.cases import hostile, large
from tests.null.viz.test_page import small

FIELDS = {"M": ("name", "pid", "tid", "args"), "X": ("name", "pid", "tid", "ts", "dur"), "C": ("name", "pid", "ts", "args"),
          "s": ("name", "cat", "id", "pid", "tid", "ts"), "f": ("name", "cat", "id", "bp", "pid", "tid", "ts")}  # fmt: skip


def ns(microseconds: float) -> int:
    """As the importer reads a time."""
    whole = round(microseconds * 1000)
    assert abs(microseconds * 1000 - whole) < 1e-3, f"{microseconds} µs is no whole nanosecond"
    return whole


def slices_of(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    """Start, end and name of the slices of each thread; each nests in the one below it."""
    found: dict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = ns(event["ts"])
            found[event["pid"], event["tid"]].append((start, start + ns(event["dur"]), event["name"]))
    for place, listed in found.items():
        open_: list[tuple[int, int, str]] = []
        for one in sorted(listed, key=lambda one: (one[0], -one[1])):
            while open_ and open_[-1][1] <= one[0]:
                open_.pop()
            assert not open_ or one[1] <= open_[-1][1], f"on {place} {one} overlaps {open_[-1]}"
            open_.append(one)
    return found


def check(text: str) -> list[dict[str, Any]]:
    assert not re.search(r"\\u[0-9a-f]{4}", text), "escapes of letters are shown as escapes, or are refused"
    whole = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    events: list[dict[str, Any]] = whole["traceEvents"]
    for event in events:
        assert event.keys() >= set(FIELDS[event["ph"]]), event
        assert all(isinstance(event[key], int) for key in ("pid", "tid") if key in event)
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "C":
            ns(event["ts"])
            assert event["args"] and all(isinstance(value, int | float) for value in event["args"].values())
    slices = slices_of(events)
    ends: dict[Any, list[str]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            at = ns(event["ts"])
            assert any(start <= at < end for start, end, _ in slices[event["pid"], event["tid"]]), (
                f"{event} hangs on nothing"
            )
            ends[event["id"]].append(event["ph"])
    assert all(kinds == ["s", "f"] for kinds in ends.values())
    return events


def ran(plan: Plan, longer: float) -> list[Event]:
    """Two iterations of all steps, one after the other; the first does not count."""
    events, at = [], 0.0
    for step in (0, 1):
        for one in plan.steps:
            seconds = one.predicted.seconds * longer + 1e-9 / 3
            events.append(Event("compute", one.node, step, at, at + seconds, attributes={"plan_step": one.name}))
            at += seconds
    return events


PLANS = {"small": small, "large": large, "async": lambda: large(max_staleness=2), "hostile": hostile}


@pytest.mark.parametrize("name", sorted(PLANS))
def test_predicted(name: str) -> None:
    events = check(PLANS[name]().to_trace())
    assert sum(event["ph"] == "X" for event in events) >= 2 and any(event["ph"] == "s" for event in events)


@pytest.mark.parametrize("longer", [0.3, 1.0, 3.7])
@pytest.mark.parametrize("name", sorted(PLANS))
def test_measured_with_their_starts(name: str, longer: float) -> None:
    plan = PLANS[name]()
    events = check(plan.to_trace(measured=compare(plan, ran(plan, longer))))
    shown = {event["name"] for event in events if event["ph"] == "X" and event["pid"] > 1000}
    assert len(shown) == len(plan.steps)


def test_measured_without_starts_stand_behind_each_other() -> None:
    plan = large()
    check(plan.to_trace(measured=[Seen(step.name, 10 * step.predicted.seconds + 0.1) for step in plan.steps]))


def test_times_that_are_no_round_numbers() -> None:
    plan = small()
    odd = [
        replace(step, predicted=replace(step.predicted, seconds=step.predicted.seconds / 3.0000001))
        for step in plan.steps
    ]
    check(replace(plan, steps=tuple(odd)).to_trace())


def test_the_rules_are_rules() -> None:
    """What the check is there for is found by it."""
    whole = json.loads(small().to_trace())
    overlapping = [*whole["traceEvents"], {"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": 1e6, "dur": 5e6}]
    with pytest.raises(AssertionError, match="overlaps"):
        check(json.dumps({"traceEvents": overlapping}, ensure_ascii=False))
    moved = [event | ({"ts": 9e9} if event["ph"] == "s" else {}) for event in whole["traceEvents"]]
    with pytest.raises(AssertionError, match="hangs on nothing"):
        check(json.dumps({"traceEvents": moved}, ensure_ascii=False))
    with pytest.raises(AssertionError, match="escapes"):
        check(json.dumps(whole))
