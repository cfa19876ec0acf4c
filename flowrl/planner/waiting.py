"""New weights that wait on devices, and the orders of work that leave room for them.

Three spans of an iteration, for each pair of a trainer and its engine:

    from the trainer's last update to the handover          its shards, where they are not at rest on the devices
    from the handover to the end, but for samples           the engine's weights
    from the beginning to the last sample with old weights  the same, of the iteration before

What works in one of them needs room beside the weights. Where a call has none, orders are left in which it comes at another time:
"the critic's update first, then the policy's, directly followed by the handover" costs a mesh that does all of it nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flowrl.planner.cells import Combination, Edge, Limits, resting_bytes
from flowrl.planner.options import Option
from flowrl.planner.orders import Rule, Window
from flowrl.planner.roles import Role

Work = tuple[int, int | None, tuple[int, ...]]
"""A role, which of its calls (None: the handover of new weights to it), and the work before it."""


@dataclass(frozen=True, slots=True)
class Handover:
    """One handover among the work of an iteration, by places in it."""

    edge: Edge
    at: int
    updates: tuple[int, ...]
    """The trainer's."""
    samples: tuple[int, ...]
    """Of the engine, with the weights of the iteration before."""

    @property
    def windows(self) -> tuple[Window, Window, Window]:
        """The three spans, in the order in which the head of this file has them."""
        return Window(self.updates, (self.at,)), Window((self.at,)), Window((), self.samples)


def handovers_of(work: Sequence[Work], roles: Sequence[Role]) -> tuple[Handover, ...]:
    """All handovers, in the order of the work."""
    before: list[frozenset[int]] = []
    """Of each piece of work: all that ends before it starts."""
    for _, _, direct in work:
        before.append(frozenset(direct).union(*(before[one] for one in direct)))
    found: list[Handover] = []
    for at, (taker, call, _) in enumerate(work):
        if call is not None:
            continue
        giver = next(index for index, role in enumerate(roles) if role.name == roles[taker].weights_from)
        calls = [(one, work[one][0], work[one][1]) for one in sorted(before[at])]
        updates = tuple(
            one for one, role, own in calls if role == giver and own is not None and _trains(roles[role], own)
        )
        samples = tuple(one for one, role, own in calls if role == taker and own is not None)
        between, beside = set[str](), set[str]()
        for one, (role, _, _) in enumerate(work):
            if one == at:
                continue
            if at not in before[one] and one not in updates and not any(one in before[update] for update in updates):
                between.add(roles[role].name)
            if one not in before[at] or any(one != sample and sample not in before[one] for sample in samples):
                beside.add(roles[role].name)
        edge = Edge(roles[giver].name, roles[taker].name, frozenset(between), frozenset(beside))
        found.append(Handover(edge, at, updates, samples))
    return tuple(found)


def _trains(role: Role, call: int) -> bool:
    return role.calls[call].work == "train"


def rule_of(
    work: Sequence[Work],
    roles: Sequence[Role],
    handovers: Sequence[Handover],
    combinations: Sequence[Combination],
    limits: Limits,
) -> Rule | None:
    """Which work may not run while which weights wait, for there is no room; None where every order fits.

    Args:
        work: calls and handovers, as `flowrl.planner.problem.work_of` lists them.
        combinations: options of each set.
    """
    if not any(one.is_ordered for one in combinations):
        return None
    windows = tuple(window for one in handovers for window in one.windows)
    moved = {one.at: one.edge for one in handovers}
    barred: list[set[int]] = [set() for _ in work]
    for one in combinations:
        if not one.is_ordered:
            continue
        option_of = {option.role: option for option in one.options}
        left = limits.device_bytes - resting_bytes(one.options, limits)
        waiting = [_waiting(handover.edge, option_of) for handover in handovers]
        for at, (role, _, _) in enumerate(work):
            name = roles[role].name
            edge = moved.get(at)
            if edge is not None:
                own: tuple[str, ...] = (edge.giver, edge.taker)
                room = left - edge.handed_bytes(one.options)
            else:
                own = (name,)
                room = left - option_of[name].dynamic_bytes if name in option_of else 0.0
            if not set(own) & set(option_of):
                continue
            sizes = [0.0 if owner in own else size for three in waiting for owner, size in three]
            barred[at] |= {mask for mask in range(1 << len(sizes)) if _sum(sizes, mask) > room}
    return Rule(windows, tuple(map(frozenset, barred)))


def _waiting(edge: Edge, option_of: Mapping[str, Option]) -> tuple[tuple[str, float], ...]:
    """(role, bytes on a device of the set) of what waits in each of the three windows."""
    given, taken = (
        (name, option_of[name].handover_bytes if name in option_of else 0.0) for name in (edge.giver, edge.taker)
    )
    return given, taken, taken


def _sum(sizes: Sequence[float], mask: int) -> float:
    return sum(size for bit, size in enumerate(sizes) if mask >> bit & 1)
