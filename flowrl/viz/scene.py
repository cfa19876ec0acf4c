"""A plan as bars on tracks: what every picture of time is drawn from. One scene, so that all pictures agree.

plan -> schedule (the planner's simulator) -> bars -> tracks by devices and lane -> gaps with their reasons
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flowrl.planner.simulate import Schedule
from flowrl.planner.steps import Plan, Step
from flowrl.planner.tasks import Lane, StepKind
from flowrl.viz.palette import HATCHES, HUES
from flowrl.viz.units import ranges

GREY = len(HUES) - 1
MOST_NAMED = 3
"""Steps that a reason names before it says how many more there are."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A step with its time and its look."""

    index: int
    """In the plan."""
    step: Step
    start_s: float
    end_s: float
    role: str
    """What shares a colour; empty for work of no model."""
    hue: int
    hatch: str
    """Of its role; a step that is no computation has the hatch of its kind instead."""
    is_critical: bool


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which a compute lane has nothing to do."""

    start_s: float
    end_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class Track:
    """One lane of devices that have the same steps."""

    lane: Lane
    bars: tuple[Bar, ...]
    """By start."""
    gaps: tuple[Gap, ...]
    busy_s: float


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that have the same steps, or the CPUs of nodes that do."""

    name: str
    """As "A: devices 0–7" or "CPUs of node 0"."""
    devices: tuple[int, ...]
    tracks: tuple[Track, ...]


@dataclass(frozen=True, slots=True)
class Scene:
    """What there is to see of a plan's time."""

    plan: Plan
    schedule: Schedule
    bars: tuple[Bar, ...]
    """In the order of the plan's steps."""
    groups: tuple[Group, ...]
    roles: tuple[tuple[str, int, str], ...]
    """Name, hue and hatch, by first use."""

    @property
    def makespan_s(self) -> float:
        """Predicted seconds from the first step to the last."""
        return self.schedule.makespan_s

    def bar(self, name: str) -> Bar:
        return next(bar for bar in self.bars if bar.step.name == name)


def scene(plan: Plan) -> Scene:
    """Run the simulator on the plan as it stands, and arrange what it says."""
    found, _ = plan.simulated()
    role_of = roles_of(plan.steps)
    names = tuple(dict.fromkeys(role for role in role_of.values() if role))
    looks = {name: (index % GREY, HATCHES[index // GREY % len(HATCHES)]) for index, name in enumerate(names)}
    bars = []
    for index, step in enumerate(plan.steps):
        role = role_of[step.name]
        hue, hatch = looks.get(role, (GREY, ""))
        start_s, end_s = found.starts[step.name], found.ends[step.name]
        bars.append(Bar(index, step, start_s, end_s, role, hue, hatch, step.name in found.critical_path))
    roles = tuple((name, *looks[name]) for name in names)
    return Scene(plan, found, tuple(bars), _groups(plan, bars, found), roles)


def roles_of(steps: Sequence[Step]) -> dict[str, str]:
    """For each step the role that it says it works for; else the role of its node; else, for a computation on devices, its
    node."""
    said = {step.name: str(dict(step.settings).get("role", "")) for step in steps}
    of_node = {step.node: said[step.name] for step in steps if said[step.name]}
    known = set(said.values())
    found = {}
    for step in steps:
        is_model = step.kind is StepKind.COMPUTE and Lane.COMPUTE in step.lanes
        role = said[step.name] or of_node.get(step.node, "")
        found[step.name] = role or (step.node if step.node in known or is_model else "")
    return found


def called(plan: Plan, devices: Iterable[int]) -> str:
    """Devices by the name of their mesh, where they are one, and their numbers."""
    numbers = sorted(devices)
    shown = f"device{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"
    name = next((name for name, mesh in plan.meshes if list(mesh.devices) == numbers), "")
    return f"{name}: {shown}" if name else shown


def cpus_of(nodes: list[int] | range) -> str:
    return f"CPUs of node{'s' if len(nodes) > 1 else ''} {ranges(nodes)}"


def place_of(plan: Plan, step: Step) -> str:
    """Where a step runs, in words: "A: devices 0–7", "CPUs of node 0", or from where to where it moves."""
    if set(step.lanes) == {Lane.HOST}:
        return cpus_of(step.mesh.nodes(plan.cluster.devices_per_node))
    here = called(plan, step.mesh.devices)
    if step.source is None or list(step.source.devices) == list(step.mesh.devices):
        return here
    return f"{called(plan, step.source.devices)} → {here}"


# ------------------------------------------------------------------------------------------------------------ tracks


def _groups(plan: Plan, bars: Sequence[Bar], found: Schedule) -> tuple[Group, ...]:
    by_steps: dict[tuple[int, ...], list[int]] = {}
    for device in sorted({device for bar in bars for device in bar.step.devices}):
        mine = tuple(bar.index for bar in bars if device in bar.step.devices and set(bar.step.lanes) - {Lane.HOST})
        if mine:
            by_steps.setdefault(mine, []).append(device)
    groups = []
    for indices, devices in by_steps.items():
        mine_bars = [bars[index] for index in indices]
        lanes = [lane for lane in Lane if lane is not Lane.HOST and any(lane in bar.step.lanes for bar in mine_bars)]
        if Lane.COMPUTE not in lanes:
            lanes.insert(0, Lane.COMPUTE)
        tracks = tuple(_track(plan, lane, mine_bars, bars, found) for lane in lanes)
        groups.append(Group(called(plan, devices), tuple(devices), tracks))
    return (*groups, *_host_groups(plan, bars, found))


def _host_groups(plan: Plan, bars: Sequence[Bar], found: Schedule) -> list[Group]:
    """The CPUs of each node are one resource, whichever of its devices a step names."""
    per_node = plan.cluster.devices_per_node
    by_steps: dict[tuple[int, ...], list[int]] = {}
    for node in range(plan.cluster.nodes):
        mine = tuple(
            bar.index
            for bar in bars
            if Lane.HOST in bar.step.lanes and any(device // per_node == node for device in bar.step.devices)
        )
        if mine:
            by_steps.setdefault(mine, []).append(node)
    groups = []
    for indices, nodes in by_steps.items():
        devices = tuple(node * per_node + one for node in nodes for one in range(per_node))
        track = _track(plan, Lane.HOST, [bars[index] for index in indices], bars, found)
        groups.append(Group(cpus_of(nodes), devices, (track,)))
    return groups


def _track(plan: Plan, lane: Lane, mine: Sequence[Bar], bars: Sequence[Bar], found: Schedule) -> Track:
    shown = tuple(sorted((bar for bar in mine if lane in bar.step.lanes), key=lambda bar: (bar.start_s, bar.index)))
    gaps = tuple(_gaps(plan, shown, bars, found)) if lane is Lane.COMPUTE else ()
    return Track(lane, shown, gaps, sum(bar.end_s - bar.start_s for bar in shown))


def _gaps(plan: Plan, shown: Sequence[Bar], bars: Sequence[Bar], found: Schedule) -> Iterable[Gap]:
    now = 0.0
    for bar in shown:
        if bar.start_s > now:
            yield Gap(now, bar.start_s, _reason(plan, bar, now, bars))
        now = max(now, bar.end_s)
    if found.makespan_s > now:
        chain = [bar for bar in bars if bar.is_critical and bar.end_s > now]
        yield Gap(now, found.makespan_s, _waits(sorted(chain, key=lambda bar: bar.start_s), "has nothing left to do"))


def _reason(plan: Plan, bar: Bar, since_s: float, bars: Sequence[Bar]) -> str:
    """The steps, one after another, because of which a step did not start earlier, as far back as the gap reaches."""
    chain: list[Bar] = []
    at: Bar | None = bar
    while at is not None and at.start_s > since_s:
        at = _blocker(plan, at, bars)
        if at is not None:
            chain.append(at)
    return _waits(chain[::-1], "waits")


def _blocker(plan: Plan, bar: Bar, bars: Sequence[Bar]) -> Bar | None:
    """The step whose end let this one start: one whose result it needs before one that had its lane."""
    ended = [one for one in bars if one.end_s == bar.start_s and one.index < bar.index]
    needed = [one for one in ended if one.step.name in bar.step.after]
    rivals = [one for one in ended if _compete(plan, one.step, bar.step)]
    best = needed or rivals
    return max(best, key=lambda one: (one.end_s - one.start_s, -one.index)) if best else None


def _compete(plan: Plan, one: Step, other: Step) -> bool:
    lanes = set(one.lanes) & set(other.lanes)
    per_node = plan.cluster.devices_per_node
    if Lane.HOST in lanes and {d // per_node for d in one.devices} & {d // per_node for d in other.devices}:
        return True
    return bool(lanes - {Lane.HOST}) and bool(set(one.devices) & set(other.devices))


def _waits(chain: Sequence[Bar], otherwise: str) -> str:
    names = list(dict.fromkeys(bar.step.name for bar in chain))
    if not names:
        return otherwise
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"waits for {', then '.join(names[-MOST_NAMED:])}{more}"
