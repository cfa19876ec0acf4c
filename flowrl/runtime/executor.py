"""Evaluate a graph one step at a time, in this process.

    step(i):  needed = what the roots ask for at step i  ->  run those nodes in the order they were written
                        |
                        `every`, `after` and `assign(every=)` decide by the step number, before anything runs

A handler per kind of node does the work; the executor never asks what a node is for. Order of writing is a safe order:
weights change in place, and FR-W01 refuses graphs that read an old version after a new one was made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flowrl.engines.protocol import Host
from flowrl.errors import RunError
from flowrl.graph.nodes import Graph, Node
from flowrl.runtime import models, tables
from flowrl.runtime.context import Context, Memory, StepLog, Table, Value, Version
from flowrl.runtime.data import Data
from flowrl.schema.types import PROMPT
from flowrl.store.rows import RowBatch

HANDLERS: dict[str, Callable[[Node, Context], Value]] = {
    "rollout": models.rollout,
    "logprobs": models.logprobs,
    "top_logprobs": models.top_logprobs,
    "values": models.values,
    "score": models.score,
    "update": models.update,
    "assign": models.assign,
    "ema": models.ema,
    "apply": tables.apply,
    "combine": tables.combine,
    "select": tables.select,
    "with_columns": tables.with_columns,
    "filter": tables.filter,
    "join": tables.join,
    "concat": tables.concat,
    "broadcast": tables.broadcast,
    "reduce": tables.reduce,
    "copy": tables.copy,
    "prompts_from": tables.prompts_from,
    "buffer": tables.buffer,
    "refill": tables.refill,
    "repeat": tables.repeat,
    "every": tables.same,
    "log": tables.log,
}
"""Kind of node to what runs it. `input` and `after` are settled by the executor itself: they only pass values on."""

Before = Callable[[Node, str], None]
"""Called before each node with (node, path of the sub-graph it is in)."""
After = Callable[[Node, Value, float, float, str], None]
"""Called after each node with (node, value, start, end, path); times of `time.perf_counter`."""


@dataclass
class Executor:
    """Runs steps of one graph.

    Example:
        executor = Executor(graph, hosts={"policy": host}, data={"prompts": data}, seed=0)
        values, log = executor.step(0)
    """

    graph: Graph
    hosts: dict[str, Host]
    data: dict[str, Data]
    seed: int = 0
    max_tokens: int = 256
    memory: Memory = field(default_factory=Memory)
    before: Before | None = None
    after: After | None = None
    reward_workers: int | None = None

    def step(self, number: int) -> tuple[dict[str, Value], StepLog]:
        """Run one iteration of the flow; returns every computed value by node name, and the step's log."""
        context = self._context(number)
        self._evaluate(context)
        return context.values, context.log

    def _context(self, number: int) -> Context:
        return Context(
            self.graph, number, self.seed, self.max_tokens, self.memory, StepLog(), self.data,
            run_body=self._run_body, reward_workers=self.reward_workers,
        )  # fmt: skip

    def _evaluate(self, context: Context) -> None:
        asked = needed(context.graph, context.step)
        for node in context.graph:
            if node.name in asked and node.name not in context.values:
                self._run(node, context)

    def _run(self, node: Node, context: Context) -> None:
        """Compute one node, whose inputs are there."""
        value, start, end = self._timed(node, context)
        context.values[node.name] = value
        if self.after is not None:
            self.after(node, value, start, end, context.path)

    def _timed(self, node: Node, context: Context) -> tuple[Value, float, float]:
        """(value, start, end) of a node."""
        if self.before is not None:
            self.before(node, context.path)
        start = time.perf_counter()
        value = self._value(node, context)
        end = time.perf_counter()
        if node.kind not in ("input", "refill"):
            context.log.seconds[node.kind] = context.log.seconds.get(node.kind, 0.0) + end - start
        return value, start, end

    def _value(self, node: Node, context: Context) -> Value:
        if node.kind == "input":
            return self._input(node)
        if node.kind == "after":
            return context.values[chosen(node, context.step)]
        try:
            handler = HANDLERS[node.kind]
        except KeyError:
            raise RunError(f"no handler for nodes of kind '{node.kind}'; add one to HANDLERS") from None
        return handler(node, context)

    def _input(self, node: Node) -> Value:
        if node["kind"] == "weights":
            return Version(self.hosts[node.name])
        rows = self.data[node.name].next()
        # a prompt drawn twice is two prompts; of rows that are responses, those of one prompt are siblings
        is_prompts = all(kind.granularity is PROMPT for kind in rows.types.values())
        return Table(tables.unique_prompts(rows) if is_prompts else rows)

    def _run_body(self, context: Context, node: Node, prompts: RowBatch, number: int) -> RowBatch:
        """One round of a node that holds a sub-graph."""
        assert node.body is not None
        values: dict[str, Value] = {"prompts": Table(prompts)}
        for port, source in node.inputs:
            if port != "rows":
                values[source] = context.values[source]
        inner = Context(
            node.body, context.step, context.seed, context.max_tokens, context.memory, context.log, context.data,
            values, f"{context.path}{node.name}/", self._run_body, context.reward_workers, context.operate,
        )  # fmt: skip
        self._evaluate(inner)
        found = inner.values[node.body.outputs[0]]
        if not isinstance(found, Table):
            raise RunError(f"the body of '{node.name}' ({node.place}) must return rows")
        return found.batch


def chosen(node: Node, step: int) -> str:
    """The side of an `after` node that holds at a step."""
    return node.source("then") if step >= node["step"] else node.source("otherwise")


def is_due(node: Node, step: int) -> bool:
    """Whether an `every` node acts at a step: the n-th, 2n-th, ... of the run."""
    return bool((step + 1) % node["steps"] == 0)


def needed(graph: Graph, step: int) -> frozenset[str]:
    """Names of the nodes that step `step` computes."""
    found: set[str] = set()
    todo = [name for name in graph.roots if graph[name].kind != "every" or is_due(graph[name], step)]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        node = graph[name]
        if node.kind == "after":
            todo.append(chosen(node, step))
        else:
            todo.extend(source for _, source in node.inputs)
    return frozenset(found)
