"""Values from a settings file or a command line, turned into what a dataclass field expects."""

from __future__ import annotations

import ast
import re
import types
import typing
from typing import Any

from flowrl.graph.schedule import Async, Schedule, Sync

_NAMED = {"true": True, "false": False, "none": None}
_ASYNC = re.compile(r"async(?:\((\d+)\))?")


class WrongType(Exception):
    """A value is not what a field expects; the message says what is expected."""


def parse_value(text: str) -> Any:
    """A Python literal (`0.1`, `(1, 8)`, `"quoted"`), `true`, `false`, `none`, or else the text itself."""
    if text.lower() in _NAMED:
        return _NAMED[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def fields_of(cls: type) -> dict[str, Any]:
    """Field name to type of a dataclass."""
    return typing.get_type_hints(cls)


def convert(value: Any, kind: Any) -> Any:
    """`value` as a field of type `kind` holds it: lists become tuples, whole numbers become floats.

    The string "none" stands for None where None is allowed, because TOML has no such value.

    Errors: WrongType, saying what is expected.
    """
    if kind is Any:
        return value
    if kind == Schedule:
        return _schedule(value)
    found = _converted(value, kind)
    if found is _NOTHING:
        raise WrongType(expected(kind))
    return found


def convert_text(text: str, kind: Any) -> Any:
    """`convert` for a value typed on the command line: a field of strings takes the text as it is."""
    parts = _members(kind)
    if type(None) in parts and text.lower() == "none":
        return None
    value = parse_value(text)
    if str in parts and not isinstance(value, str):
        return text
    if any(typing.get_args(part) == (str, ...) for part in parts) and isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return convert(value, kind)


def expected(kind: Any) -> str:
    """A type in words: `a whole number`, `a list of strings`."""
    if kind == Schedule:
        return '"sync", "async" or "async(K)" with K the most versions of staleness'
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", type(None): '"none"'}
    parts = _members(kind)
    if len(parts) > 1:
        return " or ".join(expected(part) for part in parts)
    args = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and args:
        plural = {int: "whole numbers", float: "numbers", str: "strings"}.get(args[0], "values")
        return f"a list of {plural}" if args[-1] is Ellipsis else f"a list of {len(args)} {plural}"
    if typing.get_origin(kind) is dict:
        return "a table of keys and values"
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def differs(value: Any, default: Any) -> str:
    """What was expected, when `value` cannot stand where a flow's configuration has `default`; else empty.

    Numbers of both kinds may stand for each other, and anything may replace None or an object.
    """
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else expected(bool)
    if isinstance(default, int | float):
        return expected(float) if isinstance(value, bool | str) else ""
    if isinstance(default, str):
        return expected(str) if isinstance(value, bool | int | float) else ""
    if isinstance(default, list | tuple):
        return "a list" if isinstance(value, bool | str) else ""
    return ""


class _Nothing:
    pass


_NOTHING = _Nothing()


def _members(kind: Any) -> tuple[Any, ...]:
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    return typing.get_args(kind) if is_union else (kind,)


def _converted(value: Any, kind: Any) -> Any:
    parts = _members(kind)
    if len(parts) > 1:
        if type(None) in parts and (value is None or value == "none"):
            return None
        tried = (_converted(value, part) for part in parts if part is not type(None))
        return next((found for found in tried if found is not _NOTHING), _NOTHING)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if typing.get_origin(kind) is tuple:
        return _tuple(value, typing.get_args(kind))
    if typing.get_origin(kind) is dict:
        return value if isinstance(value, dict) else _NOTHING
    is_of_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    return value if is_of_kind else _NOTHING


def _tuple(value: Any, args: tuple[Any, ...]) -> Any:
    if not isinstance(value, list | tuple):
        return _NOTHING
    kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
    if len(kinds) != len(value):
        return _NOTHING
    found = [_converted(item, kind) for item, kind in zip(value, kinds, strict=True)]
    return _NOTHING if any(item is _NOTHING for item in found) else tuple(found)


def _schedule(value: Any) -> Schedule:
    if isinstance(value, Sync | Async):
        return value
    if value == "sync":
        return Sync()
    found = _ASYNC.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise WrongType(expected(Schedule))
    return Async(int(found.group(1) or 1))
