"""The language: the calls a flow is written with. Each adds one node and returns a handle.

Importable from `flowrl` itself: `import flowrl as fr; fr.rollout(...)`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from flowrl.errors import ConfigError, TraceError
from flowrl.graph.averages import Average
from flowrl.graph.code import FunctionRef, here
from flowrl.graph.expressions import ColumnExpr, wrap
from flowrl.graph.handles import Handle, Parts, Rows, Tracer, Weights, active, returned_handles
from flowrl.graph.losses import Loss, refuse_lone_weights
from flowrl.graph.operators import Operator, OperatorCall
from flowrl.graph.values import Component, ComponentFactory
from flowrl.schema.types import TOKEN, Granularity

REDUCTIONS = ("mean", "sum", "max", "min", "first", "count")


# --- models at work -------------------------------------------------------------------------------------------------


def rollout(
    model: Any,
    prompts: Any,
    *,
    n: int = 1,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    max_tokens: int | None = None,
    stop: tuple[str, ...] | str | None = (),
    environment: Any = None,
    max_turns: int = 1,
    role: str | None = None,
) -> Rows:
    """Sample `n` responses to every prompt.

    Args:
        n: responses per prompt (the group).
        temperature: 0 takes the likeliest token. Log-probabilities are those of the distribution sampled from.
        top_p, top_k: nucleus and top-k truncation; 1.0 and 0 turn them off.
        max_tokens: most new tokens per response, all turns together; None takes the run's setting.
        stop: strings that end a response.
        environment: a component that answers the policy turn by turn (tools); see `fr.component`.
        max_turns: most turns the policy takes.
        role: value of the `role` column.

    Reads `prompt_ids` (or `prompt`, which the model's tokenizer encodes). Gives new rows, one per response, that keep the
    prompt's columns and add sample_id, sample_index, response, response_ids, response_mask, loss_mask,
    rollout_logprobs, finish_reason, num_turns, min_policy_version, max_policy_version (and role).
    """
    _whole("rollout", "n", n, least=1)
    _number("rollout", "temperature", temperature, least=0.0)
    _number("rollout", "top_p", top_p, least=0.0, most=1.0)
    _whole("rollout", "top_k", top_k, least=0)
    _whole("rollout", "max_turns", max_turns, least=1)
    if max_tokens is not None:
        _whole("rollout", "max_tokens", max_tokens, least=1)
    stops = () if stop is None else tuple(stop) if isinstance(stop, list | tuple) else (stop,)
    if not all(isinstance(text, str) and text for text in stops):
        raise ConfigError(
            f"at {here()}: fr.rollout needs text that is not empty in 'stop' (every response contains the empty text); "
            f"found {stop!r}"
        )
    if role is not None and not isinstance(role, str):
        raise ConfigError(f"at {here()}: fr.rollout needs text for 'role'; found {role!r}")
    if environment is not None and not isinstance(environment, Component | ComponentFactory):
        raise TraceError(
            f"at {here()}: fr.rollout needs a component as 'environment': decorate its class or factory with @fr.component "
            f"and call it in the flow; found {environment!r:.80}"
        )
    if max_turns > 1 and environment is None:
        raise ConfigError(f"at {here()}: fr.rollout with max_turns={max_turns} needs an environment that takes turns")
    params: dict[str, Any] = {"n": n, "temperature": float(temperature)}
    optional = {
        "top_p": (float(top_p), 1.0), "top_k": (top_k, 0), "max_tokens": (max_tokens, None),
        "stop": (stops, ()), "environment": (environment, None),
        "max_turns": (max_turns, 1), "role": (role, None),
    }  # fmt: skip
    params.update({name: value for name, (value, default) in optional.items() if value != default})
    return active("rollout").add("rollout", (("model", model), ("rows", prompts)), hint="rollout", **params)


def logprobs(model: Any, rows: Any, *, out: str) -> Rows:
    """Log-probability (nats) of every response token under `model`, as TOKEN.f32 column `out`.

    Taken at the temperature each row was sampled at (column `temperature`; 1 for a data set's rows and greedy ones), so
    that the sampling model gets the numbers of `rollout_logprobs` back.
    """
    return active("logprobs").add("logprobs", (("model", model), ("rows", rows)), hint=out, out=out)


def top_logprobs(model: Any, rows: Any, *, k: int, out: str = "teacher") -> Rows:
    """The `k` likeliest tokens at every response position: `<out>_ids` TOKEN.i32[k] and `<out>_logprobs` TOKEN.f32[k]."""
    _whole("top_logprobs", "k", k, least=1)
    return active("top_logprobs").add(
        "top_logprobs", (("model", model), ("rows", rows)), hint=f"{out}_top", k=k, out=out
    )


def values(model: Any, rows: Any, *, out: str = "values") -> Rows:
    """A critic's value at every response token, as TOKEN.f32 column `out`. The model needs a value head."""
    return active("values").add("values", (("model", model), ("rows", rows)), hint=out, out=out)


def score(model: Any, rows: Any, *, out: str = "reward") -> Rows:
    """A scalar per response from a model with a reward head, as SAMPLE.f32 column `out`."""
    return active("score").add("score", (("model", model), ("rows", rows)), hint="score", out=out)


def update(
    model: Any,
    rows: Any,
    *,
    loss: Any,
    average: str = "token_mean",
    average_length: int | None = None,
    average_rows: str | int = "trained",
    average_eps: float = 0.0,
    mask: str = "loss_mask",
) -> Weights:
    """Take optimizer steps on `loss` over `rows` and return the model's next version.

    One step for the whole batch, or one per mini-batch of `fr.repeat`. Micro-batches, packing and optimizer are the
    engine's and the model's business and change nothing: averages are taken from sums and counts over the step.

    Args:
        loss: terms that add, scale and multiply. A weight (`losses.truncated_importance`) multiplies; it is no part of a sum.
        average: one of `token_mean`, `token_sum`, `sequence_mean`, `sequence_sum`, `constant`, `prompt_mean` (formulas:
            `flowrl.graph.averages.AVERAGES`).
        average_length: the length that `constant` divides by.
        average_rows: what averages over rows divide by: `"trained"` rows that have a trained token, `"all"` rows of the step,
            or a fixed number (1 gives a sum). In `prompt_mean` the same of prompts.
        average_eps: added to the tokens of a row that `sequence_mean` divides by.
        mask: the TOKEN.bool column of tokens that train.
    """
    if not isinstance(loss, Loss):
        name = getattr(loss, "__name__", type(loss).__name__)
        what = f"the loss function '{name}' without its parentheses" if callable(loss) else type(loss).__name__
        raise TraceError(f"at {here()}: fr.update needs loss= a loss such as losses.ppo_clip(0.2); found {what}")
    if not tuple(loss.terms()):
        raise TraceError(f"at {here()}: every term of this loss is multiplied by 0, so there is nothing to train on")
    try:
        refuse_lone_weights(loss)
        chosen = Average(average, average_length, average_rows, average_eps)
    except ConfigError as error:
        raise ConfigError(f"at {here()}: {error}") from None
    params: dict[str, Any] = {"loss": loss, **chosen.params}
    if mask != "loss_mask":
        params["mask"] = mask
    return active("update").add("update", (("model", model), ("rows", rows)), hint="update", gives=Weights, **params)


def assign(target: Any, source: Any, *, every: int = 1) -> Weights:
    """`target` takes the weights of `source` at every `every`-th step; the next version of `target`."""
    _whole("assign", "every", every, least=1)
    return active("assign").add(
        "assign", (("model", target), ("source", source)), hint="assign", gives=Weights, every=every
    )


def ema(target: Any, source: Any, decay: float, *, every: int = 1) -> Weights:
    """`target = decay * target + (1 - decay) * source` at every `every`-th step; the next version of `target`."""
    _number("ema", "decay", decay, least=0.0, most=1.0)
    _whole("ema", "every", every, least=1)
    return active("ema").add(
        "ema", (("model", target), ("source", source)), hint="ema", gives=Weights, decay=float(decay), every=every
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def apply(rows: Any, operator: OperatorCall | Operator) -> Rows:
    """Apply an operator; what calling the operator on rows does."""
    call = operator.bind() if isinstance(operator, Operator) else operator
    return active(call.short_name).add("apply", (("rows", rows),), hint=_called(call), operator=call)


def _called(call: OperatorCall) -> str:
    """The name of an operator's node: of the function in its configuration where it only calls that (an adapter)."""
    wrapped = dict(call.config).get("function")
    name = wrapped.path.rpartition(":")[2].rpartition(".")[2] if isinstance(wrapped, FunctionRef) else ""
    return name if name.isidentifier() else call.short_name


def combine(*parts: tuple[float, Rows]) -> Rows:
    """Add the rewards of branches of the same rows; what `a + 0.5 * b` does.

    `reward` becomes the weighted sum; each branch's own reward stays as `reward/<name of its operator>`.
    """
    tracer = active("combine")
    names = [tracer.use(rows, "rows", "combine").node for _, rows in parts]
    inputs = tuple(("rows", rows) for _, rows in parts)
    return tracer.add("combine", inputs, hint="reward", weights=tuple(w for w, _ in parts), names=tuple(names))


def select(rows: Any, /, *columns: str, **renamed: str) -> Rows:
    """Keep the named columns, and `new="old"` under new names; keys (prompt_id, sample_id, source_id) always stay."""
    if not columns and not renamed:
        raise ConfigError(
            f"at {here()}: select needs the columns to keep, e.g. rows.select('reward', baseline='reward')"
        )
    for name in (*columns, *renamed.values()):
        if not isinstance(name, str):
            raise ConfigError(f"at {here()}: select takes column names; found {name!r}")
    twice = [name for name in columns if name in renamed]
    if twice:
        raise ConfigError(f"at {here()}: select gives two columns the name '{twice[0]}'; leave one of them out")
    columns = tuple(dict.fromkeys(columns))
    new = tuple(sorted(renamed.items()))
    return active("select").add("select", (("rows", rows),), hint="select", columns=tuple(columns), renamed=new)


def with_columns(rows: Any, /, **columns: Any) -> Rows:
    """Add or replace columns with expressions: `fr.with_columns(rows, reward=fr.where(rows["reward"] > 0, 1.0, 0.0))`."""
    if not columns:
        raise ConfigError(f"at {here()}: with_columns needs name=expression")
    expressions = tuple((name, wrap(value)) for name, value in sorted(columns.items()))
    return active("with_columns").add(
        "with_columns", (("rows", rows),), hint="_".join(sorted(columns)), columns=expressions
    )


def join(left: Any, right: Any, *, on: str, collect: bool = False) -> Rows:
    """Add the columns of `right` to the rows of `left` that have the same key.

    Args:
        on: key column, in both.
        collect: `right` has several rows per key; its SAMPLE columns become TURN lists in their order.

    Without `collect`, a row of `left` with no partner is an error, and so is one with two; with it, no partner is an empty
    list. Columns other than keys that both sides have are an error (FR-C03): `select` or rename them first.
    """
    params: dict[str, Any] = {"on": on, **({"collect": True} if collect else {})}
    return active("join").add("join", (("rows", left), ("right", right)), hint="join", **params)


def concat(*rows: Any) -> Rows:
    """Rows of several tables after each other, with the columns that all of them have."""
    if len(rows) < 2:
        raise ConfigError(f"at {here()}: concat needs at least two tables; found {len(rows)}")
    return active("concat").add("concat", tuple(("rows", r) for r in rows), hint="concat")


def filter(rows: Any, keep: Any) -> Rows:
    """Keep the rows for which `keep` holds: a filter operator (`filters.top(k=1)`) or an expression (`rows["reward"] > 0`)."""
    if isinstance(keep, Operator):
        keep = keep.bind()
    if isinstance(keep, OperatorCall):
        if not keep.is_filter:
            raise TraceError(
                f"at {here()}: '{keep.short_name}' is no filter (@fr.operator(filter=True)); it adds columns"
            )
        return apply(rows, keep)
    return active("filter").add("filter", (("rows", rows),), hint="filter", keep=wrap(keep))


def broadcast(rows: Any, column: str, *, to: Granularity = TOKEN, out: str | None = None) -> Rows:
    """Repeat a coarser column over each row's finer items: SAMPLE to TOKEN (or TURN), under the name `out`."""
    if not isinstance(to, Granularity) or not to.is_ragged:
        raise ConfigError(f"at {here()}: broadcast goes to fr.TOKEN or fr.TURN; found {to!r}")
    name = out or column
    return active("broadcast").add("broadcast", (("rows", rows),), hint=name, column=column, to=to.value, out=name)


def reduce(rows: Any, how: str, *, by: str | None = None, of: str | None = None, out: str | None = None) -> Rows:
    """Make something coarser: `how` is one of mean, sum, max, min, first, count.

    With `of=`: a TURN or TOKEN column becomes one number per row, named `out` (default: the same name with the reduction).
    With `by=`: rows with equal `by` become one row; numbers are reduced, everything else takes the first value.
    """
    if how not in REDUCTIONS:
        raise ConfigError(f"at {here()}: reduce knows {', '.join(REDUCTIONS)}; found {how!r}")
    if (by is None) == (of is None):
        raise ConfigError(f"at {here()}: reduce needs either by= (rows of a key become one) or of= (a column per row)")
    if of is not None:
        name = out or f"{of}_{how}"
        return active("reduce").add("reduce", (("rows", rows),), hint=name, how=how, of=of, out=name)
    return active("reduce").add("reduce", (("rows", rows),), hint=f"{how}_by_{by}", how=how, by=by)


def prompts_from(rows: Any, function: Callable[..., Any]) -> Rows:
    """New prompts made from rows: the function's parameters are columns of one row, it returns a prompt or a list of them.

    Each new row has `prompt`, `prompt_id` (made from the row's sample_id) and `source_id` (that sample_id), and keeps the
    row's `answer`. A prompt is text, or a list of token ids.
    """
    if not callable(function):
        raise TraceError(f"at {here()}: prompts_from needs a function of columns; found {type(function).__name__}")
    reads = tuple(
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    )
    name = getattr(function, "__name__", "prompts")
    return active("prompts_from").add(
        "prompts_from",
        (("rows", rows),),
        hint=name if name.isidentifier() else "prompts",
        function=FunctionRef.of(function),
        reads=reads,
    )


def buffer(rows: Any, *, capacity: int, draw: int, evict: str = "fifo", by: str | None = None) -> Rows:
    """Keep rows over steps and draw some: adds this step's rows, then returns `draw` random ones.

    Args:
        capacity: most rows kept.
        evict: `fifo` drops the oldest.
        by: draw whole groups of this key (a group operator or loss after it needs that).
    """
    _whole("buffer", "capacity", capacity, least=1)
    _whole("buffer", "draw", draw, least=1)
    if draw > capacity:
        raise ConfigError(f"at {here()}: buffer draws {draw} rows of at most {capacity}; raise capacity or draw fewer")
    if evict not in ("fifo",):
        raise ConfigError(f"at {here()}: buffer evicts 'fifo'; found {evict!r}")
    extra: dict[str, Any] = {"by": by} if by else {}
    return active("buffer").add(
        "buffer", (("rows", rows),), hint="buffer", capacity=capacity, draw=draw, evict=evict, **extra
    )


def refill(attempt: Callable[[Rows], Any], prompts: Any, *, keep: Any, max_rounds: int, by: str = "prompt_id") -> Rows:
    """Sample until the batch is full of groups worth keeping, at most `max_rounds` times (dynamic sampling).

    Round 1 runs `attempt` on the step's prompts; each further round on as many new prompts of the data set as groups are
    missing. When `max_rounds` ends first the batch is short; losses are averaged over what is there.

    Args:
        attempt: a flow from prompts to rows.
        keep: a filter operator; groups of which no row is kept are sampled again.
        by: what makes a group.
    """
    _whole("refill", "max_rounds", max_rounds, least=1)
    call = keep.bind() if isinstance(keep, Operator) else keep
    if not isinstance(call, OperatorCall) or not call.is_filter:
        raise TraceError(
            f"at {here()}: refill needs keep= a filter operator such as filters.group_has_signal(); found {keep!r}"
        )
    outer = active("refill")
    name = getattr(attempt, "__name__", "attempt")
    with Tracer(name, outer) as inner:
        returned = returned_handles(inner, attempt(Rows(inner, inner.parameter("prompts", "rows").node)), name)
        if len(returned) != 1 or not isinstance(returned[0], Rows):
            raise TraceError(
                f"at {here()}: what refill repeats returns rows and nothing else; '{name}' returns {list(returned)}"
            )
        body = inner.finish(returned)
    inputs = (("rows", prompts), *((_port(handle), handle) for handle in inner.captured.values()))
    return outer.add("refill", inputs, hint="refill", body=body, keep=call, max_rounds=max_rounds, by=by)


def _port(handle: Handle) -> str:
    node = handle.tracer.nodes[handle.node]
    is_weights = isinstance(handle, Weights) or node.get("kind") == "weights"
    return "model" if is_weights else "captured"


def repeat(rows: Any, *, epochs: int = 1, minibatches: int = 1, by: str | None = None, shuffle: bool = True) -> Rows:
    """Let an update pass over rows `epochs` times in `minibatches` steps each.

    Args:
        by: keep rows with equal value of this column in one mini-batch.
        shuffle: new order for every epoch (seeded).
    """
    _whole("repeat", "epochs", epochs, least=1)
    _whole("repeat", "minibatches", minibatches, least=1)
    params: dict[str, Any] = {"epochs": epochs, "minibatches": minibatches}
    if by:
        params["by"] = by
    if not shuffle:
        params["shuffle"] = False
    return active("repeat").add("repeat", (("rows", rows),), hint="repeat", **params)


# --- when ---------------------------------------------------------------------------------------------------------------


def every(steps: int, *values: Any) -> None:
    """Do something at every `steps`-th step only, e.g. an evaluation: `fr.every(50, evaluate.pass_at(...))`."""
    _whole("every", "steps", steps, least=1)
    tracer = active("every")
    for value in values:
        handle = value.rows() if isinstance(value, Parts) else value
        if not isinstance(handle, Rows):
            raise TraceError(f"at {here()}: fr.every needs rows to compute; found {handle!r}")
        made = tracer.add("every", (("rows", handle),), hint="every", steps=steps)
        tracer.effects = [name for name in tracer.effects if name != handle.node] + [made.node]


def after(step: int, then: Any, *, otherwise: Any) -> Weights:
    """`then` from step number `step` on (counting from 0), `otherwise` before: e.g. hold a policy while its critic warms up.

    What only the unchosen side needs is not computed.
    """
    _whole("after", "step", step, least=0)
    return active("after").add(
        "after", (("then", then), ("otherwise", otherwise)), hint="after", gives=Weights, step=step
    )


def log(rows: Any, *columns: str, how: str = "mean") -> Rows:
    """Write a column's mean (or max, min, sum) over rows to the run's metrics, whether or not anything else needs it."""
    if not columns:
        raise ConfigError(f"at {here()}: fr.log needs the columns to write, e.g. fr.log(rows, 'reward')")
    if how not in REDUCTIONS:
        raise ConfigError(f"at {here()}: fr.log knows {', '.join(REDUCTIONS)}; found {how!r}")
    tracer = active("log")
    handle = tracer.add("log", (("rows", rows),), hint="log", columns=tuple(columns), how=how)
    tracer.effects.append(handle.node)
    return handle


def _whole(call: str, name: str, value: Any, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        found = (
            repr(value) if not isinstance(value, ColumnExpr | Handle) else f"{value!r}, which exists only when it runs"
        )
        raise ConfigError(
            f"at {here()}: fr.{call} needs a whole number of at least {least} for '{name}'; found {found}"
        )


def _number(call: str, name: str, value: Any, *, least: float, most: float | None = None) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not value >= least or (most is not None and value > most):
        bound = f"between {least} and {most}" if most is not None else f"of at least {least}"
        raise ConfigError(f"at {here()}: fr.{call} needs a number {bound} for '{name}'; found {value!r}")


__all__ = [
    "after", "apply", "assign", "broadcast", "buffer", "combine", "concat", "ema", "every", "filter", "join", "log",
    "logprobs", "prompts_from", "reduce", "refill", "repeat", "rollout", "score", "select", "top_logprobs", "update",
    "values", "with_columns",
]  # fmt: skip
