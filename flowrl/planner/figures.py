"""The figures of a plan: seconds, tokens per second, what is busiest, and what each step holds. All of them are predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flowrl.cost.text import aligned, size_text, time_text
from flowrl.planner.placed import (
    Chosen,
    Load,
    chosen,
    idle_text,
    loads_of,
    mesh_name,
    placement_of,
    role_of,
    time_line,
)
from flowrl.planner.problem import LEAST_CHANGE, Problem
from flowrl.planner.simulate import memory
from flowrl.planner.steps import Plan, Setting, Step
from flowrl.planner.tasks import Hold

__all__ = [
    "Chosen", "Load", "Phase", "Summary", "alternative_lines", "binding_lines", "chosen", "full_line", "idle_line", "loads_of",
    "mesh_name", "overlap_line",
    "phase_table", "phases", "placement_of", "role_lines", "role_of", "setting_text", "summary", "tail_lines", "tie_line",
]  # fmt: skip

FULL = 0.95
"""Part of a device's memory from which a plan is called close to full."""
MEMORY_ERROR = 0.08
"""Part by which predicted memory and what was measured differed at most."""
TAIL_SAMPLE = 64
"""Lengths that are looked at to see whether responses are equally long."""
IDLE = 0.5
"""Slots of an engine that work less than this part of the time are worth a line."""
PARTS = 5
"""Of what a step holds, those that a table names."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a plan, all of them predicted."""

    seconds: float
    latency_s: float
    tokens: int | None
    """Of one iteration, prompts and responses; None where the flow is not at hand."""
    loads: tuple[Load, ...]
    """The one with most of the critical path first; where iterations overlap, the busiest."""
    longest: tuple[str, float]
    """The step that takes longest on the critical path, and its seconds."""
    device_bytes: int
    device_capacity_bytes: int
    during: str
    """The step in which a device holds most."""
    host_bytes: int
    host_capacity_bytes: int
    bound_s: float
    """No plan of the search space takes less; without a search, no order of the plan's steps."""

    @property
    def tokens_per_s(self) -> float | None:
        return None if self.tokens is None or not self.seconds else self.tokens / self.seconds

    @property
    def gap(self) -> float:
        """By how much the seconds may be above the best there is, as a part of the bound."""
        return max(0.0, self.seconds / self.bound_s - 1) if self.bound_s > 0 else 0.0


def summary(plan: Plan, problem: Problem | None = None) -> Summary:
    """The figures of a plan. `problem` is what it was made from; it knows how many sequences there are."""
    outlook, cluster = plan.predicted, plan.cluster
    critical = set(outlook.critical_path)
    path = [step for step in plan.steps if step.name in critical]
    longest = max(path, key=lambda step: step.predicted.seconds, default=None)
    fullest = max(plan.steps, key=lambda step: (step.predicted.memory_bytes, step.predicted.seconds), default=None)
    return Summary(
        seconds=outlook.seconds,
        latency_s=outlook.latency_s,
        tokens=None if problem is None else _tokens(problem),
        loads=loads_of(plan),
        longest=("", 0.0) if longest is None else (longest.name, longest.predicted.seconds),
        device_bytes=outlook.device_bytes,
        device_capacity_bytes=cluster.device.memory_bytes,
        during="" if fullest is None else fullest.name,
        host_bytes=outlook.host_bytes,
        host_capacity_bytes=cluster.host.memory_bytes,
        bound_s=outlook.bound_s if plan.searched is None else plan.searched.bound_s,
    )


def _tokens(problem: Problem) -> int:
    """Tokens of all sequences that are sampled in an iteration; of a flow that samples nothing, of those it works on."""
    calls = [call for role in problem.roles for call in role.calls]
    sampled = [call for call in calls if call.work == "generate"]
    mine = sampled or [max(calls, key=lambda call: call.sequences)]
    return sum(round(call.share * sum(problem.workload.totals(call.sequences))) for call in mine)


# -------------------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True)
class Phase:
    """What is held during a step on the one of its devices that holds most, at the worst moment."""

    step: str
    device_bytes: int
    parts: tuple[tuple[str, int], ...]
    """What it consists of, the largest first, then by name."""
    host_bytes: int
    """The most that the host of that device holds meanwhile."""


def phases(plan: Plan) -> tuple[Phase, ...]:
    """Memory of each step by what is held, in the order of the steps."""
    times, used = plan.simulated()
    tasks, resident, per_node = plan.tasks, plan.predicted.resident, plan.cluster.devices_per_node
    names = {hold.what for hold in (*resident, *(hold for task in tasks for hold in task.holds))}

    def only(holds: Sequence[Hold], what: str) -> tuple[Hold, ...]:
        return tuple(hold for hold in holds if hold.what == what)

    by_what = {
        what: memory(
            [replace(task, holds=only(task.holds, what)) for task in tasks],
            times,
            resident=only(resident, what),
            devices_per_node=per_node,
        ).devices
        for what in sorted(names)
    }
    found = []
    for step in plan.steps:
        start_s, end_s = times.starts[step.name], times.ends[step.name]
        device = max(step.devices, key=lambda one: (used.devices[one].between(start_s, end_s), -one))
        usage = used.devices[device]
        moment_s = max(_moments(usage.levels, start_s, end_s), key=lambda moment: (usage.at(moment), -moment))
        held = {what: devices[device].at(moment_s) for what, devices in by_what.items() if device in devices}
        parts = sorted(((what, count) for what, count in held.items() if count), key=lambda one: (-one[1], one[0]))
        host = used.hosts[plan.cluster.node_of(device)].between(start_s, end_s)
        found.append(Phase(step.name, usage.at(moment_s), tuple(parts), host))
    return tuple(found)


def _moments(levels: Sequence[tuple[float, int]], start_s: float, end_s: float) -> Iterator[float]:
    yield start_s
    yield from (moment_s for moment_s, _ in levels if start_s < moment_s < end_s)


# ---------------------------------------------------------------------------------------------------------------- text


UNSAID = {("park_weights", False)}
"""A setting that is for two classes of offload only."""


def role_lines(plan: Plan) -> list[str]:
    """What was chosen for each role, a line each: mesh, layout, settings."""
    rows = [("role", "mesh", "layout", "settings")]
    for name, one in chosen(plan).items():
        settings = (f"{key} {setting_text(value)}" for key, value in one.settings if (key, value) not in UNSAID)
        rows.append((name, mesh_name(plan, one.mesh), str(one.layout), ", ".join(settings)))
    return aligned(rows, "llll")


def setting_text(value: Setting) -> str:
    """`yes`, `no`, or the value."""
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def binding_lines(found: Summary, plan: Plan) -> list[str]:
    """What takes the time and what takes the memory, a line each."""
    lines: list[str] = []
    if time := time_line(plan):
        lines.append(f"time: {time}")
    headroom = 0.0 if plan.searched is None else plan.searched.headroom
    free = f", {headroom:.0%} kept free" if headroom else ""
    for name, used, capacity, during in (
        ("device", found.device_bytes, found.device_capacity_bytes, f"{free}, most during {found.during}"),
        ("host", found.host_bytes, found.host_capacity_bytes, ""),
    ):
        lines.append(
            f"{name} memory: {size_text(used)} of {size_text(capacity)} ({used / capacity:.0%}){during * bool(used)}"
        )
    return lines


def overlap_line(plan: Plan) -> str:
    """Of a plan whose rows may be older than the weights: that this gains nothing. Empty where iterations overlap."""
    if not plan.max_staleness or len({one.mesh for one in chosen(plan).values()}) > 1:
        return ""
    return "all roles share one mesh, so that iterations do not overlap: sync would take about as long"


def idle_line(plan: Plan) -> str:
    """That a plan leaves devices idle, and why; empty where it uses those of all nodes alike."""
    text = idle_text(plan)
    return f"{text}: all of them would be no faster, because meshes are neighbouring devices" if text else ""


def full_line(plan: Plan) -> str:
    """That a plan leaves its devices little; empty where it leaves enough."""
    used, capacity = plan.predicted.device_bytes, plan.cluster.device.memory_bytes
    if used <= FULL * capacity:
        return ""
    return (
        f"close to full: predicted memory was measured within {MEMORY_ERROR:.0%}, and {size_text(capacity - used)} of "
        f"{size_text(capacity)} per device are left; --headroom 0.1 plans with less"
    )


def tails(plan: Plan) -> Iterator[tuple[Step, float, str]]:
    """Sampling whose slots mostly wait for the longest responses: the step, the part of the time that they work, and why."""
    for step in plan.steps:
        used = step.predicted.slot_utilization
        if used is None or used >= IDLE:
            continue
        helps = "a lower cap helps" if plan.max_staleness else "a lower cap or Async helps"
        is_tail = plan.workload is None or len({*plan.workload.response_lengths.draw(TAIL_SAMPLE)}) > 1
        why = f"the longest responses decide; {helps}" if is_tail else "the last of its waves fills few of them"
        yield step, used, why


def tail_lines(plan: Plan) -> list[str]:
    """`tails`, a line for each."""
    return [f"{step.name}: its slots work {used:.0%} of the time, {why}" for step, used, why in tails(plan)]


def alternative_lines(plan: Plan) -> list[str]:
    """The plans of other kinds that the search looked at to the end, and why each lost; then kinds of which nothing fits."""
    searched = plan.searched
    if searched is None:
        return ["none: the plan was not found by a search"]
    lines = [one.why for one in searched.alternatives]
    lines += [f"does not fit: {line}" for line in searched.refused]
    return lines or ["none was looked at to the end: a bound left out all others"]


def tie_line(plan: Plan) -> str:
    """What another plan is predicted to gain, where that is too little to choose it; else empty."""
    searched, seconds = plan.searched, plan.predicted.seconds
    faster = (
        [] if searched is None else [one for one in searched.alternatives if one.seconds < seconds * (1 - LEAST_CHANGE)]
    )
    if searched is None or not faster:
        return ""
    best = min(faster, key=lambda one: one.seconds)
    return searched.why_simpler.removeprefix("a tie: ") or (
        f"{best.placement} is predicted to take {time_text(best.seconds)}; plans within {searched.tie:.1%} count as equal"
    )


def phase_table(found: Sequence[Phase]) -> list[str]:
    """Phases as lines, the largest parts behind each other. Steps that follow each other and hold the same share a line."""
    has_host = any(phase.host_bytes for phase in found)
    rows = [("step", "", "device", *(["host"] * has_host), "of which")]
    at = 0
    while at < len(found):
        phase, last = found[at], at
        while last + 1 < len(found) and replace(found[last + 1], step=phase.step) == phase:
            last += 1
        which = str(at) if last == at else f"{at}-{last}"
        names = phase.step if last == at else f"{phase.step} to {found[last].step}"
        parts = [f"{what} {size_text(count)}" for what, count in phase.parts[:PARTS]]
        rest = phase.parts[PARTS:]
        if rest:
            parts.append(f"{len(rest)} more {size_text(sum(count for _, count in rest))}")
        host = [size_text(phase.host_bytes)] * has_host
        rows.append((which, names, size_text(phase.device_bytes), *host, ", ".join(parts)))
        at = last + 1
    return aligned(rows, "llr" + "r" * has_host + "l")
