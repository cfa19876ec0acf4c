"""Values a node may hold: frozen, comparable, with a text form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from flowrl.errors import ConfigError, TraceError
from flowrl.graph.code import FunctionRef, path_of, resolve
from flowrl.schema.columns import nearest

Scalar = None | bool | int | float | str


@dataclass(frozen=True, slots=True)
class Component:
    """An object the runtime builds where it runs (an environment): a factory's name and its frozen arguments.

    Made by calling a function decorated with `@fr.component`.
    """

    name: str
    """`module:qualname` of the factory."""
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    factory: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    def build(self) -> Any:
        """Call the factory; it is imported by name when the graph came from text."""
        factory = self.factory if self.factory is not None else resolve(self.name)
        return getattr(factory, "factory", factory)(
            *(thaw(a) for a in self.args), **{k: thaw(v) for k, v in self.kwargs}
        )


class ComponentFactory:
    """A function or class whose call in a flow is recorded instead of made. See `component`."""

    def __init__(self, factory: Callable[..., Any]) -> None:
        self.factory = factory
        self.__doc__ = factory.__doc__
        self.__name__ = factory.__name__
        self.__qualname__ = factory.__qualname__
        self.__module__ = factory.__module__
        self.__wrapped__ = factory

    def __call__(self, *args: Any, **kwargs: Any) -> Component:
        frozen = tuple(freeze(a) for a in args)
        named = tuple(sorted((k, freeze(v)) for k, v in kwargs.items()))
        return Component(path_of(self.factory), frozen, named, self.factory)


def component(factory: Callable[..., Any]) -> ComponentFactory:
    """Declare a factory of runtime objects, such as environments; calling it in a flow records the call.

    Example:
        @fr.component
        class Calculator:
            def __init__(self, digits=2): ...

        rows = fr.rollout(policy, prompts, environment=Calculator(digits=3), max_turns=4)
    """
    return ComponentFactory(factory)


def freeze(value: Any) -> Any:
    """A frozen, comparable equal of `value`, or TraceError with what would do."""
    from flowrl.graph.expressions import ColumnExpr, Expression
    from flowrl.graph.handles import Handle
    from flowrl.graph.losses import Loss
    from flowrl.graph.operators import Operator, OperatorCall

    if isinstance(value, np.generic):  # before the numbers: a NumPy float is a float that prints otherwise
        return freeze(value.item())
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Expression | Loss | OperatorCall | FunctionRef | Component):
        return value
    if isinstance(value, ColumnExpr):
        return value.expression
    if isinstance(value, Operator):
        return value.bind()
    if isinstance(value, ComponentFactory):
        return value()
    if isinstance(value, list | tuple):
        return tuple(freeze(v) for v in value)
    if isinstance(value, Mapping):
        return FrozenMap(tuple(sorted((str(k), freeze(v)) for k, v in value.items())))
    if isinstance(value, Handle):
        raise TraceError(
            f"{value!r} stands for values that exist only when the flow runs, so it cannot be configuration; "
            "pass it as rows or weights, or use fr.where for a choice that depends on data"
        )
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return freeze(value.item())
    if callable(value):
        return FunctionRef.of(value)
    raise TraceError(
        f"a flow's configuration is made of None, bool, int, float, str, lists, dicts, functions, operators and losses; "
        f"found {type(value).__name__}. Data and models are parameters of the flow instead"
    )


@runtime_checkable
class Environment(Protocol):
    """What answers a policy turn by turn in a rollout with `environment=`; a component builds one per rollout node.

    It works on text; the runtime encodes what it says and holds those tokens out of training.

    Example:
        class Guess:
            def reset(self, row):                  # one episode per response
                return {"secret": row["answer"]}

            def step(self, state, response):
                return None if response == state["secret"] else "no, try again"

    One call may take 600 seconds; an attribute `step_timeout_s` says otherwise (None: no limit).
    """

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Begin an episode for one response; `row` has the prompt's columns. Returns the episode's own state."""
        ...

    def step(self, state: Any, response: str) -> str | None:
        """Answer the policy's turn `response` with text for its next turn, or None to end the episode.

        `state` is what `reset` returned for this episode and may be changed in place. Calls for different episodes may come in
        any order.
        """
        ...


@dataclass(frozen=True, slots=True)
class FrozenMap:
    """A dict in a node's parameters."""

    items: tuple[tuple[str, Any], ...]


EMPTY_MAP = FrozenMap(())


def thaw(value: Any) -> Any:
    """Back to plain Python: functions, dicts, lists become usable values."""
    if isinstance(value, FunctionRef):
        return value.resolve()
    if isinstance(value, FrozenMap):
        return {k: thaw(v) for k, v in value.items}
    if isinstance(value, tuple):
        return tuple(thaw(v) for v in value)
    return value


def frozen_defaults(defaults: Mapping[str, Any]) -> FrozenMap:
    """The configuration values that a text need not give, by name.

    A function, an operator or a component is given even so: it is declared in the text, by its hash.
    """
    return FrozenMap(tuple(sorted((name, value) for name, value in defaults.items() if is_plain(value))))


def is_plain(value: Any) -> bool:
    """Whether a frozen value is made of None, numbers, text, tuples and maps alone."""
    match value:
        case None | bool() | int() | float() | str():
            return True
        case tuple():
            return all(map(is_plain, value))
        case FrozenMap(items):
            return all(is_plain(v) for _, v in items)
    return False


def freeze_config(
    name: str, defaults: Mapping[str, Any], args: tuple[Any, ...], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Fill a configuration: positional values go to the names in order; unknown and missing names are refused."""
    from flowrl.graph.operators import REQUIRED

    names = list(defaults)
    if len(args) > len(names):
        raise ConfigError(f"'{name}' has {len(names)} configuration values ({', '.join(names)}); found {len(args)}")
    given = dict(zip(names, args, strict=False))
    for key, value in config.items():
        if key in given:
            raise ConfigError(f"'{name}' got '{key}' twice")
        if key not in defaults:
            raise ConfigError(f"'{name}' has no configuration '{key}'; {nearest(key, names)}")
        given[key] = value
    full = {key: freeze(given[key]) if key in given else value for key, value in defaults.items()}
    missing = [key for key, value in full.items() if value is REQUIRED]
    if missing:
        raise ConfigError(f"'{name}' needs a value for {', '.join(missing)}")
    return full
