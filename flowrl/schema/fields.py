"""Whether values are what the fields of a dataclass are declared to be: for objects that people write, not for those made by the
thousand.

int                 a whole number (no bool) of at most `MOST_INT`, so that it can become a float
float               an int or float, finite, of at most `MOST_FLOAT`, so that products of a few do not overflow
str                 text that can be written to a file: no half of a surrogate pair
tuple[T, ...]       a tuple; lists are not taken, because frozen objects must be hashable
A | None, Literal   one of these
a class             an object of it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from flowrl.errors import ConfigError
from flowrl.schema.columns import nearest

MOST_INT = 2**63 - 1
MOST_FLOAT = 1e30
MOST_DIGITS = 18
"""Of a whole number in a text: what has more is too large, and `int` raises a plain ValueError for thousands of them."""
_SHOWN = 60


def check_fields(owner: object, *names: str) -> None:
    """Raise `ConfigError` unless the fields of a dataclass (all, or those named) have values of their declared types."""
    kind: Any = type(owner)
    hints = hints_of(kind)
    for name in names or hints:
        value = getattr(owner, name)
        if not fits(hints[name], value):
            raise ConfigError(f"{kind.__name__} needs {described(hints[name])} for {name}; found {shown(value)}")


def check_keys(kind: Any, given: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError` for a key that is no field of a dataclass, and where a field without default has no key.

    Args: where: names what was given, in errors.
    """
    hints = hints_of(kind)
    for key in given:
        if key not in hints:
            raise ConfigError(f"'{where}' has no key '{key}'; {nearest(key, hints)}")
    missing = [
        one.name for one in fields(kind) if one.name not in given and one.default is one.default_factory is MISSING
    ]
    if missing:
        raise ConfigError(f"'{where}' lacks {', '.join(missing)}")


@lru_cache(maxsize=128)
def hints_of(kind: type[Any]) -> Mapping[str, Any]:
    """Field -> declared type of a dataclass."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def fits(kind: Any, value: Any) -> bool:
    """Whether a value is of a declared type; see the top of this module."""
    check = _PLAIN.get(kind) if isinstance(kind, type) else None
    if check is not None:
        return check(value)
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(part, value) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if parts[-1:] == (...,):
            return all(fits(parts[0], one) for one in value)
        return len(parts) == len(value) and all(map(fits, parts, value))
    if kind is Any:
        return True
    return isinstance(value, origin or kind)


def is_int(value: Any) -> bool:
    """A whole number, no bool, that can become a float."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST_INT


def is_number(value: Any) -> bool:
    """A finite int or float, no bool, that a formula can count with."""
    if isinstance(value, float):
        return -MOST_FLOAT <= value <= MOST_FLOAT  # nan and inf are not
    return is_int(value)


def is_text(value: Any) -> bool:
    """Text that can be written as UTF-8."""
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= one <= "\udfff" for one in value))


_PLAIN: dict[type, Callable[[Any], bool]] = {
    int: is_int,
    float: is_number,
    str: is_text,
    bool: lambda value: isinstance(value, bool),
    NoneType: lambda value: value is None,
}


def described(kind: Any) -> str:
    """A declared type in words: `a whole number or None`, `a tuple of numbers`."""
    plain = {int: "a whole number", float: "a finite number", str: "text", bool: "True or False", NoneType: "None"}
    if isinstance(kind, type) and kind in plain:
        return plain[kind]
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(described(part) for part in parts)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin is tuple:
        if parts[-1:] == (...,):
            return f"a tuple, each {described(parts[0])},"
        return f"a tuple of ({', '.join(map(described, parts))})"
    return f"a {getattr(kind, '__name__', kind)}"


def shown(value: Any) -> str:
    """A value in an error: short, whatever it is. `repr` of a whole number of thousands of digits raises, and others may."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > MOST_INT:
        return f"one of {value.bit_length()} bits, which is too large"
    if isinstance(value, float) and math.isfinite(value) and abs(value) > MOST_FLOAT:
        return f"{value!r}, which is too large (up to {MOST_FLOAT:g})"
    try:
        text = repr(value)
    except Exception:  # a container of such a number, or an object whose own repr fails
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
