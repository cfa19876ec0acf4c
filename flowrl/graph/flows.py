"""Flows: functions from handles to handles.

Example:
    @fr.flow
    def grpo(prompts, policy, ref, *, group_size=8): ...

    grpo.graph(group_size=4)        # the graph
    grpo(group_size=4)              # the same
    grpo(prompts, policy, ref)      # inside another flow: its nodes are added there
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from flowrl.errors import ConfigError, TraceError
from flowrl.graph.code import here, path_of, place_of
from flowrl.graph.handles import Handle, Parts, Rows, Weights, trace
from flowrl.graph.nodes import Graph
from flowrl.graph.operators import REQUIRED
from flowrl.schema.columns import Column, nearest
from flowrl.schema.types import ColumnType
from flowrl.shown import shown

RESERVED = frozenset({"flow", "steps", "seed", "engine", "options", "models"})
"""Names of run options, which a flow's parameters may therefore not have."""


class Flow:
    """A function that writes an algorithm as a graph. Made by `@fr.flow`."""

    def __init__(self, function: Callable[..., Any], columns: dict[str, tuple[Column, ...]]) -> None:
        self.function = function
        self.name = function.__name__
        self.path = path_of(function)
        self.place = place_of(function)
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self.__qualname__ = function.__qualname__
        self.__module__ = function.__module__
        self.__wrapped__ = function
        self.parameters, self.defaults = _signature(function, columns)

    def graph(self, **config: Any) -> Graph:
        """Trace the function once with handles and return the graph. Nothing runs.

        Errors: ConfigError for an unknown or missing configuration value; TraceError for what cannot become a graph.
        """
        full = self._config(config)
        parameters = tuple((name, kind, columns) for name, (kind, columns) in self.parameters.items())
        return trace(self.name, self.function, parameters, self.place, **full)

    def _config(self, config: dict[str, Any]) -> dict[str, Any]:
        for key in config:
            if key not in self.defaults:
                known = nearest(key, self.defaults)
                hint = "it is an input, given when the flow runs" if key in self.parameters else known
                raise ConfigError(f"flow '{self.name}' has no configuration '{key}'; {hint}")
        full = {**self.defaults, **config}
        missing = [key for key, value in full.items() if value is REQUIRED]
        if missing:
            raise ConfigError(f"flow '{self.name}' needs a value for {', '.join(missing)}")
        return full

    def __call__(self, *handles: Any, **config: Any) -> Any:
        """With handles: add this flow's nodes to the flow being traced. With configuration alone: the graph."""
        given = {name: config.pop(name) for name in list(config) if name in self.parameters}
        if not handles and not given:
            return self.graph(**config)
        for value in (*handles, *given.values()):
            if not isinstance(value, Handle | Parts):
                raise TraceError(
                    f"at {here()}: flow '{self.name}' is called with {type(value).__name__}; inside another flow it takes "
                    f"handles, and data and models are given when it runs: fr.run_local({self.name}, "
                    f"{', '.join(f'{p}=...' for p in self.parameters)})"
                )
        return self.function(*handles, **given, **self._config(config))

    def check(self, **config: Any) -> tuple[Any, ...]:
        """Problems of the traced graph, all at once."""
        return self.graph(**config).check()

    def __repr__(self) -> str:
        inputs = ", ".join(self.parameters)
        config = ", ".join(f"{name}={value!r}" for name, value in self.defaults.items())
        return f"<flow {self.name}({inputs}{'; ' if config else ''}{config})>"

    def _repr_html_(self) -> str:
        return shown("flow", self)

    def __copy__(self) -> Flow:
        return self  # it never changes

    def __deepcopy__(self, memo: dict[int, Any]) -> Flow:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        from flowrl.graph.code import resolve

        return (resolve, (self.path,))


def flow(
    function: Callable[..., Any] | None = None, /, *, columns: dict[str, dict[str, ColumnType]] | None = None
) -> Any:
    """Declare a function as a flow: positional parameters are tables and models, keyword-only ones configuration.

    Args:
        columns: for a parameter, columns its data set brings besides the standard ones:
            `@fr.flow(columns={"prompts": {"difficulty": fr.PROMPT.f32}})`.
    """
    declared = {
        name: tuple(Column(c, t, from_data=True) for c, t in columns_of.items())
        for name, columns_of in (columns or {}).items()
    }
    if function is not None:
        return Flow(function, declared)
    return lambda f: Flow(f, declared)


def _signature(
    function: Callable[..., Any], columns: dict[str, tuple[Column, ...]]
) -> tuple[dict[str, tuple[str, tuple[Column, ...]]], dict[str, Any]]:
    parameters: dict[str, tuple[str, tuple[Column, ...]]] = {}
    defaults: dict[str, Any] = {}
    for param in inspect.signature(function).parameters.values():
        if param.kind in (param.VAR_POSITIONAL, param.VAR_KEYWORD):
            raise TraceError(
                f"flow '{function.__name__}' has '*{param.name}'; name every input and configuration value"
            )
        if param.kind is param.KEYWORD_ONLY:
            defaults[param.name] = REQUIRED if param.default is param.empty else param.default
            continue
        if param.default is not param.empty:
            raise TraceError(
                f"input '{param.name}' of flow '{function.__name__}' has a default; configuration goes after '*': "
                f"def {function.__name__}(..., *, {param.name}=...)"
            )
        if param.name in RESERVED:
            raise TraceError(
                f"input '{param.name}' of flow '{function.__name__}' has the name of a run option "
                f"({', '.join(sorted(RESERVED))}); call it something else"
            )
        kinds = {
            Rows: "rows",
            "Rows": "rows",
            "fr.Rows": "rows",
            Weights: "weights",
            "Weights": "weights",
            "fr.Weights": "weights",
        }
        parameters[param.name] = (kinds.get(param.annotation, ""), columns.get(param.name, ()))
    for name in columns:
        if name not in parameters:
            raise TraceError(
                f"flow '{function.__name__}' has no input '{name}' for columns=; {nearest(name, parameters)}"
            )
    return parameters, defaults
