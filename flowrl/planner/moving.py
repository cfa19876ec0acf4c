"""How parked state leaves the devices and comes back: steps, and what they hold, for one choice of gaps.

[Note: On the way]
State that leaves does so behind its last use, state that comes back is there before its next one. The next slot waits until what
leaves has left, and what comes in waits until the slot before its use has ended, unless memory allows more: then the copy runs
beside as many slots as it takes time for. Beside a step that copies during its own work nothing is moved.

The iteration is a circle: the gap behind the last use goes on before the first one. State leaves either at the end of the
iteration, or stays until it is over and leaves beside the first slots of the next one (in the first iteration nothing has to).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

from flowrl.planner.draft import Draft, Parked
from flowrl.planner.parking import Choice, Gap, Parking, Slots, holds_of
from flowrl.planner.steps import Predicted, Setting, Step
from flowrl.planner.tasks import Edge, Hold, Lane, StepKind

COPYING = frozenset({Lane.H2D, Lane.D2H})


class Timing(IntEnum):
    """When copies run. See [Note: On the way]."""

    APART = 0
    """One thing after the other."""
    BESIDE = 1
    """Beside other work where memory allows it."""
    NEXT = 2
    """The same; and what leaves behind its last use does so in the next iteration, where that hides more."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a state leaves in a gap and comes back: slots beside which it is still, or already, on the devices."""

    until: int
    """It has left before this slot begins; the number of slots: at the end of the iteration."""
    since: int
    """It comes in when this slot has ended; -1: at the beginning of the iteration."""
    is_next: bool = False
    """Whether it leaves in the iteration after that of its use: `until` is a slot of that one."""


class Moving:
    """The steps of each choice."""

    def __init__(self, parking: Parking) -> None:
        self.parking = parking
        self.shares = {call.node: call.share for role in parking.draft.problem.roles for call in role.calls}
        """Of the steps in which each call runs."""

    def _ways(self, choice: Choice, timing: Timing) -> dict[Gap, Way]:
        """Of each gap in which a state leaves. See [Note: On the way]."""
        ways = {gap: Way(gap.start + 1, gap.stop - 1) for gap in self.parking.leaving(choice)}
        if timing is Timing.APART:
            return ways
        for mesh in self.parking.on.values():
            room = [left - load for left, load in zip(mesh.left, self.parking.loads(mesh, choice), strict=True)]
            mine = sorted(
                (gap for gap in ways if self.parking.of(gap.parked) is mesh),
                key=lambda gap: (gap.stop, gap.start, gap.parked),
            )
            for gap in mine:
                ways[gap] = self._sooner(mesh, gap, ways[gap], room)
            for gap in mine:
                if self.parking.is_old(gap, choice):
                    late = self._in_next(mesh, gap, ways[gap], room) if timing is Timing.NEXT else None
                    ways[gap] = late or self._later(mesh, gap, ways[gap], room)
        return ways

    def _in_next(self, mesh: Slots, gap: Gap, way: Way, room: list[int]) -> Way | None:
        """It stays until the iteration is over and leaves beside the first slots of the next one; None where that is no way."""
        size, tail = self.parking.sizes[gap.parked], range(gap.start + 1, len(mesh.slots))
        if gap.stop > gap.start or any(room[slot] < size for slot in tail):
            return None
        until = self._beside_slots(mesh, gap, range(way.since + 1), room)
        if not until:
            return None
        for slot in tail:
            room[slot] -= size
        return Way(until, way.since, is_next=True)

    def _sooner(self, mesh: Slots, gap: Gap, way: Way, room: list[int]) -> Way:
        """It comes in beside earlier slots, as long as that helps and fits."""
        lowest = way.until if gap.stop > gap.start else 0
        return Way(way.until, way.since - self._beside_slots(mesh, gap, range(way.since, lowest - 1, -1), room))

    def _later(self, mesh: Slots, gap: Gap, way: Way, room: list[int]) -> Way:
        """It leaves beside later slots, as long as that helps and fits."""
        highest = way.since if gap.stop > gap.start else len(mesh.slots) - 1
        return Way(way.until + self._beside_slots(mesh, gap, range(way.until, highest + 1), room), way.since)

    def _beside_slots(self, mesh: Slots, gap: Gap, slots: Iterable[int], room: list[int]) -> int:
        """Beside how many of these slots, from the first one on, a copy runs: as many as it takes time for and as have room. It
        takes that room."""
        size = self.parking.sizes[gap.parked]
        copy_s = self.parking.states[gap.parked].state.moved_bytes / self.parking.link
        count, covered = 0, 0.0
        for slot in slots:
            if covered >= copy_s or room[slot] < size or _copies(mesh.slots[slot]):
                break
            room[slot] -= size
            covered += mesh.slots[slot].predicted.seconds
            count += 1
        return count

    def moves(self, choice: Choice, timing: Timing) -> tuple[dict[str, list[str]], list[Step]]:
        """(what steps wait for besides, by their names; the moves) of a choice."""
        ways = self._ways(choice, timing)
        waits: dict[str, list[str]] = {}
        moves: list[Step] = []
        for mesh in self.parking.on.values():
            mine = {gap: way for gap, way in ways.items() if self.parking.of(gap.parked) is mesh}
            out = {gap: self._out(mesh, gap, way, choice) for gap, way in mine.items()}
            for gap, way in mine.items():
                moves.append(out[gap])
                if way.until < len(mesh.slots):
                    waits.setdefault(mesh.slots[way.until].name, []).append(out[gap].name)
            present, at_start = self._present(mesh, choice, mine), self._at_start(mesh, choice, mine)
            for gap, way in mine.items():
                after = [mesh.slots[way.since].name] if way.since >= 0 else []
                leaving = [other for other, its in mine.items() if its.until == way.since + 1]
                entering = sum(
                    self.parking.sizes[other.parked] for other, its in mine.items() if its.since == way.since
                )
                staying = present[way.since] if way.since >= 0 else at_start
                is_tight = staying + entering > mesh.between[way.since + 1]
                after += [out[other].name for other in leaving if is_tight or other.parked == gap.parked]
                step = self._in(mesh, gap, tuple(dict.fromkeys(after)))
                moves.append(step)
                waits.setdefault(mesh.slots[gap.stop].name, []).append(step.name)
        return waits, moves

    def _present(self, mesh: Slots, choice: Choice, ways: dict[Gap, Way]) -> list[int]:
        """Bytes of parked state in each slot, with what is on its way."""
        loads = self.parking.loads(mesh, choice)
        for gap, way in ways.items():
            for slot in self._beside(mesh, gap, way):
                loads[slot] += self.parking.sizes[gap.parked]
        return loads

    def _at_start(self, mesh: Slots, choice: Choice, ways: dict[Gap, Way]) -> int:
        """Bytes of parked state that is there when the iteration begins."""
        starting = [
            gap.parked for gap, stays in zip(self.parking.open, choice, strict=True) if stays and gap.stop <= gap.start
        ]
        starting += [gap.parked for gap, way in ways.items() if way.is_next]
        return sum(self.parking.sizes[index] for index in starting if self.parking.of(index) is mesh)

    def _beside(self, mesh: Slots, gap: Gap, way: Way) -> list[int]:
        """Slots of a gap in which a state is still, or already, there."""
        leaving = [*range(gap.start + 1, len(mesh.slots)), *range(way.until)] if way.is_next else [
            *range(gap.start + 1, way.until)
        ]  # fmt: skip
        return [*leaving, *range(way.since + 1, gap.stop)]

    def _label(self, gap: Gap, what: str) -> str:
        state = self.parking.states[gap.parked].state
        mine = [one for one in self.parking.open if one.parked == gap.parked]
        number = f".{mine.index(gap) + 1}" if len(mine) > 1 else ""
        return f"{state.role}.{state.name.replace(' ', '_')}.{what}{number}"

    def _out(self, mesh: Slots, gap: Gap, way: Way, choice: Choice) -> Step:
        one, use = self.parking.states[gap.parked], mesh.slots[gap.start]
        size, _ = self.parking.gap_bytes(gap, choice)
        share = self.shares.get(use.name, 1.0)
        seconds = share * size / one.mesh.size / self.parking.link
        settings: tuple[tuple[str, Setting], ...] = (
            ("role", one.state.role), ("state", one.state.name), ("writes", bool(size)), ("is_next", way.is_next)
        )  # fmt: skip
        after = () if way.is_next else (use.name,)
        return Step(self._label(gap, "offload"), use.node, StepKind.OFFLOAD, one.mesh, (Lane.D2H,) if size else (),
                    Predicted(seconds, num_bytes=round(share * size)), after, reads=_categories(one),
                    settings=settings)  # fmt: skip

    def _in(self, mesh: Slots, gap: Gap, after: tuple[str, ...]) -> Step:
        one, use = self.parking.states[gap.parked], mesh.slots[gap.stop]
        share = self.shares.get(use.name, 1.0)
        size = one.state.moved_bytes
        return Step(self._label(gap, "onload"), use.node, StepKind.ONLOAD, one.mesh, (Lane.H2D,),
                    Predicted(share * size / self.parking.link, num_bytes=round(share * size * one.mesh.size)), after,
                    reads=_categories(one), settings=(("role", one.state.role), ("state", one.state.name)))  # fmt: skip

    def apply(self, choice: Choice, timing: Timing) -> Draft:
        """The draft with the steps of a choice, and what its states hold."""
        waits, moves = self.moves(choice, timing)
        ways = self._ways(choice, timing)
        resident: list[Hold] = []
        for index, one in enumerate(self.parking.states):
            resident += self._held(one, {gap: way for gap, way in ways.items() if gap.parked == index})
        draft = self.parking.draft.with_steps(moves, waits)
        return replace(draft, resident=(*draft.resident, *resident), parked=())

    def _held(self, one: Parked, leaving: dict[Gap, Way]) -> Iterable[Hold]:
        """From where it comes in until it has left; on the hosts all the time, if it ever leaves."""
        if not leaving:
            return holds_of(one)
        wrap = next((gap for gap in leaving if gap.stop <= gap.start), None)
        marks: list[tuple[str, str]] = []
        ordered = sorted(leaving, key=lambda gap: gap.start)
        for index, gap in enumerate(ordered):
            before = ordered[index - 1] if index else wrap
            until = "" if leaving[gap].is_next else self._label(gap, "offload")
            marks.append((self._label(before, "onload") if before else "", until))
        if wrap is None:
            marks.append((self._label(ordered[-1], "onload"), ""))
        elif leaving[wrap].is_next:
            marks.append(("", self._label(wrap, "offload")))
        found = [
            replace(hold, from_task=start, from_edge=Edge.START, until_task=stop, until_edge=Edge.END)
            for start, stop in marks
            for hold in holds_of(one)
        ]
        total, host = sum(count for _, count in one.state.parts), one.state.host_bytes
        devices = tuple(one.mesh.devices)
        found += [
            Hold(f"{one.state.role} {name}", 0, host * count / total, devices=devices)
            for name, count in one.state.parts
        ]
        return found


def _categories(one: Parked) -> tuple[str, ...]:
    return tuple(name for name, _ in one.state.parts)


def _copies(step: Step) -> bool:
    return bool(COPYING & set(step.lanes))
