"""Column expressions: arithmetic and choices over columns of one table, as values.

    rows["reward"] - 0.1 * rows["length"]
    fr.where(rows["finish_reason"] == "length", -1.0, rows["reward"])

They exist so that a choice that depends on data can be written, checked and printed. Anything longer is an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.errors import SchemaError, TraceError
from flowrl.graph.code import here
from flowrl.schema.ragged import Ragged

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "&": lambda a, b: np.logical_and(a, b),
    "|": lambda a, b: np.logical_or(a, b),
}
COMPARISONS = frozenset({"==", "!=", "<", "<=", ">", ">=", "&", "|"})
"""Operations whose result is a boolean."""


class Expression:
    """Base of the expression tree: frozen, compared by structure."""

    __slots__ = ()

    def columns(self) -> tuple[str, ...]:
        """Names of the columns read, in order of first use."""
        found: list[str] = []
        _collect(self, found)
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Col(Expression):
    """A column by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Literal(Expression):
    """A constant."""

    value: bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Binary(Expression):
    """`left op right`, elementwise."""

    op: str
    left: Expression
    right: Expression


@dataclass(frozen=True, slots=True)
class Where(Expression):
    """`then` where `condition` is true, else `otherwise`, elementwise."""

    condition: Expression
    then: Expression
    otherwise: Expression


class ColumnExpr:
    """What a flow holds: an expression with Python's operators. `==` builds a comparison, so compare with `is`."""

    __slots__ = ("expression",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expression: Expression) -> None:
        self.expression = expression

    def __bool__(self) -> bool:
        raise TraceError(
            f"at {here()}: '{to_source(self.expression)}' has no value while the flow is traced, so `if`, `and`, `or` and "
            "`not` cannot use it; write fr.where(condition, then, otherwise), `&`, `|`, `~`, or keep rows with fr.filter"
        )

    def __repr__(self) -> str:
        return f"<column {to_source(self.expression)}>"

    def _make(self, op: str, other: Any, swapped: bool = False) -> ColumnExpr:
        theirs = wrap(other)
        return ColumnExpr(Binary(op, theirs, self.expression) if swapped else Binary(op, self.expression, theirs))

    def __add__(self, other: Any) -> ColumnExpr:
        return self._make("+", other)

    def __radd__(self, other: Any) -> ColumnExpr:
        return self._make("+", other, swapped=True)

    def __sub__(self, other: Any) -> ColumnExpr:
        return self._make("-", other)

    def __rsub__(self, other: Any) -> ColumnExpr:
        return self._make("-", other, swapped=True)

    def __mul__(self, other: Any) -> ColumnExpr:
        return self._make("*", other)

    def __rmul__(self, other: Any) -> ColumnExpr:
        return self._make("*", other, swapped=True)

    def __truediv__(self, other: Any) -> ColumnExpr:
        return self._make("/", other)

    def __rtruediv__(self, other: Any) -> ColumnExpr:
        return self._make("/", other, swapped=True)

    def __lt__(self, other: Any) -> ColumnExpr:
        return self._make("<", other)

    def __le__(self, other: Any) -> ColumnExpr:
        return self._make("<=", other)

    def __gt__(self, other: Any) -> ColumnExpr:
        return self._make(">", other)

    def __ge__(self, other: Any) -> ColumnExpr:
        return self._make(">=", other)

    def __eq__(self, other: object) -> ColumnExpr:  # type: ignore[override]
        return self._make("==", other)

    def __ne__(self, other: object) -> ColumnExpr:  # type: ignore[override]
        return self._make("!=", other)

    def __and__(self, other: Any) -> ColumnExpr:
        return self._make("&", other)

    def __or__(self, other: Any) -> ColumnExpr:
        return self._make("|", other)

    def __neg__(self) -> ColumnExpr:
        return self._make("-", 0, swapped=True)

    def __invert__(self) -> ColumnExpr:
        return self._make("==", False)


def col(name: str) -> ColumnExpr:
    """A column by name, for expressions written away from their table: `fr.filter(rows, fr.col("reward") > 0)`."""
    return ColumnExpr(Col(name))


def where(condition: Any, then: Any, otherwise: Any) -> ColumnExpr:
    """`then` where `condition` holds, else `otherwise`, row by row: the way to choose on data inside a flow."""
    return ColumnExpr(Where(wrap(condition), wrap(then), wrap(otherwise)))


def wrap(value: Any) -> Expression:
    """A constant or a column as an expression tree."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, ColumnExpr):
        return value.expression
    if value is None or isinstance(value, bool | int | float | str):
        return Literal(value)
    raise TraceError(
        f"a column expression is made of columns and constants; found {type(value).__name__}. "
        "Columns are written rows['name'] or fr.col('name')"
    )


def to_source(expression: Expression) -> str:
    """The expression as Python would write it."""
    match expression:
        case Col(name):
            return f"col({name!r})"
        case Literal(value):
            return repr(value)
        case Binary(op, left, right):
            return f"({to_source(left)} {op} {to_source(right)})"
        case Where(condition, then, otherwise):
            return f"where({to_source(condition)}, {to_source(then)}, {to_source(otherwise)})"
    raise TypeError(f"no source for {type(expression).__name__}")


def evaluate(expression: Expression, columns: Mapping[str, Any]) -> Any:
    """Compute an expression over arrays [N] (or `Ragged`); constants stay scalars."""
    match expression:
        case Col(name):
            return columns[name]
        case Literal(value):
            return value
        case Binary(op, left, right):
            return _elementwise(BINARY[op], evaluate(left, columns), evaluate(right, columns))
        case Where(condition, then, otherwise):
            return _where(*(evaluate(part, columns) for part in (condition, then, otherwise)))
    raise TypeError(f"no evaluation for {type(expression).__name__}")


def _where(condition: Any, then: Any, otherwise: Any) -> Any:
    return _elementwise(np.where, condition, then, otherwise)


def _elementwise(operation: Callable[..., Any], *values: Any) -> Any:
    """Over arrays and constants as they are; where one is a list per row, over all lists' values, the others repeated."""
    like = next((value for value in values if isinstance(value, Ragged)), None)
    flat = values if like is None else tuple(_beside(like, value) for value in values)
    with np.errstate(divide="ignore", invalid="ignore"):  # what is not finite shows in metrics and stops no step
        found = operation(*flat)
    return found if like is None else Ragged.like(found, like)


def _beside(like: Ragged, value: Any) -> Any:
    """`value` beside the values [T] of `like`: those of lists of the same lengths, a value per row repeated, a constant."""
    if isinstance(value, Ragged):
        if value.offsets is not like.offsets and not np.array_equal(value.offsets, like.offsets):
            raise SchemaError("two list columns must have the same row lengths to be combined")
        return value.values
    return like.spread(value) if isinstance(value, np.ndarray) and value.ndim else value


def _collect(expression: Expression, found: list[str]) -> None:
    match expression:
        case Col(name):
            found.append(name)
        case Binary(_, left, right):
            _collect(left, found)
            _collect(right, found)
        case Where(condition, then, otherwise):
            for part in (condition, then, otherwise):
                _collect(part, found)
