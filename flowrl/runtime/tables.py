"""Handlers of nodes that only touch tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flowrl.errors import DataError, OperatorError
from flowrl.graph.code import place_of
from flowrl.graph.expression_types import expression_type
from flowrl.graph.expressions import evaluate
from flowrl.graph.nodes import Node
from flowrl.graph.types import ColumnInfo, RowsType
from flowrl.runtime.context import Context, Table, result
from flowrl.runtime.operators import joined_errors
from flowrl.schema import standard as s
from flowrl.schema.columns import nearest
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import SAMPLE, TURN, ColumnType, Granularity
from flowrl.store.rows import RowBatch
from flowrl.store.table import ExperienceTable


def apply(node: Node, context: Context) -> Table:
    table = context.table(node)
    call = node["operator"]
    state = context.state(node) if call.state_param else None
    done = context.operate(call, table.batch, state=state, place=node.place, workers=context.reward_workers)
    if done.failed:
        context.log.notes.append(
            f"{node.name}: {done.failed} of {len(done.rows)} rows flagged; the first: {done.first_error}"
        )
        context.log.extra[f"{node.name}/flagged"] = done.failed
    rows = done.rows
    if done.mask is not None:
        context.log.extra[f"{node.name}/kept"] = float(done.mask.sum())
        rows = rows.filter(done.mask)
    return result(context, node, rows, *(c.name for c in call.writes), table=table)


def combine(node: Node, context: Context) -> Table:
    tables = [context.values[source] for source in node.sources("rows")]
    batches = [t.batch for t in tables if isinstance(t, Table)]
    total = np.zeros(len(batches[0]))
    merged = batches[0]
    for weight, name, batch in zip(node["weights"], node["names"], batches, strict=True):
        total = total + weight * batch["reward"]
        for column in batch.names:
            if column not in merged:
                merged = merged.with_column(column, batch[column], batch.types[column])
        merged = merged.with_column(f"reward/{name}", batch["reward"], s.REWARD.type)
    if s.ROW_ERROR.name in merged:
        merged = merged.with_column(s.ROW_ERROR.name, _errors_by_part(node["names"], batches), s.ROW_ERROR.type)
    merged = merged.with_column("reward", total, s.REWARD.type)
    return result(context, node, merged, "reward", *(f"reward/{name}" for name in node["names"]))


def _errors_by_part(names: Sequence[str], batches: Sequence[RowBatch]) -> np.ndarray:
    """[N] why rows have no reward: `"exact: ValueError: ...; short: ..."`, parts that say the same named together."""
    parts = zip(names, batches, strict=True)
    columns = [(name, batch[s.ROW_ERROR.name]) for name, batch in parts if s.ROW_ERROR.name in batch]
    texts = []
    for row in range(len(batches[0])):
        said: dict[str, list[str]] = {}
        for name, errors in columns:
            if errors[row]:
                said.setdefault(errors[row], []).append(name)
        texts.append("; ".join(f"{', '.join(owners)}: {text}" for text, owners in said.items()))
    return np.asarray(texts, dtype=object)


def select(node: Node, context: Context) -> Table:
    table = context.table(node)
    rows = table.batch
    renamed = dict(node["renamed"])
    made = rows.select([k for k in s.KEYS if k in rows and k not in renamed])
    for name in node["columns"]:
        made = made.with_column(name, rows[name], rows.types[name])
    for new, old in renamed.items():
        kind = s.STANDARD[new].type if new in s.KEYS else rows.types[old]
        made = made.with_column(new, rows[old], kind)
    return result(context, node, made, table=table)


def with_columns(node: Node, context: Context) -> Table:
    table = context.table(node)
    rows = table.batch
    known = RowsType(columns={name: ColumnInfo(kind, "") for name, kind in rows.types.items()})
    made = rows
    for name, expression in node["columns"]:
        kind = expression_type(expression, known)
        columns = {c: rows[c] for c in expression.columns()}
        values = evaluate(expression, columns)
        if not hasattr(values, "__len__") or isinstance(values, str):
            values = np.full(len(rows), values, dtype=object if isinstance(values, str) else None)
        made = made.with_column(name, values, kind)
    return result(context, node, made, *(name for name, _ in node["columns"]), table=table)


def filter(node: Node, context: Context) -> Table:
    table = context.table(node)
    rows = table.batch
    mask = np.asarray(evaluate(node["keep"], {c: rows[c] for c in node["keep"].columns()}))
    if mask.shape == ():
        mask = np.full(len(rows), bool(mask))
    context.log.extra[f"{node.name}/kept"] = float(mask.sum())
    return result(context, node, rows.filter(mask.astype(bool)), table=table)


def join(node: Node, context: Context) -> Table:
    table = context.table(node)
    left, right = table.batch, context.rows(node, "right")
    key = node["on"]
    partners: dict[Any, list[int]] = {}
    for index, value in enumerate(right[key]):
        partners.setdefault(value, []).append(index)
    collect = bool(node.get("collect", False))
    found = [partners.get(value, []) for value in left[key]]
    for value, rows in zip(left[key], found, strict=True):
        if not collect and len(rows) != 1:
            what = "no partner" if not rows else f"{len(rows)} partners"
            fix = (
                "filter the left side first"
                if not rows
                else "reduce the right side to one row per key, or join(collect=True)"
            )
            raise DataError(f"node '{node.name}' ({node.place}): {key}={value!r} has {what} on the right; {fix}")
    made = left
    written = []
    for name in right.names:
        if name in (key, *s.KEYS):
            continue
        column, kind = right[name], right.types[name]
        if name == s.ROW_ERROR.name:
            theirs = ["; ".join(dict.fromkeys(column[row] for row in rows if column[row])) for rows in found]
            both = joined_errors(left[name], theirs) if name in left else np.asarray(theirs, dtype=object)
            made = made.with_column(name, both, kind)
        elif collect:
            parts = [column[np.asarray(rows, np.int64)] for rows in found]
            made = made.with_column(name, Ragged.of(parts, column.dtype), ColumnType(TURN, kind.dtype, kind.inner))
        else:
            order = np.asarray([rows[0] for rows in found], np.int64)
            made = made.with_column(name, column.take(order) if isinstance(column, Ragged) else column[order], kind)
        written.append(name)
    return result(context, node, made, *written, table=table)


def concat(node: Node, context: Context) -> Table:
    tables = [context.values[source] for source in node.sources("rows")]
    return result(context, node, RowBatch.concat([t.batch for t in tables if isinstance(t, Table)]))


def broadcast(node: Node, context: Context) -> Table:
    table = context.table(node)
    rows = table.batch
    target = Granularity[node["to"]]
    like = _boundaries(rows, target, node)
    kind = rows.types[node["column"]]
    values = Ragged.like(like.spread(rows[node["column"]]), like)
    made = rows.with_column(node["out"], values, ColumnType(target, kind.dtype, kind.inner))
    return result(context, node, made, table=table)


def _boundaries(rows: RowBatch, target: Granularity, node: Node) -> Ragged:
    names = ["response_ids"] if "response_ids" in rows else []
    names += [n for n in rows.names if rows.types[n].granularity is target]
    for name in names:
        column = rows[name]
        if rows.types[name].granularity is target and isinstance(column, Ragged):
            return column
    raise OperatorError(
        f"node '{node.name}' ({node.place}) needs a {target!r} column in its rows to know their lengths"
    )


def reduce(node: Node, context: Context) -> Table:
    table = context.table(node)
    rows = table.batch
    how = node["how"]
    if node.get("of") is not None:
        column = rows[node["of"]]
        values = np.asarray([_reduce_array(item, how) for item in column])
        kind = SAMPLE.i32 if how == "count" else SAMPLE.f32
        return result(context, node, rows.with_column(node["out"], values, kind), node["out"], table=table)
    groups = rows.group_indices(node["by"])
    first = np.asarray([g[0] for g in groups], np.int64)
    kept = [n for n in rows.names if not rows.types[n].granularity.is_ragged]
    made = rows.select(kept).take(first)
    for name in kept:
        kind = rows.types[name]
        numeric = (
            kind.dtype in ("f16", "f32", "f64", "i32", "i64", "bool") and not kind.inner and kind.granularity is SAMPLE
        )
        if numeric and how != "first":
            values = np.asarray([_reduce_array(rows[name][g], how) for g in groups])
            made = made.with_column(name, values, ColumnType(SAMPLE, "i32" if how == "count" else "f32"))
    return result(context, node, made)


_REDUCE: dict[str, Callable[[np.ndarray], Any]] = {
    "mean": lambda a: a.mean() if len(a) else float("nan"),
    "sum": lambda a: a.sum(),
    "max": lambda a: a.max() if len(a) else float("nan"),
    "min": lambda a: a.min() if len(a) else float("nan"),
    "first": lambda a: a[0] if len(a) else float("nan"),
    "count": len,
}


def _reduce_array(values: np.ndarray, how: str) -> Any:
    return _REDUCE[how](np.asarray(values))


def copy(node: Node, context: Context) -> Table:
    table = context.table(node)
    rows = table.batch
    for new, old in node["columns"]:
        rows = rows.with_column(new, rows[old], rows.types[old])
    return result(context, node, rows, table=table)


def prompts_from(node: Node, context: Context) -> Table:
    rows = context.rows(node)
    function = node["function"].resolve()
    made: list[dict[str, Any]] = []
    for index in range(len(rows)):
        arguments = {name: _plain(rows[name][index]) for name in node["reads"]}
        source = rows["sample_id"][index]
        try:
            answer = function(**arguments)
        except (Exception, SystemExit) as error:
            # whatever a user's function raises is reported with its place, and chained
            raise OperatorError(
                f"'{node['function'].path}' ({place_of(function)}), used at {node.place}, failed on row {source!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        for number, prompt in enumerate(_prompts(answer, node, source)):
            row = {"prompt_id": f"{source}#{number}", "source_id": source, "prompt": prompt}
            if "answer" in rows:
                row["answer"] = rows["answer"][index]
            made.append(row)
    columns = [s.PROMPT_ID, s.SOURCE_ID, s.PROMPT_TEXT, *([s.ANSWER] if "answer" in rows else [])]
    types = {c.name: c.type for c in columns}
    texts = [row for row in made if isinstance(row["prompt"], str)]
    if 0 < len(texts) < len(made):
        other = next(row for row in made if not isinstance(row["prompt"], str))
        raise OperatorError(
            f"'{node['function'].path}', used at {node.place}, returned text for row {texts[0]['source_id']!r} and token ids "
            f"for row {other['source_id']!r}; all prompts of a step are one or the other"
        )
    if made and not texts:
        types["prompt_ids"] = s.PROMPT_IDS.type
        del types["prompt"]
        made = [{("prompt_ids" if k == "prompt" else k): v for k, v in row.items()} for row in made]
    return result(context, node, RowBatch.from_rows(made, types))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _prompts(answer: Any, node: Node, source: str) -> list[Any]:
    if isinstance(answer, str):
        return [answer]
    if isinstance(answer, list | tuple):
        items = list(answer)
        if items and _are_ids(items):
            return [items]
        if all(isinstance(i, str) or (isinstance(i, list | tuple) and _are_ids(i)) for i in items):
            return items
    raise OperatorError(
        f"'{node['function'].path}', used at {node.place}, returned {type(answer).__name__} for row {source!r}; "
        f"a prompt is a string or a list of token ids, and several are a list of them; found {answer!r:.80}"
    )


def _are_ids(items: Sequence[Any]) -> bool:
    return all(isinstance(i, int | np.integer) and not isinstance(i, bool) and i >= 0 for i in items)


def open_buffer(capacity: int) -> ExperienceTable:
    """An empty table for so many rows of whole groups."""
    return ExperienceTable(max_rows=capacity, keep_together="buffer/key", memory="private")


def buffer(node: Node, context: Context) -> Table:
    table = context.table(node)
    path = context.path + node.name
    kept = context.memory.buffers.get(path)
    if kept is None:
        kept = context.memory.buffers[path] = open_buffer(node["capacity"])
    fresh = table.batch
    # groups of different steps are different groups even when their prompt is the same
    by = node.get("by")
    marks = np.asarray([f"{context.step}:{v}" for v in (fresh[by] if by else np.arange(len(fresh)))], dtype=object)
    largest = max((len(group) for group in fresh.group_indices(by)), default=0) if by else 1
    if largest > node["capacity"]:
        raise DataError(
            f"node '{node.name}' ({node.place}): a group of equal '{by}' has {largest} rows and the buffer keeps "
            f"{node['capacity']}; raise capacity"
        )
    kept.append(fresh.with_column("buffer/key", marks, SAMPLE.str))
    everything = kept.batch()
    generator = np.random.default_rng([context.seed & 0xFFFFFFFFFFFFFFFF, context.step, len(everything)])
    groups = everything.group_indices("buffer/key")
    drawn: list[np.ndarray] = []
    count = 0
    for index in generator.permutation(len(groups)):
        if count >= node["draw"]:
            break
        drawn.append(groups[index])
        count += len(groups[index])
    order = np.sort(np.concatenate(drawn)) if drawn else np.zeros(0, np.int64)
    rows = everything.take(order)
    context.log.extra[f"{node.name}/rows"] = len(everything)
    drop = [n for n in rows.names if n != "buffer/key"]
    return result(context, node, rows.select(drop), table=table)


def repeat(node: Node, context: Context) -> Table:
    table = context.table(node)
    return Table(
        table.batch,
        epochs=table.epochs * node["epochs"],
        minibatches=table.minibatches * node["minibatches"],
        split_by=node.get("by", table.split_by),
        shuffle=node.get("shuffle", True),
    )


def same(node: Node, context: Context) -> Table:
    return context.table(node)


def log(node: Node, context: Context) -> Table:
    table = context.table(node)
    for name in node["columns"]:
        if name not in table.batch:
            raise DataError(f"node '{node.name}' ({node.place}) logs '{name}'; {nearest(name, table.batch.names)}")
        column = table.batch[name]
        values = column.values if isinstance(column, Ragged) else column
        if values.dtype == object and node["how"] != "count":
            raise DataError(
                f"node '{node.name}' ({node.place}) logs '{name}', which is {table.batch.types[name]}; a mean is of numbers"
            )
        finite = values[np.isfinite(values.astype(float))] if values.dtype != object else values
        context.log.extra[f"log/{name}"] = float(_reduce_array(finite, node["how"]))
    return table


def refill(node: Node, context: Context) -> Table:
    assert context.run_body is not None and node.body is not None
    prompts = context.rows(node)
    source = node.source("rows")
    data = context.data.get(source)
    target = len(prompts)
    kept: list[RowBatch] = []
    groups = rounds = tried = 0
    while True:  # one round even without prompts: it says which columns there are
        rows = context.run_body(context, node, prompts, rounds)
        tried += len(prompts)
        rounds += 1
        done = context.operate(node["keep"], rows, place=node.place, workers=context.reward_workers)
        rows = done.rows.filter(done.mask) if done.mask is not None else done.rows
        found = rows.group_indices(node["by"])[: target - groups]
        if found:
            kept.append(rows.take(np.concatenate(found)))
            groups += len(found)
        missing = target - groups
        if missing <= 0 or data is None or rounds >= node["max_rounds"]:
            break
        prompts = unique_prompts(data.next(missing), f"r{rounds}")
    context.log.extra.update(
        {f"{node.name}/rounds": rounds, f"{node.name}/groups": groups, f"{node.name}/tried": tried}
    )
    if groups < target:
        why = (
            f"after {rounds} rounds (max_rounds={node['max_rounds']})" if data else "and its prompts are not an input's"
        )
        context.log.notes.append(f"{node.name}: {groups} of {target} groups passed '{node['keep'].short_name}' {why}")
    batch = RowBatch.concat(kept) if kept else rows.take(np.zeros(0, np.int64))
    return result(context, node, batch)


def unique_prompts(rows: RowBatch, mark: str = "") -> RowBatch:
    """Give repeated prompts of one step names of their own, so that their groups and random streams stay apart."""
    taken = set(rows["prompt_id"])
    counts: dict[str, int] = {}
    names = []
    for name in rows["prompt_id"]:
        count = counts.get(name, 0) + 1
        while (made := _marked(name, mark, count)) != name and made in taken:  # the data may use such a name itself
            count += 1
        counts[name] = count
        taken.add(made)
        names.append(made)
    if names == list(rows["prompt_id"]):
        return rows
    return rows.with_column("prompt_id", np.asarray(names, dtype=object), s.PROMPT_ID.type)


def _marked(name: str, mark: str, count: int) -> str:
    suffix = ".".join(part for part in (mark, str(count) if count > 1 else "") if part)
    return f"{name}~{suffix}" if suffix else name
