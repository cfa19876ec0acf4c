"""The order in which one process does a plan: a list of actions made once, before the first iteration.

    plan's steps of the device, in the plan's order
        compute  -> run the node, and before it the nodes without a step of their own that it needs
        reshard  -> of a node that gives a model other weights (`assign`, `ema`): run the node
        others   -> a move, at its place

[Note: A column may be ahead of its table]
A plan orders work by what it really waits for. Two forward passes over the same responses wait for the tokens only, so a plan
may have them in the other order than the flow, where the second takes the table that the first one gave. Such a node is computed
ahead: on an earlier table with the same rows and the same columns that it reads. What it wrote joins its own table as soon as
that is there. The numbers are those of the flow's order, because the node reads the same values.

[Note: Weights change in place]
What reads a model's weights comes before what changes them, in the order of the flow, although no edge of the graph says so. Two
refills that draw from one data set keep their order too. Where a plan contradicts this or the data, the node that is needed runs
earlier than the plan has it, and a note says so: the numbers never depend on the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from flowrl.errors import ConfigError
from flowrl.graph.infer import Inference, infer
from flowrl.graph.kinds import KINDS, gives_weights
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.types import RowsType
from flowrl.planner.steps import Plan, Step
from flowrl.planner.tasks import StepKind
from flowrl.schema.columns import nearest

FORWARD_READS = frozenset({"prompt", "prompt_ids", "response", "response_ids", "loss_mask", "temperature"})
"""Columns that a forward pass reads, or would make where they are missing."""
PASSES_ROWS_ON = frozenset({"repeat", "log", "every"})
"""Kinds of node that give the table they are given."""


class Act(StrEnum):
    """What an action does."""

    RUN = "run"
    AHEAD = "ahead"
    """Compute a node on an earlier table; see [Note: A column may be ahead of its table]."""
    JOIN = "join"
    """Put what was computed ahead into the node's own table."""
    MOVE = "move"
    """Do a step that computes nothing."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do in an iteration, unless it does not ask for the node.

    Example:
        Action(Act.AHEAD, "old_logprobs", base="rollout")
    """

    act: Act
    node: str
    """Of the graph; of a move, what its step names, which may be no node."""
    step: Step | None = None
    """Of a move."""
    base: str = ""
    """The earlier node whose table is read ahead."""


@dataclass(frozen=True, slots=True)
class Program:
    """What one device does in an iteration."""

    actions: tuple[Action, ...]
    steps: dict[str, str]
    """Path of a node (`refill/rollout` inside a sub-graph) to the plan's step that it is."""
    notes: tuple[str, ...] = ()
    """Where the order is not the plan's."""


def program_of(plan: Plan, graph: Graph, device: int) -> Program:
    """The actions of a device for a graph, which is the plan's after pruning and merging.

    Errors: ConfigError for a step whose node the graph does not have.
    """
    return program_in_order(plan.column(device), graph)


def program_in_order(column: Sequence[Step], graph: Graph) -> Program:
    """The actions of some of a plan's steps, in their order; see `program_of`."""
    paths = dict(paths_of(graph))
    steps: dict[str, str] = {}
    for step in column:
        if step.kind is StepKind.COMPUTE and step.node not in paths:
            raise ConfigError(
                f"step '{step.name}' of the plan computes node '{step.node}', which flow '{graph.name}' does not have; "
                f"{nearest(step.node, paths)}"
            )
        if _is_work(step, graph):
            steps[paths[step.node]] = step.name
    builder = _Builder(graph, {path.partition("/")[0] for path in steps})
    for step in column:
        if _is_work(step, graph):
            builder.compute(paths[step.node].partition("/")[0])
        else:
            builder.actions.append(Action(Act.MOVE, step.node, step))
    for node in graph:
        builder.emit(node.name)
    return Program(tuple(builder.actions), steps, tuple(builder.notes))


def _is_work(step: Step, graph: Graph) -> bool:
    """Whether a step is a node's work: it computes it, or the node itself changes weights and does nothing else."""
    if step.kind is not StepKind.RESHARD or step.node not in graph:
        return step.kind is StepKind.COMPUTE
    kind = KINDS[graph[step.node].kind]
    return kind.changes_model and not kind.uses_model


def paths_of(graph: Graph, prefix: str = "") -> Iterator[tuple[str, str]]:
    """What a plan calls each node (`refill.rollout`), and its path."""
    for node in graph:
        yield (prefix + node.name).replace("/", "."), prefix + node.name
        if node.body is not None:
            yield from paths_of(node.body, f"{prefix}{node.name}/")


@dataclass
class _Builder:
    """Puts nodes into an order that plan, data and weights allow."""

    graph: Graph
    planned: set[str]
    """Nodes with a step of their own (or with one inside)."""
    actions: list[Action] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.types: Inference = infer(self.graph)
        hidden = hidden_order(self.graph)
        self.before = {node.name: {source for _, source in node.inputs} | hidden[node.name] for node in self.graph}
        self.place = {node.name: index for index, node in enumerate(self.graph)}
        self.done: set[str] = set()
        """Nodes whose value is there."""
        self.ahead: set[str] = set()
        """Nodes computed ahead that have not joined their table."""

    def compute(self, name: str) -> None:
        """Do a node of the plan: now, ahead, or after those that it needs although the plan has them later."""
        if name in self.done or name in self.ahead:
            return
        early = self.waiting(name)
        base = self._base(name) if early else ""
        if base:
            self.emit(base)
            for other in self.before[name] - {self.graph[name].source("rows")}:
                self.emit(other)
            self.actions.append(Action(Act.AHEAD, name, base=base))
            self.ahead.add(name)
            return
        if early:
            names = ", ".join(f"'{one}'" for one in early)
            self.notes.append(f"plan: {names} before '{name}', which needs it, although the plan has it later")
        self.emit(name)

    def emit(self, name: str) -> None:
        """A node and all that it needs, in the order of the flow."""
        for one in sorted(self._closure(name) - self.done, key=self.place.__getitem__):
            self.actions.append(Action(Act.JOIN if one in self.ahead else Act.RUN, one))
            self.ahead.discard(one)
            self.done.add(one)

    def waiting(self, name: str) -> list[str]:
        """Nodes with a later step in the plan that must come before `name`."""
        needed = self._closure(name) - self.done - self.ahead - {name}
        return sorted(needed & self.planned, key=self.place.__getitem__)

    def _closure(self, name: str) -> set[str]:
        """The node and all that must come before it."""
        found: set[str] = set()
        todo = [name]
        while todo:
            one = todo.pop()
            if one not in found:
                found.add(one)
                todo.extend(self.before[one] - self.done)
        return found

    def _base(self, name: str) -> str:
        """The nearest earlier node whose table will do for `name`; empty when there is none that could be had now."""
        node = self.graph[name]
        reads = _reads_of(node)
        if reads is None or any(
            self.waiting(one) for one in self.before[name] - {node.source("rows")} if one not in self.done
        ):
            return ""
        wanted = self.types.rows(node.source("rows"))
        at = node.source("rows")
        while True:
            if _same(self.types.rows(at), wanted, reads) and not (at in self.planned - self.done or self.waiting(at)):
                return at
            passed = self.graph[at]
            if not (KINDS[passed.kind].adds_columns or passed.kind in PASSES_ROWS_ON):
                return ""
            at = passed.source("rows")


def _reads_of(node: Node) -> frozenset[str] | None:
    """Columns that decide what a node writes; None for one that is not computed ahead of its table."""
    if KINDS[node.kind].is_forward:
        return FORWARD_READS
    if node.kind == "with_columns":
        return frozenset(column for _, expression in node["columns"] for column in expression.columns())
    if node.kind != "apply":
        return None
    call = node["operator"]
    # a filter takes rows away; one that flags rows, or remembers them, tells of the table it was given
    if call.is_filter or call.on_error == "flag" or call.state_param:
        return None
    names = {name for read in call.reads for name in (read.column, read.broadcast)}
    return frozenset({*names, call.locality.key, "response_ids"} - {""})


def _same(one: RowsType, other: RowsType, reads: frozenset[str]) -> bool:
    """Whether two tables have the same rows and, of the columns read, the same values."""
    writers = [{name: rows.columns[name].writer for name in reads if name in rows.columns} for rows in (one, other)]
    return (one.rowset, one.tokens) == (other.rowset, other.tokens) and writers[0] == writers[1]


def hidden_order(graph: Graph) -> dict[str, set[str]]:
    """For each node those that must come before it though it takes nothing from them; [Note: Weights change in place]."""
    found: dict[str, set[str]] = {node.name: set() for node in graph}
    readers: dict[str, set[str]] = {}
    writers: dict[str, set[str]] = {}
    drawers: dict[str, str] = {}
    model: dict[str, str] = {}
    for node in graph:
        used = {model[source] for _, source in node.inputs if source in model}
        written: set[str] = set()
        if KINDS[node.kind].changes_model:
            written = {model[node.source("model")]}
        elif node.body is not None and any(KINDS[inner.kind].changes_model for inner in node.body):
            written = used
        if gives_weights(node.kind, dict(node.params)):
            # `after` chooses between two versions of one model
            first = next((s for p, s in node.inputs if p == "model"), node.inputs[0][1] if node.inputs else "")
            model[node.name] = model[first] if first else node.name
        if node.kind in ("input", "after"):
            continue
        for name in used:
            found[node.name] |= writers.get(name, set())
            if name in written:
                found[node.name] |= readers.get(name, set())
        for name in used:
            (writers if name in written else readers).setdefault(name, set()).add(node.name)
        if node.body is not None:
            data = node.source("rows")
            found[node.name] |= {drawers[data]} if data in drawers else set()
            drawers[data] = node.name
    return found
