"""Run one operator over a table: split by its locality, call it, check what it returned."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl.errors import ConfigError, DataError, MissingExtra, OperatorError, SchemaError, WaitTimeout
from flowrl.graph.code import Place, place_of
from flowrl.graph.operators import Keep, OperatorCall, Read, State
from flowrl.graph.values import thaw
from flowrl.runtime.guard import Call, call_with_timeout, time_limit
from flowrl.runtime.pool import CannotRun, Outcome, default_workers, named_elsewhere, shared
from flowrl.schema.columns import Column
from flowrl.schema.ragged import Ragged
from flowrl.schema.standard import ROW_ERROR
from flowrl.store.rows import RowBatch, readonly

Array = np.ndarray | Ragged

LARGEST = {"f16": 65504.0, "f32": float(np.finfo(np.float32).max), "f64": float(np.finfo(np.float64).max)}
"""Largest finite number of a dtype; a whole number may be greater than any."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What an operator gave."""

    rows: RowBatch
    """All rows, with the written columns."""
    mask: np.ndarray | None
    """[N] rows to keep, for a filter."""
    failed: int = 0
    """Rows flagged because the function raised or took too long."""
    first_error: str = ""
    """Why the first of them failed."""


def run_operator(
    call: OperatorCall,
    rows: RowBatch,
    *,
    state: State | None = None,
    place: Place | None = None,
    workers: int | None = None,
) -> Applied:
    """Apply `call` to `rows`.

    Args:
        workers: worker processes for operators of one row. None: as many as there are processors, for operators that ask for
            them (`processes=True`); 0: none; otherwise so many, for all operators of one row that can be imported by name.
            Under a debugger everything runs here.

    Errors: OperatorError with the operator's own file and line, the line of the flow and the rows at hand.
    """
    function = call.resolve()
    config = {name: thaw(value) for name, value in call.config}
    if call.state_param:
        config[call.state_param] = state if state is not None else State()
    inputs = {read.param: read_column(rows, read, call.short_name) for read in call.reads}
    with time_limit(call.timeout_s) as limited:
        work = _Work(call, function, config, place or Place(), limited)
        if call.each_row:
            return _each_row(work, rows, inputs, workers)
        if call.locality.kind == "group" and not call.many_groups:
            return _per_group(work, rows, inputs)
        columns, mask = work.call(inputs, len(rows), "all rows")
    return Applied(_with_written(rows, work, columns), mask)


def read_column(rows: RowBatch, read: Read, name: str) -> Array | None:
    """The array an operator gets for one of its parameters, read-only."""
    if read.column in rows:
        return readonly(rows[read.column])
    if read.broadcast and read.broadcast in rows:
        if "response_ids" not in rows:
            raise OperatorError(
                f"'{name}' spreads '{read.broadcast}' over tokens, which needs 'response_ids' in its rows"
            )
        tokens = rows["response_ids"]
        return readonly(Ragged.like(tokens.spread(rows[read.broadcast]), tokens))
    if read.is_optional:
        return None
    raise OperatorError(f"'{name}' reads '{read.column}', which its rows lack; they have {', '.join(rows.names)}")


@dataclass(slots=True)
class _Work:
    operator: OperatorCall
    function: Callable[..., Any]
    config: dict[str, Any]
    place: Place
    limited: Call
    """Calls the function under the operator's time limit."""

    @property
    def used(self) -> str:
        """Where, in words; nothing where it is called outside a flow."""
        return f", used at {self.place}" if self.place.file else ""

    def call(self, inputs: Mapping[str, Any], count: int, which: str) -> tuple[dict[str, Array], np.ndarray | None]:
        """Call the function on `count` rows and return ({written column: values}, mask)."""
        name = self.operator.short_name
        try:
            returned = self.limited(lambda: self.function(*inputs.values(), **self.config), f"operator '{name}'")
        except (Exception, SystemExit) as error:
            # whatever a user's function raises is reported with its place, and chained
            raise self.failure(error, which) from error
        return self.unpack(returned, count, which)

    def failure(self, error: BaseException, which: str) -> OperatorError:
        operator = self.operator
        hint = ""
        if isinstance(error, ValueError) and "read-only" in str(error):
            hint = "; columns are shared by all their readers and read-only: work on a copy (column.copy())"
        return OperatorError(
            f"operator '{operator.short_name}' ({place_of(self.function)}){self.used}, failed on {which}: "
            f"{_named(error)}{hint}"
        )

    def unpack(self, returned: Any, count: int, which: str) -> tuple[dict[str, Array], np.ndarray | None]:
        operator = self.operator
        mask: np.ndarray | None = None
        if operator.is_filter:
            keep = returned if isinstance(returned, Keep) else Keep(returned)
            mask = np.asarray(keep.mask)
            if mask.dtype != bool or mask.shape != (count,):
                raise self.wrong(
                    f"a filter returns one boolean per row ({count}); found {mask.dtype} of shape {mask.shape}", which
                )
            returned = dict(keep.columns)
        names = [column.name for column in operator.writes]
        if not isinstance(returned, Mapping):
            if len(names) != 1:
                raise self.wrong(
                    f"it writes {', '.join(names)}, so it returns a dict of them; found {type(returned).__name__}",
                    which,
                )
            returned = {names[0]: returned}
        if set(returned) != set(names):
            raise self.wrong(
                f"it declares {', '.join(sorted(names))} and returned {', '.join(sorted(map(str, returned)))}", which
            )
        for column, values in returned.items():
            length = len(values) if hasattr(values, "__len__") else None
            if length != count:
                found = (
                    f"a {type(values).__name__}" if length is None else f"{length} value{'s' if length != 1 else ''}"
                )
                found = "None (does it return?)" if values is None else found
                raise self.wrong(f"'{column}' needs one value per row ({count}); found {found}", which)
        return dict(returned), mask

    def wrong(self, text: str, which: str) -> OperatorError:
        return OperatorError(
            f"operator '{self.operator.short_name}' ({place_of(self.function)}){self.used}, on {which}: {text}"
        )


def _with_written(before: RowBatch, work: _Work, columns: Mapping[str, Any]) -> RowBatch:
    rows = before
    for column in work.operator.writes:
        try:
            rows = rows.with_column(column.name, columns[column.name], column.type)
        except (SchemaError, DataError) as error:
            raise work.wrong(f"it returned '{column.name}' wrongly: {error}", "all rows") from error
    _refuse_wider(work, before, rows)
    return rows


def _refuse_wider(work: _Work, before: RowBatch, after: RowBatch) -> None:
    """A mask that an operator says it narrows is true nowhere else."""
    name = work.operator.narrows
    if not name or name not in before:
        return
    mask = before[name]
    for column in work.operator.writes:
        written = after[column.name]
        if column.type.dtype == "bool" and isinstance(written, Ragged) and isinstance(mask, Ragged):
            if not np.array_equal(written.offsets, mask.offsets) or bool((written.values & ~mask.values).any()):
                raise work.wrong(f"it narrows '{name}', and its '{column.name}' is true where that is not", "all rows")


def _per_group(work: _Work, rows: RowBatch, inputs: Mapping[str, Array | None]) -> Applied:
    key = work.operator.locality.key
    parts: dict[str, list[Any]] = {column.name: [None] * len(rows) for column in work.operator.writes}
    mask = np.ones(len(rows), bool) if work.operator.is_filter else None
    for indices in rows.group_indices(key):
        mine = {name: _take(column, indices) for name, column in inputs.items()}
        which = f"the group {key}={rows[key][indices[0]]!r} ({len(indices)} rows)"
        columns, kept = work.call(mine, len(indices), which)
        if mask is not None and kept is not None:
            mask[indices] = kept
        for name, values in columns.items():
            target = parts[name]
            for index, value in zip(indices.tolist(), values, strict=True):
                target[index] = value
    written = {c.name: _assemble(parts[c.name], c) for c in work.operator.writes}
    return Applied(_with_written(rows, work, written), mask)


def _take(column: Array | None, indices: np.ndarray) -> Array | None:
    if column is None:
        return None
    start, stop = int(indices[0]), int(indices[-1]) + 1
    if stop - start == len(indices):  # indices of a group ascend, so they are a range: neighbours, read where they lie
        if not isinstance(column, Ragged):
            return column[start:stop]
        first, last = column.offsets[start], column.offsets[stop]
        return Ragged(column.values[first:last], column.offsets[start : stop + 1] - first)
    return readonly(column.take(indices) if isinstance(column, Ragged) else column[indices])


def _assemble(values: list[Any], column: Column) -> Any:
    if column.type.granularity.is_ragged or column.type.inner:
        return values
    return np.asarray(values, dtype=object) if not column.type.is_numeric else np.asarray(values)


def _each_row(work: _Work, rows: RowBatch, inputs: Mapping[str, Array | None], workers: int | None) -> Applied:
    operator = work.operator
    errors = [""] * len(rows)
    parts: dict[str, list[Any]] = {column.name: [None] * len(rows) for column in operator.writes}
    key = "sample_id" if "sample_id" in rows else "prompt_id" if "prompt_id" in rows else ""
    names: Sequence[Any] = rows[key] if key else range(len(rows))
    columns = [_row_values(column, len(rows)) for column in inputs.values()]
    quick = _quick_column(work)
    values_of = list(zip(*columns, strict=True)) if columns else [()] * len(rows)
    answer_of = _answers(work, values_of, names, workers)
    for index in range(len(rows)):
        try:
            answer = answer_of(index)
            if quick and type(answer) is float and not LARGEST["f32"] < abs(answer) < math.inf:
                parts[quick][index] = answer
                continue
            values = _checked(work, answer, f"row {names[index]!r}")
        except (OperatorError, WaitTimeout) as error:
            # a missing package or an option that makes no sense is no fault of the row, and would flag every one
            if operator.on_error == "raise" or isinstance(error.__cause__, MissingExtra | ConfigError):
                raise
            errors[index] = _reason(error)
            values = {c.name: "" if c.type.dtype == "str" else float("nan") for c in operator.writes}
        for name, value in values.items():
            parts[name][index] = value
    written = {column.name: _assemble(parts[column.name], column) for column in operator.writes}
    failed = sum(1 for error in errors if error)
    rows = _with_written(rows, work, written)
    if operator.on_error == "flag":  # even when no row failed: a table's columns do not depend on luck
        before = rows["row_error"] if ROW_ERROR.name in rows else [""] * len(rows)
        rows = rows.with_column(ROW_ERROR.name, joined_errors(before, errors), ROW_ERROR.type)
    return Applied(rows, None, failed, next(filter(None, errors), ""))


def joined_errors(*columns: Sequence[str] | np.ndarray) -> np.ndarray:
    """[N] `row_error` of several, each text once: `"first; second"`, or empty where none failed."""
    rows = zip(*columns, strict=True)
    return np.asarray(["; ".join(dict.fromkeys(filter(None, texts))) for texts in rows], dtype=object)


def _named(error: BaseException) -> str:
    """An error's type and text, whatever its text does."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (its text cannot be had)"


def _reason(error: BaseException) -> str:
    """Why a row failed, for its `row_error`: what the function raised, or what was wrong with its answer."""
    cause = error.__cause__
    return str(error) if cause is None or isinstance(cause, WaitTimeout) else _named(cause)


def _row_values(column: Array | None, count: int) -> Sequence[Any]:
    """What a function of one row gets: plain Python values, arrays for what is ragged or has inner lengths."""
    if column is None:
        return [None] * count
    return list(column) if isinstance(column, Ragged) or column.ndim > 1 else column.tolist()


def _quick_column(work: _Work) -> str:
    """The column whose answer needs no look when it is a plain float: the only one written, wide enough for any."""
    writes = work.operator.writes
    if len(writes) != 1 or work.operator.is_filter:
        return ""
    kind = writes[0].type
    is_plain = kind.dtype in ("f32", "f64") and not kind.granularity.is_ragged and not kind.inner
    return writes[0].name if is_plain else ""


def _answers(
    work: _Work, values_of: Sequence[Sequence[Any]], names: Sequence[Any], workers: int | None
) -> Callable[[int], Any]:
    """What gives the answer of a row: worker processes, threads, or a call here and now, row after row."""
    call = work.operator

    def here(index: int) -> Any:
        return _row_answer(work, values_of[index], names, index)

    if sys.gettrace() is not None or workers == 0 or not values_of:
        return here
    if call.threads > 1:
        return _in_threads(work, values_of, names)
    if not (call.processes if workers is None else workers > 0):
        return here
    if not named_elsewhere(call):
        _say_here(call, "it was defined in a script or inside a function", is_asked=workers is not None)
        return here
    count = default_workers() if workers is None else workers
    try:
        outcomes = shared().run(call, values_of, workers=count, timeout_s=call.timeout_s)
    except CannotRun as error:
        _say_here(call, str(error), is_asked=True)
        return here

    def there(index: int) -> Any:
        found = outcomes[index]
        if isinstance(found.error, WaitTimeout):
            late = WaitTimeout(
                f"operator '{call.short_name}' on row {names[index]!r} took longer than {call.timeout_s:g} s"
            )
            raise OperatorError(f"{late} ({place_of(work.function)}{work.used})") from late
        if found.error is not None:
            raise work.failure(found.error, f"row {names[index]!r}") from found.error
        return found.value

    return there


def _say_here(call: OperatorCall, why: str, *, is_asked: bool) -> None:
    if is_asked:
        warnings.warn(
            f"operator '{call.short_name}' runs in this process and not in workers: {why}; a function at the top of a module "
            "of its own can be imported there",
            RuntimeWarning,
            stacklevel=2,
        )


def _in_threads(work: _Work, values_of: Sequence[Sequence[Any]], names: Sequence[Any]) -> Callable[[int], Any]:
    """Rows under way side by side, each in a thread: for functions that wait for a server."""
    call = work.operator
    outcomes = [Outcome()] * len(values_of)
    todo = deque(range(len(values_of)))

    def one(index: int) -> Outcome:
        try:
            value = call_with_timeout(
                lambda: work.function(*values_of[index], **work.config),
                call.timeout_s,
                lambda: f"operator '{call.short_name}' on row {names[index]!r}",
            )
        except BaseException as error:  # carried to the caller, whatever it is
            return Outcome(error=error)
        return Outcome(value)

    def pull() -> None:
        with contextlib.suppress(IndexError):  # nothing is left
            while True:
                index = todo.popleft()
                outcomes[index] = one(index)

    # daemons: after Ctrl-C nobody waits for a server
    threads = [threading.Thread(target=pull, daemon=True) for _ in range(min(call.threads, len(values_of)))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        todo.clear()

    def there(index: int) -> Any:
        error = outcomes[index].error
        if isinstance(error, WaitTimeout):
            raise OperatorError(f"{error} ({place_of(work.function)}, used at {work.place})") from error
        if isinstance(error, Exception | SystemExit):
            raise work.failure(error, f"row {names[index]!r}") from error
        if error is not None:
            raise error
        return outcomes[index].value

    return there


def _row_answer(work: _Work, values: Sequence[Any], names: Sequence[Any], index: int) -> Any:
    """What the function says of one row; the row's name is put together only when it is needed."""
    try:
        return work.limited(
            lambda: work.function(*values, **work.config),
            lambda: f"operator '{work.operator.short_name}' on row {names[index]!r}",
        )
    except WaitTimeout as error:
        raise OperatorError(f"{error} ({place_of(work.function)}, used at {work.place})") from error
    except (Exception, SystemExit) as error:  # reported with its place, or flagged on its row
        raise work.failure(error, f"row {names[index]!r}") from error


def _checked(work: _Work, answer: Any, which: str) -> dict[str, Any]:
    """A row's answer by column. Errors: OperatorError when it is not what the operator declares."""
    writes = work.operator.writes
    if not isinstance(answer, Mapping):
        if len(writes) != 1:
            raise work.wrong(f"it writes {', '.join(c.name for c in writes)}, so it returns a dict of them", which)
        answer = {writes[0].name: answer}
    if set(answer) != {c.name for c in writes}:
        raise work.wrong(
            f"it declares {', '.join(c.name for c in writes)} and returned {', '.join(map(str, answer))}", which
        )
    for column in writes:
        value = answer[column.name]
        if (
            column.type.is_numeric
            and not column.type.granularity.is_ragged
            and not isinstance(value, int | float | np.generic)
        ):
            raise work.wrong(f"'{column.name}' is a number; found {type(value).__name__} {value!r}", which)
        if (
            column.type.dtype in LARGEST
            and isinstance(value, int | float)
            and LARGEST[column.type.dtype] < abs(value) < math.inf
        ):
            raise work.wrong(f"'{column.name}' is {column.type}, which cannot hold {value!r:.60}", which)
    return dict(answer)
