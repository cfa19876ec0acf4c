"""A problem in which parked state is moved in no time: what plans come near that hide these copies beside other work."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from flowrl.planner.holds import moves_s
from flowrl.planner.options import Option
from flowrl.planner.problem import Problem
from flowrl.planner.space import Space


def free_spaces(problem: Problem) -> tuple[Free, ...]:
    """Of the whole cluster, then of its parts."""
    return tuple(Free(part, problem) for part in problem.parts)


class Free(Space):
    """The same problem, with state that is moved in no time. `real` has what such an option really is."""

    def __init__(self, problem: Problem, whole: Problem | None = None) -> None:
        super().__init__(problem, whole)
        self._real: dict[tuple[int, Option], Option] = {}

    def costs(self, option: Option) -> tuple[float, ...]:
        """Bytes are those of the moments at which they count, so that state that is parked is nowhere costlier than the same that
        is not: what moves in no time may as well stay. Where hosts have room for all that may be parked, theirs do not count."""
        at_rest = option.static_bytes
        bytes_of = (at_rest, at_rest + option.dynamic_bytes, at_rest + option.handover_bytes)
        return (
            *option.seconds,
            *bytes_of,
            option.numerics,
            option.is_on_host,
            0.0 if self.is_roomy else option.host_bytes,
        )

    @cached_property
    def is_roomy(self) -> bool:
        """Whether one host has room for the most that each role keeps on hosts."""
        most = (
            max(
                (one.host_bytes for size in self.sizes for one in super(Free, self).every_option(role, size)),
                default=0.0,
            )
            for role in range(len(self.roles))
        )
        return sum(most) <= self.cluster.host.memory_bytes

    def every_option(self, role: int, size: int) -> tuple[Option, ...]:
        mine = self.roles[role]
        found: list[Option] = []
        for option in super().every_option(role, size):
            moving = [moves_s(self.problem, mine, option, call) for call in mine.calls]
            if any(moving):
                seconds = tuple(max(0.0, a - b) for a, b in zip(option.seconds, moving, strict=True))
                free = replace(option, seconds=seconds)
                self._real[role, free] = option
                found.append(free)
            else:
                found.append(option)
        return tuple(found)

    def real(self, option: Option) -> Option:
        """With the seconds of its copies."""
        return self._real.get((self.index[option.role], option), option)
