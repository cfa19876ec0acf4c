"""Predicted against measured: a plan beside the trace of the run that executed it.

Example:
    print(compare_run("runs/grpo-3"))         # plan.json and trace.jsonl of a run that was given a plan
    compare(plan, events).largest(3)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median

from flowrl.cost.text import aligned, size_text, time_text
from flowrl.errors import RunError
from flowrl.planner.steps import Plan, Step
from flowrl.planner.tasks import StepKind
from flowrl.trace import HOST_MEMORY, MEMORY, NODE_KIND, RANK, STEP, Event, read_trace

PLAN_FILE, TRACE_FILE = "plan.json", "trace.jsonl"
"""Of a run's folder."""


@dataclass(frozen=True, slots=True)
class StepMeasured:
    """One step of a plan, as it was expected and as it was.

    Example:
        StepMeasured("update", "update", StepKind.COMPUTE, "update", predicted_s=97.1, seconds=110.4, start_s=45.0, runs=9,
                     iterations=9, predicted_bytes=29420363776, device_bytes=31138512896)
    """

    name: str
    node: str
    kind: StepKind
    node_kind: str
    """Kind of the graph's node, where it was run: `update`, `logprobs`, ..."""
    predicted_s: float
    seconds: float | None
    """Measured: median of the iterations that ran it; None where none did after the first."""
    start_s: float | None
    """Measured, since the beginning of the iteration: the median."""
    runs: int
    """Iterations that ran it, without the first."""
    iterations: int
    predicted_bytes: int
    """On a device."""
    device_bytes: int | None = None
    """Measured: peak of the device's allocator while it ran, the most of all iterations that count. None without a device."""
    process_bytes: int | None = None
    """Measured: what the whole process had resident after it, the most of all iterations. None where a device was measured."""

    @property
    def measured_bytes(self) -> int | None:
        return self.process_bytes if self.device_bytes is None else self.device_bytes

    @property
    def measured_s(self) -> float | None:
        """Seconds per iteration, also of those that did not run it: a prediction spreads over all iterations, too, what happens
        in every 50th."""
        return None if self.seconds is None else self.seconds * self.runs / self.iterations

    @property
    def ratio(self) -> float | None:
        """Measured over predicted seconds; None without both."""
        return self.measured_s / self.predicted_s if self.measured_s and self.predicted_s else None

    @property
    def error_s(self) -> float:
        """By how much it is off, either way; 0 where it was not measured."""
        return 0.0 if self.measured_s is None else abs(self.measured_s - self.predicted_s)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A plan's predictions beside what a run measured. `str` is the table."""

    plan: str
    """Name."""
    plan_hash: str
    steps: tuple[StepMeasured, ...]
    iterations: int
    """That count: all but the first, which warms up."""
    predicted_s: float
    """Of an iteration."""
    measured_s: float | None
    """Median of the iterations, from the start of their first event to the end of their last."""
    predicted_host_bytes: int = 0
    """Of the host that holds most."""
    host_bytes: int | None = None
    """Measured: what state of models took of the hosts, of all ranks together, the most of all iterations. None where nothing of
    it was there."""
    processes: int = 1
    """That the run had; a step's seconds are those of the slowest of them."""

    @property
    def ran(self) -> tuple[StepMeasured, ...]:
        """The steps that were measured: those of an evaluation that was never due are not among them."""
        return tuple(step for step in self.steps if step.runs)

    @property
    def memory(self) -> str:
        """What was measured: `device` (peak of its allocator), `process` (resident memory of all of it), or nothing."""
        kinds = {"device": [s.device_bytes for s in self.steps], "process": [s.process_bytes for s in self.steps]}
        return next((name for name, found in kinds.items() if any(found)), "")

    @property
    def ratio(self) -> float | None:
        """Measured over predicted seconds of an iteration."""
        return self.measured_s / self.predicted_s if self.measured_s and self.predicted_s else None

    @property
    def unplanned_s(self) -> float | None:
        """Of an iteration, outside of the plan's steps: operators, tables, and the writing of the run itself."""
        if self.measured_s is None:
            return None
        return max(0.0, self.measured_s - sum(step.measured_s or 0.0 for step in self.steps))

    @property
    def overlapped_s(self) -> float:
        """Seconds by which the steps add up to more than the iteration: processes are in different steps at the same time, and a
        step's seconds are of the slowest."""
        return max(0.0, sum(step.measured_s or 0.0 for step in self.steps) - (self.measured_s or 0.0))

    @property
    def beside_s(self) -> float:
        """Predicted seconds that do not add to the iteration, because steps run beside each other."""
        return max(0.0, sum(step.predicted_s for step in self.steps) - self.predicted_s)

    def largest(self, count: int = 3) -> tuple[StepMeasured, ...]:
        """The steps that are off by the most seconds, the worst first."""
        ranked = sorted(self.steps, key=lambda step: -step.error_s)
        return tuple(step for step in ranked[:count] if step.error_s > 0)

    def __str__(self) -> str:
        if not self.iterations:
            return (
                f"plan {self.plan} ({self.plan_hash}): nothing to compare, as the first iteration warms up and does not count; "
                "run at least 2"
            )
        rows = [("step", "node", "kind", "predicted s", "measured s", "ratio", "predicted memory", "measured memory")]
        for step in self.steps:
            measured = "" if step.measured_bytes is None else size_text(step.measured_bytes)
            times = time_text(step.predicted_s), _seconds_text(step.measured_s), _ratio(step.ratio)
            rows.append((step.name, step.node, str(step.kind), *times, size_text(step.predicted_bytes), measured))
        times = time_text(self.predicted_s), _seconds_text(self.measured_s), _ratio(self.ratio)
        rows.append(("iteration", "", "", *times, "", ""))
        counted = "the second iteration" if self.iterations == 1 else f"the median of {self.iterations} iterations"
        head = f"plan {self.plan} ({self.plan_hash}): predicted beside measured, {counted}; the first does not count"
        return "\n".join([head, "", *aligned(rows, "lllrrrrr"), "", *self._said()])

    def _said(self) -> list[str]:
        found = ["seconds are per iteration; ratio is measured over predicted"]
        if self.memory:
            how = (
                "its allocator's peak"
                if self.memory == "device"
                else "all that the process had resident, Python included"
            )
            found.append(f"memory predicted is of the device; measured, of the {self.memory}: {how}")
        if self.host_bytes is not None:
            found.append(
                f"state in host memory: {size_text(self.host_bytes)} measured, over all ranks; "
                f"{size_text(self.predicted_host_bytes)} predicted for the host that holds most"
            )
        if self.processes > 1 and self.overlapped_s:
            found.append(
                f"the steps add up to {time_text(self.overlapped_s)} more than the iteration: each is of the slowest of "
                f"{self.processes} processes, and they overlap"
            )
        elif self.unplanned_s is not None:
            found.append(f"outside of the plan's steps: {time_text(self.unplanned_s)} per iteration measured")
        if self.beside_s > 0.01 * self.predicted_s:
            found.append(
                f"predicted to run beside other steps: {time_text(self.beside_s)} per iteration"
                + ("; one process does one after the other" if self.processes == 1 else "")
            )
        largest = self.largest()
        if largest:
            shown = (
                f"{s.name} {time_text(s.predicted_s)} predicted, {_seconds_text(s.measured_s)} measured"
                for s in largest
            )
            found.append(f"largest errors: {'; '.join(shown)}")
        never = [step.name for step in self.steps if step not in self.ran]
        if never:
            found.append(f"not run: {', '.join(never)}")
        return found


def compare(plan: Plan, events: Iterable[Event]) -> Comparison:
    """A plan beside the events of a run of it. The first iteration is left out.

    A step inside a refill runs once in each round: its time is the sum of an iteration's rounds. That of a refill which is a step
    itself is what they leave.
    """
    traced = sorted((one for one in events if one.step >= 0), key=lambda one: one.step)
    iterations = [_Iteration.of(list(one)) for _, one in groupby(traced, key=lambda one: one.step)][1:]
    return Comparison(
        plan.name,
        plan.hash,
        tuple(_measured(step, iterations) for step in plan.steps),
        len(iterations),
        plan.predicted.seconds,
        median(one.seconds for one in iterations) if iterations else None,
        plan.predicted.host_bytes,
        max((sum(one.on_host.values()) for one in iterations), default=0) or None,
        max(1, len({one.attributes.get(RANK, 0) for one in traced})),
    )


@dataclass
class _Iteration:
    """What the events of one iteration say of a plan's steps, by name."""

    seconds: float
    steps_s: dict[str, float] = field(default_factory=dict)
    starts_s: dict[str, float] = field(default_factory=dict)
    peaks: dict[tuple[str, str], int] = field(default_factory=dict)
    """By step and attribute."""
    on_host: dict[int, int] = field(default_factory=dict)
    """State in host memory, by rank."""
    kinds: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, events: Sequence[Event]) -> _Iteration:
        start = min(event.start_s for event in events)
        found = cls(max(event.end_s for event in events) - start)
        by_rank: dict[tuple[str, int], float] = {}
        inner = [one for one in events if "/" in one.node and STEP in one.attributes]
        for event in events:
            name = event.attributes.get(STEP)
            if not isinstance(name, str):
                continue
            whose = name, int(event.attributes.get(RANK, 0))
            by_rank[whose] = by_rank.get(whose, 0.0) + event.seconds - _inside_s(event, inner)
            found.steps_s[name] = max(found.steps_s.get(name, 0.0), by_rank[whose])  # ranks work at the same time
            found.starts_s[name] = min(found.starts_s.get(name, math.inf), event.start_s - start)
            found.kinds[name] = str(event.attributes.get(NODE_KIND, ""))
            rank = whose[1]
            found.on_host[rank] = max(found.on_host.get(rank, 0), int(event.attributes.get(HOST_MEMORY, 0)))
            for key in MEMORY:
                if event.attributes.get(key):
                    found.peaks[name, key] = max(found.peaks.get((name, key), 0), int(event.attributes[key]))
        return found


def _inside_s(event: Event, inner: Sequence[Event]) -> float:
    """Seconds of steps inside a node that is a step as well: a refill's own work is what its rounds leave."""
    inside = f"{event.node}/"
    rank = event.attributes.get(RANK)
    return sum(one.seconds for one in inner if one.node.startswith(inside) and one.attributes.get(RANK) == rank)


def _measured(step: Step, iterations: Sequence[_Iteration]) -> StepMeasured:
    name = step.name
    ran = [one for one in iterations if name in one.steps_s]
    return StepMeasured(
        name,
        step.node,
        step.kind,
        ran[0].kinds[name] if ran else "",
        step.predicted.seconds,
        median(one.steps_s[name] for one in ran) if ran else None,
        median(one.starts_s[name] for one in ran) if ran else None,
        len(ran),
        len(iterations),
        step.predicted.memory_bytes,
        *(max((one.peaks[name, key] for one in ran if (name, key) in one.peaks), default=None) for key in MEMORY),
    )


def compare_run(path: str | Path) -> Comparison:
    """The comparison of a run's folder. Errors: RunError when it has no plan."""
    folder = Path(path)
    if not (folder / PLAN_FILE).is_file():
        raise RunError(
            f"'{folder}' has no {PLAN_FILE}: it is no folder of a run that was given a plan (run_local(..., plan=plan))"
        )
    return compare(Plan.load(folder / PLAN_FILE), read_trace(folder / TRACE_FILE))


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    digits = max(0, 2 - math.floor(math.log10(ratio))) if ratio < 100 else 0
    return f"{ratio:.{min(digits, 4)}f}"


def _seconds_text(seconds: float | None) -> str:
    return "" if seconds is None else time_text(seconds)
