"""Types of column expressions, and what is wrong with them before anything runs."""

from __future__ import annotations

from flowrl.graph.expressions import COMPARISONS, Binary, Col, Expression, Literal, Where, to_source
from flowrl.graph.types import RowsType
from flowrl.schema.types import COARSE_TO_FINE, SAMPLE, ColumnType


def expression_type(expression: Expression, rows: RowsType) -> ColumnType:
    """Type of an expression: the finest granularity of its columns; comparisons are bool, divisions float."""
    grains = [rows.columns[c].type.granularity for c in expression.columns() if c in rows.columns]
    finest = max(grains, key=COARSE_TO_FINE.index, default=SAMPLE)
    return ColumnType(finest, _dtype(expression, rows))


def expression_problems(expression: Expression, rows: RowsType) -> list[tuple[str, str]]:
    """(problem, fix) of each operation whose sides do not go together: text with numbers, `None`, lists of two kinds."""
    found: list[tuple[str, str]] = []
    if any(c not in rows.columns for c in expression.columns()):
        return found  # reported already; what is not there has no type
    grains = {rows.columns[c].type.granularity for c in expression.columns() if c in rows.columns}
    lists = {grain for grain in grains if grain.is_ragged}
    if len(lists) > 1:
        fix = "reduce one of them: fr.reduce(rows, 'mean', of='column')"
        found.append((f"combines lists per turn with lists per token in '{to_source(expression)}'", fix))
    inner = [c for c in expression.columns() if c in rows.columns and rows.columns[c].type.inner]
    if inner:
        found.append(
            (
                f"computes with '{inner[0]}', which is {rows.columns[inner[0]].type}: several values each",
                "use an operator",
            )
        )
    _expression_problems(expression, rows, found)
    return found


def _expression_problems(expression: Expression, rows: RowsType, found: list[tuple[str, str]]) -> None:
    match expression:
        case Literal(None):
            found.append(
                ("uses None, which no column holds", "write float('nan') for a missing number, '' for missing text")
            )
        case Binary(op, left, right):
            _expression_problems(left, rows, found)
            _expression_problems(right, rows, found)
            kinds = [_dtype(left, rows), _dtype(right, rows)]
            texts = [kind in ("str", "bytes") for kind in kinds]
            if any(texts) and (op not in COMPARISONS - {"&", "|"} or not all(texts)):
                what = f"'{to_source(expression)}' has {kinds[0]} and {kinds[1]} on the sides of '{op}'"
                found.append((what, "text is compared with text; convert or join text in an operator"))
        case Where(condition, then, otherwise):
            for part in (condition, then, otherwise):
                _expression_problems(part, rows, found)
            kinds = [_dtype(then, rows), _dtype(otherwise, rows)]
            if len({kind in ("str", "bytes") for kind in kinds}) > 1:
                what = f"'{to_source(expression)}' is {kinds[0]} or {kinds[1]}"
                found.append((what, "both choices of fr.where are text or both are numbers"))
            if _dtype(condition, rows) != "bool":
                what = f"'{to_source(condition)}' is {_dtype(condition, rows)} and no yes or no"
                found.append((what, "compare it: fr.where(rows['reward'] > 0, ...)"))


_ORDER = ("bool", "u8", "i32", "i64", "f16", "f32", "f64")


def _dtype(expression: Expression, rows: RowsType) -> str:
    match expression:
        case Col(name):
            return rows.columns[name].type.dtype if name in rows.columns else "f32"
        case Literal(value):
            return {bool: "bool", int: "i64", float: "f32", str: "str"}.get(type(value), "f32")
        case Binary(op, left, right):
            if op in COMPARISONS:
                return "bool"
            return "f32" if op == "/" else _wider(_dtype(left, rows), _dtype(right, rows))
        case Where(_, then, otherwise):
            return _wider(_dtype(then, rows), _dtype(otherwise, rows))
    raise TypeError(f"no type for {type(expression).__name__}")


def _wider(a: str, b: str) -> str:
    if a not in _ORDER or b not in _ORDER:
        return a
    return max(a, b, key=_ORDER.index)
