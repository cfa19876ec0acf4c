"""Handlers of nodes that run a model. They know kinds of work, not what a model is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flowrl.engines.protocol import Host, SampleKey, SampleRequest, SamplingOptions, TokenRows, UpdateJob, UpdateReport
from flowrl.errors import DataError, OperatorError
from flowrl.graph.averages import Average
from flowrl.graph.code import place_of
from flowrl.graph.losses import is_live, reads_of
from flowrl.graph.nodes import Node
from flowrl.runtime.context import Context, Table, Version, result
from flowrl.runtime.guard import call_with_timeout
from flowrl.runtime.tables import unique_prompts
from flowrl.schema import standard as s
from flowrl.schema.columns import Column, nearest
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import TOKEN, ColumnType
from flowrl.store.rows import RowBatch

Compute = Callable[[Host, TokenRows], np.ndarray | Ragged]


@dataclass(slots=True)
class _Episode:
    """One response being sampled, turn by turn."""

    row: int
    index: int
    prompt_ids: list[int]
    state: Any = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    foreign: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of `ids` that the environment wrote and the policy did not sample."""
    finish_reason: str = ""
    turns: int = 0
    budget: int = 0


STEP_TIMEOUT_S = 600.0
"""Most seconds of one call of an environment that says nothing else (`step_timeout_s`)."""


@dataclass(frozen=True, slots=True)
class _Partner:
    """The environment of a rollout. What it raises, or answers wrongly, is reported with its class and the flow's line."""

    environment: Any
    name: str
    node: Node

    @classmethod
    def of(cls, node: Node) -> _Partner:
        name = node["environment"].name
        try:
            made = node["environment"].build()
        except (Exception, SystemExit) as error:  # a user's factory; reported with its place, and chained
            raise OperatorError(
                f"environment '{name}', used at {node.place}, cannot be made: {_said(error)}"
            ) from error
        for method in ("reset", "step"):
            if not callable(getattr(made, method, None)):
                raise OperatorError(
                    f"environment '{name}', used at {node.place}, has no method '{method}'; it needs reset(row) and "
                    "step(state, response), see fr.Environment"
                )
        return cls(made, name, node)

    def reset(self, row: dict[str, Any]) -> Any:
        return self._call("reset", row["prompt_id"], row)

    def step(self, state: Any, response: str, prompt_id: str) -> str | None:
        text = self._call("step", prompt_id, state, response)
        if text is not None and not isinstance(text, str):
            raise OperatorError(
                f"environment '{self.name}', used at {self.node.place}, answered prompt {prompt_id!r} with {text!r:.80} "
                f"({type(text).__name__}); step returns text for the policy's next turn, or None to end the episode"
            )
        return text

    def _call(self, method: str, prompt_id: str, *arguments: Any) -> Any:
        function = getattr(self.environment, method)
        limit = getattr(self.environment, "step_timeout_s", STEP_TIMEOUT_S)
        try:
            return call_with_timeout(lambda: function(*arguments), limit, f"{method} of environment '{self.name}'")
        except (Exception, SystemExit) as error:
            # whatever a user's environment raises; reported with its place, and chained
            raise OperatorError(
                f"environment '{self.name}' ({place_of(function)}), used at {self.node.place}, failed in {method} for prompt "
                f"{prompt_id!r}: {_said(error)}"
            ) from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def rollout(node: Node, context: Context) -> Table:
    host, prompts = context.host(node), context.rows(node)
    prompts = unique_prompts(tokenized_prompts(prompts, host))
    environment = _Partner.of(node) if node.get("environment") is not None else None
    episodes = _episodes(node, context, host, prompts, environment)
    options = SamplingOptions(node["temperature"], node.get("top_p", 1.0), node.get("top_k", 0), node.get("stop", ()))
    active = episodes
    names, stream = prompts["prompt_id"], context.path + node.name
    for turn in range(node.get("max_turns", 1)):
        requests = [
            SampleRequest(
                [*e.prompt_ids, *e.ids] if e.ids else e.prompt_ids,
                e.budget,
                SampleKey(context.seed, context.step, stream, names[e.row], e.index, turn),
            )
            for e in active
        ]
        answers = host.generate(requests, options) if requests else []
        for episode, sampled in zip(active, answers, strict=True):
            _add_turn(episode, sampled.ids, sampled.logprobs, sampled.finish_reason)
        if environment is None:
            break
        last = turn + 1 >= node.get("max_turns", 1)
        active = [
            e for e, a in zip(active, answers, strict=True) if _reply(e, a.ids, environment, host, last, names[e.row])
        ]
        if not active:
            break
    return result(
        context, node, _response_rows(node, host, prompts, episodes), "response_ids", "finish_reason", "num_turns"
    )


def _episodes(
    node: Node, context: Context, host: Host, prompts: RowBatch, environment: _Partner | None
) -> list[_Episode]:
    limit = host.max_context
    asked = node.get("max_tokens") or context.max_tokens
    made = []
    for row, ids in enumerate(prompts["prompt_ids"]):
        name = prompts["prompt_id"][row]
        if len(ids) == 0:
            raise DataError(
                f"prompt '{name}' has no tokens; a model needs at least one to go on from (node '{node.name}', {node.place})"
            )
        if limit is not None and len(ids) >= limit:
            raise DataError(
                f"prompt '{name}' has {len(ids)} tokens and the context of '{host.name}' holds {limit}, response included "
                f"(node '{node.name}', {node.place}); shorten or filter the prompts, or raise Model(max_context=...)"
            )
        budget = asked if limit is None else min(asked, limit - len(ids))
        prompt_ids = ids.tolist()  # shared by the prompt's episodes, none of which changes it
        for index in range(node["n"]):
            state = environment.reset({n: prompts[n][row] for n in prompts.names}) if environment is not None else None
            made.append(_Episode(row, index, prompt_ids, state, budget=budget))
    return made


def _add_turn(episode: _Episode, ids: list[int], logprobs: list[float], reason: str) -> None:
    episode.ids += ids
    episode.logprobs += logprobs
    episode.budget -= len(ids)
    episode.finish_reason = reason
    episode.turns += 1


def _reply(
    episode: _Episode, turn_ids: list[int], environment: _Partner, host: Host, last: bool, prompt_id: str
) -> bool:
    """Let the environment answer; true when the policy goes on. Sampled ids are kept as they are, never re-encoded."""
    text = environment.step(episode.state, host.tokenizer.decode(turn_ids), prompt_id)
    if text is None:
        return False
    added = host.tokenizer.encode_continuation(text)
    if last or episode.budget <= len(added):
        episode.finish_reason = "length"
        return False
    episode.foreign.append((len(episode.ids), len(episode.ids) + len(added)))
    episode.ids += added
    episode.logprobs += [0.0] * len(added)
    episode.budget -= len(added)
    episode.finish_reason = "environment"
    return True


def _response_rows(node: Node, host: Host, prompts: RowBatch, episodes: list[_Episode]) -> RowBatch:
    kept = [n for n in prompts.names if prompts.types[n].granularity is s.PROMPT_ID.type.granularity]
    rows = prompts.select(kept).take(np.asarray([e.row for e in episodes], np.int64))
    ids = Ragged.of([e.ids for e in episodes], np.int32)
    temperature = node["temperature"] or 1.0
    tokens = host.tokenizer
    columns: list[tuple[Column, Any]] = [
        (s.SAMPLE_ID, [f"{p}/{e.index}" for p, e in zip(rows["prompt_id"], episodes, strict=True)]),
        (s.SAMPLE_INDEX, np.asarray([e.index for e in episodes], np.int32)),
        (s.RESPONSE, [tokens.decode(_visible(e, tokens.eos_ids)) for e in episodes]),
        (s.RESPONSE_IDS, ids),
        (s.RESPONSE_MASK, Ragged.like(np.ones(len(ids.values), bool), ids)),
        (s.LOSS_MASK, Ragged.like(_sampled(episodes, ids), ids)),
        (s.ROLLOUT_LOGPROBS, Ragged.of([e.logprobs for e in episodes], np.float32)),
        (s.FINISH_REASON, [e.finish_reason for e in episodes]),
        (s.NUM_TURNS, np.asarray([e.turns for e in episodes], np.int32)),
        (s.TEMPERATURE, np.full(len(episodes), temperature, np.float32)),
        (s.MIN_POLICY_VERSION, np.full(len(episodes), host.version, np.int32)),
        (s.MAX_POLICY_VERSION, np.full(len(episodes), host.version, np.int32)),
    ]
    if node.get("role") is not None:
        columns.append((s.ROLE, [node["role"]] * len(episodes)))
    made = {c.name: np.asarray(v, dtype=object) if isinstance(v, list) else v for c, v in columns}
    return rows.with_columns(made, {c.name: c.type for c, _ in columns})


def _sampled(episodes: list[_Episode], ids: Ragged) -> np.ndarray:
    """[T] true where the policy sampled the token (and the environment did not write it)."""
    mask = np.ones(len(ids.values), bool)
    for episode, start in zip(episodes, ids.offsets[:-1].tolist(), strict=True):
        for first, last in episode.foreign:
            mask[start + first : start + last] = False
    return mask


def _visible(episode: _Episode, eos_ids: frozenset[int]) -> list[int]:
    return episode.ids[:-1] if episode.ids and episode.ids[-1] in eos_ids else episode.ids


def tokenized_prompts(rows: RowBatch, host: Host) -> RowBatch:
    """Add `prompt_ids` by encoding `prompt` with the model's tokenizer, where the data set did not bring them."""
    if "prompt_ids" in rows:
        return rows
    if "prompt" not in rows:
        raise DataError(f"rows need 'prompt' (text) or 'prompt_ids' for '{host.name}'; {nearest('prompt', rows.names)}")
    ids = _encoded(rows, "prompt", host, host.tokenizer.encode)
    return rows.with_column("prompt_ids", ids, s.PROMPT_IDS.type)


def _encoded(rows: RowBatch, column: str, host: Host, encode: Callable[[str], list[int]]) -> Ragged:
    """A text column in token ids. Errors: DataError with the row when the tokenizer cannot take its text."""
    found = []
    for index, text in enumerate(rows[column]):
        try:
            found.append(encode(text))
        except Exception as error:  # a tokenizer may be the user's own; reported with the row, and chained
            name = rows["prompt_id"][index] if "prompt_id" in rows else index
            raise DataError(
                f"the tokenizer of '{host.name}' cannot encode '{column}' of row '{name}', {text!r:.60}: {_said(error)}"
            ) from error
    return Ragged.of(found, np.int32)


def tokenized(rows: RowBatch, host: Host) -> RowBatch:
    """Add `prompt_ids`, `response_ids` and `loss_mask` to rows of a data set that brings them as text.

    A response's ids end with the end token, which trains: a model that is to stop must be shown stopping.
    """
    rows = tokenized_prompts(rows, host)
    if "response_ids" not in rows:
        if "response" not in rows:
            raise DataError(
                f"rows need 'response' (text) or 'response_ids' for '{host.name}'; {nearest('response', rows.names)}"
            )
        end = [min(host.tokenizer.eos_ids)] if host.tokenizer.eos_ids else []
        encode = host.tokenizer.encode_continuation
        ids = _encoded(rows, "response", host, lambda text: [*encode(text), *end])
        rows = rows.with_column("response_ids", ids, s.RESPONSE_IDS.type)
    if "loss_mask" not in rows:
        ids = rows["response_ids"]
        rows = rows.with_column("loss_mask", Ragged.like(np.ones(len(ids.values), bool), ids), s.LOSS_MASK.type)
    _check_context(rows, host)
    return rows


def _check_context(rows: RowBatch, host: Host) -> None:
    limit = host.max_context
    if limit is None or not len(rows):
        return
    lengths = rows["prompt_ids"].lengths + rows["response_ids"].lengths
    worst = int(np.argmax(lengths))
    if lengths[worst] > limit:
        name = rows["prompt_id"][worst] if "prompt_id" in rows else worst
        raise DataError(
            f"row '{name}' has {lengths[worst]} tokens and the context of '{host.name}' holds {limit}; "
            "shorten or filter the rows, or raise Model(max_context=...)"
        )


def token_rows(rows: RowBatch) -> TokenRows:
    """The token columns an engine works on."""
    temperature = rows["temperature"] if "temperature" in rows else np.ones(len(rows), np.float32)
    return TokenRows(rows["prompt_ids"], rows["response_ids"], np.asarray(temperature, np.float32))


def _forward(node: Node, context: Context, kind: ColumnType, compute: Compute, *logged: str) -> Table:
    """Add the column `out` that a model computes from token columns."""
    table, host = context.table(node), context.host(node)
    rows = tokenized(table.batch, host)
    made = rows.with_column(node["out"], compute(host, token_rows(rows)), kind)
    return result(context, node, made, *logged, table=table)


def logprobs(node: Node, context: Context) -> Table:
    return _forward(node, context, TOKEN.f32, lambda host, rows: host.logprobs(rows))


def values(node: Node, context: Context) -> Table:
    return _forward(node, context, TOKEN.f32, lambda host, rows: host.values(rows))


def score(node: Node, context: Context) -> Table:
    return _forward(node, context, s.REWARD.type, lambda host, rows: host.score(rows), node["out"])


def top_logprobs(node: Node, context: Context) -> Table:
    table, host = context.table(node), context.host(node)
    rows = tokenized(table.batch, host)
    ids, values = host.top_logprobs(token_rows(rows), node["k"])
    out = node["out"]
    rows = rows.with_column(f"{out}_ids", ids, TOKEN.i32[node["k"]])
    rows = rows.with_column(f"{out}_logprobs", values, TOKEN.f32[node["k"]])
    return result(context, node, rows, table=table)


def update(node: Node, context: Context) -> Version:
    table, host = context.table(node), context.host(node)
    if not len(table.batch):
        context.log.notes.append(f"{node.name}: no rows, so '{host.name}' keeps its weights")
        context.log.updates.append((context.path + node.name, UpdateReport()))
        return Version(host)
    rows = tokenized(table.batch, host)
    mask = rows[node.get("mask", "loss_mask")]
    loss = node["loss"]
    columns = {}
    for read in reads_of(loss):
        if is_live(read):
            continue
        name = read.column if read.column in rows else read.broadcast
        if name in rows:
            columns[name] = rows[name]
    group_key = loss.group_key()
    average = Average.of(node.get)
    job = UpdateJob(
        rows=token_rows(rows),
        mask=mask,
        columns=columns,
        loss=loss,
        average=average,
        epochs=table.epochs,
        minibatches=table.minibatches,
        split_by=rows[table.split_by] if table.split_by else rows[group_key] if group_key else None,
        group_by=rows[group_key] if group_key else None,
        is_whole=loss.needs_whole_batch(),
        prompts=np.asarray(rows[average.key]) if average.key else None,
        shuffle=table.shuffle,
        seed=SampleKey(context.seed, context.step, node.name, "", 0).number(),
    )
    report = host.update(job)
    if report.skipped:
        steps = f"{report.skipped} optimizer step{'s' if report.skipped != 1 else ''} skipped, not finite"
        context.log.notes.append(f"{node.name}: {steps}{_not_finite(columns)}")
    elif not report.steps:
        context.log.notes.append(
            f"{node.name}: no token of {len(rows)} rows trains, so '{host.name}' keeps its weights"
        )
    context.log.updates.append((context.path + node.name, report))
    return Version(host)


def _not_finite(columns: dict[str, np.ndarray | Ragged]) -> str:
    """Which stored columns of a loss hold NaN or infinity: where to look first."""
    plain = {name: column.values if isinstance(column, Ragged) else column for name, column in columns.items()}
    found = [repr(n) for n, values in plain.items() if values.dtype.kind == "f" and not np.isfinite(values).all()]
    return f" ({', '.join(found)} {'is' if len(found) == 1 else 'are'} not finite in some rows)" if found else ""


def assign(node: Node, context: Context) -> Version:
    return _blend(node, context, 0.0)


def ema(node: Node, context: Context) -> Version:
    return _blend(node, context, node["decay"])


def _blend(node: Node, context: Context, decay: float) -> Version:
    target, source = context.host(node), context.host(node, "source")
    if (context.step + 1) % node["every"] == 0:
        target.blend(source, decay)
    return Version(target)
