"""Memory over time by category: from the simulator that decided whether a plan fits, run on the holds of one category at a time.

So the layers of a stack add up to the level that the planner counted, at every moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flowrl.planner.simulate import Memory, Usage, memory
from flowrl.planner.steps import Plan
from flowrl.planner.tasks import Hold
from flowrl.viz.overlap import Overlap, spoken
from flowrl.viz.palette import CATEGORIES, Category, category_of
from flowrl.viz.units import ranges

Levels = tuple[tuple[float, int], ...]
Keep = Callable[[Hold], Hold]


@dataclass(frozen=True, slots=True)
class Layer:
    """What one category takes over time."""

    category: Category
    levels: Levels
    """(seconds, bytes): from then on it holds this much."""

    def at(self, moment_s: float) -> int:
        return next((level for since_s, level in reversed(self.levels) if since_s <= moment_s), 0)


@dataclass(frozen=True, slots=True)
class Stack:
    """Devices, or hosts, whose memory is the same over time."""

    usage: Usage
    """Of the first of them: levels and peak of all categories together."""
    indices: tuple[int, ...]
    cap_bytes: int
    layers: tuple[Layer, ...]
    """From below."""

    @property
    def is_host(self) -> bool:
        return self.usage.place == "host"

    @property
    def name(self) -> str:
        noun = "host" if self.is_host else "device"
        return f"{noun}{'s' if len(self.indices) > 1 else ''} {ranges(self.indices)}"

    @property
    def when(self) -> str:
        """When the peak is, in words: "during update", "all the time"."""
        *held, last = [level for _, level in self.usage.levels] or [0]
        if last in (0, self.usage.peak_bytes) and all(level == self.usage.peak_bytes for level in held):
            return "all the time"
        return f"during {', '.join(map(spoken, self.usage.during))}" if self.usage.during else ""

    @property
    def moments(self) -> tuple[float, ...]:
        """When a layer changes, rising."""
        return tuple(sorted({moment_s for layer in self.layers for moment_s, _ in layer.levels} | {0.0}))


def stacks(plan: Plan) -> tuple[tuple[Stack, ...], tuple[Stack, ...]]:
    """Of devices and of hosts, the fullest first, over one iteration. Hosts that hold nothing are left out."""
    found, _ = plan.simulated()
    resident, per_node = plan.predicted.resident, plan.cluster.devices_per_node

    def held(kept: Keep) -> Memory:
        tasks = [replace(task, holds=tuple(map(kept, task.holds))) for task in plan.tasks]
        return memory(tasks, found, resident=tuple(map(kept, resident)), devices_per_node=per_node)

    return _both(plan, held)


def overlapping_stacks(together: Overlap) -> tuple[tuple[Stack, ...], tuple[Stack, ...]]:
    """As `stacks`, over several iterations that overlap."""
    return _both(together.plan, together.memory)


def _both(plan: Plan, held: Callable[[Keep], Memory]) -> tuple[tuple[Stack, ...], tuple[Stack, ...]]:
    total = held(lambda hold: hold)
    parts = {category.name: held(_only(category)) for category in used(plan)}
    devices = _stacks(total.devices, parts, lambda one: one.devices, plan.cluster.device.memory_bytes)
    hosts = _stacks(total.hosts, parts, lambda one: one.hosts, plan.cluster.host.memory_bytes)
    return devices, tuple(stack for stack in hosts if stack.usage.peak_bytes)


def used(plan: Plan) -> tuple[Category, ...]:
    """The categories of which the plan has holds, in the order of the palette."""
    holds = [hold for step in plan.steps for hold in step.predicted.holds] + list(plan.predicted.resident)
    names = {category_of(hold).name for hold in holds if hold.device_bytes or hold.host_bytes}
    return tuple(category for category in CATEGORIES if category.name in names)


def _only(category: Category) -> Keep:
    """Keeps the holds of one category; the others are there with no bytes."""

    def kept(hold: Hold) -> Hold:
        return hold if category_of(hold) == category else replace(hold, device_bytes=0, host_bytes=0)

    return kept


def _stacks(
    total: dict[int, Usage], parts: dict[str, Memory], pick: Callable[[Memory], dict[int, Usage]], cap_bytes: int
) -> tuple[Stack, ...]:
    alike: dict[tuple[Levels, tuple[Levels, ...], tuple[tuple[str, int], ...]], list[int]] = {}
    for index, usage in total.items():
        each = tuple(pick(part)[index].levels for part in parts.values())
        alike.setdefault((usage.levels, each, usage.parts), []).append(index)
    by_name = {category.name: category for category in CATEGORIES}
    found = []
    for (_, levels, _), indices in alike.items():
        layers = tuple(
            Layer(by_name[name], level)
            for name, level in zip(parts, levels, strict=True)
            if any(num_bytes for _, num_bytes in level)
        )
        found.append(Stack(total[indices[0]], tuple(indices), cap_bytes, layers))
    return tuple(sorted(found, key=lambda stack: (-stack.usage.peak_bytes, stack.indices)))
