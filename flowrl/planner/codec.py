"""Frozen dataclasses as JSON values and back, by their declared types.

dataclass     object with its fields; one that is left out has its default
tuple         list
enum          its value
Layout        its text ("f8")
float         number; integers are read as floats
"""

from __future__ import annotations

import math
from dataclasses import is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from flowrl.errors import ConfigError, FlowError
from flowrl.mesh import Layout
from flowrl.schema.columns import nearest
from flowrl.schema.fields import check_keys, hints_of, is_int, is_number, is_text, shown

_Made = TypeVar("_Made")


def encode(value: Any) -> Any:
    """A JSON value. Raises `ConfigError` for a number that JSON has not."""
    if isinstance(value, Layout):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        hints = hints_of(type(value))
        found = {name: encode(getattr(value, name)) for name in hints}
        # a float field that was given an integer is written as a float: equal values, equal texts
        return {name: float(one) if hints[name] is float else one for name, one in found.items()}
    if isinstance(value, tuple):
        return [encode(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"a plan holds finite numbers; found {value!r}")
    return value


def decode(kind: type[_Made], value: Any, where: str) -> _Made:
    """A value of a type from what `encode` gives. `where` names it in errors.

    Raises `ConfigError` for an unknown key, a missing one, a value of another type, or one that the class refuses.
    """
    return cast(_Made, _decode(kind, value, where))


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _any_of(parts, value, where)
    if origin is Literal:
        if not any(type(value) is type(part) and value == part for part in parts):
            raise _wrong(where, " or ".join(map(repr, parts)), value)
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, "a list", value)
        if parts[-1:] == (...,):
            parts = parts[:1] * len(value)
        if len(parts) != len(value):
            raise _wrong(where, f"a list of {len(parts)}", value)
        return tuple(
            _decode(part, one, f"{where}[{i}]") for i, (part, one) in enumerate(zip(parts, value, strict=True))
        )
    if kind is float and is_number(value):
        return float(value)
    if kind in _PLAIN and _is_plain(kind, value):
        return value
    if kind is Layout and isinstance(value, str):
        return _made(where, Layout.parse, value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        known = [one.value for one in kind]
        if not isinstance(value, str) or value not in known:
            raise ConfigError(
                f"'{where}' is {shown(value)}; {nearest(value if isinstance(value, str) else '', map(str, known))}"
            )
        return kind(value)
    if is_dataclass(kind) and kind is not Layout:
        return _object(cast(type, kind), value, where)
    raise _wrong(where, kind.__name__, value)


def _any_of(parts: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and NoneType in parts:
        return None
    plain = [one for one in parts if one in _PLAIN]
    if type(value) in plain and _is_plain(type(value), value):
        return value
    rest = [one for one in parts if one is not NoneType]
    if len(rest) == 1:
        return _decode(rest[0], value, where)
    raise _wrong(where, " or ".join(one.__name__ for one in rest), value)


def _object(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong(where, f"an object ({kind.__name__})", value)
    check_keys(kind, value, where)
    hints = hints_of(kind)
    made = {key: _decode(hints[key], one, f"{where}.{key}") for key, one in value.items()}
    return _made(where, kind, **made)


def _made(where: str, make: Any, *values: Any, **named: Any) -> Any:
    try:
        return make(*values, **named)
    except FlowError as error:
        raise ConfigError(f"'{where}': {error}") from error


_PLAIN = {int: is_int, float: is_number, str: is_text, bool: lambda value: True}


def _is_plain(kind: type, value: Any) -> bool:
    return type(value) is kind and _PLAIN[kind](value)


def _wrong(where: str, wanted: str, value: Any) -> ConfigError:
    return ConfigError(f"'{where}' is {wanted}; found {shown(value)}")
