"""Parked state of a draft: its gaps, what fits the memory, and the steps that move it.

[Note: Slots]
The steps that occupy a mesh are its slots, in a fixed order. State takes memory in the slots of its uses, in all slots of a gap
in which it stays, and in those in which it is on its way. So what fits is a sum for each slot, whatever the times.

[Note: On the way]
State that leaves does so behind its last use, state that comes back is there before its next one. The next slot waits until what
leaves has left, and what comes in waits until the slot before its use has ended, unless memory allows more: then the copy runs
beside as many slots as it takes time for. Beside a step that copies during its own work nothing is moved. The iteration is a
circle: the gap behind the last use goes on before the first one; both ends of it are in this iteration.

[Note: Old copies]
State that was only read leaves without a copy: the one on the hosts is still good.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from flowrl.mesh import Mesh
from flowrl.planner.draft import Draft, Parked
from flowrl.planner.simulate import memory, schedule
from flowrl.planner.steps import Predicted, Step
from flowrl.planner.tasks import Edge, Hold, Lane, StepKind

COPYING = frozenset({Lane.H2D, Lane.D2H})

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


@dataclass(frozen=True, slots=True)
class Way:
    """How a state leaves in a gap and comes back: slots beside which it is still, or already, on the devices."""

    until: int
    """It has left before this slot begins; the number of slots: at the end of the iteration."""
    since: int
    """It comes in when this slot has ended; -1: at the beginning of the iteration."""


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
        self.sizes = [sum(int(hold.device_bytes) for hold in _holds(one)) for one in draft.parked]
        self.on = {mesh.first: self._slots(mesh) for mesh in draft.candidate.meshes}
        self.uses = [sorted({self.on[one.mesh.first].at[name] for name in one.uses}) for one in draft.parked]
        gaps = [gap for index in range(len(self.states)) for gap in self._gaps(index)]
        self.open = [gap for gap in gaps if gap.inside(len(self._of(gap.parked).slots))]
        self.shares = self._shares()

    def _of(self, parked: int) -> Slots:
        return self.on[self.states[parked].mesh.first]

    def _slots(self, mesh: Mesh) -> Slots:
        """Memory of each slot without parked state, by the simulator."""
        draft = self.draft
        slots, capacity = draft.slots(mesh), draft.problem.cluster.device.memory_bytes
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

    def _shares(self) -> dict[str, float]:
        """Of the steps in which each call runs."""
        return {call.node: call.share for role in self.draft.problem.roles for call in role.calls}

    # -------------------------------------------------------------------------------------------------------- memory

    def fits(self, choice: Choice) -> bool:
        """Whether there is memory for all that stays. What is on its way takes only what is left over."""
        return all(
            load <= left
            for mesh in self.on.values()
            for load, left in zip(self._loads(mesh, choice), mesh.left, strict=True)
        )

    def _loads(self, mesh: Slots, choice: Choice) -> list[int]:
        """Bytes of parked state in each slot of a mesh, without what is on its way."""
        loads = [0] * len(mesh.slots)
        for index, one in enumerate(self.states):
            if one.mesh.first == mesh.mesh.first:
                for slot in {*self.uses[index], *self._kept(index, choice)}:
                    loads[slot] += self.sizes[index]
        return loads

    def _kept(self, parked: int, choice: Choice) -> set[int]:
        """Slots of the gaps in which a state stays."""
        inside: set[int] = set()
        for gap, stays in zip(self.open, choice, strict=True):
            if stays and gap.parked == parked:
                inside |= set(gap.inside(len(self._of(parked).slots)))
        return inside

    def moved_bytes(self, choice: Choice) -> float:
        """In one iteration, over all devices."""
        return sum(size for gap in self._leaving(choice) for size in self._gap_bytes(gap, choice))

    def _leaving(self, choice: Choice) -> list[Gap]:
        return [gap for gap, stays in zip(self.open, choice, strict=True) if not stays]

    def _gap_bytes(self, gap: Gap, choice: Choice) -> tuple[float, float]:
        """(out, in) of all devices together."""
        one = self.states[gap.parked]
        size = one.state.moved_bytes * one.mesh.size
        return (size if self._is_old(gap, choice) else 0.0), size

    def _is_old(self, gap: Gap, choice: Choice) -> bool:
        """Whether the copy on the hosts is old when a state leaves: it was written since it came in."""
        leaving = {(one.parked, one.start) for one in self._leaving(choice)}
        one, uses = self.states[gap.parked], self.uses[gap.parked]
        names = self._of(gap.parked).slots
        at = uses.index(gap.start)
        for back in range(len(uses)):
            slot = uses[(at - back) % len(uses)]
            if back and (gap.parked, slot) in leaving:
                return False
            if names[slot].name in one.writers:
                return True
        return False

    # --------------------------------------------------------------------------------------------------------- moves

    def _ways(self, choice: Choice, beside: bool) -> dict[Gap, Way]:
        """Of each gap in which a state leaves. See [Note: On the way]."""
        ways = {gap: Way(gap.start + 1, gap.stop - 1) for gap in self._leaving(choice)}
        if not beside:
            return ways
        for mesh in self.on.values():
            room = [left - load for left, load in zip(mesh.left, self._loads(mesh, choice), strict=True)]
            mine = sorted(
                (gap for gap in ways if self._of(gap.parked) is mesh), key=lambda gap: (gap.stop, gap.start, gap.parked)
            )
            for gap in mine:
                ways[gap] = self._sooner(mesh, gap, ways[gap], room)
            for gap in mine:
                if self._is_old(gap, choice):
                    ways[gap] = self._later(mesh, gap, ways[gap], room)
        return ways

    def _sooner(self, mesh: Slots, gap: Gap, way: Way, room: list[int]) -> Way:
        """It comes in beside earlier slots, as long as that helps and fits."""
        lowest = way.until if gap.stop > gap.start else 0
        size, since, covered = self.sizes[gap.parked], way.since, 0.0
        while (
            since >= lowest and covered < self._copy_s(gap) and room[since] >= size and not _copies(mesh.slots[since])
        ):
            room[since] -= size
            covered += mesh.slots[since].predicted.seconds
            since -= 1
        return Way(way.until, since)

    def _later(self, mesh: Slots, gap: Gap, way: Way, room: list[int]) -> Way:
        """It leaves beside later slots, as long as that helps and fits."""
        highest = way.since if gap.stop > gap.start else len(mesh.slots) - 1
        size, until, covered = self.sizes[gap.parked], way.until, 0.0
        while (
            until <= highest and covered < self._copy_s(gap) and room[until] >= size and not _copies(mesh.slots[until])
        ):
            room[until] -= size
            covered += mesh.slots[until].predicted.seconds
            until += 1
        return Way(until, way.since)

    def _copy_s(self, gap: Gap) -> float:
        return self.states[gap.parked].state.moved_bytes / self.link

    def moves(self, choice: Choice, beside: bool) -> tuple[dict[str, list[str]], list[Step]]:
        """(what steps wait for besides, by their names; the moves) of a choice.

        `beside`: copies run beside other work where memory allows it; else one thing after the other.
        """
        ways = self._ways(choice, beside)
        waits: dict[str, list[str]] = {}
        moves: list[Step] = []
        for mesh in self.on.values():
            mine = {gap: way for gap, way in ways.items() if self._of(gap.parked) is mesh}
            out = {gap: self._out(mesh, gap, choice) for gap in mine}
            for gap, way in mine.items():
                moves.append(out[gap])
                if way.until < len(mesh.slots):
                    waits.setdefault(mesh.slots[way.until].name, []).append(out[gap].name)
            present = self._present(mesh, choice, mine)
            for gap, way in mine.items():
                after = [mesh.slots[way.since].name] if way.since >= 0 else []
                leaving = [other for other, its in mine.items() if its.until == way.since + 1]
                entering = sum(self.sizes[other.parked] for other, its in mine.items() if its.since == way.since)
                staying = present[way.since] if way.since >= 0 else self._at_start(mesh, choice)
                is_tight = staying + entering > mesh.between[way.since + 1]
                after += [out[other].name for other in leaving if is_tight or other.parked == gap.parked]
                step = self._in(mesh, gap, tuple(dict.fromkeys(after)))
                moves.append(step)
                waits.setdefault(mesh.slots[gap.stop].name, []).append(step.name)
        return waits, moves

    def _present(self, mesh: Slots, choice: Choice, ways: dict[Gap, Way]) -> list[int]:
        """Bytes of parked state in each slot, with what is on its way."""
        loads = self._loads(mesh, choice)
        for gap, way in ways.items():
            for slot in self._beside(mesh, gap, way):
                loads[slot] += self.sizes[gap.parked]
        return loads

    def _at_start(self, mesh: Slots, choice: Choice) -> int:
        """Bytes of parked state that is there when the iteration begins."""
        starting = [gap.parked for gap, stays in zip(self.open, choice, strict=True) if stays and gap.stop <= gap.start]
        return sum(self.sizes[index] for index in starting if self._of(index) is mesh)

    def _beside(self, mesh: Slots, gap: Gap, way: Way) -> list[int]:
        return [*range(gap.start + 1, way.until), *range(way.since + 1, gap.stop)]

    def _label(self, gap: Gap, what: str) -> str:
        state = self.states[gap.parked].state
        mine = [one for one in self.open if one.parked == gap.parked]
        number = f".{mine.index(gap) + 1}" if len(mine) > 1 else ""
        return f"{state.role}.{state.name.replace(' ', '_')}.{what}{number}"

    def _out(self, mesh: Slots, gap: Gap, choice: Choice) -> Step:
        one, use = self.states[gap.parked], mesh.slots[gap.start]
        size, _ = self._gap_bytes(gap, choice)
        share = self.shares.get(use.name, 1.0)
        seconds = share * size / one.mesh.size / self.link
        settings = (("role", one.state.role), ("state", one.state.name), ("writes", bool(size)))
        return Step(self._label(gap, "offload"), use.node, StepKind.OFFLOAD, one.mesh, (Lane.D2H,) if size else (),
                    Predicted(seconds, num_bytes=round(share * size)), (use.name,), reads=_categories(one),
                    settings=settings)  # fmt: skip

    def _in(self, mesh: Slots, gap: Gap, after: tuple[str, ...]) -> Step:
        one, use = self.states[gap.parked], mesh.slots[gap.stop]
        share = self.shares.get(use.name, 1.0)
        size = one.state.moved_bytes
        return Step(self._label(gap, "onload"), use.node, StepKind.ONLOAD, one.mesh, (Lane.H2D,),
                    Predicted(share * size / self.link, num_bytes=round(share * size * one.mesh.size)), after,
                    reads=_categories(one), settings=(("role", one.state.role), ("state", one.state.name)))  # fmt: skip

    # -------------------------------------------------------------------------------------------------------- result

    def apply(self, choice: Choice, beside: bool) -> Draft:
        """The draft with the steps of a choice, and what its states hold."""
        waits, moves = self.moves(choice, beside)
        resident: list[Hold] = []
        for index, one in enumerate(self.states):
            leaving = [gap for gap in self._leaving(choice) if gap.parked == index]
            resident += self._held(one, leaving)
        draft = self.draft.with_steps(moves, waits)
        return replace(draft, resident=(*draft.resident, *resident), parked=())

    def _held(self, one: Parked, leaving: list[Gap]) -> Iterable[Hold]:
        """From where it comes in until it has left; on the hosts all the time, if it ever leaves."""
        if not leaving:
            return _holds(one)
        wrap = next((gap for gap in leaving if gap.stop <= gap.start), None)
        marks: list[tuple[str, str]] = []
        ordered = sorted(leaving, key=lambda gap: gap.start)
        for index, gap in enumerate(ordered):
            before = ordered[index - 1] if index else wrap
            marks.append((self._label(before, "onload") if before else "", self._label(gap, "offload")))
        if wrap is None:
            marks.append((self._label(ordered[-1], "onload"), ""))
        found = [
            replace(hold, from_task=start, from_edge=Edge.START, until_task=stop, until_edge=Edge.END)
            for start, stop in marks
            for hold in _holds(one)
        ]
        total, host = sum(count for _, count in one.state.parts), one.state.host_bytes
        devices = tuple(one.mesh.devices)
        found += [
            Hold(f"{one.state.role} {name}", 0, host * count / total, devices=devices)
            for name, count in one.state.parts
        ]
        return found


def _holds(one: Parked) -> list[Hold]:
    devices = tuple(one.mesh.devices)
    return [Hold(f"{one.state.role} {name}", count, devices=devices) for name, count in one.state.parts]


def _categories(one: Parked) -> tuple[str, ...]:
    return tuple(name for name, _ in one.state.parts)


def _copies(step: Step) -> bool:
    return bool(COPYING & set(step.lanes))
