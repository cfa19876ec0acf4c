"""Nodes whose work is shared by the ranks of a mesh, or done by one of them for all.

    rollout               prompts are cut into neighbouring parts, one for each replica; a prompt's responses stay together
    operator of a row     rows are cut likewise, by tokens
    operator of a group   cut between groups; where groups do not stand together, one rank does all
    operator of a batch   one rank, the first of the mesh; so does one that remembers something
    buffer, prompts_from  one rank: it remembers rows, or calls a function of the user

[Note: A user's function sees a row once] What a person wrote (a reward, an environment, a filter) runs on one rank for each row,
and the others read what it gave. So a function that asks a judge is not asked twice, and one that draws numbers of its own gives
all ranks the same.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flowrl.engines.launch.board import mates
from flowrl.errors import RunError
from flowrl.graph.code import Place
from flowrl.graph.nodes import Node
from flowrl.graph.operators import OperatorCall, State
from flowrl.runtime import models, tables
from flowrl.runtime.context import Context, StepLog, Table, result
from flowrl.runtime.executor import HANDLERS
from flowrl.runtime.operators import Applied, run_operator
from flowrl.runtime.pool import default_workers, named_elsewhere
from flowrl.runtime.ranks.desk import Desk
from flowrl.runtime.ranks.exchange import lengths_of
from flowrl.runtime.ranks.hosts import SharedHost
from flowrl.runtime.ranks.shares import Bounds, cut, neighbours
from flowrl.schema import standard as s
from flowrl.schema.types import PROMPT
from flowrl.store.rows import RowBatch

KEPT = "ranks/kept"
"""Column of a part that says which rows a filter keeps."""


def rollout(node: Node, context: Context, desk: Desk) -> Table:
    """Responses to all prompts: each replica samples, and steps the environments of, its own. Of ranks that share a copy of the
    model the first leads, and the others make its calls of `generate`."""
    host, key = context.host(node), desk.key()
    prompts = tables.unique_prompts(models.tokenized_prompts(context.rows(node), host))
    site = desk.places.site_of[desk.path]
    workers = site.data_ranks
    mine = None
    assert isinstance(host, SharedHost)
    if desk.rank in workers:
        first, stop = cut(lengths_of(prompts, "prompt_ids"), len(workers))[workers.index(desk.rank)]
        mine = _sampled(node, context, prompts.slice(first, stop))
        host.dismiss()
    elif desk.rank in site.ranks:
        host.follow()
    made, _ = desk.exchange.rows(key, workers, mine, f"the responses of '{desk.path}'")
    if len(made) != len(prompts) * node["n"]:
        raise RunError(
            f"'{desk.path}' has {len(made)} responses to {len(prompts)} prompts; {node['n']} each were asked for"
        )
    carried = [name for name in prompts.names if prompts.types[name].granularity is PROMPT]
    rows = prompts.select(carried).take(np.repeat(np.arange(len(prompts)), node["n"]))
    rows = rows.with_columns({name: made[name] for name in made.names}, made.types)
    return result(context, node, rows, "response_ids", "finish_reason", "num_turns")


def _sampled(node: Node, context: Context, prompts: RowBatch) -> RowBatch:
    """What this rank samples, without the columns that come from the prompts."""
    values = {**context.values, node.source("rows"): Table(prompts)}
    rows = models.rollout(node, replace(context, values=values, log=StepLog())).batch
    return rows.select([name for name in rows.names if rows.types[name].granularity is not PROMPT])


def on_one_rank(node: Node, context: Context, desk: Desk) -> Table:
    """Rows that the first rank of the mesh makes for all."""
    key, worker = desk.key(), desk.workers[0]
    mine, told = None, None
    if desk.rank == worker:
        before = dict(context.log.extra)
        made = HANDLERS[node.kind](node, context)
        assert isinstance(made, Table)
        mine = made.batch
        told = {name: value for name, value in context.log.extra.items() if before.get(name) != value}
    rows, (extra,) = desk.exchange.rows(key, (worker,), mine, f"the rows of '{desk.path}'", told)
    context.log.extra.update(extra)
    if desk.rank == worker:
        assert mine is not None
        return Table(mine)
    return result(context, node, rows)


WORK = {"rollout": rollout, "buffer": on_one_rank, "prompts_from": on_one_rank}
"""Kind of node to what shares its work. Models are shared by `hosts.SharedHost`, operators by `Operate`."""


class Operate:
    """Runs an operator on all rows, of which this rank does its share; see `flowrl.runtime.operators.run_operator`."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def __call__(
        self,
        call: OperatorCall,
        rows: RowBatch,
        *,
        state: State | None = None,
        place: Place | None = None,
        workers: int | None = None,
    ) -> Applied:
        desk, key = self._desk, self._desk.key()
        if desk.is_alone:
            return run_operator(call, rows, state=state, place=place, workers=workers)
        if workers is None and call.processes and named_elsewhere(call):
            workers = max(1, default_workers() // len(mates(desk.exchange.board)))  # they share the host's processors
        bounds = _bounds(call, rows, len(desk.workers))
        ranks = _working(desk.workers, bounds)
        mine, failed = None, (0, "")
        if desk.rank in ranks:
            first, stop = bounds[desk.workers.index(desk.rank)]
            part = rows.slice(first, stop)
            done = run_operator(call, part, state=state, place=place, workers=workers)
            mine, failed = _part(call, part, done), (done.failed, done.first_error)
        found, notes = desk.exchange.rows(key, ranks, mine, f"what '{desk.path}' writes", failed)
        written = [name for name in found.names if name != KEPT]
        whole = rows.with_columns({name: found[name] for name in written}, found.types) if written else rows
        failures = [note for note in notes if note[0]]
        return Applied(
            whole,
            np.asarray(found[KEPT], bool) if KEPT in found else None,
            sum(count for count, _ in failures),
            failures[0][1] if failures else "",
        )


def _part(call: OperatorCall, before: RowBatch, done: Applied) -> RowBatch:
    """The columns that an operator wrote into a part of the rows."""
    names = [column.name for column in call.writes if column.name in done.rows]
    if s.ROW_ERROR.name in done.rows and call.on_error == "flag":
        names.append(s.ROW_ERROR.name)
    part = done.rows.select(list(dict.fromkeys(names)))
    if done.mask is not None:
        part = part.with_column(KEPT, done.mask, s.CHOSEN.type)
    return part


def _bounds(call: OperatorCall, rows: RowBatch, parts: int) -> Bounds:
    """The rows of each rank of the mesh. Depends on nothing but rows and mesh, so that all ranks agree."""
    alone: Bounds = ((0, len(rows)), *(((len(rows), len(rows)),) * (parts - 1)))
    if parts == 1 or call.state_param or not len(rows):
        return alone
    weights = 1 + lengths_of(rows, "response_ids")
    if call.locality.kind == "row":
        return cut(weights, parts)
    if call.locality.kind == "group" and call.locality.key in rows:
        firsts = neighbours(rows.group_indices(call.locality.key))
        return alone if firsts is None else cut(weights, parts, firsts=firsts)
    return alone


def _working(workers: tuple[int, ...], bounds: Bounds) -> tuple[int, ...]:
    """Ranks that have rows; the first one where nobody has: it says which columns there are."""
    busy = tuple(rank for rank, (first, stop) in zip(workers, bounds, strict=True) if stop > first)
    return busy or workers[:1]
