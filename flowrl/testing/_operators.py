"""Properties every operator must have. Each tries small inputs first and raises `Broken` with the first that shows it."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flowrl.errors import FlowError, OperatorError
from flowrl.graph.code import resolve
from flowrl.graph.losses import LossFunction, Term
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.operators import Operator, OperatorCall, State
from flowrl.graph.text import from_text, to_text
from flowrl.graph.values import thaw
from flowrl.runtime.operators import read_column, run_operator
from flowrl.schema.ragged import Ragged
from flowrl.schema.standard import STANDARD
from flowrl.schema.types import PROMPT, SAMPLE, TOKEN, ColumnType
from flowrl.store.rows import RowBatch
from flowrl.testing._findings import Broken
from flowrl.testing._inputs import Maker, Rows, Shape, refuse_unknown, type_of

SIZES = (1, 2, 3, 4, 6, 9)
KEPT = "is_kept"
"""Column of an answer that holds a filter's mask."""

RELATIVE, ABSOLUTE = 1e-5, 1e-6
"""Two float answers computed in different company may differ by this much."""

FILLS = (float("nan"), float("inf"), 1e30, -1e30)
"""What is put where nothing may be read."""


@dataclass(frozen=True)
class Trial:
    """An operator under one configuration, and how its inputs are made."""

    operator: Operator | None
    call: OperatorCall
    columns: Mapping[str, Maker] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_unknown(self.columns, self.types(), self.call.short_name)

    def types(self) -> dict[str, ColumnType]:
        """The columns an input has: what is read, the group's key, and what tells the lengths of tokens."""
        found = {read.column: type_of(read) for read in self.call.reads}
        key = self.call.locality.key
        if key and key not in found:
            found[key] = STANDARD[key].type if key in STANDARD else SAMPLE.str
        if any(read.broadcast for read in self.call.reads):
            found.setdefault("response_ids", TOKEN.i32)
        return found

    def table(self, shape: Shape, seed: int) -> RowBatch:
        types = self.types()
        is_paired = "pair_id" in types
        n = shape.rows + shape.rows % 2 if is_paired else shape.rows
        least = max(shape.min_group, self.call.min_group)
        rows = Rows.of(replace(shape, rows=n, min_group=least, is_paired=is_paired), seed)
        return RowBatch({n: rows.column(n, kind, self.columns.get(n)) for n, kind in types.items()}, types, n)

    def tables(self, least: int = 1, seeds: int = 2, **shape: Any) -> Iterator[RowBatch]:
        """Inputs, small ones first."""
        for size in SIZES:
            if size >= max(least, self.call.min_group if self.call.locality.kind == "group" else 1):
                for seed in range(seeds):
                    yield self.table(Shape(size, **shape), self.seed + seed)

    def run(self, rows: RowBatch, state: State | None = None, call: OperatorCall | None = None) -> RowBatch:
        """What the operator writes, and which rows a filter keeps. Errors: Broken with the input."""
        call = call or self.call
        try:
            applied = run_operator(call, rows, state=state)
        except FlowError as error:
            raise Broken(str(error), given=given(rows)) from error
        answer = applied.rows.select([column.name for column in call.writes])
        if "row_error" in applied.rows and call.on_error == "flag":
            answer = answer.with_column("row_error", applied.rows["row_error"], SAMPLE.str)
        return answer if applied.mask is None else answer.with_column(KEPT, applied.mask, SAMPLE.bool)


def given(rows: RowBatch) -> dict[str, Any]:
    return {name: rows[name] for name in rows.names}


def unless_refused(run: Callable[..., Any], *args: Any) -> None:
    """Run what an operator may refuse in words of its own (an error of `flowrl.errors`), but not fail at."""
    try:
        run(*args)
    except Broken as broken:
        raised = broken.__cause__.__cause__ if isinstance(broken.__cause__, OperatorError) else None
        if not isinstance(raised, FlowError):
            raise


# ------------------------------------------------------------------------------------------------------- comparing


def differing(one: RowBatch, other: RowBatch, *, is_exact: bool = False) -> str:
    """The first column in which two answers differ, or empty."""
    for name in one.names:
        a, b = one[name], other[name]
        if isinstance(a, Ragged) and isinstance(b, Ragged):
            if not np.array_equal(a.offsets, b.offsets):
                return name
            a, b = a.values, b.values
        if a.shape != b.shape:
            return name
        if a.dtype.kind != "f" or is_exact:
            same = np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        else:
            same = bool(np.allclose(a, b, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True))
        if not same:
            return name
    return ""


def must_equal(rows: RowBatch, expected: RowBatch, found: RowBatch, text: str, *, is_exact: bool = False) -> None:
    name = differing(expected, found, is_exact=is_exact)
    if name:
        raise Broken(f"'{name}' {text}", given=given(rows), expected=expected[name], found=found[name])


def must_be_finite(rows: RowBatch, answer: RowBatch, text: str, which: np.ndarray | None = None) -> None:
    """Errors: Broken when a number of the rows `which` is not finite. A row with a `row_error` may be NaN."""
    chosen = np.arange(len(rows)) if which is None else which
    if "row_error" in answer:
        chosen = chosen[[not answer["row_error"][i] for i in chosen]]
    for name in answer.names:
        values = answer[name]
        flat = values.take(chosen).values if isinstance(values, Ragged) else values[chosen]
        if flat.dtype.kind == "f" and not np.isfinite(flat).all():
            raise Broken(f"'{name}' is not finite {text}", given=given(rows), found=values)


# ------------------------------------------------------------------------------------------------------ properties


def columns(trial: Trial) -> None:
    call = trial.call
    for rows in trial.tables():
        answer = trial.run(rows)
        must_be_finite(rows, answer, "although every input is")
        tokens = next((rows[name].lengths for name, kind in rows.types.items() if kind.granularity is TOKEN), None)
        for name, kind in answer.types.items():
            if tokens is not None and kind.granularity is TOKEN and not np.array_equal(answer[name].lengths, tokens):
                raise Broken(
                    f"'{name}' has other lengths than its rows",
                    given=given(rows),
                    expected=tokens,
                    found=answer[name].lengths,
                )
        for read in call.reads:
            if read.is_optional and not read.broadcast and read.column != call.locality.key:
                unless_refused(trial.run, rows.drop([read.column]))
            if read.broadcast and len(rows):
                coarse = np.linspace(-1.0, 1.0, len(rows), dtype=np.float32)
                tokens = rows["response_ids"]
                fine = rows.with_column(read.column, Ragged.like(tokens.spread(coarse), tokens), type_of(read))
                spread = rows.drop([read.column]).with_column(read.broadcast, coarse, SAMPLE.f32)
                text = f"differs when '{read.broadcast}' is spread over the tokens of '{read.column}'"
                must_equal(rows, trial.run(fine), trial.run(spread), text)


def inputs(trial: Trial) -> None:
    call, function = trial.call, trial.call.resolve()
    config = {name: thaw(value) for name, value in call.config}
    for rows in trial.tables(seeds=1):
        part = rows.take(_one_call(call, rows))
        arrays = {read.param: read_column(part, read, call.short_name) for read in call.reads}
        if call.each_row:
            arrays = {name: None if v is None else next(iter(v), None) for name, v in arrays.items()}
        mine = {name: _writable(values) for name, values in arrays.items()}
        state = {call.state_param: State()} if call.state_param else {}
        try:
            function(*mine.values(), **config, **state)
        except Exception as error:  # an operator may raise anything; what it declares for its own rows is run elsewhere
            raise Broken(f"{type(error).__name__}: {error}", given=given(part)) from error
        for name, before in arrays.items():
            if not _same(before, mine[name]):
                raise Broken(f"changes its input '{name}'", given=given(part), expected=before, found=mine[name])


def repeatable(trial: Trial) -> None:
    kept = random.getstate(), np.random.get_state()
    try:
        for rows in trial.tables():
            random.seed(1)
            np.random.seed(1)
            first = trial.run(rows, State())
            random.seed(2)
            np.random.seed(2)
            second = trial.run(rows, State())
            must_equal(rows, first, second, "differs when it is computed again", is_exact=True)
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])


def chunks(trial: Trial) -> None:
    call = trial.call
    for rows in trial.tables(least=2, seeds=3):
        whole = trial.run(rows)
        for parts in _splits(call, rows):
            pieces = [trial.run(rows.take(part)) for part in parts]
            order = np.argsort(np.concatenate(parts), kind="stable")
            text = f"depends on which rows are given together: rows {[p.tolist() for p in parts]} one after the other"
            must_equal(rows, whole, RowBatch.concat(pieces).take(order), text)
        if call.many_groups:
            apart = trial.run(rows, call=replace(call, many_groups=False))
            must_equal(rows, apart, whole, "differs when several groups are given in one call (many_groups=True)")


def order(trial: Trial) -> None:
    # without ties: which of two equal rows comes first may well decide
    for rows in trial.tables(least=2, seeds=3, is_distinct=True):
        whole = trial.run(rows)
        for seed in range(2):
            moved = np.random.default_rng(seed).permutation(len(rows))
            text = f"depends on the order of rows: with rows {moved.tolist()} (shown in the old order)"
            must_equal(rows, whole, trial.run(rows.take(moved)).take(np.argsort(moved)), text)


def empty(trial: Trial) -> None:
    rows = trial.table(Shape(2), trial.seed).take([])
    trial.run(rows)


def one_row(trial: Trial) -> None:
    for seed in range(3):
        rows = trial.table(Shape(1), trial.seed + seed).slice(0, 1)
        if trial.call.min_group > 1:
            # refused where the size of groups is known; where not, an error that says so will do
            unless_refused(trial.run, rows)
        else:
            must_be_finite(rows, trial.run(rows), "for one row")


def masked(trial: Trial) -> None:
    for rows in trial.tables(masked="all"):
        must_be_finite(rows, trial.run(rows), "when no token trains")


def ragged(trial: Trial) -> None:
    for size in (4, 8):
        rows = trial.table(Shape(size, lengths="extreme"), trial.seed)
        must_be_finite(rows, trial.run(rows), "with rows of no token and a very long one")


def leaks(trial: Trial) -> None:
    masks, floats = _masks(trial), _token_floats(trial)
    for rows in trial.tables(seeds=3):
        outside = ~np.any([rows[name].values for name in masks], axis=0)
        if not outside.any():
            continue
        clean = _inside(trial.run(rows), ~outside)
        for name in floats:
            for fill in FILLS:
                values = rows[name].values.copy()
                values[outside] = fill
                filled = rows.with_column(name, Ragged.like(values, rows[name]), rows.types[name])
                text = f"depends on '{name}' where '{masks[0]}' is false (filled with {fill:g} there)"
                must_equal(filled, clean, _inside(trial.run(filled), ~outside), text, is_exact=True)


def poison(trial: Trial) -> None:
    kind = trial.call.locality.kind
    for rows in trial.tables(least=2):
        clean = trial.run(rows, State())
        for name in _numbers(trial):
            for bad in (float("nan"), float("inf"), -float("inf")):
                victim = int(np.random.default_rng(len(rows)).integers(len(rows)))
                company = _company(trial.call, rows, victim)
                for victims in ([victim], company) if bad != bad and len(company) > 1 else ([victim],):
                    ill = rows.with_column(name, _with_bad(rows[name], victims, bad), rows.types[name])
                    state = State()
                    answer = trial.run(ill, state)
                    others = np.setdiff1d(np.arange(len(rows)), victims)
                    alone = np.setdiff1d(others, company)
                    which = f"row {victims[0]}" if len(victims) == 1 else f"rows {list(victims)}"
                    what = f"because '{name}' of {which} is {bad}"
                    must_be_finite(ill, answer, f"in another row, {what}", others)
                    if kind != "batch" and kind != "stateful" and len(alone):
                        text = f"differs in rows {alone.tolist()}, {what}"
                        must_equal(ill, clean.take(alone), answer.take(alone), text)
                    if kind == "stateful":
                        must_be_finite(rows, trial.run(rows, state), f"a step later, {what} in the step before")


def pickles(trial: Trial) -> None:
    call, operator = trial.call, trial.operator
    try:
        again = pickle.loads(pickle.dumps(call))
        same = operator is None or pickle.loads(pickle.dumps(operator)) is operator
    except Exception as error:  # pickling may raise anything
        raise Broken(
            f"cannot be pickled ({type(error).__name__}: {error}); define it at the top of a module, with configuration that "
            "is numbers, text, lists and dicts"
        ) from error
    if again != call or not same:
        raise Broken("is another operator after pickling", expected=call, found=again)
    for rows in trial.tables(seeds=1):
        must_equal(rows, trial.run(rows), trial.run(rows, call=again), "differs after pickling", is_exact=True)


def state(trial: Trial) -> None:
    tables = list(trial.tables())
    kept = State()
    for first, second in itertools.pairwise(tables):
        trial.run(first, kept)
        for how, saved in (("pickle", pickle.loads(pickle.dumps(kept))), ("JSON", _through_json(kept))):
            goes_on = State(pickle.loads(pickle.dumps(kept)))
            expected, found = trial.run(second, goes_on), trial.run(second, saved)
            must_equal(second, expected, found, f"differs after its state was saved by {how}", is_exact=True)
            if not _same(dict(goes_on), dict(saved)):
                raise Broken(
                    f"its state goes on differently after it was saved by {how}",
                    given=given(second), expected=dict(goes_on), found=dict(saved),
                )  # fmt: skip


def text(trial: Trial) -> None:
    must_read_back(graph_of(trial.call), trial.call, Operator, "operator")


def must_read_back(graph: Graph, call: OperatorCall | Term, kind: type[Operator | LossFunction], word: str) -> None:
    """The text of a graph reads back as the same graph, and its call's name finds what was called."""
    again = from_text(to_text(graph))
    if again != graph or again.hash != graph.hash:
        raise Broken("its text form reads back as another graph", expected=to_text(graph), found=to_text(again))
    try:
        found: Any = resolve(call.name)
    except FlowError as error:
        raise Broken(f"its text form names what cannot be found again: {error}") from error
    if not isinstance(found, kind) or found.hash != call.hash:
        now = found.hash if isinstance(found, kind) else type(found).__name__
        raise Broken(f"'{call.name}' finds something else than this {word}", expected=call.hash, found=now)


def cost(trial: Trial) -> None:
    assert trial.operator is not None
    config = dict(trial.call.config)
    seen: dict[tuple[int, int], float] = {}
    for rows in (0, 1, 10, 1000):
        for tokens in (0, rows, 100 * rows):
            seconds = trial.operator.cost_s(num_rows=rows, num_tokens=tokens, **config)
            where = f"for num_rows={rows}, num_tokens={tokens}"
            if seconds is None or not 0 <= seconds < float("inf"):
                raise Broken(f"its cost is no number of seconds {where}", found=seconds)
            for (fewer, less), before in seen.items():
                if fewer <= rows and less <= tokens and before > seconds:
                    raise Broken(
                        f"costs less {where} than for num_rows={fewer}, num_tokens={less}",
                        expected=before,
                        found=seconds,
                    )
            seen[rows, tokens] = seconds


def graph_of(call: OperatorCall) -> Graph:
    """The smallest graph that applies an operator."""
    nodes = (
        Node("rows", "input", params=(("kind", "rows"),)),
        Node("applied", "apply", (("rows", "rows"),), (("operator", call),)),
    )
    return Graph("conformance", nodes, ("applied",))


@dataclass(frozen=True)
class Property:
    """One thing that must hold."""

    says: str
    check: Callable[[Any], None]
    applies: Callable[[Any], bool] = lambda trial: True


PROPERTIES: dict[str, Property] = {
    "columns": Property("must return what it declares, finite, with and without optional columns", columns),
    "inputs": Property("must change none of its inputs", inputs),
    "repeatable": Property("must give the same answer again", repeatable),
    "chunks": Property(
        "must give the same under any split of the rows, a group operator under any that keeps groups whole",
        chunks,
        lambda t: t.call.locality.kind in ("row", "group"),
    ),
    "order": Property(
        "must answer each row alike, wherever it stands", order, lambda t: t.call.locality.kind != "stateful"
    ),
    "empty": Property("must take a batch without rows", empty),
    "one_row": Property("must take a single row", one_row),
    "masked": Property("must take a batch in which no token trains", masked, lambda t: bool(_masks(t))),
    "ragged": Property(
        "must take rows without tokens and very long ones",
        ragged,
        lambda t: any(kind.granularity.is_ragged for kind in t.types().values()),
    ),
    "leaks": Property("must not see masked tokens", leaks, lambda t: bool(_masks(t)) and bool(_token_floats(t))),
    "poison": Property("must keep NaN and infinities to the rows that have them", poison, lambda t: bool(_numbers(t))),
    "pickles": Property("must pickle", pickles),
    "state": Property(
        "must go on from a saved state as if nothing had happened", state, lambda t: bool(t.call.state_param)
    ),
    "cost": Property(
        "must cost no less for more rows and tokens",
        cost,
        lambda t: t.operator is not None and t.operator.declared.cost is not None,
    ),
    "text": Property("must have a text form that reads back, and a hash that is the same again", text),
}


# --------------------------------------------------------------------------------------------------------- helpers


def _one_call(call: OperatorCall, rows: RowBatch) -> np.ndarray:
    """The rows that one call of the function is given."""
    if call.each_row:
        return np.arange(min(1, len(rows)))
    if call.locality.kind == "group" and not call.many_groups:
        return np.asarray(next(iter(rows.group_indices(call.locality.key))))
    return np.arange(len(rows))


def _writable(values: Any) -> Any:
    if isinstance(values, Ragged):
        return Ragged(values.values.copy(), values.offsets.copy())
    return values.copy() if isinstance(values, np.ndarray) else values


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, float) and one != one:
        return bool(other != other)
    return bool(one == other)


def _splits(call: OperatorCall, rows: RowBatch) -> Iterator[list[np.ndarray]]:
    """Ways to give the rows in parts."""
    n = len(rows)
    if call.locality.kind == "row":
        yield [np.asarray([i]) for i in range(n)]
        yield [np.arange(n // 2), np.arange(n // 2, n)]
        yield [np.arange(0, n, 2), np.arange(1, n, 2)]
        return
    groups = [np.asarray(indices) for indices in rows.group_indices(call.locality.key)]
    if len(groups) > 1:
        yield groups
        yield [np.concatenate(groups[1:]), groups[0]]


def _masks(trial: Trial) -> list[str]:
    """The masks an operator reads, the one that trains first."""
    names = [name for name, kind in trial.types().items() if kind == TOKEN.bool and name.endswith("mask")]
    return sorted(names, key=lambda name: name != "loss_mask")


def _token_floats(trial: Trial) -> list[str]:
    return [n for n, kind in trial.types().items() if kind.granularity is TOKEN and kind.dtype[0] == "f"]


def _numbers(trial: Trial) -> list[str]:
    """Columns whose NaN must stay in its row: numbers per response, and rewards per token."""
    return [
        name
        for name, kind in trial.types().items()
        if kind.dtype[0] == "f"
        and not kind.inner
        and (kind.granularity in (SAMPLE, PROMPT) or (kind.granularity is TOKEN and "reward" in name))
    ]


def _inside(answer: RowBatch, inside: np.ndarray) -> RowBatch:
    """An answer with its values outside the masks made equal: they may be anything."""
    for column, kind in answer.types.items():
        if kind.granularity is TOKEN:
            values = answer[column]
            where = inside.reshape(-1, *(1,) * (values.values.ndim - 1))
            cleared = np.where(where, values.values, np.zeros((), values.dtype)).astype(values.dtype)
            answer = answer.with_column(column, Ragged.like(cleared, values), kind)
    return answer


def _with_bad(values: Any, victims: Sequence[int], bad: float) -> Any:
    if isinstance(values, Ragged):
        flat = values.values.copy()
        flat[np.isin(values.row_index, victims)] = bad
        return Ragged.like(flat, values)
    changed = values.copy()
    changed[victims] = bad
    return changed


def _company(call: OperatorCall, rows: RowBatch, victim: int) -> list[int]:
    """Rows that are given together: the victim, its group, or all."""
    if call.locality.kind == "row":
        return [victim]
    if call.locality.kind == "group":
        key = rows[call.locality.key]
        return [i for i in range(len(rows)) if key[i] == key[victim]]
    return list(range(len(rows)))


def _through_json(kept: State) -> State:
    """A state written as JSON and read back; arrays as lists with their dtype."""

    def encoded(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {"dtype": str(value.dtype), "array": value.tolist()}
        if isinstance(value, np.generic):
            return value.item()
        raise Broken(
            f"its state holds a {type(value).__name__}; a state is made of numbers, text, lists, dicts and NumPy arrays",
            found=dict(kept),
        )

    def decoded(value: dict[str, Any]) -> Any:
        return np.asarray(value["array"], value["dtype"]) if set(value) == {"dtype", "array"} else value

    return State(json.loads(json.dumps(dict(kept), default=encoded), object_hook=decoded))
