"""Parked state of a draft: its gaps, and what fits the memory. The steps that move it are made in `flowrl.planner.moving`.

[Note: Slots]
The steps that occupy a mesh are its slots, in a fixed order. State takes memory in the slots of its uses, in all slots of a gap
in which it stays, and in those in which it is on its way. So what fits is a sum for each slot, whatever the times.

[Note: Old copies]
State that was only read leaves without a copy: the one on the hosts is still good.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from flowrl.mesh import Mesh
from flowrl.planner.draft import Draft, Parked
from flowrl.planner.simulate import memory, schedule
from flowrl.planner.steps import Step
from flowrl.planner.tasks import Hold

Choice = tuple[bool, ...]
"""Of each gap with slots inside: whether the state stays."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two uses of one state on a mesh."""

    parked: int
    """Which state, as `Draft.parked` lists them."""
    start: int
    """Slot of the use before it."""
    stop: int
    """Slot of the use behind it; at or before `start`: in the next iteration."""

    def inside(self, num_slots: int) -> list[int]:
        """The slots between."""
        if self.stop > self.start:
            return list(range(self.start + 1, self.stop))
        return [*range(self.start + 1, num_slots), *range(self.stop)]


@dataclass
class Slots:
    """Slots of one mesh, and the memory that is left beside its parked state."""

    mesh: Mesh
    slots: tuple[Step, ...]
    left: list[int]
    """Bytes on each device, by slot."""
    between: list[int]
    """The same before each slot, while the mesh waits, and at the end."""
    at: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.at = {step.name: index for index, step in enumerate(self.slots)}


class Parking:
    """The parked state of one draft.

    `open` are the gaps that leave a choice: those with slots inside. All else is forced.
    """

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        cluster = draft.problem.cluster
        self.per_node, self.link = cluster.devices_per_node, cluster.host_link.bytes_s
        self.states = draft.parked
        self.sizes = [sum(int(hold.device_bytes) for hold in holds_of(one)) for one in draft.parked]
        self.on = {mesh.first: self._slots(mesh) for mesh in draft.candidate.meshes}
        self.uses = [sorted({self.on[one.mesh.first].at[name] for name in one.uses}) for one in draft.parked]
        gaps = [gap for index in range(len(self.states)) for gap in self._gaps(index)]
        self.open = [gap for gap in gaps if gap.inside(len(self.of(gap.parked).slots))]

    def of(self, parked: int) -> Slots:
        """Of the mesh of a state."""
        return self.on[self.states[parked].mesh.first]

    def _slots(self, mesh: Mesh) -> Slots:
        """Memory of each slot without parked state, by the simulator."""
        draft = self.draft
        slots, capacity = draft.slots(mesh), draft.problem.room_bytes
        tasks = [step.task for step in draft.steps]
        found = schedule(tasks, devices_per_node=self.per_node)
        spans = [(found.starts[step.name], found.ends[step.name]) for step in slots]
        edges = [0.0, *(moment for span in spans for moment in span), found.makespan_s]
        gaps = list(zip(edges[::2], edges[1::2], strict=True))
        left: list[list[int]] = []
        # between two slots there is what stays; a wait of no length would else be taken for the slot behind it
        for holding, moments in ((tasks, spans), ([replace(task, holds=()) for task in tasks], gaps)):
            used = memory(holding, found, resident=draft.resident, devices_per_node=self.per_node).devices[mesh.first]
            left.append([capacity - used.between(*span) for span in moments])
        return Slots(mesh, slots, *left)

    def _gaps(self, parked: int) -> Iterator[Gap]:
        uses = self.uses[parked]
        for start, stop in zip(uses, [*uses[1:], uses[0]], strict=True):
            yield Gap(parked, start, stop)

    # -------------------------------------------------------------------------------------------------------- memory

    def fits(self, choice: Choice) -> bool:
        """Whether there is memory for all that stays. What is on its way takes only what is left over."""
        return all(
            load <= left
            for mesh in self.on.values()
            for load, left in zip(self.loads(mesh, choice), mesh.left, strict=True)
        )

    def loads(self, mesh: Slots, choice: Choice) -> list[int]:
        """Bytes of parked state in each slot of a mesh, without what is on its way."""
        loads = [0] * len(mesh.slots)
        for index, one in enumerate(self.states):
            if one.mesh.first == mesh.mesh.first:
                for slot in {*self.uses[index], *self.kept(index, choice)}:
                    loads[slot] += self.sizes[index]
        return loads

    def kept(self, parked: int, choice: Choice) -> set[int]:
        """Slots of the gaps in which a state stays."""
        inside: set[int] = set()
        for gap, stays in zip(self.open, choice, strict=True):
            if stays and gap.parked == parked:
                inside |= set(gap.inside(len(self.of(parked).slots)))
        return inside

    def moved_bytes(self, choice: Choice) -> float:
        """In one iteration, over all devices."""
        return sum(size for gap in self.leaving(choice) for size in self.gap_bytes(gap, choice))

    def leaving(self, choice: Choice) -> list[Gap]:
        """The gaps in which a state does not stay."""
        return [gap for gap, stays in zip(self.open, choice, strict=True) if not stays]

    def gap_bytes(self, gap: Gap, choice: Choice) -> tuple[float, float]:
        """(out, in) of all devices together."""
        one = self.states[gap.parked]
        size = one.state.moved_bytes * one.mesh.size
        return (size if self.is_old(gap, choice) else 0.0), size

    def is_old(self, gap: Gap, choice: Choice) -> bool:
        """Whether the copy on the hosts is old when a state leaves: it was written since it came in."""
        leaving = {(one.parked, one.start) for one in self.leaving(choice)}
        one, uses = self.states[gap.parked], self.uses[gap.parked]
        names = self.of(gap.parked).slots
        at = uses.index(gap.start)
        for back in range(len(uses)):
            slot = uses[(at - back) % len(uses)]
            if back and (gap.parked, slot) in leaving:
                return False
            if names[slot].name in one.state.writers:
                return True
        return False


def holds_of(one: Parked) -> list[Hold]:
    """What a state takes on its devices, all the time."""
    devices = tuple(one.mesh.devices)
    return [Hold(f"{one.state.role} {name}", count, devices=devices) for name, count in one.state.parts]
