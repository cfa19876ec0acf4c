"""What operators and losses check of their options."""

from __future__ import annotations

from flowrl.errors import ConfigError


def checked(name: str, value: object, known: tuple[str, ...], where: str) -> str:
    """The value of an option that must be one of some words. Errors: ConfigError."""
    if value not in known:
        raise ConfigError(f"{where}: {name} is one of {', '.join(known)}; found {value!r}")
    return str(value)


def required(needs: str, holds: bool, **found: object) -> None:
    """Refuse options that do not go together, e.g. `required("x needs low <= high", low <= high, low=low, high=high)`.

    Errors: ConfigError.
    """
    if not holds:
        raise ConfigError(f"{needs}; found {', '.join(f'{name}={value!r}' for name, value in found.items())}")


def above_0(*values: float | None) -> bool:
    """Whether all that are not None are above 0; NaN is not."""
    return all(value is None or value > 0 for value in values)


def at_least_0(*values: float | None) -> bool:
    """Whether all that are not None are 0 or more; NaN is not."""
    return all(value is None or value >= 0 for value in values)
