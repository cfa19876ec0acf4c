"""What a search looked at on the way to its plan: kept with the plan, for people and pictures. No part of its identity."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another plan that was looked at to the end."""

    placement: str
    seconds: float
    """Predicted, as `Outlook.seconds`."""
    device_bytes: int
    host_bytes: int
    """Of the host that holds most."""
    why: str
    """Why it lost, in one line."""


@dataclass(frozen=True, slots=True)
class Searched:
    """How a plan was found."""

    bound_s: float
    """No plan of the search space takes less, whatever its order and memory."""
    placements: int
    """Splits into sets with sizes whose options were looked at."""
    simulated: int
    """Plans whose seconds were computed."""
    pruned: int
    """Branches left because of a bound."""
    unfit: int
    """Placements of which nothing fits the memory."""
    is_exhaustive: bool = True
    """False: the search space was too large, and a seeded random search went through a part of it."""
    seed: int = 0
    """Of that random search."""
    alternatives: tuple[Alternative, ...] = ()
    """The best of other kinds, the fastest first."""
    refused: tuple[str, ...] = ()
    """Kinds of which nothing fits, and what is short, a line each."""
    tie: float = 0.0
    """The part by which plans may differ in seconds and still count as equal."""
    why_simpler: str = ""
    """Where a tie decided: what is simpler about this plan than about the fastest."""

    headroom: float = 0.0
    """Part of each device's memory that was to stay free."""
    of_per_node: int = 0
    """Devices of each node that there are, where the plan's cluster has fewer because it is faster so; else 0."""

    def check(self) -> None:
        """Raise `ConfigError` for what no search finds."""
        numbers = [
            (name, getattr(self, name))
            for name in ("bound_s", "placements", "simulated", "pruned", "unfit", "of_per_node")
        ]
        numbers += [
            (f"{name} of the alternative '{one.placement}'", getattr(one, name))
            for one in self.alternatives
            for name in ("seconds", "device_bytes", "host_bytes")
        ]
        for name, value in numbers:
            if value < 0:
                raise ConfigError(f"the plan's searched.{name} is at least 0; found {value!r}")
        for name in ("tie", "headroom"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"the plan's searched.{name} is a part, from 0 to below 1; found {getattr(self, name)!r}"
                )

    def gap(self, seconds: float) -> float:
        """By how much a plan of `seconds` may be above the best there is, as a part of the bound."""
        return max(0.0, seconds / self.bound_s - 1) if self.bound_s > 0 else 0.0
