"""Schedules: when rollouts may use older weights. An argument of checking, planning and running, never of a flow."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.errors import ConfigError
from flowrl.schema.fields import shown

MOST_STALENESS = 256
"""Versions that rows may be old. Nobody trains on older ones; pictures show as many iterations beside each other."""


def check_staleness(value: object) -> None:
    """Raise `ConfigError` unless it is a whole number from 0 to `MOST_STALENESS`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"max_staleness is a whole number of at least 0; found {shown(value)}")
    if value > MOST_STALENESS:
        raise ConfigError(f"max_staleness is {MOST_STALENESS} at most; found {shown(value)}")


@dataclass(frozen=True, slots=True)
class Sync:
    """Every rollout uses the newest weights; staleness is 0."""

    @property
    def max_staleness(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Async:
    """Rollouts may be up to `max_staleness` versions behind the trainer. With 0 it equals `Sync()`."""

    max_staleness: int = 1

    def __post_init__(self) -> None:
        check_staleness(self.max_staleness)


Schedule = Sync | Async
