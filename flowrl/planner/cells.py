"""A set of roles that take turns on one mesh: which combinations of their options fit its memory.

Between calls every role of the set keeps its static bytes; one at a time uses its dynamic bytes:

    sum of static + largest dynamic + device context <= memory of a device

While new weights wait, they are there too, beside what works meanwhile: the trainer's shards from its update to the handover,
the engine's weights from the handover to the next sample. Where not every role that may work then has room beside them, the order
of the work decides whether the set fits (`flowrl.planner.waiting`).

Sets stand on devices of their own: device memory is a matter of one set, host memory of all sets of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import le

from flowrl.planner.options import Option


@dataclass(frozen=True, slots=True)
class Edge:
    """New weights go from one role to another."""

    giver: str
    taker: str
    between: frozenset[str] = frozenset()
    """Roles that may work after the giver's update and before the handover, in some order."""
    beside: frozenset[str] = frozenset()
    """Roles that may work while the taker has its weights and does not sample."""

    def handed_bytes(self, options: Iterable[Option]) -> float:
        """What holds the weights on a device of the set during the handover."""
        return sum(option.handover_bytes for option in options if option.role in (self.giver, self.taker))

    def waiting_bytes(self, role: str, options: Iterable[Option]) -> float:
        """The most of it that is there while a role of the set works. Its own is part of what it uses."""
        most = 0.0
        for option in options:
            waits = option.role == self.giver and role in self.between
            waits |= option.role == self.taker and role in self.beside
            if waits and option.role != role and option.handover_bytes > most:
                most = option.handover_bytes
        return most


@dataclass(frozen=True, slots=True)
class Combination:
    """An option for each role of a set."""

    options: tuple[Option, ...]
    """In the order of the roles."""
    peak_bytes: float
    """The most on one of its devices, whatever the order; where not every order fits, what a device holds."""
    host_bytes: float
    """On all hosts of the mesh together."""
    numerics: int
    is_ordered: bool = False
    """Whether it fits in some orders of the work only, if in any."""

    @property
    def seconds(self) -> float:
        """For which the mesh is busy."""
        return sum(sum(option.seconds) for option in self.options)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device holds, and what its context takes of it."""

    device_bytes: float
    context_bytes: float


def undominated(
    options: Sequence[Option], costs_of: Callable[[Option], tuple[float, ...]], *, with_layout: bool = True
) -> tuple[Option, ...]:
    """Without the options that another one is nowhere costlier than; the fastest first, and of equals the first.

    `with_layout`: only one of the same layout counts.
    """
    kept: dict[object, list[tuple[float, ...]]] = {}
    found: list[Option] = []
    ranked = sorted((sum(one.seconds), costs_of(one), index) for index, one in enumerate(options))
    for _, costs, index in ranked:
        alike = kept.setdefault(options[index].layout if with_layout else None, [])
        if not any(all(map(le, other, costs)) for other in alike):
            alike.append(costs)
            found.append(options[index])
    return tuple(found)


def made(options: tuple[Option, ...], edges: Sequence[Edge], limits: Limits) -> Combination | None:
    """The combination of these options; None when it does not fit a device in any order."""
    if least_bytes(options, edges, limits) > limits.device_bytes:
        return None
    needed = needed_bytes(options, edges, limits)
    return Combination(
        options,
        min(needed, limits.device_bytes),
        sum(option.host_bytes for option in options),
        max(option.numerics for option in options),
        needed > limits.device_bytes,
    )


def resting_bytes(options: Sequence[Option], limits: Limits) -> float:
    """Bytes between all calls."""
    context = limits.context_bytes if any(option.has_context for option in options) else 0.0
    return context + sum(option.static_bytes for option in options)


def least_bytes(options: Sequence[Option], edges: Sequence[Edge], limits: Limits) -> float:
    """Bytes at the worst moment of an order in which nothing works while weights wait: a call, or a handover."""
    handed = (edge.handed_bytes(options) for edge in edges)
    return resting_bytes(options, limits) + max([max(option.dynamic_bytes for option in options), *handed])


def needed_bytes(options: Sequence[Option], edges: Sequence[Edge], limits: Limits) -> float:
    """Bytes at the worst moment of any order: a call or a handover beside all weights that may wait meanwhile."""
    most = 0.0
    for option in options:
        waiting = sum(edge.waiting_bytes(option.role, options) for edge in edges)
        most = max(most, option.dynamic_bytes + waiting)
    for edge in edges:
        others = (one for one in edges if one is not edge)
        # of another pair either the trainer's shards wait or the engine's weights
        waiting = sum(max((one.handed_bytes((option,)) for option in options), default=0.0) for one in others)
        most = max(most, edge.handed_bytes(options) + waiting)
    return resting_bytes(options, limits) + most
