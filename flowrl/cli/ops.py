"""`flowrl ops`: what the installed packs offer, whether it holds, and what changed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flowrl.cli import OK, PROBLEMS, description
from flowrl.cli.commands import table
from flowrl.errors import ConfigError, PackError
from flowrl.graph import packs
from flowrl.graph.losses import LossFunction
from flowrl.graph.operators import REQUIRED, Operator
from flowrl.recipe import targets


def list_packs(only: str | None, *, as_json: bool = False) -> int:
    """Every pack with its operators and losses. A pack or module that cannot be imported is listed with the reason."""
    known = packs.packs()
    if only is not None:
        known = (_asked(lambda: packs.pack_named(only)),)
    if as_json:
        if len(known) != 1:
            raise ConfigError(f"--json describes one pack: --pack {known[0].name if known else 'PACK'}")
        print(description.text_of(description.of_pack(known[0])))
        return OK
    if not known:
        print("no packs are installed; the first one is the distribution flowrl-operators")
        return OK
    failed = False
    for number, pack in enumerate(known):
        print(f"{'' if number == 0 else chr(10)}{pack}")
        found = packs.contents(pack)
        _print_rows(
            "operator", [[name, _reads(op), _writes(op), _locality(op)] for name, op in found.operators.items()]
        )
        _print_rows("loss", [[name, _reads(loss), "", _locality(loss)] for name, loss in found.losses.items()])
        for module, reason in found.failures.items():
            print(f"  cannot import {module}: {reason}")
        failed = failed or bool(found.failures)
    return PROBLEMS if failed else OK


def show_operator(name: str, *, as_json: bool = False) -> int:
    """One operator or loss in full."""
    found: Any = _named(name)
    if as_json:
        print(description.text_of(description.of_one(name, found)))
        return OK
    is_loss = isinstance(found, LossFunction)
    rows = [["kind", "loss" if is_loss else "filter" if found.declared.is_filter else "operator"]]
    rows += [["defined", f"{found.name} ({found.place})"], ["hash", found.hash], ["locality", _locality(found)]]
    rows += [["reads" if i == 0 else "", re.sub(r"\$(\w+)", r"<\1>", str(read))] for i, read in enumerate(found.reads)]
    if is_loss:
        settled = {
            key: value for key, value in found.properties.items() if key != "locality" and value not in (None, False)
        }
        rows += [["declares" if i == 0 else "", f"{key}={value}"] for i, (key, value) in enumerate(settled.items())]
    else:
        rows += [["writes" if i == 0 else "", text] for i, text in enumerate(_written(found))]
        rows += [["state", "remembers between steps"]] if found.state_param else []
    rows += [
        ["config" if i == 0 else "", f"{key} (required)" if value is REQUIRED else f"{key} = {value!r}"]
        for i, (key, value) in enumerate(found.defaults.items())
    ]
    print(f"{name}\n")
    print(table(rows))
    doc = inspect.getdoc(found.function)
    if doc:
        print(f"\n{doc}")
    return OK


def test(name: str, config: Sequence[str], cases: str | None) -> int:
    """Try an operator, or everything of a pack, with the conformance kit."""
    from flowrl.cli import ops_test

    is_pack = "." not in name and ":" not in name
    if is_pack:
        _asked(lambda: packs.pack_named(name))
    return ops_test.run_tests(name, ops_test.of_pack(name) if is_pack else {name: _named(name)}, config, cases)


def compat(old: str, new: str) -> int:
    """Say what the change from one version to another means for users."""
    from flowrl.cli.compat import Level, compare, level_of

    changes = compare(_described(old), _described(new))
    level = level_of(changes)
    print(f"{level}: {old} to {new}" if level else f"no change: {old} to {new}")
    if changes:
        print("\n" + table([[str(change.level), change.name, change.text] for change in changes]))
    return PROBLEMS if level is Level.MAJOR else OK


def _described(what: str) -> description.Description:
    """The description of a pack, an operator, or one written by --json."""
    if what.endswith(".json"):
        return description.read_file(what)
    if "." not in what and ":" not in what:
        return description.of_pack(_asked(lambda: packs.pack_named(what)))
    return description.of_one(what, _named(what))


def _named(name: str) -> Operator | LossFunction:
    """The operator or loss that `PACK.OPERATOR`, `FILE.py:NAME` or `module:NAME` names."""
    packs.packs()  # a name claimed by two distributions is no mistake of whoever asks
    if ":" in name or name.endswith(".py"):
        return _in_file(name)
    found: Operator | LossFunction = _asked(lambda: packs.find(name), name)
    return found


def _in_file(target: str) -> Operator | LossFunction:
    """The operator or loss that `FILE.py:NAME` or `module:NAME` names."""
    where, name = targets.split_target(target)
    if not name:
        raise ConfigError(f"name the operator or loss of the file: {where}:NAME")
    found = targets.find(target)
    if not isinstance(found, Operator | LossFunction):
        raise ConfigError(f"'{target}' is a {type(found).__name__}; it should be an operator or a loss")
    return found


def _asked(look_up: Callable[[], Any], name: str = "") -> Any:
    """A look-up of what was typed: a name that does not exist is wrong usage."""
    try:
        return look_up()
    except PackError as error:
        pack = name.partition(".")[0]
        own = f"; what a file defines is named {pack}.py:NAME" if Path(f"{pack}.py").is_file() else ""
        raise ConfigError(f"{error}{own}") from error


def _print_rows(what: str, rows: list[list[str]]) -> None:
    if rows:
        lines = table([[what, "reads", "writes", "locality"], *rows]).splitlines()
        print("\n".join(f"  {line}" for line in lines))


def _reads(found: Operator | LossFunction) -> str:
    return ", ".join(f"{_column(found, read.column)}{'?' if read.is_optional else ''}" for read in found.reads) or "-"


def _column(found: Operator | LossFunction, column: str) -> str:
    """A column's name; where a configuration value holds it, the default one."""
    default = found.defaults.get(column[1:]) if column.startswith("$") else column
    return default if isinstance(default, str) else f"<{column[1:]}>"


def _writes(found: Operator) -> str:
    if not callable(found.declared.writes):
        return ", ".join(found.declared.writes) or "(keeps rows)"
    call = description.with_defaults(found)
    return ", ".join(column.name for column in call.writes) if call is not None else "by configuration"


def _written(found: Operator) -> list[str]:
    """Columns with types; those that depend on the configuration as they are by default, when it has defaults."""
    writes = found.declared.writes
    if not callable(writes):
        return [f"{column}: {kind}" for column, kind in writes.items()] or ["no columns; says which rows to keep"]
    call = description.with_defaults(found)
    if call is None:
        return ["depends on the configuration"]
    return [f"{column.name}: {column.type} (by default)" for column in call.writes]


def _locality(found: Operator | LossFunction) -> str:
    declared = found.properties["locality"] if isinstance(found, LossFunction) else found.declared.locality
    if not callable(declared) or isinstance(found, LossFunction):
        return str(declared)
    call = description.with_defaults(found)
    return f"{call.locality} by default" if call is not None else "by configuration"
