"""`flowrl ops compat OLD NEW`: what a change of a pack means for whoever uses it.

major   flows that were right may be refused, or give other numbers without a word
minor   every flow that was right is right and means the same
patch   what is declared is the same; the code differs, so numbers may
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flowrl.cli.description import Description
from flowrl.schema.types import ColumnType


class Level(enum.IntEnum):
    """How much a change asks of users. Ordered: the greatest of all changes is that of the whole."""

    SAME = 0
    PATCH = 1
    MINOR = 2
    MAJOR = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Change:
    """One difference.

    Example:
        Change(Level.MAJOR, "advantages.centred", "does not write 'baseline' any more")
    """

    level: Level
    name: str
    text: str


def compare(old: Description, new: Description) -> list[Change]:
    """Every difference between two descriptions, the greatest first. Two single operators are compared whatever their names."""
    before, after = old["operators"], new["operators"]
    if len(before) == len(after) == 1:
        ((name, one),), ((_, other),) = before.items(), after.items()
        found = list(_compared(name, one, other))
    else:
        found = [Change(Level.MAJOR, name, "is gone") for name in before if name not in after]
        found += [Change(Level.MINOR, name, f"is new ({after[name]['kind']})") for name in after if name not in before]
        for name in before:
            if name in after:
                found += _compared(name, before[name], after[name])
    return sorted(found, key=lambda change: (-change.level, change.name))


def level_of(changes: list[Change]) -> Level:
    return max((change.level for change in changes), default=Level.SAME)


def _compared(name: str, old: Description, new: Description) -> Iterator[Change]:
    found = [
        Change(level, name, text)
        for part in (_kind, _reads, _writes, _config, _locality, _declares)
        for level, text in part(old, new)
    ]
    if old["hash"] != new["hash"] and not found:
        found = [
            Change(
                Level.PATCH,
                name,
                "its code differs (or that of a helper); what it declares is the same, numbers may not be",
            )
        ]
    yield from found


Found = Iterator[tuple[Level, str]]


def _kind(old: Description, new: Description) -> Found:
    if old["kind"] != new["kind"]:
        yield Level.MAJOR, f"was a{'n' if old['kind'][0] in 'aeiou' else ''} {old['kind']}, is a {new['kind']}"


def _reads(old: Description, new: Description) -> Found:
    before, after = ({read["column"]: read for read in side["reads"]} for side in (old, new))
    for column, read in after.items():
        if column not in before:
            optional = bool(read.get("optional"))
            yield (
                (Level.MINOR if optional else Level.MAJOR),
                f"reads '{column}'{', optionally' if optional else ' too'}",
            )
    for column, read in before.items():
        if column not in after:
            yield Level.MINOR, f"does not read '{column}' any more"
        else:
            yield from _one_read(column, read, after[column])
    kept = [column for column in before if column in after]
    if kept != [column for column in after if column in before]:
        yield Level.MAJOR, f"takes its columns in another order ({', '.join(after)}), which calls on arrays rely on"
    elif any(column not in before for column in list(after)[: len(kept)]) and kept:
        yield Level.MAJOR, "a new column comes before old ones, whose places calls on arrays rely on"


def _one_read(column: str, old: Description, new: Description) -> Found:
    if bool(old.get("many")) != bool(new.get("many")):
        yield Level.MAJOR, f"reads '{column}' as {'many columns' if new.get('many') else 'one column'}"
    if old.get("optional") and not new.get("optional"):
        yield Level.MAJOR, f"needs '{column}', which was optional"
    if new.get("optional") and not old.get("optional"):
        yield Level.MINOR, f"does without '{column}'"
    for how in ("broadcast", "live"):
        was, now = old.get(how, ""), new.get(how, "")
        if was != now:
            if was:
                yield Level.MAJOR, f"does not take '{was}' for '{column}' any more"
            if now:
                yield Level.MINOR, f"takes '{now}' where '{column}' is not there"
    if old["type"] != new["type"]:
        wider = new["type"] is None or (
            old["type"] is not None and ColumnType.parse(new["type"]).accepts(ColumnType.parse(old["type"]))
        )
        yield (
            (Level.MINOR if wider else Level.MAJOR),
            f"reads '{column}' as {new['type'] or 'any type'}, was {old['type'] or 'any type'}",
        )


def _writes(old: Description, new: Description) -> Found:
    if "writes" not in old or "writes" not in new:
        return
    before, after = old["writes"], new["writes"]
    if before is None or after is None:  # decided by configuration that has no default
        if before != after:
            yield Level.MAJOR, "what it writes depends on its configuration now, or no longer does"
        return
    for column, kind in before.items():
        if column not in after:
            yield Level.MAJOR, f"does not write '{column}' any more"
        elif after[column] != kind:
            yield Level.MAJOR, f"writes '{column}' as {after[column]}, was {kind}"
    for column in after:
        if column not in before:
            yield Level.MINOR, f"writes '{column}' too"


def _config(old: Description, new: Description) -> Found:
    before, after = old["config"], new["config"]
    for key, value in before.items():
        if key not in after:
            yield Level.MAJOR, f"has no configuration '{key}' any more"
        elif "default" in value and "default" not in after[key]:
            yield Level.MAJOR, f"needs a value for '{key}', which had a default"
        elif "default" not in value and "default" in after[key]:
            yield Level.MINOR, f"'{key}' has a default now: {after[key]['default']}"
        elif value != after[key]:
            yield Level.MAJOR, f"'{key}' is {after[key]['default']} by default, was {value['default']}: numbers change"
    for key, value in after.items():
        if key not in before:
            if "default" in value:
                yield Level.MINOR, f"has a configuration '{key}' (default {value['default']})"
            else:
                yield Level.MAJOR, f"needs a value for '{key}'"
    kept = [key for key in before if key in after]
    if list(after)[: len(kept)] != kept:
        yield Level.MAJOR, "its configuration values have other places, which values without names rely on"


def _locality(old: Description, new: Description) -> Found:
    if old["locality"] != new["locality"]:
        yield (
            Level.MAJOR,
            f"its locality is {new['locality'] or 'by configuration'}, was {old['locality'] or 'by configuration'}",
        )


def _declares(old: Description, new: Description) -> Found:
    if old["kind"] != new["kind"]:
        return
    for key, was in old["declares"].items():
        now = new["declares"].get(key)
        if was != now:
            yield (Level.MINOR if _is_looser(key, was, now) else Level.MAJOR), f"declares {key}={now!r}, was {was!r}"


def _is_looser(key: str, was: Any, now: Any) -> bool:
    """Whether all that was accepted still is."""
    match key:
        case "min_group":
            return isinstance(was, int) and isinstance(now, int) and now < was
        case "on_policy":
            return was and not now
        case "max_staleness":
            return now is None or (was is not None and now > was)
        case "corrects" | "replaces":
            return now and not was
    return False
