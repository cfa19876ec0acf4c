"""What a node's handler may ask of the run it is part of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from flowrl.engines.protocol import Host, UpdateReport
from flowrl.errors import RunError
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.operators import State
from flowrl.runtime.data import Data
from flowrl.runtime.operators import Applied, run_operator
from flowrl.store.rows import RowBatch
from flowrl.store.table import ExperienceTable


@dataclass(frozen=True, slots=True)
class Table:
    """Rows on an edge, and how an update is to pass over them."""

    batch: RowBatch
    epochs: int = 1
    minibatches: int = 1
    split_by: str = ""
    shuffle: bool = True

    def with_batch(self, batch: RowBatch) -> Table:
        return replace(self, batch=batch)


@dataclass(frozen=True, slots=True)
class Version:
    """Weights on an edge: the host that holds them."""

    host: Host


Value = Table | Version


@dataclass
class Memory:
    """What nodes remember from step to step, by the path of the node."""

    states: dict[str, State] = field(default_factory=dict)
    buffers: dict[str, ExperienceTable] = field(default_factory=dict)


@dataclass
class StepLog:
    """What a step did, for metrics and the live view."""

    written: list[tuple[Node, RowBatch, tuple[str, ...]]] = field(default_factory=list)
    """(node, rows, columns it wrote)."""
    updates: list[tuple[str, UpdateReport]] = field(default_factory=list)
    extra: dict[str, float] = field(default_factory=dict)
    """Numbers of nodes' own: `refill/rounds`, `log/...`."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time by kind of node."""
    notes: list[str] = field(default_factory=list)
    """Things a person should see: a short batch, flagged rows."""

    @classmethod
    def joined(cls, logs: Iterable[StepLog]) -> StepLog:
        """One log of several, as if what they tell had happened one after the other."""
        whole = cls()
        for log in logs:
            whole.written += log.written
            whole.updates += log.updates
            whole.extra.update(log.extra)
            whole.notes += log.notes
            for kind, spent in log.seconds.items():
                whole.seconds[kind] = whole.seconds.get(kind, 0.0) + spent
        return whole


@dataclass
class Context:
    """One evaluation of a graph (or of a node's sub-graph) at one step."""

    graph: Graph
    step: int
    seed: int
    max_tokens: int
    memory: Memory
    log: StepLog
    data: dict[str, Data]
    values: dict[str, Value] = field(default_factory=dict)
    path: str = ""
    """Prefix of node paths inside sub-graphs."""
    run_body: Callable[[Context, Node, RowBatch, int], RowBatch] | None = None
    reward_workers: int | None = None
    """Worker processes for operators of one row; see `run_operator`."""
    operate: Callable[..., Applied] = run_operator
    """Runs an operator on rows: here, or on several ranks."""

    def table(self, node: Node, port: str = "rows") -> Table:
        found = self.values[node.source(port)]
        if not isinstance(found, Table):
            raise RunError(f"node '{node.name}' needs rows on port '{port}'; found weights")
        return found

    def rows(self, node: Node, port: str = "rows") -> RowBatch:
        return self.table(node, port).batch

    def host(self, node: Node, port: str = "model") -> Host:
        found = self.values[node.source(port)]
        if not isinstance(found, Version):
            raise RunError(f"node '{node.name}' needs weights on port '{port}'; found rows")
        return found.host

    def state(self, node: Node) -> State:
        return self.memory.states.setdefault(self.path + node.name, State())


def result(context: Context, node: Node, batch: RowBatch, *columns: str, table: Table | None = None) -> Table:
    """A node's rows, with the columns it wrote noted for metrics."""
    if columns:
        context.log.written.append((node, batch, columns))
    return table.with_batch(batch) if table is not None else Table(batch)


def params(node: Node) -> dict[str, Any]:
    return dict(node.params)
