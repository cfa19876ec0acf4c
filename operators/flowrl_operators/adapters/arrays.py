"""Operators without a graph: columns in, columns out.

    arrays.apply(advantages.group_norm(scale="none"), {"reward": [1, 0, 1], "prompt_id": ["a", "a", "b"]})

`operator(array, ...)` calls the plain function. This does what a flow does around it: finds columns by name, splits rows into
groups, calls row by row what is written for one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError, DataError, MissingExtra, OperatorError
from flowrl.graph.operators import OperatorCall, Read
from flowrl.graph.values import thaw

__all__ = ["apply", "bound"]

Column = np.ndarray | fr.Ragged
Columns = Mapping[str, Any]


def bound(operator: fr.Operator | OperatorCall, config: Mapping[str, Any] | None = None) -> OperatorCall:
    """An operator with its configuration. Errors: ConfigError for anything else."""
    if isinstance(operator, fr.Operator):
        return operator.bind(**dict(config or {}))
    if not isinstance(operator, OperatorCall):
        raise ConfigError(f"an operator is needed, such as advantages.group_norm; found {type(operator).__name__}")
    if config:
        raise ConfigError(f"'{operator.short_name}' has its configuration already; found {', '.join(config)} beside it")
    return operator


def apply(
    operator: fr.Operator | OperatorCall, columns: Columns, *, state: fr.State | None = None, **config: Any
) -> Any:
    """What the operator writes: one column, or a dict of them. A filter gives its mask [N], or `fr.Keep`.

    Args:
        columns: by name: [N] arrays or lists, `fr.Ragged` or a list of lists for values per token or turn.
        state: of an operator that remembers: the same `fr.State()` in every call.
        config: of the operator, unless it is bound already.

    What an operator of one row raises gives NaN where a flow would flag the row; time limits are kept in flows only.

    Errors: DataError naming a column that is missing; what the operator raises, as OperatorError.
    """
    call = bound(operator, config)
    given = {name: _column(name, values) for name, values in columns.items()}
    counts = {name: len(values) for name, values in given.items()}
    if len(set(counts.values())) != 1:
        raise DataError(f"every column needs one value per row; found {counts or 'no columns'}")
    count = next(iter(counts.values()))
    inputs = [_read(call, read, given) for read in call.reads]
    options = {name: thaw(value) for name, value in call.config}
    if call.state_param:
        options[call.state_param] = state if state is not None else fr.State()
    function = call.resolve()

    def work(rows: Sequence[Any], which: str) -> Any:
        try:
            return function(*rows, **options)
        except MissingExtra:
            raise
        except Exception as error:  # whatever an operator raises, with its name
            raise OperatorError(
                f"operator '{call.short_name}' failed on {which}: {type(error).__name__}: {error}"
            ) from error

    if call.each_row:
        return _each_row(call, inputs, count, work)
    if call.locality.kind == "group" and not call.many_groups:
        return _per_group(call, inputs, given, count, work)
    return _named(call, work(inputs, "all rows"))


Work = Callable[[Sequence[Any], str], Any]


def _column(name: str, values: Any) -> Column:
    if isinstance(values, fr.Ragged | np.ndarray):
        return values
    values = list(values)
    if values and isinstance(values[0], list | tuple | np.ndarray):
        return fr.Ragged.of(values)
    is_text = any(value is None or isinstance(value, str | bytes | dict) for value in values)
    return np.asarray(values, dtype=object if is_text else None)


def _read(call: OperatorCall, read: Read, given: Mapping[str, Column]) -> Column | None:
    if read.column in given:
        return given[read.column]
    if read.broadcast and read.broadcast in given:
        like = next((v for v in given.values() if isinstance(v, fr.Ragged)), None)
        if like is None:
            raise DataError(f"'{call.short_name}' spreads '{read.broadcast}' over tokens; give a column with tokens")
        return fr.Ragged.like(like.spread(given[read.broadcast]), like)  # type: ignore[arg-type,unused-ignore]
    if read.is_optional:
        return None
    raise DataError(f"'{call.short_name}' reads '{read.column}'; there are {', '.join(given) or 'no columns'}")


def _named(call: OperatorCall, answer: Any) -> Any:
    if isinstance(answer, Mapping) and len(call.writes) == 1 and call.writes[0].name in answer:
        return answer[call.writes[0].name]
    return answer


def _each_row(call: OperatorCall, inputs: Sequence[Column | None], count: int, work: Work) -> Any:
    columns: list[Any] = [
        [None] * count if c is None else list(c) if isinstance(c, fr.Ragged) else c.tolist() for c in inputs
    ]
    found: dict[str, list[Any]] = {column.name: [] for column in call.writes}
    for row in range(count):
        try:
            answer = work([column[row] for column in columns], f"row {row}")
        except OperatorError:
            if call.on_error == "raise":
                raise
            answer = dict.fromkeys(found, float("nan"))
        values = answer if isinstance(answer, Mapping) else {call.writes[0].name: answer}
        for name, column in found.items():
            column.append(values[name])
    made = {name: np.asarray(column) for name, column in found.items()}
    return next(iter(made.values())) if len(made) == 1 else made


def _per_group(
    call: OperatorCall, inputs: Sequence[Column | None], given: Mapping[str, Column], count: int, work: Work
) -> Any:
    key = call.locality.key
    if key not in given:
        raise DataError(f"'{call.short_name}' works on groups of equal '{key}'; there are {', '.join(given)}")
    groups: dict[Any, list[int]] = {}
    for row, value in enumerate(given[key]):
        groups.setdefault(value, []).append(row)
    whole: dict[str, list[Any]] = {}
    for value, members in groups.items():
        rows = np.asarray(members)
        mine = [None if c is None else c.take(rows) if isinstance(c, fr.Ragged) else c[rows] for c in inputs]
        for name, part in _parts(call, work(mine, f"the group {key}={value!r}")).items():
            column = whole.setdefault(name, [None] * count)
            for row, item in zip(members, part, strict=True):
                column[row] = item
    made = {name: _column(name, column) for name, column in whole.items()}
    if call.is_filter:
        mask = np.asarray(made.pop("", np.zeros(0)), bool)
        return fr.Keep(mask, made) if made else mask
    return next(iter(made.values())) if len(made) == 1 else made


def _parts(call: OperatorCall, answer: Any) -> dict[str, Any]:
    if isinstance(answer, fr.Keep):
        return {"": answer.mask, **answer.columns}
    if isinstance(answer, Mapping):
        return dict(answer)
    return {"" if call.is_filter else call.writes[0].name: answer}
