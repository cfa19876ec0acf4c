"""What an operator or a loss declares, as JSON: written by `ops show --json` and `ops list --json`, read by `ops compat`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.graph import packs
from flowrl.graph.losses import SEGMENTS, LossFunction
from flowrl.graph.operators import REQUIRED, Operator, OperatorCall, Read

FORMAT = 1
"""Of the JSON; a number that is not this one is refused."""

Description = dict[str, Any]


def of_operator(found: Operator | LossFunction) -> Description:
    """One operator or loss. What depends on the configuration is given as it is with the defaults, else as null."""
    about: Description = {
        "kind": "loss" if isinstance(found, LossFunction) else "filter" if found.declared.is_filter else "operator",
        "name": found.name,
        "hash": found.hash,
        "reads": [_read(read) for read in found.reads if read.param != SEGMENTS],
        "config": {
            name: {"required": True} if value is REQUIRED else {"default": repr(value)}
            for name, value in found.defaults.items()
        },
    }
    if isinstance(found, LossFunction):
        properties = dict(found.properties)
        return {**about, "locality": str(properties.pop("locality")), "declares": properties}
    call = with_defaults(found)
    declared = found.declared
    locality = _settled(declared.locality, call.locality if call else None)
    return {
        **about,
        "writes": _writes(found, call),
        "locality": None if locality is None else str(locality),
        "declares": {
            "min_group": _settled(declared.min_group, call.min_group if call else None),
            "each_row": declared.each_row,
            "on_error": declared.on_error,
            "timeout_s": _settled(declared.timeout_s, call.timeout_s if call else None),
            "replaces": declared.replaces,
        },
    }


def _settled(declared: Any, by_default: Any) -> Any:
    """What is declared; where that is a function of the configuration, what it gives for the defaults."""
    return by_default if callable(declared) else declared


def with_defaults(found: Operator) -> OperatorCall | None:
    """The operator with its default configuration, where every value has a default."""
    return None if any(value is REQUIRED for value in found.defaults.values()) else found.bind()


def _writes(found: Operator, call: OperatorCall | None) -> dict[str, str] | None:
    if callable(found.declared.writes):
        return {column.name: str(column.type) for column in call.writes} if call is not None else None
    return {name: str(kind) for name, kind in found.declared.writes.items()}


def written(found: Operator) -> tuple[str, ...] | None:
    """Names of the columns it writes, by default; None where they depend on configuration that has no default."""
    columns = _writes(found, with_defaults(found))
    return None if columns is None else tuple(columns)


def _read(read: Read) -> Description:
    about: Description = {
        "param": read.param,
        "column": read.column,
        "type": None if read.type is None else str(read.type),
    }
    more = {
        "broadcast": read.broadcast,
        "live": read.live,
        "optional": read.is_optional,
        "many": read.is_many,
    }
    return {**about, **{name: value for name, value in more.items() if value}}


def of_pack(pack: packs.Pack | str) -> Description:
    """Everything a pack offers, by name."""
    contents = packs.contents(pack)
    if contents.failures:
        module, reason = next(iter(contents.failures.items()))
        raise ConfigError(f"{module} cannot be imported, so pack '{contents.pack.name}' cannot be described: {reason}")
    return {
        "format": FORMAT,
        "pack": contents.pack.name,
        "version": contents.pack.version,
        "operators": {name: of_operator(one) for name, one in contents.everything.items()},
    }


def read_file(path: str) -> Description:
    """What `ops show --json` (one operator) or `ops list --json --pack PACK` (a pack) wrote.

    Errors: ConfigError when it is neither.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"'{path}' cannot be read as a description of operators: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT or not isinstance(found.get("operators"), dict):
        raise ConfigError(
            f"'{path}' is no description of operators of format {FORMAT}; `flowrl ops list --pack PACK --json` and "
            "`flowrl ops show NAME --json` write one"
        )
    return found


def of_one(name: str, found: Operator | LossFunction) -> Description:
    """One operator in the form of a file."""
    return {"format": FORMAT, "operators": {name: of_operator(found)}}


def text_of(description: Any) -> str:
    return json.dumps(description, indent=2, ensure_ascii=False)
