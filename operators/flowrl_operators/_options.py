"""What operators and losses check of their options."""

from __future__ import annotations

from flowrl.errors import ConfigError


def checked(name: str, value: object, known: tuple[str, ...], where: str) -> str:
    """The value of an option that must be one of some words. Errors: ConfigError."""
    if value not in known:
        raise ConfigError(f"{where}: {name} is one of {', '.join(known)}; found {value!r}")
    return str(value)
