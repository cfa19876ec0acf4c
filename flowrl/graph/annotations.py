"""What an annotation says about a configuration value: `eps: float` is no text, `unbiased: bool` is not "False"."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from flowrl.errors import ConfigError
from flowrl.graph.values import FrozenMap, is_plain

_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text", NoneType: "None", None: "None"}


def refuse_misfit(owner: str, config: Mapping[str, Any], asked: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Errors: ConfigError for a frozen value that its annotation does not allow.

    Annotations of other kinds than numbers, text, tuples, mappings and unions of these say nothing; nor do they about values
    that only a run can tell (expressions, functions). A default always fits.
    """
    for key, value in config.items():
        is_default = type(value) is type(defaults[key]) and value == defaults[key]
        if key in asked and not is_default and is_plain(value) and not _fits(value, asked[key]):
            raise ConfigError(
                f"'{owner}' takes {_worded(asked[key])} as {key}; found {value!r:.60} ({type(value).__name__})"
            )


def _fits(value: Any, asked: Any) -> bool:
    origin, args = get_origin(asked), get_args(asked)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in args)
    if asked in (None, NoneType):
        return value is None
    if asked is bool:
        return isinstance(value, bool)
    if asked in (int, float):
        return isinstance(value, int | asked) and not isinstance(value, bool)
    if asked is str:
        return isinstance(value, str)
    if origin is tuple or asked is tuple:
        if not isinstance(value, tuple):
            return False
        if len(args) == 2 and args[1] is Ellipsis:
            return all(_fits(one, args[0]) for one in value)
        return not args or (len(args) == len(value) and all(map(_fits, value, args)))
    if (origin or asked) in (Mapping, dict):
        return isinstance(value, FrozenMap)
    return True


def _worded(asked: Any) -> str:
    origin, args = get_origin(asked), get_args(asked)
    if origin in (Union, UnionType):
        return " or ".join(map(_worded, args))
    if origin is tuple and args:
        if args[-1] is Ellipsis:
            return f"a tuple, each {_worded(args[0])},"
        return f"a tuple ({', '.join(map(_worded, args))})"
    if (origin or asked) in (Mapping, dict):
        return "a mapping"
    return _WORDS.get(asked, getattr(asked, "__name__", str(asked)))
