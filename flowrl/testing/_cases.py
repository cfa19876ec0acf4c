"""Cases: one property of one operator or loss, under every configuration that is tried."""

from __future__ import annotations

import re
import unittest
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from flowrl.errors import ConfigError, PackError
from flowrl.graph import packs
from flowrl.graph.losses import LossFunction, Term
from flowrl.graph.operators import REQUIRED, Operator, OperatorCall
from flowrl.schema.columns import nearest
from flowrl.testing import _losses, _operators
from flowrl.testing._findings import Broken, ConformanceError
from flowrl.testing._inputs import Maker
from flowrl.testing._operators import Property

Subject = Operator | OperatorCall | LossFunction | Term
Config = Mapping[str, Any]
Settings = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Keyword arguments of `check_operator` or `check_loss`, or several to try one after the other."""

ALL = "*"
"""In `skip`: every property."""


@dataclass(frozen=True)
class Case:
    """One property of one operator or loss. `str(case)` is a readable name for it: `advantages.group_norm-chunks`.

    Example:
        @pytest.mark.parametrize("case", operator_cases(centred), ids=str)
        def test_centred(case):
            case.check()
    """

    name: str
    property: str
    says: str
    """What must hold."""
    trials: tuple[Any, ...] = field(repr=False)
    """One for each configuration."""
    holds: Property = field(repr=False)
    skipped: str = ""
    """Why it is not tried, or empty."""

    def __str__(self) -> str:
        return f"{self.name}-{self.property}"

    def check(self) -> None:
        """Errors: ConformanceError with the smallest input that shows it; unittest.SkipTest when it is skipped."""
        if self.skipped:
            raise unittest.SkipTest(self.skipped)
        message = self.failure()
        if message:
            raise ConformanceError(message)

    def failure(self) -> str:
        """What is wrong, or empty."""
        for trial in self.trials:
            try:
                self.holds.check(trial)
            except Broken as broken:
                config = dict((trial.call if hasattr(trial, "call") else trial.term).config)
                shown = f"({', '.join(f'{k}={v!r}' for k, v in config.items())})" if config else ""
                return f"{self.name}{shown} breaks '{self.property}' ({self.says}):\n{broken}"
        return ""


def operator_cases(
    operator: Operator | OperatorCall,
    *,
    config: Config | Sequence[Config] | None = None,
    columns: Mapping[str, Maker] | None = None,
    skip: Mapping[str, str] | None = None,
    seed: int = 0,
    name: str = "",
) -> list[Case]:
    """The properties of an operator as cases, for `pytest.mark.parametrize`; arguments as in `check_operator`."""
    if not isinstance(operator, Operator | OperatorCall):
        raise ConfigError(f"operator_cases needs an operator (@fr.operator); found {type(operator).__name__}")
    short = name or (operator.short_name if isinstance(operator, OperatorCall) else operator.__name__)
    if skip and ALL in skip:
        return _skipped(short, _operators.PROPERTIES, skip)
    calls = (
        [operator] if isinstance(operator, OperatorCall) else [operator.bind(**c) for c in _configs(operator, config)]
    )
    of = operator if isinstance(operator, Operator) else None
    trials = tuple(_operators.Trial(of, call, columns or {}, seed) for call in calls)
    return list(_made(short, trials, _operators.PROPERTIES, skip or {}))


def loss_cases(
    loss: LossFunction | Term,
    *,
    config: Config | Sequence[Config] | None = None,
    columns: Mapping[str, Maker] | None = None,
    skip: Mapping[str, str] | None = None,
    stop_gradient: str = "",
    seed: int = 0,
    name: str = "",
) -> list[Case]:
    """The properties of a loss as cases, for `pytest.mark.parametrize`; arguments as in `check_loss`."""
    if not isinstance(loss, LossFunction | Term):
        raise ConfigError(f"loss_cases needs a loss (@fr.loss) or one term; found {type(loss).__name__}")
    short = name or (loss.short_name if isinstance(loss, Term) else loss.__name__)
    if skip and ALL in skip:
        return _skipped(short, _losses.PROPERTIES, skip)
    terms = [loss] if isinstance(loss, Term) else [loss(**c) for c in _configs(loss, config)]
    of = loss if isinstance(loss, LossFunction) else None
    trials = tuple(_losses.Trial(of, term, columns or {}, seed, stop_gradient) for term in terms)
    return list(_made(short, trials, _losses.PROPERTIES, skip or {}))


def pack_cases(pack: str | ModuleType, *, settings: Mapping[str, Settings] | None = None) -> list[Case]:
    """All cases of a pack's operators and losses; arguments as in `check_pack`. Without settings those that the pack has itself
    are taken: the dict CASES of its module `conformance`."""
    if isinstance(pack, ModuleType):
        found = packs.contents(packs.Pack(pack.__name__, pack.__name__, "", ""))
    else:
        try:
            found = packs.contents(pack)
        except PackError as error:
            raise PackError(
                f"{error}; install yours (pip install -e .), or give its module in place of its name"
            ) from error
    if found.failures:
        listed = "; ".join(f"{module}: {reason}" for module, reason in found.failures.items())
        raise PackError(f"a module of pack '{found.pack.name}' cannot be imported: {listed}")
    everything = found.everything
    if not everything:
        raise PackError(f"pack '{found.pack.name}' offers no operator and no loss")
    given = dict(packs.own_cases(found.pack.module) if settings is None else settings)
    for key in given:
        if key not in everything:
            raise ConfigError(f"settings name '{key}', which the pack does not have; {nearest(key, everything)}")
    return [case for name, one in everything.items() for case in cases_of(name, one, given.get(name, {}))]


def cases_of(name: str, one: Operator | LossFunction, settings: Settings) -> list[Case]:
    """Cases of one operator or loss under its settings; where these are several, the later ones are called `name#2`, ..."""
    make: Any = operator_cases if isinstance(one, Operator) else loss_cases
    several = [settings] if isinstance(settings, Mapping) else settings
    try:
        return [
            case
            for number, given in enumerate(several, 1)
            for case in make(one, name=name if number == 1 else f"{name}#{number}", **given)
        ]
    except TypeError as error:  # keyword arguments of a dict somebody wrote
        raise ConfigError(f"the settings of '{name}' do not fit: {error}") from error


def check_operator(
    operator: Operator | OperatorCall,
    *,
    config: Config | Sequence[Config] | None = None,
    columns: Mapping[str, Maker] | None = None,
    skip: Mapping[str, str] | None = None,
    seed: int = 0,
) -> None:
    """Try everything an operator must hold on inputs made from what it reads.

    Example:
        check_operator(centred)
        check_operator(centred, config=[{}, {"scale": 0.5}], columns={"reward": lambda rng, n: rng.normal(size=n)})

    Args:
        operator: an operator, or one with its configuration (`centred(scale=0.5)`).
        config: a configuration to try, or several; None tries the defaults.
        columns: how to make a column when its type and name are not enough: a function of a random generator and the number
            of rows (of prompts for a PROMPT column; for TOKEN and TURN columns `lengths`, how long each row's list is).
        skip: properties that do not hold, each with the reason; `{"*": reason}` tries none.
        seed: of the inputs.

    Errors: ConformanceError listing every property that does not hold; ConfigError for arguments that fit nothing.
    """
    _refuse_broken(operator_cases(operator, config=config, columns=columns, skip=skip, seed=seed))


def check_loss(
    loss: LossFunction | Term,
    *,
    config: Config | Sequence[Config] | None = None,
    columns: Mapping[str, Maker] | None = None,
    skip: Mapping[str, str] | None = None,
    stop_gradient: str = "",
    seed: int = 0,
) -> None:
    """Try everything a loss must hold on tensors made from what it reads.

    Args:
        loss: a loss, or a term (`clipped(0.2)`).
        config, skip, seed: as in `check_operator`.
        columns: as in `check_operator`; a function of a random generator and of the number of rows, or of their lengths.
        stop_gradient: why some of its live columns are held constant on purpose (importance weights, say). Without it, the
            gradient must be the derivative of the value.

    Errors: ConformanceError listing every property that does not hold; ConfigError for arguments that fit nothing.
    """
    _refuse_broken(loss_cases(loss, config=config, columns=columns, skip=skip, stop_gradient=stop_gradient, seed=seed))


def check_pack(pack: str | ModuleType, *, settings: Mapping[str, Settings] | None = None) -> None:
    """Check every operator and loss of a pack.

    Example:
        check_pack("my_pack", settings={"losses.clipped": {"stop_gradient": "the ratio weighs"}})

    Args:
        pack: name of an installed pack, or the module of one that is not.
        settings: for each operator or loss that needs some, the keyword arguments of `check_operator` or `check_loss`, or a list
            of such to try one after the other.

    Errors: ConformanceError listing everything that does not hold; PackError when a module cannot be imported.
    """
    _refuse_broken(pack_cases(pack, settings=settings))


def _refuse_broken(cases: Sequence[Case]) -> None:
    told = failures(cases)
    if told:
        raise ConformanceError("\n\n".join(told))


def failures(cases: Sequence[Case]) -> list[str]:
    """What does not hold, a text for each cause; the properties that one cause breaks are listed with it."""
    return by_cause([(case, "" if case.skipped else case.failure()) for case in cases])


def by_cause(told: Sequence[tuple[Case, str]]) -> list[str]:
    """What cases say, empty where they hold, with one text for each cause."""
    found: dict[tuple[str, str], tuple[str, list[str]]] = {}
    for case, message in told:
        if message:
            found.setdefault((case.name, _cause(message)), (message, []))[1].append(case.property)
    return [
        message + (f"\n  also breaks {', '.join(broken[1:])}" if len(broken) > 1 else "")
        for message, broken in found.values()
    ]


def _cause(message: str) -> str:
    """What went wrong, whatever the input: without places, numbers and the rows that showed it."""
    line = message.splitlines()[1]
    line = re.sub(r"^(operator|loss) '.*?(failed.*?: (?=\w+: )|, on .*?: )", "", line)
    return re.sub(r"\d+( values?)?", "#", line)


def _configs(of: Operator | LossFunction, config: Config | Sequence[Config] | None) -> Sequence[Config]:
    missing = [name for name, value in of.defaults.items() if value is REQUIRED]
    if config is None and missing:
        raise ConfigError(
            f"'{of.__name__}' needs a value for {', '.join(missing)} to be tried: config={{{missing[0]!r}: ...}}"
        )
    if config is None:
        return [{}]
    return [config] if isinstance(config, Mapping) else list(config)


def _skipped(name: str, properties: Mapping[str, Property], skip: Mapping[str, str]) -> list[Case]:
    """One case for all properties of what is not tried at all, so that it may want configuration that nobody gave."""
    _refuse_skips(name, properties, skip)
    return [Case(name, "all", "is not tried", (), next(iter(properties.values())), skip[ALL])]


def _made(
    name: str, trials: tuple[Any, ...], properties: Mapping[str, Property], skip: Mapping[str, str]
) -> Iterator[Case]:
    _refuse_skips(name, properties, skip)
    for key, one in properties.items():
        applying = tuple(trial for trial in trials if one.applies(trial))
        if applying:
            yield Case(name, key, one.says, applying, one, skip.get(key, ""))


def _refuse_skips(name: str, properties: Mapping[str, Property], skip: Mapping[str, str]) -> None:
    for known, reason in skip.items():
        if known != ALL and known not in properties:
            raise ConfigError(f"skip names '{known}', which is no property of '{name}'; {nearest(known, properties)}")
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError(f"skip gives the reason why '{name}' need not hold '{known}'; found {reason!r}")
