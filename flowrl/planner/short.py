"""What is short where nothing fits: the least memory that a set of roles needs on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowrl.planner.options import Option
from flowrl.planner.problem import GIB
from flowrl.planner.space import Space


def every(option: Option) -> bool:
    """Takes every option."""
    return True


@dataclass(frozen=True, slots=True)
class Need:
    """The least that roles need on each device of a mesh, however they are run."""

    roles: tuple[str, ...]
    devices: int
    num_bytes: float
    """With the device context."""
    option: Option | None = None
    """The one that needs least, of a single role."""

    def line(self, capacity_bytes: float) -> str:
        """In words, with what there is."""
        names = " + ".join(self.roles)
        text = f"'{names}' needs {self.num_bytes / GIB:.1f} GiB on each of {self.devices} devices > {capacity_bytes / GIB:.1f}"
        if self.option is None:
            return text
        one = self.option
        return text + f" (at rest {one.static_bytes / GIB:.1f}, working {one.dynamic_bytes / GIB:.1f}, {one.layout})"


def least_option(space: Space, role: int, size: int, takes: Callable[[Option], bool] = every) -> Option | None:
    """Of a role, the option with the lowest peak, whether or not a device holds it; None where it has none at all."""
    found = (one for one in space.roomy_options(role, size) if space.problem.takes(one) and takes(one))
    return min(found, key=lambda option: option.peak_bytes, default=None)


def shortage(space: Space, mine: Sequence[int], size: int, takes: Callable[[Option], bool] = every) -> str:
    """Why roles do not fit a mesh together, in one line; empty where nothing says that they do not.

    A single role that needs too much goes before all of them together.
    """
    memory, capacity = space.problem.choices.memory, space.problem.room_bytes
    static, dynamic, context = 0.0, 0.0, 0.0
    for role in mine:
        name, least = space.roles[role].name, least_option(space, role, size, takes)
        if least is None:
            if space.roles[role].is_engine:
                return f"no offered share of {capacity / GIB:.1f} GiB on {size} devices lets '{name}' hold the longest sequence"
            return f"'{name}' has no such option on {size} devices"
        held = memory.context_bytes if least.has_context else 0.0
        if least.peak_bytes + held > capacity:
            return Need((name,), size, least.peak_bytes + held, least).line(capacity)
        options = [one for one in space.options(role, size) if takes(one)]
        static += min((one.static_bytes for one in options), default=0.0)
        dynamic = max(dynamic, min((one.dynamic_bytes for one in options), default=0.0))
        context = max(context, held)
    if static + dynamic + context > capacity:
        return Need(tuple(space.roles[role].name for role in mine), size, static + dynamic + context).line(capacity)
    host = sum(min((one.host_bytes for one in space.options(role, size) if takes(one)), default=0.0) for role in mine)
    nodes = max(1, size // space.cluster.devices_per_node)
    if host / nodes > space.cluster.host.memory_bytes:
        names, needed = " + ".join(space.roles[role].name for role in mine), f"{host / nodes / GIB:.0f} GiB"
        devices = f"{size} device{'s' if size > 1 else ''}"
        return f"'{names}' on {devices} needs {needed} on each host > {space.cluster.host.memory_bytes / GIB:.0f}"
    return ""
