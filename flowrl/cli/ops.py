"""`flowrl ops`: what the installed packs offer, whether it holds, and what changed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

from flowrl.cli import OK, PROBLEMS, description, lookup
from flowrl.cli.commands import table
from flowrl.errors import ConfigError
from flowrl.graph import packs
from flowrl.graph.losses import LossFunction
from flowrl.graph.operators import REQUIRED, Operator

WIDTH = 120
"""Characters in a line of a list."""

WRITES = 22
"""Of them for the columns an operator writes."""

LEAST = 40
"""Of them at least for what it says of itself, however long the names are."""


def list_packs(only: str | None, *, as_json: bool = False, words: Sequence[str] = ()) -> int:
    """Every pack with its operators and losses. A pack or module that cannot be imported is listed with the reason."""
    known = packs.packs() if only is None else (lookup.pack(only),)
    if as_json:
        if words:
            raise ConfigError("--json describes a whole pack, and --search part of it: give one of them")
        if len(known) != 1:
            raise ConfigError(f"--json describes one pack: --pack {known[0].name if known else 'PACK'}")
        print(description.text_of(description.of_pack(known[0])))
        return OK
    if not known:
        print("no packs are installed; the first one is the distribution flowrl-operators")
        return OK
    if words:
        return _print_matches(words, known)
    failed = False
    for number, pack in enumerate(known):
        print(f"{'' if number == 0 else chr(10)}{pack}")
        found = packs.contents(pack)
        _print_rows("operator", "writes", [(name, _writes(op), op) for name, op in found.operators.items()])
        _print_rows("loss", "", [(name, "", loss) for name, loss in found.losses.items()])
        for module, reason in found.failures.items():
            print(f"  cannot import {module}: {reason}")
        failed = failed or bool(found.failures)
    return PROBLEMS if failed else OK


def show_operator(name: str, *, as_json: bool = False) -> int:
    """One operator or loss in full."""
    found: Any = lookup.named(name)
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

    found = ops_test.of_pack(name) if lookup.is_pack(name) else {name: lookup.named(name)}
    return ops_test.run_tests(name, found, config, cases)


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
    if lookup.is_pack(what):
        return description.of_pack(what)
    return description.of_one(what, lookup.named(what))


def _print_rows(what: str, writes: str, rows: Sequence[tuple[str, str, Operator | LossFunction]]) -> None:
    """A line each: name, columns written, what it says of itself, as far as there is room."""
    if not rows:
        return
    lines = [[what, writes, ""], *([name, lookup.cut(columns, WRITES), ""] for name, columns, _ in rows)]
    if not writes:
        lines = [[name, text] for name, _, text in lines]
    room = max(WIDTH - 2 - max(map(len, table(lines).splitlines())) - 2, LEAST)
    for line, (_, _, found) in zip(lines[1:], rows, strict=True):
        line[-1] = lookup.cut(lookup.first_sentence(found), room)
    print("\n".join(f"  {line}" for line in table(lines).splitlines()))


def _print_matches(words: Sequence[str], among: Sequence[packs.Pack]) -> int:
    """Operators and losses that are named, described or configured with these words, and where that stands."""
    found = lookup.search(words, among)
    if not found:
        said = " and ".join(f"'{word}'" for word in words)
        hint = lookup.nearest_word(words[0], among) if len(words) == 1 else ""
        print(f"no operator and no loss of {', '.join(pack.name for pack in among)} mentions {said}{hint}")
        return PROBLEMS
    for match in found:
        print(match.name)
        for text in (match.sentence, *match.places):
            print(f"    {lookup.cut(text, WIDTH - 4)}")
    return OK


def _writes(found: Operator) -> str:
    columns = description.written(found)
    return "by configuration" if columns is None else ", ".join(columns) or "(keeps rows)"


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
