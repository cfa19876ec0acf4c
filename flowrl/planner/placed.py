"""What a plan has chosen for each role, and what each mesh does: read from its steps."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrl.cost.text import time_text
from flowrl.mesh import Layout, Mesh
from flowrl.mesh.placement import Group, Placement, Role as Placed
from flowrl.planner.tasks import Lane

if TYPE_CHECKING:
    from flowrl.planner.steps import Plan, Setting, Step

STEPS = 3
"""Of what makes a mesh busy, those that a line names, as far as they take `LEAST_PART` of the time."""
LEAST_PART = 0.01


@dataclass(frozen=True, slots=True)
class Load:
    """What one lane of a mesh does for one iteration."""

    mesh: str
    lane: Lane
    roles: tuple[str, ...]
    """Or nodes, where steps name no role."""
    busy_s: float
    critical_s: float
    """Of the critical path."""
    steps: tuple[tuple[str, float], ...] = ()
    """With their seconds, the longest first; where iterations do not overlap, those of the critical path."""


def mesh_name(plan: Plan, mesh: Mesh) -> str:
    """`A[8]` for a mesh that the plan names, else its devices: `0-7[8]`."""
    for name, one in plan.meshes:
        if (one.first, one.size) == (mesh.first, mesh.size):
            return f"{name}[{mesh.size}]"
    return f"{mesh.first}[1]" if mesh.size == 1 else f"{mesh.first}-{mesh.first + mesh.size - 1}[{mesh.size}]"


def idle_text(plan: Plan) -> str:
    """That a plan leaves devices of each node idle, `4 of the 5 devices of each node; the others stay idle`; else empty."""
    there = 0 if plan.searched is None else plan.searched.of_per_node
    if not there:
        return ""
    of_each = " of each node" if plan.cluster.nodes > 1 else ""
    return f"{plan.cluster.devices_per_node} of the {there} devices{of_each}; the others stay idle"


def role_of(step: Step) -> str:
    """The role whose work a step does, or else its node."""
    return str(dict(step.settings).get("role", step.node))


def loads_of(plan: Plan) -> tuple[Load, ...]:
    """The one with most of the critical path first; where iterations overlap, the busiest."""
    critical = set(plan.predicted.critical_path)
    found: dict[tuple[str, Lane], list[Step]] = {}
    for step in plan.steps:
        if step.lanes:
            found.setdefault((mesh_name(plan, step.mesh), step.lanes[0]), []).append(step)
    loads = [_load(mesh, lane, steps, critical, bool(plan.max_staleness)) for (mesh, lane), steps in found.items()]
    if plan.max_staleness:
        return tuple(sorted(loads, key=lambda one: (-one.busy_s, one.mesh, one.lane)))
    return tuple(sorted(loads, key=lambda one: (-one.critical_s, one.mesh, one.lane)))


def _load(mesh: str, lane: Lane, steps: Sequence[Step], critical: Set[str], is_overlapped: bool) -> Load:
    on_path = [step for step in steps if step.name in critical]
    ranked = sorted(steps if is_overlapped else on_path, key=lambda step: (-step.predicted.seconds, step.name))
    return Load(
        mesh,
        lane,
        tuple(dict.fromkeys(map(role_of, steps))),
        sum(step.predicted.seconds for step in steps),
        sum(step.predicted.seconds for step in on_path),
        tuple((step.name, step.predicted.seconds) for step in ranked),
    )


def time_line(plan: Plan) -> str:
    """What takes the time: a mesh, its share, and its longest steps. Empty where nothing is done."""
    loads = loads_of(plan)
    if not loads:
        return ""
    load, outlook = loads[0], plan.predicted
    whole = outlook.seconds if plan.max_staleness else outlook.latency_s
    mine = load.busy_s if plan.max_staleness else load.critical_s
    part = f" ({mine / whole:.0%})" if whole else ""
    what = "is busy" if plan.max_staleness else "is on the critical path"
    longest = [f"{name} {time_text(s)} ({s / whole:.0%})" for name, s in load.steps[:STEPS] if s > LEAST_PART * whole]
    return (
        f"{load.mesh} ({', '.join(load.roles)}), lane {load.lane}, {what} for {time_text(mine)} of "
        f"{time_text(whole)}{part}{'; longest there: ' * bool(longest)}{', '.join(longest)}"
    )


@dataclass(frozen=True, slots=True)
class Chosen:
    """Where a role stands, and how."""

    mesh: Mesh
    layout: Layout
    settings: tuple[tuple[str, Setting], ...]

    @property
    def offload(self) -> str | None:
        """Class of offload; None for a role that has nothing to choose there."""
        found = dict(self.settings).get("offload")
        return None if found is None else str(found)


def chosen(plan: Plan) -> dict[str, Chosen]:
    """What a plan has chosen for each role, by name."""
    found: dict[str, Chosen] = {}
    for step in plan.steps:
        said = dict(step.settings)
        if "role" in said and step.layout is not None:
            settings = tuple((key, value) for key, value in step.settings if key != "role")
            found.setdefault(str(said["role"]), Chosen(step.mesh, step.layout, settings))
    return dict(sorted(found.items()))


def placement_of(plan: Plan) -> Placement:
    """What goes where, in the notation in which a placement is asked for."""
    groups: dict[tuple[int, int], list[Placed]] = {}
    for name, one in chosen(plan).items():
        groups.setdefault((one.mesh.first, one.mesh.size), []).append(Placed(name, one.layout.ordered("mod")))
    return Placement(tuple(Group(tuple(mine)) for _, mine in sorted(groups.items())))
