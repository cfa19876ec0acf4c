"""What a table and its calls may be told, and what of it does not fit together."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError

COMPRESSIONS = ("lz4", "zstd", "auto")
CHOICES = {
    "compression": (None, *COMPRESSIONS),
    "memory": ("shared", "private"),
    "eviction": ("fifo", "lru"),
    "on_full": ("evict", "wait", "raise"),
}


def check_count(what: str, name: str, value: object) -> None:
    """Errors: ConfigError for an option of `what` that is no whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{what} needs {name} of at least 1; found {value!r}")


def check_claim_wait(wait_s: object) -> None:
    """Errors: ConfigError for no number of seconds, or infinitely many."""
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not wait_s < float("inf"):
        raise ConfigError(f"claim needs wait_s in seconds, and an end to every wait; found {wait_s!r}")


def check_settings(settings: Mapping[str, Any], path: str | Path | None) -> None:
    for name in ("max_rows", "max_bytes", "chunk_rows", "hot_bytes", "memory_bytes"):
        value = settings[name]
        least = 0 if name == "hot_bytes" else 1
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ConfigError(f"ExperienceTable needs {name} of at least {least}, a whole number; found {value!r}")
    if settings["chunk_rows"] is None:
        raise ConfigError("ExperienceTable needs chunk_rows of at least 1; found None")
    for name, choices in CHOICES.items():
        if settings[name] not in choices:
            shown = ", ".join(repr(choice) for choice in choices)
            near = difflib.get_close_matches(str(settings[name]), [str(c) for c in choices if c], 1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ConfigError(f"ExperienceTable's {name} is one of {shown}; found {settings[name]!r}{hint}")
    key = settings["keep_together"]
    if key is not None and (not isinstance(key, str) or not key):
        raise ConfigError(f"ExperienceTable's keep_together is a column's name; found {key!r}")
    timeout_s = settings["timeout_s"]
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < float("inf"):
        raise ConfigError(f"ExperienceTable needs timeout_s above 0, and an end to every wait; found {timeout_s!r}")
    if settings["memory_bytes"] is not None and path is None:
        raise ConfigError("memory_bytes says when rows are written to files, which needs path='a new folder'")
    if settings["hot_bytes"] is not None and settings["compression"] is None:
        raise ConfigError("hot_bytes says when rows are compressed, which needs compression='lz4', 'zstd' or 'auto'")
    if path is not None and settings["memory"] == "private":
        raise ConfigError(
            "a table with a path is open to other processes, so its memory is 'shared'; leave one of them out"
        )
