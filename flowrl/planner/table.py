"""A plan as a table of its steps.

Small work on rows that stands together is one line: from `MANY` operators or transfers in a row on, each below `SMALL` of the
iteration. Their numbers stay those of the steps: "7-10".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flowrl.cost.text import aligned, size_text, time_text
from flowrl.planner.context import context_lines
from flowrl.planner.placed import idle_text, mesh_name
from flowrl.planner.tasks import ASSUMED, Lane, StepKind
from flowrl.schema.escaped import escaped

if TYPE_CHECKING:
    from flowrl.planner.steps import Plan, Step

MIB = 2**20
MANY = 4
SMALL = 0.01
LEAST_S = 1e-4
"""Seconds that are shown."""
HEAD = ("step", "node", "kind", "mesh", "layout", "reads", "start", "seconds", "moved", "memory")


def table(plan: Plan) -> str:
    """The text of `str(plan)`."""
    outlook, cluster = plan.predicted, plan.cluster
    schedule_name = f"async, staleness up to {plan.max_staleness}" if plan.max_staleness else "sync"
    alone = f", {_time(outlook.latency_s)} from its first step to its last" if plan.max_staleness else ""
    idle = f" ({text})" if (text := idle_text(plan)) else ""
    head = [
        f"plan {plan.name}: {len(plan.steps)} steps on {cluster.num_devices}x{cluster.device.name}{idle}, {schedule_name}; "
        f"graph {plan.graph_hash}, plan {plan.hash}",
        f"predicted: {_time(outlook.seconds)} per iteration{alone}, no order below {_time(outlook.bound_s)}; at most "
        f"{_size(outlook.device_bytes)} of {_size(cluster.device.memory_bytes)} per device, {_size(outlook.host_bytes)} of "
        f"{_size(cluster.host.memory_bytes)} per host",
    ]
    rows = [HEAD, *(tuple(map(escaped, _row(plan, first, steps))) for first, steps in _grouped(plan))]
    foot = "* on the critical path; start, seconds, moved and memory are predicted"
    if any(ASSUMED in step.settings for step in plan.steps):
        foot += ", seconds of operators assumed"
    notes = [f"note: {line}" for line in context_lines(plan)]
    return escaped("\n".join([*head, "", *aligned(rows, "rlllllrrrr"), "", foot, *notes]), keep="\n")


def _grouped(plan: Plan) -> Iterator[tuple[int, tuple[Step, ...]]]:
    """The number of a step, and the steps of its line."""
    run: list[Step] = []
    for index, step in enumerate((*plan.steps, None)):
        if step is not None and _is_small(plan, step):
            run.append(step)
            continue
        first = index - len(run)
        if len(run) >= MANY:
            yield first, tuple(run)
        else:
            yield from ((first + at, (one,)) for at, one in enumerate(run))
        run = []
        if step is not None:
            yield index, (step,)


def _counted(steps: tuple[Step, ...]) -> str:
    """`4 operators, 1 transfer`."""
    moves = sum(step.kind is StepKind.TRANSFER for step in steps)
    counts = (("operator", len(steps) - moves), ("transfer", moves))
    return ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts if count)


def _is_small(plan: Plan, step: Step) -> bool:
    is_on_rows = step.kind is StepKind.TRANSFER or step.lanes == (Lane.HOST,)
    return is_on_rows and step.predicted.seconds < SMALL * plan.predicted.latency_s


def _row(plan: Plan, first: int, steps: tuple[Step, ...]) -> tuple[str, ...]:
    step = steps[0]
    critical = "*" if any(one.name in plan.predicted.critical_path for one in steps) else ""
    moved = sum(one.predicted.num_bytes for one in steps)
    places = dict.fromkeys(_place(plan, one) for one in steps)
    is_one = len(steps) == 1
    reads = dict.fromkeys(column for one in steps for column in one.reads)
    return (
        f"{critical}{first}" if is_one else f"{critical}{first}-{first + len(steps) - 1}",
        step.node if is_one else _counted(steps),
        str(step.kind) if is_one else "rows",
        next(iter(places)) if len(places) == 1 else "",
        "" if step.layout is None else str(step.layout),
        _short(", ".join(reads)),
        _time(step.predicted.start_s),
        _time(sum(one.predicted.seconds for one in steps)),
        _size(moved) if moved else "",
        _size(max(one.predicted.memory_bytes for one in steps)),
    )


def _place(plan: Plan, step: Step) -> str:
    if step.source is not None and step.source != step.mesh:
        return f"{mesh_name(plan, step.source)} -> {mesh_name(plan, step.mesh)}"
    return mesh_name(plan, step.mesh)


def _time(seconds: float) -> str:
    if 0 < seconds < LEAST_S:
        return f"<{LEAST_S * 1e3:.1f} ms"
    return time_text(seconds) if seconds else "0.0 s"


def _size(num_bytes: int) -> str:
    return size_text(num_bytes) if num_bytes >= MIB else f"{num_bytes} B"


def _short(text: str, most: int = 32) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
