"""Handles: what a flow's function holds while it is traced, and the tracer that turns calls into nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

from flowrl.errors import TraceError
from flowrl.graph.code import Place, here
from flowrl.graph.expressions import Col, ColumnExpr
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.values import freeze
from flowrl.schema.columns import Column

_ACTIVE: ContextVar[Tracer | None] = ContextVar("flowrl_tracer", default=None)


class Handle:
    """Stands for a value that exists only when the flow runs. Never a Python truth value, number or iterable."""

    __slots__ = ("node", "tracer")

    def __init__(self, tracer: Tracer, node: str) -> None:
        self.tracer = tracer
        self.node = node

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} '{self.node}' of flow '{self.tracer.name}'>"

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise TraceError(
            f"at {here()}: {what} needs the values of {self!r}, which exist only when the flow runs; {instead}"
        )

    def __bool__(self) -> bool:
        self._refuse(
            "`if` (or `and`, `or`, `not`, `while`)",
            "choose row by row with fr.where, drop rows with fr.filter, sample again with fr.refill, "
            "choose on the step with fr.after or fr.every",
        )

    def __iter__(self) -> Iterator[Any]:
        self._refuse("`for` (or unpacking)", "work on rows in an operator, or pass over them again with fr.repeat")

    def __len__(self) -> int:
        self._refuse("len()", "count rows in an operator (locality='batch')")

    def __float__(self) -> float:
        self._refuse("float()", "compute in an operator, or fr.log a column to see it")

    __int__ = __index__ = __float__


class Weights(Handle):
    """One version of a model's weights. `fr.update`, `fr.assign` and `fr.ema` return the next one."""

    __slots__ = ()


class Rows(Handle):
    """A table of rows. Operators add columns; every call returns a new handle and leaves the old one valid.

    `rows["reward"]` is a column for expressions; `a + 0.5 * b` combines the rewards of two branches of the same rows.
    """

    __slots__ = ()

    def __getitem__(self, column: str) -> ColumnExpr:
        if not isinstance(column, str):
            self._refuse(f"indexing with {column!r}", 'a column is rows["name"]; rows are kept with fr.filter')
        return ColumnExpr(Col(column))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise TraceError(
            f"at {here()}: rows have no method '{name}'; a column is rows[{name!r}], and there are "
            "select, with_columns, filter, log"
        )

    def select(self, *columns: str, **renamed: str) -> Rows:
        """Keep the named columns, and `new="old"` under new names; keys (prompt_id, sample_id, source_id) always stay."""
        from flowrl.graph.language import select

        return select(self, *columns, **renamed)

    def with_columns(self, **columns: Any) -> Rows:
        """Add columns computed by expressions: `rows.with_columns(reward=rows["reward"] * 2)` replaces `reward`."""
        from flowrl.graph.language import with_columns

        return with_columns(self, **columns)

    def filter(self, keep: Any) -> Rows:
        """Same as `fr.filter(rows, keep)`."""
        from flowrl.graph.language import filter as keep_rows

        return keep_rows(self, keep)

    def __add__(self, other: Any) -> Parts:
        return Parts.of(self) + Parts.of(other)

    def __radd__(self, other: Any) -> Parts:
        if isinstance(other, int) and other == 0:  # sum() starts from 0
            return Parts.of(self)
        return Parts.of(other) + Parts.of(self)

    def __mul__(self, factor: Any) -> Parts:
        return Parts(((_factor(factor), self),))

    __rmul__ = __mul__


class Parameter(Rows):
    """A parameter of a flow before its first use tells whether it is rows or weights."""

    __slots__ = ()


class Parts:
    """`rewards.exact(rows) + 0.1 * rewards.format(rows)`: rewards to be added. Becomes one node at its first use."""

    __slots__ = ("_rows", "parts")

    def __init__(self, parts: tuple[tuple[float, Rows], ...]) -> None:
        self.parts = parts
        self._rows: Rows | None = None

    @classmethod
    def of(cls, value: Any) -> Parts:
        if isinstance(value, Parts):
            return value
        if isinstance(value, Rows):
            return cls(((1.0, value),))
        raise TraceError(f"at {here()}: rows are added to rows; found {type(value).__name__}")

    def rows(self) -> Rows:
        """The combined rows; the node is added once."""
        if self._rows is None:
            from flowrl.graph.language import combine

            self._rows = combine(*self.parts)
        return self._rows

    def __add__(self, other: Any) -> Parts:
        return Parts((*self.parts, *Parts.of(other).parts))

    def __radd__(self, other: Any) -> Parts:
        if isinstance(other, int) and other == 0:  # sum() starts from 0
            return self
        return Parts.of(other) + self

    def __mul__(self, factor: Any) -> Parts:
        return Parts(tuple((weight * _factor(factor), rows) for weight, rows in self.parts))

    __rmul__ = __mul__

    def __getitem__(self, column: str) -> ColumnExpr:
        return self.rows()[column]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.rows(), name)


def _factor(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        found = repr(value) if isinstance(value, float) else type(value).__name__
        raise TraceError(
            f"at {here()}: rows are scaled by a number that is finite (it scales their reward); found {found}"
        )
    return float(value)


class Tracer:
    """Collects nodes while a flow's function runs.

    A tracer opened inside another (the body of `refill`) takes handles of the outer one as captured inputs.
    """

    def __init__(self, name: str, outer: Tracer | None = None) -> None:
        self.name = name
        self.outer = outer
        self.nodes: dict[str, Node] = {}
        self.effects: list[str] = []
        self.captured: dict[str, Handle] = {}
        self.is_open = True

    def parameter(
        self, name: str, kind: str = "", columns: tuple[Column, ...] = (), place: Place | None = None
    ) -> Handle:
        """An input of the flow; `kind` is "rows", "weights" or empty for not known yet."""
        params: dict[str, Any] = {"kind": kind}
        if columns:
            params["columns"] = tuple((c.name, str(c.type)) for c in columns)
        self.nodes[name] = Node(name, "input", params=tuple(sorted(params.items())), place=place or here())
        return {"rows": Rows, "weights": Weights, "": Parameter}[kind](self, name)

    def add(
        self,
        kind: str,
        inputs: tuple[tuple[str, Any], ...],
        *,
        hint: str,
        gives: type[Handle] = Rows,
        body: Graph | None = None,
        **params: Any,
    ) -> Any:
        """Append a node and return its handle. Ports named `model`, `source`, `then`, `otherwise` take weights."""
        place = here()
        wired = tuple((port, self.use(handle, port, kind).node) for port, handle in inputs)
        frozen = tuple(sorted((name, freeze(value)) for name, value in params.items()))
        name = self.unique(hint)
        self.nodes[name] = Node(name, kind, wired, frozen, body, place)
        return gives(self, name)

    def unique(self, hint: str) -> str:
        """A name that no node of this flow has, nor of the flows around it: those may be captured later."""
        name, count = hint, 1
        while self._is_taken(name):
            count += 1
            name = f"{hint}_{count}"
        return name

    def _is_taken(self, name: str) -> bool:
        return name in self.nodes or (self.outer is not None and self.outer._is_taken(name))

    def use(self, handle: Any, port: str, kind: str) -> Handle:
        """The handle as an input of this graph: settles what a parameter is, captures handles of the outer flow."""
        wanted: type[Handle] = Weights if port in WEIGHT_PORTS else Rows
        if isinstance(handle, Parts):
            handle = handle.rows()
        if not isinstance(handle, Handle):
            raise TraceError(
                f"at {here()}: fr.{kind} needs {_words(wanted)} for '{port}'; found {type(handle).__name__}. "
                "Data and models become handles as parameters of the flow: "
                "def my_flow(prompts, policy): ..., and are given when it runs"
            )
        if handle.tracer is not self:
            handle = self._capture(handle)
        if not self.is_open:
            raise TraceError(f"at {here()}: {handle!r} is used after its flow was traced")
        node = self.nodes[handle.node]
        if isinstance(handle, Parameter) and not node["kind"]:
            self.nodes[handle.node] = node.with_params(kind="weights" if wanted is Weights else "rows")
            self._settle_outer(handle.node, wanted)
        elif isinstance(handle, Parameter):
            found: type[Handle] = Weights if node["kind"] == "weights" else Rows
            if found is not wanted:
                raise TraceError(
                    f"at {here()}: '{handle.node}' is used as {_words(found)} before and as {_words(wanted)} here; "
                    f"fr.{kind} takes {_words(wanted)} for '{port}'"
                )
        elif not isinstance(handle, wanted):
            raise TraceError(f"at {here()}: fr.{kind} needs {_words(wanted)} for '{port}'; found {handle!r}")
        return handle

    def _settle_outer(self, name: str, wanted: type[Handle]) -> None:
        captured = self.captured.get(name)
        if captured is not None and self.outer is not None:
            self.outer.use(captured, "model" if wanted is Weights else "rows", "use")

    def _capture(self, handle: Handle) -> Handle:
        if self.outer is None:
            raise TraceError(
                f"at {here()}: {handle!r} belongs to another flow; handles cannot leave the flow that made them"
            )
        if handle.node not in self.captured:
            if handle.node in self.nodes:
                raise TraceError(
                    f"at {here()}: '{self.name}' uses '{handle.node}' of the flow around it; it has an input of that name of "
                    "its own: use its parameter instead"
                )
            outer = handle if handle.tracer is self.outer else self.outer._capture(handle)
            kind = self.outer.nodes[outer.node].get("kind", "") if isinstance(handle, Parameter) else ""
            if not isinstance(handle, Parameter):
                kind = "weights" if isinstance(handle, Weights) else "rows"
            self.captured[handle.node] = outer
            self.parameter(handle.node, kind)
        return (Parameter if isinstance(handle, Parameter) else type(handle))(self, handle.node)

    def finish(self, outputs: tuple[Handle, ...]) -> Graph:
        self.is_open = False
        nodes = tuple(
            node.with_params(kind="unused") if node.kind == "input" and not node["kind"] else node
            for node in self.nodes.values()
        )
        nodes = tuple(sorted(nodes, key=lambda node: node.kind != "input"))  # a captured input may come late
        return Graph(self.name, nodes, tuple(handle.node for handle in outputs), tuple(self.effects))

    def __enter__(self) -> Tracer:
        self._token = _ACTIVE.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _ACTIVE.reset(self._token)
        self.is_open = False


WEIGHT_PORTS = frozenset({"model", "source", "then", "otherwise"})
"""Ports that take weights; every other port takes rows."""


def _words(kind: type[Handle]) -> str:
    return "weights (a model)" if issubclass(kind, Weights) else "rows (a table)"


def active(what: str) -> Tracer:
    """The tracer of the flow being traced; outside a flow, an error with the way to write it."""
    tracer = _ACTIVE.get()
    if tracer is None:
        raise TraceError(f"at {here()}: fr.{what} works inside a function decorated with @fr.flow")
    return tracer


def trace(
    name: str,
    function: Callable[..., Any],
    parameters: tuple[tuple[str, str, tuple[Column, ...]], ...],
    place: Place,
    /,
    **config: Any,
) -> Graph:
    """Run `function` once with a handle for each parameter (name, kind, columns) and return the graph of its calls."""
    with Tracer(name) as tracer:
        handles = [tracer.parameter(n, kind, columns, place) for n, kind, columns in parameters]
        try:
            returned = function(*handles, **config)
        except RecursionError as error:
            raise TraceError(
                f"flow '{name}' ({place}) calls itself without end, or builds an expression thousands of steps deep; a flow is "
                "traced once, so repeat with a `for` over configuration, and sum many columns in an operator"
            ) from error
        return tracer.finish(returned_handles(tracer, returned, name))


def returned_handles(tracer: Tracer, returned: Any, name: str) -> tuple[Handle, ...]:
    """What a flow returns as handles of `tracer`; a parameter returned untouched is fine, anything else is refused."""
    values = returned if isinstance(returned, tuple | list) else (returned,)
    found: list[Handle] = []
    for value in values:
        if isinstance(value, Parts):
            value = value.rows()
        if not isinstance(value, Handle):
            raise TraceError(
                f"flow '{name}' returns {type(value).__name__}; it returns what the run keeps: the weights that fr.update "
                "gave, or rows"
            )
        found.append(value if value.tracer is tracer else tracer._capture(value))
    return tuple(found)
