"""Packs: distributions of operators, found by their entry point and imported only when something in them is asked for.

    [project.entry-points."flowrl.operators"]
    core = "flowrl_operators"                  # pack name = module; importing the module registers nothing

    packs()                        -> what is installed, without importing any of it
    contents("core")               -> its operators and losses, and what could not be imported
    find("core.group_norm")        -> one of them

A module's public functions made with `@fr.operator`, `@fr.reward` or `@fr.loss` are what a pack offers. Names are
`pack.operator`, or `pack.module.operator` where two modules of a pack use one name.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from types import ModuleType
from typing import Any

from flowrl.errors import PackError
from flowrl.graph.code import public_module
from flowrl.graph.losses import LossFunction
from flowrl.graph.operators import REQUIRED, Operator
from flowrl.schema.columns import nearest

GROUP = "flowrl.operators"
"""The entry-point group packs are listed under."""

LOSSES = "losses"
"""Modules of this name may import torch, so they are read last and never for a hint."""


CONFORMANCE = "conformance"
"""The module in which a pack says how its operators are to be tried: a dict CASES. It offers no operators."""


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack as its distribution announces it.

    Example:
        Pack(name="core", module="flowrl_operators", distribution="flowrl-operators", version="0.1.0")
    """

    name: str
    module: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version}, module {self.module})"


@dataclass(frozen=True)
class Contents:
    """What a pack offers."""

    pack: Pack
    operators: dict[str, Operator] = field(default_factory=dict)
    """By `module.name`, e.g. `advantages.group_norm`; a function in the pack's top module has its bare name."""
    losses: dict[str, LossFunction] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """For each module that could not be imported, why."""

    @property
    def everything(self) -> dict[str, Operator | LossFunction]:
        """Operators and losses."""
        return {**self.operators, **self.losses}


def packs() -> tuple[Pack, ...]:
    """Installed packs by name. Nothing is imported.

    Errors: PackError when two distributions use one name; it names both.
    """
    found: dict[str, Pack] = {}
    for entry in metadata.entry_points(group=GROUP):
        dist = entry.dist
        pack = Pack(
            entry.name, entry.value.partition(":")[0], dist.name if dist else "?", dist.version if dist else "?"
        )
        other = found.setdefault(entry.name, pack)
        if (other.distribution, other.module) != (pack.distribution, pack.module):
            raise PackError(
                f"two distributions call their pack '{entry.name}': {other.distribution} {other.version} and "
                f"{pack.distribution} {pack.version}; uninstall one of them"
            )
    return tuple(found[name] for name in sorted(found))


def pack_named(name: str) -> Pack:
    """Errors: PackError naming the installed packs."""
    known = {pack.name: pack for pack in packs()}
    if name not in known:
        raise PackError(f"no pack '{name}' is installed; {nearest(name, known)}")
    return known[name]


def load(name: str) -> ModuleType:
    """Import a pack's module. Errors: PackError with the reason."""
    pack = pack_named(name)
    try:
        return importlib.import_module(pack.module)
    except Exception as error:  # a pack's module may raise anything when it is imported; the reason is passed on
        raise PackError(f"pack {pack} cannot be imported: {_reason(error)}") from error


def contents(pack: Pack | str, *, with_losses: bool = True) -> Contents:
    """Operators and losses in a pack's public modules. A module that cannot be imported is listed with the reason."""
    pack = pack_named(pack) if isinstance(pack, str) else pack
    found = Contents(pack)
    for path, module in _modules(pack.module, "", found.failures, with_losses):
        for name, value in vars(module).items():
            # only what is defined there, or in a private module of it: all else is offered by its own module
            if name.startswith("_") or public_module(getattr(value, "__module__", None) or "") != module.__name__:
                continue
            if isinstance(value, Operator):
                found.operators[f"{path}{name}"] = value
            elif isinstance(value, LossFunction):
                found.losses[f"{path}{name}"] = value
    return found


def own_cases(module: str) -> Mapping[str, Any]:
    """CASES of a pack's module `conformance`: for each operator's name the arguments of `flowrl.testing.check_operator`, or of
    `check_loss`. Empty where there is no such module.

    Errors: PackError when it cannot be imported or has no such dict.
    """
    name = f"{module}.{CONFORMANCE}"
    home = importlib.import_module(module)
    if not hasattr(home, "__path__") or importlib.util.find_spec(name) is None:
        return {}
    try:
        found = importlib.import_module(name).CASES
    except Exception as error:  # a pack's module may raise anything when it is imported; the reason is passed on
        raise PackError(f"{name}, which says how the pack is tried, cannot be used: {_reason(error)}") from error
    if not isinstance(found, Mapping):
        raise PackError(f"{name}.CASES is a dict of operators' names to arguments; found {type(found).__name__}")
    return found


def find(name: str) -> Operator | LossFunction:
    """The operator or loss called `pack.operator` or `pack.module.operator`.

    Errors: PackError with the nearest names, or with all candidates when two modules use the name.
    """
    pack, _, wanted = name.partition(".")
    if not wanted:
        raise PackError(f"a name in a pack is 'pack.operator', e.g. 'core.group_norm'; found '{name}'")
    light = contents(pack, with_losses=False)
    chosen = _matching(light.operators, wanted)
    if not chosen:
        full = contents(pack)
        chosen = _matching(full.everything, wanted)
        if not chosen:
            failed = "".join(f"; its module '{m}' cannot be imported: {why}" for m, why in full.failures.items())
            short = [key.rpartition(".")[2] for key in full.everything]
            raise PackError(f"pack '{pack}' has no '{wanted}'; {nearest(wanted, (*short, *full.everything))}{failed}")
    if len(chosen) > 1:
        raise PackError(
            f"'{name}' may be {' or '.join(f'{pack}.{key}' for key in sorted(chosen))}; write the one you mean"
        )
    found: Operator | LossFunction = next(iter(chosen.values()))
    return found


def writers(column: str) -> tuple[str, ...]:
    """Names of installed operators that write a column, e.g. `core.advantages.group_norm` for `advantage`."""
    return all_writers().get(column, ())


def all_writers() -> dict[str, tuple[str, ...]]:
    """For each column, the installed operators that write it when called with their defaults.

    Packs that cannot be imported, and modules of losses, are left out: this is for hints. What can be called as it stands
    comes first, adapters and what needs worker processes or a server last.
    """
    found: dict[str, list[tuple[bool, bool, str]]] = {}
    for pack in packs():
        for name, operator in contents(pack, with_losses=False).operators.items():
            declared = operator.declared
            needs_more = any(value is REQUIRED for value in operator.defaults.values())
            is_special = declared.processes or declared.threads != 1 or name.startswith("adapters.")
            own = () if callable(declared.writes) else declared.writes
            needed = {read.column for read in operator.reads if not read.is_optional}
            for column in set(own) - needed:  # what rewrites a column cannot be its beginning
                found.setdefault(column, []).append((needs_more, is_special, f"{pack.name}.{name}"))
    return {column: tuple(name for *_, name in sorted(entries)) for column, entries in found.items()}


def _matching(known: Mapping[str, Any], wanted: str) -> dict[str, Any]:
    return {key: value for key, value in known.items() if wanted in (key, key.rpartition(".")[2])}


def _modules(module: str, path: str, failures: dict[str, str], with_losses: bool) -> Iterator[tuple[str, ModuleType]]:
    """(`sub.module.`, module) of a module and its public submodules, depth first; losses after the others."""
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever a module raises when imported is shown with its name, and the others go on
        failures[module] = _reason(error)
        return
    yield path, found
    below = [m.name for m in pkgutil.iter_modules(getattr(found, "__path__", ())) if not m.name.startswith("_")]
    for name in sorted(below, key=lambda n: (n == LOSSES, n)):
        if name != CONFORMANCE and (name != LOSSES or with_losses):
            yield from _modules(f"{module}.{name}", f"{path}{name}.", failures, with_losses)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
