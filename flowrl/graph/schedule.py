"""Schedules: when rollouts may use older weights. An argument of checking, planning and running, never of a flow."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.errors import ConfigError


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
        if self.max_staleness < 0:
            raise ConfigError(f"max_staleness is a whole number of at least 0; found {self.max_staleness!r}")


Schedule = Sync | Async
