"""A plan's timeline in the trace format of Chrome, which Perfetto opens: predicted and measured above each other.

One process per node and source (predicted, measured), one thread per device and lane. `ph` X are steps, C memory by category,
s and f the ends of an arrow from a step to one that waits for its move.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from flowrl.planner.measured import Comparison
from flowrl.planner.steps import Plan
from flowrl.planner.tasks import Lane
from flowrl.viz.measured import Seen, seen
from flowrl.viz.palette import LANES
from flowrl.viz.scene import Bar, Scene, place_of, scene
from flowrl.viz.stacks import Stack, stacks
from flowrl.viz.svg import clean

NANO = 1e9
PER_MICRO = 1000
"""Perfetto keeps whole nanoseconds, and a slice that ends one behind the start of its neighbour is dropped: so times are rounded
here, and a length is the difference of rounded times."""
MEASURED = 1000
"""Added to a node's number for the process of what was measured."""
HOST_TID = 1_000_000

Event = dict[str, Any]


def trace_json(plan: Plan, measured: Comparison | Iterable[Any] | None = None) -> str:
    """The trace as JSON. Times are microseconds since the beginning of the iteration.

    Args:
        measured: as of `flowrl.viz.measured.seen`. A step whose start was not measured is drawn at its predicted one, or behind
            the measured step before it.
    """
    drawn, spans = scene(plan), seen(plan, measured)
    on_devices, on_hosts = stacks(plan)
    events = [*_names(drawn, bool(spans)), *_steps(drawn), *_memory(drawn, (*on_devices, *on_hosts)), *_arrows(drawn)]
    events += _measured(drawn, spans)
    facts = {
        "plan": clean(plan.name),
        "hash": plan.hash,
        "what": "predicted" + (" and measured" if spans else ""),
        "makespan_s": drawn.makespan_s,
        "device_bytes": max((one.usage.peak_bytes for one in on_devices), default=0),
        "host_bytes": max((one.usage.peak_bytes for one in on_hosts), default=0),
    }
    values = {"displayTimeUnit": "ms", "otherData": facts, "traceEvents": events}
    # letters as they are: Perfetto refuses a trace with the escapes of an emoji, and shows those of other letters as escapes
    return json.dumps(values, separators=(",", ":"), allow_nan=False, ensure_ascii=False) + "\n"


def _ns(moment_s: float) -> int:
    return round(moment_s * NANO)


def _seconds(value: float) -> float:
    """For an argument, in whole nanoseconds: Perfetto reads a number of twenty decimals wrongly."""
    return _ns(value) / NANO


def _us(moment_ns: int) -> float:
    """As JSON says it: microseconds."""
    return moment_ns / PER_MICRO


def _threads(drawn: Scene, bar: Bar) -> Iterator[tuple[int, int, Lane]]:
    """(node, thread, lane) of a step: a thread of each device and lane, or of a node's CPUs."""
    per_node = drawn.plan.cluster.devices_per_node
    for lane in bar.step.lanes:
        if lane is Lane.HOST:
            for node in sorted({device // per_node for device in bar.step.devices}):
                yield node, HOST_TID, lane
        else:
            for device in bar.step.devices:
                yield device // per_node, _thread(device, lane), lane


def _thread(device: int, lane: Lane) -> int:
    return device * 10 + list(Lane).index(lane) + 1


def _names(drawn: Scene, has_measured: bool) -> Iterator[Event]:
    found: dict[tuple[int, int], str] = {}
    for bar in drawn.bars:
        for node, thread, lane in _threads(drawn, bar):
            device = "" if lane is Lane.HOST else f"device {thread // 10} "
            found[node, thread] = f"{device}{LANES[lane]}"
    for node in sorted({node for node, _ in found}):
        for offset, source in ((0, "predicted"), *(((MEASURED, "measured"),) if has_measured else ())):
            pid = node + 1 + offset
            yield _named("process_name", pid, 0, f"{source}: node {node}")
            yield {
                "ph": "M",
                "name": "process_sort_index",
                "pid": pid,
                "tid": 0,
                "args": {"sort_index": 2 * node + bool(offset)},
            }
    for (node, thread), name in sorted(found.items()):
        for offset in (0, *((MEASURED,) if has_measured else ())):
            yield _named("thread_name", node + 1 + offset, thread, name)


def _named(what: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _steps(drawn: Scene) -> Iterator[Event]:
    for bar in drawn.bars:
        predicted = bar.step.predicted
        args = {
            "node": clean(bar.step.node),
            "where": clean(place_of(drawn.plan, bar.step)),
            "predicted_s": _seconds(predicted.seconds),
            "bytes": predicted.num_bytes,
            "memory_bytes": predicted.memory_bytes,
            "critical": bar.is_critical,
        }
        if bar.step.layout is not None:
            args["layout"] = str(bar.step.layout)
        for node, thread, _ in _threads(drawn, bar):
            yield _slice(bar, node + 1, thread, _ns(bar.start_s), _ns(bar.end_s), args)


def _slice(bar: Bar, pid: int, tid: int, start_ns: int, end_ns: int, args: dict[str, Any]) -> Event:
    return {"ph": "X", "name": clean(bar.step.name), "cat": str(bar.step.kind), "pid": pid, "tid": tid, "ts": _us(start_ns),
            "dur": _us(end_ns - start_ns), "args": args}  # fmt: skip


def _memory(drawn: Scene, found: tuple[Stack, ...]) -> Iterator[Event]:
    """A counter for each stack, at the process of its first device or host; devices that are alike share one.

    What is held for no time at all is in no layer, and may be the peak: so the peak is a counter of its own.
    """
    per_node = drawn.plan.cluster.devices_per_node
    for stack in found:
        node = stack.indices[0] if stack.is_host else stack.indices[0] // per_node
        name = f"memory of {stack.name}, predicted bytes"
        for moment_s in stack.moments if stack.layers else ():
            args = {layer.category.name: layer.at(moment_s) for layer in stack.layers}
            yield {"ph": "C", "name": name, "pid": node + 1, "ts": _us(_ns(moment_s)), "args": args}
        peak = {"peak": stack.usage.peak_bytes}
        yield {
            "ph": "C",
            "name": f"peak of {stack.name}, predicted bytes",
            "pid": node + 1,
            "ts": _us(_ns(stack.usage.peak_s)),
            "args": peak,
        }


def _arrows(drawn: Scene) -> Iterator[Event]:
    """From what a step waits for to the step, with the bytes that come that way."""
    by_name = {bar.step.name: bar for bar in drawn.bars}
    number = 0
    for bar in drawn.bars:
        end = _hook(drawn, bar)
        for source in _waits_for(drawn, by_name, bar) if end is not None else ():
            start = _hook(drawn, source)
            assert start is not None and end is not None
            number += 1
            moved = source.step.predicted.num_bytes or bar.step.predicted.num_bytes
            common = {"name": "waits for", "cat": "edge", "id": number, "args": {"bytes": moved}}
            # one nanosecond before its end, as no slice is open at its end
            yield {"ph": "s", **common, "pid": start[0] + 1, "tid": start[1], "ts": _us(_ns(source.end_s) - 1)}
            yield {"ph": "f", "bp": "e", **common, "pid": end[0] + 1, "tid": end[1], "ts": _us(_ns(bar.start_s))}


def _hook(drawn: Scene, bar: Bar) -> tuple[int, int] | None:
    """Node and thread of a slice that an arrow can hang on; None where it takes no time or is on no lane, as waiting is."""
    place = next(_threads(drawn, bar), None)
    return None if place is None or _ns(bar.start_s) == _ns(bar.end_s) else place[:2]


def _waits_for(drawn: Scene, by_name: dict[str, Bar], bar: Bar) -> list[Bar]:
    """The steps before this one that arrows can hang on; through one that has no slice to those before it."""
    found: dict[str, Bar] = {}
    asked = [by_name[name] for name in bar.step.after]
    for source in asked:
        if _hook(drawn, source) is not None:
            found[source.step.name] = source
        else:
            asked += [by_name[name] for name in source.step.after]
    return list(found.values())


def _measured(drawn: Scene, spans: Iterable[Seen]) -> Iterator[Event]:
    """By start. Slices of a thread stand beside each other, as Perfetto drops what overlaps its neighbour: one whose start is not
    known begins at the predicted one, or behind what ran before it on that thread."""
    starts = {one.step: drawn.bar(one.step).start_s if one.start_s is None else one.start_s for one in spans}
    free_ns: dict[tuple[int, int], int] = {}
    for one in sorted(spans, key=lambda one: starts[one.step]):
        bar = drawn.bar(one.step)
        args: dict[str, Any] = {
            "measured_s": _seconds(one.seconds),
            "predicted_s": _seconds(bar.step.predicted.seconds),
        }
        if one.device_bytes is not None:
            args["measured_device_bytes"] = one.device_bytes
        threads = [(node, thread) for node, thread, _ in _threads(drawn, bar)]
        start_ns = max([_ns(starts[one.step]), *(free_ns.get(place, 0) for place in threads)])
        end_ns = start_ns + _ns(one.seconds)
        for node, thread in threads:
            free_ns[node, thread] = end_ns
            yield _slice(bar, node + 1 + MEASURED, thread, start_ns, end_ns, args)
