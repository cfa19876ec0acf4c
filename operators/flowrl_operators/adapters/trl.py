"""Reward functions of TRL's trainers, both ways. Nothing of TRL is imported: its protocol is a plain function.

f(prompts, completions, completion_ids=..., answer=..., **more) -> [0.0, 1.0, None, ...]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError, DataError
from flowrl.graph.handles import Parts, Rows
from flowrl.graph.operators import Locality, OperatorCall, Read
from flowrl_operators._options import checked
from flowrl_operators.adapters import _calls, arrays

__all__ = ["function_reward", "reward", "reward_function"]

GIVEN = ("prompts", "completions", "completion_ids")
TRAINERS = ("trainer_state", "log_extra", "log_metric", "environments")
"""What TRL's trainers also pass: there is no such thing in a flow, so functions must do without."""


def reward(
    rows: Any = None,
    function: Callable[..., Any] | None = None,
    *,
    columns: Sequence[str] | None = None,
    messages: bool = False,
    none: float | None = None,
    out: str = "reward",
    locality: str = "batch",
    timeout_s: float | None = 60.0,
) -> Any:
    """A TRL reward function as a reward of a flow: `reward(function, ...)(rows)`, or `reward(rows, function, ...)`.

    Example:
        from trl.rewards import accuracy_reward
        rows = adapters.trl.reward(accuracy_reward, messages=True)(rows)

    Args:
        function: takes `prompts`, `completions` and, by name, `completion_ids` and columns of the data set, each a list with
            one value per row; returns one number or None per row. May be async.
        columns: those it gets beside the three; None takes them from its signature, where `**kwargs` tells of none.
        messages: prompts and completions are chat messages (`[{"role": "user", "content": ...}]`), as in TRL where the data
            set is conversational. Else they are text.
        none: reward of a row for which it answers None, "does not apply". None makes it NaN: the row has no reward, and in a sum
            of several functions the whole sum is NaN. TRL sums the others: `rewards.total(rows, {...}, missing="zero")`.
        out: the column written.
        locality: `"batch"` shows it all rows of the step at once, and where it raises the run ends, as in TRL. `"row"` calls it
            for each row by itself: a row for which it raises gets NaN and a `row_error`, and the others go on.
        timeout_s: seconds for all rows together, or, with `"row"`, for each.

    The node, and what is logged of it, is called after the function. The function is part of the graph by its name and code, as
    any function of a configuration.

    Returns the operator with its configuration or, given `rows`, the rows with the reward.
    """
    if function is None and not isinstance(rows, Rows | Parts):
        rows, function = None, rows
    if not callable(function):
        raise ConfigError(
            f"adapters.trl.reward needs a function, as in reward(function)(rows) or reward(rows, function); "
            f"found {function!r:.80}"
        )
    checked("locality", locality, ("batch", "row"), "adapters.trl.reward")
    wanted = [c for c in _calls.named(function) if c not in (*GIVEN, *TRAINERS)] if columns is None else list(columns)
    required = {n for n, p in inspect.signature(function).parameters.items() if p.default is p.empty}
    more = tuple(Read(name, name, None, is_optional=columns is None and name not in required) for name in wanted)
    reads_ids = "completion_ids" in _calls.named(function) or _calls.takes_any(function)
    call = function_reward.bind(
        function=function, columns=tuple(wanted), messages=messages, none=none, out=out, reads_ids=reads_ids,
        each=locality == "row",
    )  # fmt: skip
    reads = tuple(read for read in call.reads if reads_ids or read.param != "response_ids")
    made = replace(
        call, reads=(*reads, *more), locality=Locality(locality), timeout_s=timeout_s, each_row=locality == "row",
        on_error="flag" if locality == "row" else "raise",
    )  # fmt: skip
    return made if rows is None else made(rows)


def _scored(*values: Any, **options: Any) -> np.ndarray | float:
    if options["each"]:
        columns = [None if value is None else [value] for value in values]
        return float(_of_all(*columns, **options)[0])
    return _of_all(*values, **options)


def _of_all(*values: Any, **options: Any) -> np.ndarray:
    function, columns, reads_ids = options["function"], options["columns"], options["reads_ids"]
    prompts, completions, *rest = values
    given: dict[str, Any] = {"prompts": _plain(prompts), "completions": _plain(completions)}
    if options["messages"]:
        given["prompts"] = [[{"role": "user", "content": text}] for text in given["prompts"]]
        given["completions"] = [[{"role": "assistant", "content": text}] for text in given["completions"]]
    if reads_ids:
        ids = rest.pop(0)
        given.update({} if ids is None else {"completion_ids": _plain(ids)})
    given.update((name, _plain(column)) for name, column in zip(columns, rest, strict=True) if column is not None)
    name = getattr(function, "__name__", function)
    try:
        answer = _calls.finished(function(**_calls.accepted(function, given)))
    except (TypeError, AttributeError, KeyError) as error:
        hint = _hint(error, given, is_text=not options["messages"])
        if not hint:
            raise
        raise DataError(f"reward function '{name}' failed with {type(error).__name__}: {error}; {hint}") from error
    scores = list(answer)
    if len(scores) != len(given["prompts"]):
        raise DataError(f"reward function '{name}' returned {len(scores)} rewards for {len(given['prompts'])} rows")
    nothing = float("nan") if options["none"] is None else options["none"]
    return np.asarray([nothing if score is None else float(score) for score in scores], np.float64)


def _hint(error: Exception, given: Mapping[str, Any], *, is_text: bool) -> str:
    """What to say to `reward` where a function expects what it was not given; empty where that is not the reason."""
    if isinstance(error, KeyError):
        name = error.args[0] if error.args else None
        if not isinstance(name, str) or name in given:
            return ""
        return f"if '{name}' is a column it takes from **kwargs, name those it needs: columns=['{name}', ...]"
    is_message = "string indices must be integers" in str(error) or "'str' object has no attribute" in str(error)
    return "it was given text; if it expects chat messages, say messages=True" if is_text and is_message else ""


def _plain(column: Any) -> list[Any]:
    if isinstance(column, fr.Ragged):
        return column.to_list()
    return (
        [v.tolist() if isinstance(v, np.ndarray) else v for v in column]
        if isinstance(column, list)
        else column.tolist()
    )


def _declared() -> fr.Operator:
    def function_reward(
        prompt: fr.PROMPT.str,
        response: fr.SAMPLE.str,
        response_ids: fr.TOKEN.i32 = None,
        *,
        function: Any,
        columns: Any = (),
        messages: bool = False,
        none: float | None = None,
        out: str = "reward",
        reads_ids: bool = True,
        each: bool = False,
    ) -> Any: ...

    # its columns are those that the function in its configuration asks for, so it takes any number
    _scored.__signature__ = inspect.signature(function_reward, eval_str=False)
    _scored.__name__ = _scored.__qualname__ = "function_reward"
    _scored.__doc__ = "The operator behind `reward`: calls the function in its configuration."
    return fr.operator(writes=lambda *, out, **_: {out: fr.SAMPLE.f32}, locality="batch", replaces=False)(_scored)


function_reward = _declared()


def reward_function(
    operator: fr.Operator | OperatorCall, *, name: str | None = None, answer: str = "answer", **config: Any
) -> Callable[..., list[float | None]]:
    """A reward of FlowRL as a function for `GRPOTrainer(reward_funcs=[...])`.

    Example:
        GRPOTrainer(model, reward_funcs=[adapters.trl.reward_function(rewards.math)], ...)

    Args:
        operator: reads `prompt`, `response`, `response_ids` or columns of the data set, and writes one number per row.
        name: by which TRL logs it; None takes the operator's.
        answer: the data set's column of reference answers, for operators that read `answer`.
        config: of the operator, unless it is bound already.

    Of chat messages the text is taken: of a completion all that the assistant said, of a prompt everything. A row that the
    operator cannot judge (NaN) is None: TRL leaves it out. Time limits are kept in flows only.
    """
    call = arrays.bound(operator, config)
    if len(call.writes) != 1:
        written = ", ".join(column.name for column in call.writes) or "nothing"
        raise ConfigError(f"a TRL reward is one number per row; '{call.short_name}' writes {written}")

    def scored(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]] | None = None, **columns: Any
    ) -> list[float | None]:
        given = {name: values for name, values in columns.items() if name not in TRAINERS and values is not None}
        given["prompt"] = np.asarray([_calls.text_of(p, "a prompt") for p in prompts], object)
        given["response"] = np.asarray([_said(c) for c in completions], object)
        if completion_ids is not None:
            given["response_ids"] = fr.Ragged.of([list(map(int, ids)) for ids in completion_ids], np.int32)
        if answer in columns:
            given["answer"] = columns[answer]
        wanted = {read.column for read in call.reads} | {call.locality.key}
        found = arrays.apply(call, {n: v for n, v in given.items() if n in wanted or n == "response"})
        return [float(score) if np.isfinite(score) else None for score in found]

    scored.__name__ = scored.__qualname__ = name or call.short_name
    scored.__doc__ = f"FlowRL's {call.name} for TRL."
    return scored


def _said(completion: Any) -> str:
    """All that the assistant said in a completion."""
    if isinstance(completion, str):
        return completion
    return "\n".join(_calls.text_of(m) for m in completion if m.get("role", "assistant") == "assistant")
