"""A set of roles that take turns on one mesh: which combinations of their options fit its memory.

Between calls every role of the set keeps its static bytes; one at a time uses its dynamic bytes:

    sum of static + largest dynamic + device context <= memory of a device

While new weights wait for their engine, they are there too, together with what the roles that may work meanwhile use.

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
    beside: frozenset[str] = frozenset()
    """Roles that may work while the weights wait: after the update, and before the taker uses them."""

    def handed_bytes(self, options: Iterable[Option]) -> float:
        """What holds the weights on a device of the set meanwhile."""
        return sum(option.handover_bytes for option in options if option.role in (self.giver, self.taker))

    def beside_bytes(self, options: Iterable[Option]) -> float:
        """What those beside use at most."""
        return max((option.dynamic_bytes for option in options if option.role in self.beside), default=0.0)


@dataclass(frozen=True, slots=True)
class Combination:
    """An option for each role of a set."""

    options: tuple[Option, ...]
    """In the order of the roles."""
    peak_bytes: float
    """The most on one of its devices."""
    host_bytes: float
    """On all hosts of the mesh together."""
    numerics: int

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
    """The combination of these options; None when it does not fit a device."""
    needed = needed_bytes(options, edges, limits)
    if needed > limits.device_bytes:
        return None
    return Combination(
        options, needed, sum(option.host_bytes for option in options), max(option.numerics for option in options)
    )


def needed_bytes(options: Sequence[Option], edges: Sequence[Edge], limits: Limits) -> float:
    """Bytes at the worst moment: a call, or new weights going from one role of the set to another."""
    context = limits.context_bytes if any(option.has_context for option in options) else 0.0
    static = sum(option.static_bytes for option in options)
    waiting = (edge.handed_bytes(options) + edge.beside_bytes(options) for edge in edges)
    return context + static + max([max(option.dynamic_bytes for option in options), *waiting])
