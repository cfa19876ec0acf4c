"""What was measured of a plan's steps, for pictures that show it beside what was predicted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flowrl.errors import ConfigError
from flowrl.planner.measured import Comparison
from flowrl.planner.steps import Plan
from flowrl.schema.columns import nearest


@dataclass(frozen=True, slots=True)
class Seen:
    """A step that ran.

    Example:
        Seen("update", seconds=71.3, device_bytes=55 * 2**30)
    """

    step: str
    """Name of the step in the plan."""
    seconds: float
    start_s: float | None = None
    """Since the beginning of the iteration; None where only the duration is known."""
    device_bytes: int | None = None
    """The most that a device held while it ran."""

    @property
    def end_s(self) -> float | None:
        return None if self.start_s is None else self.start_s + self.seconds


def seen(plan: Plan, measured: Comparison | Iterable[Any] | None) -> tuple[Seen, ...]:
    """What was measured, in the order of the plan's steps.

    Args:
        measured: the comparison of a run with its plan (`flowrl.planner.measured.compare_run`), `Seen`s, or any objects with
            `step`, `seconds`, and perhaps `start_s` and `device_bytes`; for steps that ran several times their median is a fair
            value to give.

    Raises `ConfigError` for a name that is no step of the plan, one that is there twice, or a comparison with another plan.
    """
    if isinstance(measured, Comparison):
        measured = _compared(plan, measured)
    found: dict[str, Seen] = {}
    names = [step.name for step in plan.steps]
    for one in measured or ():
        made = one if isinstance(one, Seen) else _seen(one)
        if made.step not in names:
            raise ConfigError(f"'{made.step}' was measured and is no step of the plan; {nearest(made.step, names)}")
        if made.step in found:
            raise ConfigError(f"step '{made.step}' was measured twice; give one value for each step, such as the mean")
        found[made.step] = made
    return tuple(found[name] for name in names if name in found)


def _compared(plan: Plan, comparison: Comparison) -> list[Seen]:
    if comparison.plan_hash != plan.hash:
        raise ConfigError(
            f"what was measured belongs to the plan {comparison.plan_hash}, and this one is {plan.hash}; draw the plan that ran"
        )
    # the memory of a whole process is no memory of a device
    has_devices = comparison.memory == "device"
    return [
        Seen(step.name, step.measured_s, step.start_s, step.measured_bytes if has_devices else None)
        for step in comparison.steps
        if step.measured_s is not None
    ]


def _seen(one: Any) -> Seen:
    step = getattr(one, "step", None)
    seconds = getattr(one, "seconds", None)
    if not isinstance(step, str) or not isinstance(seconds, int | float):
        raise ConfigError(
            f"a measurement needs the step's name and its seconds, as Seen('update', seconds=71.3); found {one!r:.80}"
        )
    return Seen(step, float(seconds), getattr(one, "start_s", None), getattr(one, "device_bytes", None))
