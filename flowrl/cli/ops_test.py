"""`flowrl ops test`: the conformance kit from the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.cli import OK, PROBLEMS
from flowrl.cli.commands import table
from flowrl.errors import ConfigError
from flowrl.graph import packs
from flowrl.graph.losses import LossFunction
from flowrl.graph.operators import Operator
from flowrl.recipe import targets
from flowrl.recipe.typed import parse_value


def run_tests(name: str, found: Mapping[str, Operator | LossFunction], config: Sequence[str], cases: str | None) -> int:
    """Try every property of what was found; print a table and what is wrong."""
    settings = settings_of(cases, found)
    if config:
        if len(found) != 1:
            raise ConfigError(
                f"--config is for one operator; '{name}' names {len(found)}: settings of several come by --cases"
            )
        key = next(iter(found))
        several = settings.get(key, {})
        given = several[0] if isinstance(several, list) else several
        settings[key] = {**given, "config": _pairs(config)}
    return _one(name, found, settings) if len(found) == 1 else _many(name, found, settings)


def settings_of(cases: str | None, found: Mapping[str, Any]) -> dict[str, Any]:
    """The dict that FILE.py:NAME names: for each operator the keyword arguments of `flowrl.testing.check_operator`. Without it
    what the packs say of themselves."""
    if cases is None:
        known = packs.packs()  # reads the metadata of every distribution, so once for all that was found
        return {name: said for name, one in found.items() if (said := _said_by_its_pack(one, known)) is not None}
    given = targets.find(cases)
    if not isinstance(given, Mapping) or not all(isinstance(v, Mapping | list) for v in given.values()):
        raise ConfigError(
            f"--cases names a dict of operators' names to keyword arguments of flowrl.testing.check_operator; {cases} is a "
            f"{type(given).__name__}"
        )
    return {name: value for key, value in given.items() for name in found if _is_meant(key, name)}


def _said_by_its_pack(one: Operator | LossFunction, known: Sequence[packs.Pack]) -> Any:
    """How the pack that has an operator or a loss tries it; None where it says nothing."""
    module, _, function = one.name.partition(":")
    for pack in known:
        if f"{module}.".startswith(f"{pack.module}."):
            inside = f"{module}.{function}".removeprefix(f"{pack.module}.")
            return packs.own_cases(pack.module).get(inside)
    return None


def _is_meant(key: str, name: str) -> bool:
    """Whether a key such as `advantages.centred` names `core.centred`, `core.advantages.centred` or `file.py:centred`."""
    if key == name:
        return True
    parts, asked = re.split("[.:]", name), re.split("[.:]", key)
    same = min(len(parts), len(asked))
    return parts[-1] == asked[-1] and (parts[-same:] == asked[-same:] or len(parts) == 2 or ":" in name)


def _one(title: str, found: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    from flowrl.testing._cases import by_cause, cases_of

    ((name, one),) = found.items()
    cases = cases_of(name, one, settings.get(name, {}))
    wrong = ["" if case.skipped else case.failure() for case in cases]
    rows = [
        [case.property, "skipped" if case.skipped else "fails" if failed else "ok", case.skipped or case.says]
        for case, failed in zip(cases, wrong, strict=True)
    ]
    print(f"{title}\n\n{table(rows)}")
    return _told(by_cause(list(zip(cases, wrong, strict=True))))


def _many(title: str, found: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    from flowrl.testing._cases import cases_of, failures

    rows: list[list[str]] = []
    wrong: list[str] = []
    for name, one in found.items():
        try:
            cases = cases_of(name, one, settings.get(name, {}))
        except ConfigError as error:
            rows.append([name, "not tried", ""])
            wrong.append(f"{name} is not tried: {error}")
            continue
        told = failures(cases)
        tried = [case for case in cases if not case.skipped]
        skipped = [case.property for case in cases if case.skipped]
        rows.append([name, "fails" if told else "ok" if tried else "skipped", f"{len(tried)} properties"])
        if skipped:
            rows[-1][2] += f", skipped: {', '.join(skipped)}"
        wrong.extend(told)
    print(f"{title}\n\n{table(rows)}")
    return _told(wrong)


def _told(wrong: list[str]) -> int:
    if not wrong:
        return OK
    print("\n" + "\n\n".join(wrong))
    return PROBLEMS


def _pairs(config: Sequence[str]) -> dict[str, Any]:
    found = {}
    for item in config:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"--config takes KEY=VALUE; found {item!r}")
        found[key.strip()] = parse_value(value)
    return found


def of_pack(name: str) -> dict[str, Operator | LossFunction]:
    """Everything a pack offers. Errors: ConfigError with the module that cannot be imported."""
    contents = packs.contents(name)
    for module, reason in contents.failures.items():
        raise ConfigError(f"{module} of pack '{name}' cannot be imported: {reason}")
    return contents.everything
