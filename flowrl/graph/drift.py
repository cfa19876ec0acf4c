"""Code that is not what it was when the text of a graph was written.

A text names operators, losses and functions with their hashes. When one has another hash now, the run is refused; with
`allow_drift=True` the graph is rewritten to the code as it is now, and the run says which code that was and is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flowrl.errors import FlowError, TraceError
from flowrl.graph.code import DO_ABOUT_DRIFT, FunctionRef, code_hash, resolve
from flowrl.graph.losses import LossFunction, Product, Scale, Sum, Term
from flowrl.graph.nodes import Graph
from flowrl.graph.operators import Operator, OperatorCall
from flowrl.graph.values import Component, FrozenMap


@dataclass(frozen=True, slots=True)
class Drift:
    """One operator, loss or function that has changed.

    Example:
        Drift(name="my_pack.advantages:centred", then="5f0c37a1f2c6", now="0b1d2e9a77c4")
    """

    name: str
    then: str
    now: str

    def __str__(self) -> str:
        return f"'{self.name}' (hash {self.then} then, {self.now} now)"


def without_drift(graph: Graph, *, allowed: bool) -> tuple[Graph, tuple[Drift, ...]]:
    """(a graph from a text with everything that has changed taken as it is now, what has changed, each once).

    Operators and losses keep the configuration the graph gives them. Code that cannot be imported is left as it is: the error
    comes where it is used.

    Errors: TraceError that names everything that has changed, unless it is `allowed`; ConfigError when a configuration does
    not fit (any more).
    """
    found: dict[tuple[str, str], Drift] = {}

    def renewed(value: Any) -> Any:
        now = _now(value)
        if now is None:
            return value
        name = value.path if isinstance(value, FunctionRef) else value.name
        found.setdefault((name, value.hash), Drift(name, value.hash, _hash(now)))
        if not allowed:
            return value
        match value:
            case OperatorCall():
                return replace(now.bind(**dict(value.config)), replaces=value.replaces)
            case Term():
                return now(**dict(value.config))
        return FunctionRef.of(now)

    changed = _mapped(graph, renewed)
    drift = tuple(found.values())
    if drift and not allowed:
        raise TraceError(
            f"{', '.join(map(str, drift))} {'has' if len(drift) == 1 else 'have'} changed since the text of the graph was "
            f"written; {DO_ABOUT_DRIFT}"
        )
    return changed if drift else graph, drift


def code_in(graph: Graph) -> tuple[tuple[str, str], ...]:
    """(name, hash) of every operator, loss and function that a graph holds, sub-graphs included; sorted, each once."""
    found: set[tuple[str, str]] = set()

    def noted(value: Any) -> Any:
        found.add((value.path if isinstance(value, FunctionRef) else value.name, value.hash))
        return value

    _mapped(graph, noted)
    return tuple(sorted(found))


def _now(value: Any) -> Any:
    """The operator, loss or function behind a value of a text, where its hash is another one now; else None.

    A text's losses have not been called, so their configuration is looked at here, before anything runs.
    """
    if value.function is not None or not value.hash:
        return None
    try:
        found = resolve(value.path if isinstance(value, FunctionRef) else value.name)
    except FlowError:
        return None
    wanted = {OperatorCall: Operator, Term: LossFunction}.get(type(value))
    if wanted is not None and not isinstance(found, wanted):
        return None
    if _hash(found) != value.hash:
        return found
    if isinstance(found, LossFunction):
        found.validate(dict(value.config))
    return None


def _hash(found: Any) -> str:
    hashed: str = found.hash if isinstance(found, Operator | LossFunction) else code_hash(found)
    return hashed


def _mapped(graph: Graph, change: Callable[[Any], Any]) -> Graph:
    nodes = tuple(
        replace(
            node,
            params=tuple((name, _value(value, change)) for name, value in node.params),
            body=None if node.body is None else _mapped(node.body, change),
        )
        for node in graph
    )
    return replace(graph, nodes=nodes)


def _value(value: Any, change: Callable[[Any], Any]) -> Any:
    match value:
        case OperatorCall() | Term() | FunctionRef():
            inside = value
            if not isinstance(value, FunctionRef):
                inside = replace(value, config=tuple((k, _value(v, change)) for k, v in value.config))
            return change(inside)
        case Sum(parts):
            return Sum(tuple(_value(part, change) for part in parts))
        case Scale(factor, part):
            return Scale(factor, _value(part, change))
        case Product(left, right):
            return Product(_value(left, change), _value(right, change))
        case tuple():
            return tuple(_value(v, change) for v in value)
        case FrozenMap(items):
            return FrozenMap(tuple((k, _value(v, change)) for k, v in items))
        case Component():
            return replace(
                value,
                args=tuple(_value(v, change) for v in value.args),
                kwargs=tuple((k, _value(v, change)) for k, v in value.kwargs),
            )
    return value
