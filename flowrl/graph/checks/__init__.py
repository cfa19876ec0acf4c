"""Everything that can be known to be wrong before a run: all problems at once, each with a place and a fix.

    find_problems(graph)             -> tuple of Problem
    check(flow, group_size=8)        -> the graph, or CheckError with every problem

A check is one function in one file, from `Facts` to problems. Codes are stable; `docs/reference/checks.md` explains them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from flowrl.errors import CheckError, ConfigError, PackError, Problem
from flowrl.graph.checks.columns import columns
from flowrl.graph.checks.facts import Facts
from flowrl.graph.checks.foreign_tokens import foreign_tokens
from flowrl.graph.checks.group_size import group_size
from flowrl.graph.checks.groups import groups
from flowrl.graph.checks.lost_weights import lost_weights
from flowrl.graph.checks.needed_logprobs import needed_logprobs
from flowrl.graph.checks.old_logprobs import old_logprobs
from flowrl.graph.checks.staleness import staleness
from flowrl.graph.checks.tokenizers import tokenizers
from flowrl.graph.checks.weights_order import weights_order
from flowrl.graph.flows import Flow
from flowrl.graph.infer import Inference, Writers, infer
from flowrl.graph.nodes import Graph
from flowrl.graph.schedule import Schedule, Sync
from flowrl.schema.columns import Column, TableSchema, nearest
from flowrl.schema.standard import PROMPT_ID, STANDARD
from flowrl.schema.types import PROMPT, ColumnType

Check = Callable[[Facts], Iterable[Problem]]

CHECKS: tuple[Check, ...] = (
    columns,
    needed_logprobs,
    staleness,
    old_logprobs,
    groups,
    group_size,
    foreign_tokens,
    weights_order,
    tokenizers,
    lost_weights,
)
"""Every check, in the order of the codes."""

_SYNC = Sync()


def find_problems(
    graph: Graph,
    *,
    schedule: Schedule = _SYNC,
    models: Mapping[str, Any] | None = None,
    data: Mapping[str, TableSchema | Iterable[str | Column]] | None = None,
) -> tuple[Problem, ...]:
    """All problems of a graph, in the order of their lines.

    Args:
        schedule: how old rows may be.
        models: for inputs whose model is known, the model (or the fingerprint of its tokenizer, a string).
        data: for inputs whose data set is known, the columns it has; a name alone has its standard or declared type.

    Errors: ConfigError when `models` or `data` name an input that the flow does not have.
    """
    for what, given in (("models", models), ("data", data)):
        for name in given or {}:
            known = [node.name for node in graph.inputs]
            if name not in known:
                raise ConfigError(
                    f"{what} names '{name}', which is no input of flow '{graph.name}'; {nearest(name, known)}"
                )
    columns_of = {name: tuple(_columns(graph, name, has)) for name, has in (data or {}).items()}
    facts = Facts(_infer(graph, columns_of), schedule, _fingerprints(models or {}))
    found = [problem for run in CHECKS for problem in run(facts)]
    return tuple(sorted(dict.fromkeys(found), key=_line))


def check(
    flow: Flow | Graph,
    *,
    schedule: Schedule = _SYNC,
    models: Mapping[str, Any] | None = None,
    data: Mapping[str, TableSchema | Iterable[str | Column]] | None = None,
    **config: Any,
) -> Graph:
    """The graph of a flow, checked.

    Args: those of `find_problems`; `config` is the flow's configuration.

    Errors: CheckError with every problem; ConfigError and TraceError when there is no graph to check.
    """
    if isinstance(flow, Graph):
        if config:
            raise ConfigError(
                f"a graph has no configuration any more; found {', '.join(config)}. Check the flow instead"
            )
        graph = flow
    elif isinstance(flow, Flow):
        graph = flow.graph(**config)
    else:
        raise ConfigError(
            f"check needs a flow (a function decorated with @fr.flow) or a graph; found {type(flow).__name__}"
        )
    problems = find_problems(graph, schedule=schedule, models=models, data=data)
    if problems:
        raise CheckError(graph.name, problems)
    return graph


def _infer(graph: Graph, given: Mapping[str, tuple[Column, ...]]) -> Inference:
    found = infer(graph, given=given)
    if any(problem.code == "FR-C01" for problem in found.all_problems()):
        # packs are imported only now, to say which of their operators would write the column
        found = infer(graph, given=given, writers=_writers())
    return found


def _writers() -> Writers:
    from flowrl.graph import packs

    try:
        return packs.all_writers()
    except PackError:  # two packs of one name: `flowrl ops list` reports it, a hint can do without
        return {}


def _columns(graph: Graph, name: str, has: TableSchema | Iterable[str | Column]) -> Iterator[Column]:
    declared = dict(graph[name].get("columns", ()))
    has = tuple(has)
    if not any((c.name if isinstance(c, Column) else c) == PROMPT_ID.name for c in has):
        yield PROMPT_ID  # a run numbers the rows of a data set that has none
    for column in has:
        if isinstance(column, Column):
            yield column
        elif column in declared:
            yield Column(column, ColumnType.parse(declared[column]))
        else:
            yield STANDARD[column] if column in STANDARD else Column(column, PROMPT.str)


def _fingerprints(models: Mapping[str, Any]) -> dict[str, str]:
    found = {
        n: m if isinstance(m, str) else getattr(getattr(m, "tokenizer", None), "fingerprint", None)
        for n, m in models.items()
    }
    return {name: value for name, value in found.items() if isinstance(value, str) and value}


def _line(problem: Problem) -> tuple[str, int, str]:
    file, _, line = problem.where.rpartition(":")
    return file, int(line) if line.isdigit() else 0, problem.code


__all__ = ["CHECKS", "Facts", "check", "find_problems"]
