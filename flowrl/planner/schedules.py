"""Schedules as people write them: `sync`, `async`, `async:2`."""

from __future__ import annotations

from flowrl.errors import ConfigError
from flowrl.graph.schedule import Async, Schedule, Sync


def schedule_of(said: Schedule | str | None) -> Schedule | None:
    """The schedule that is meant. Errors: ConfigError with the forms there are."""
    if not isinstance(said, str):
        return said
    kind, colon, staleness = said.strip().partition(":")
    if kind == "sync" and not colon:
        return Sync()
    if kind == "async" and (not colon or staleness.isdecimal()):
        return Async(int(staleness)) if colon else Async()
    raise ConfigError(
        f"a schedule is 'sync', or 'async:K' with K the most versions that rows may be old; found {said!r}"
    )
