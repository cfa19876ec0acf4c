"""Which models a flow keeps on devices, and what each of them does in one iteration, in order.

Read off the graph by the properties of nodes alone; a model's name means nothing. A model is an `input` that gives weights.
What samples from it is a role of its own (an engine holds weights in its own layout); training and forward passes share one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.graph.kinds import KINDS, gives_weights
from flowrl.graph.nodes import Graph, Node
from flowrl.planner.workload import MOST_SEQUENCES, Workload
from flowrl.schema.columns import nearest
from flowrl.schema.fields import shown

ENGINE = "gen"
TOKENS = frozenset({"prompt_ids", "response_ids"})
"""Columns that a forward pass reads; what only adds others does not hold it up."""


@dataclass(frozen=True, slots=True)
class Call:
    """One piece of work of a role.

    Example:
        Call("update", "policy", "train", sequences=1024, after=("ref_logprobs",))
    """

    node: str
    """Name of the graph's node; inside a refill `refill.rollout`."""
    role: str
    work: str
    """`generate`, `forward` or `train`."""
    sequences: int
    """Rows it works on, epochs included."""
    after: tuple[str, ...] = ()
    """Calls of the same iteration whose results it needs."""
    steps: int = 1
    """Optimizer steps."""
    share: float = 1.0
    """Of the iterations in which it runs: 0.02 for what happens every 50 steps."""


@dataclass(frozen=True, slots=True)
class Role:
    """Weights on devices, and what is done with them."""

    name: str
    model: str
    """The input of the graph."""
    shape: ModelShape
    calls: tuple[Call, ...]
    weights_from: str = ""
    """The role whose new weights it receives once per iteration; empty for one that keeps its own."""

    @property
    def is_engine(self) -> bool:
        return any(call.work == "generate" for call in self.calls)

    @property
    def is_trained(self) -> bool:
        return any(call.work == "train" for call in self.calls)


def roles_of(graph: Graph, models: Mapping[str, ModelShape], workload: Workload) -> tuple[Role, ...]:
    """The roles of a graph, in the order in which the graph lists its models, engines first.

    Raises `ConfigError` for a model of the graph without a shape, or a shape for no model.
    """
    used = {node.name for node in graph.inputs if node["kind"] == "weights"}
    for name in models:
        if name not in used:
            raise ConfigError(f"flow '{graph.name}' has no model '{name}'; {nearest(name, used)}")
    reader = _Reader(graph, workload)
    calls = reader.calls()
    _check_sequences(graph, calls, workload)
    sampled = [
        name for name in reader.models if any(c.work == "generate" for c in calls if reader.model[c.node] == name)
    ]
    roles: list[Role] = []
    for name in reader.models:
        mine = tuple(call for call in calls if reader.model[call.node] == name)
        if not mine:
            continue
        if name not in models:
            raise ConfigError(
                f"model '{name}' of flow '{graph.name}' needs a shape: models={{'{name}': ModelShape.of(...)}}"
            )
        engine = ENGINE if len(sampled) == 1 else f"{ENGINE}.{name}"
        generating = tuple(_of(call, engine) for call in mine if call.work == "generate")
        others = tuple(_of(call, name) for call in mine if call.work != "generate")
        is_trained = any(call.work == "train" for call in others)
        if generating:
            roles.append(Role(engine, name, models[name], generating, name if is_trained else ""))
        if others:
            roles.append(Role(name, name, models[name], others))
    if not roles:
        raise ConfigError(f"flow '{graph.name}' uses no model: there is nothing to place on devices")
    return tuple(sorted(roles, key=lambda role: not role.is_engine))


def _check_sequences(graph: Graph, calls: Sequence[Call], workload: Workload) -> None:
    """Raise `ConfigError` for more rows of one piece of work than lengths are drawn for.

    A workload alone does not know how many there are: the size of a group may be the rollout's, and buffers give what they say.
    """
    for call in calls:
        count = math.ceil(call.sequences / call.steps)
        if count > MOST_SEQUENCES:
            work = {"generate": "samples", "forward": "reads", "train": "trains on"}[call.work]
            raise ConfigError(
                f"'{call.node}' of flow '{graph.name}' {work} {shown(count)} responses of one iteration, and plans are made for "
                f"up to {MOST_SEQUENCES:,}: each has a length of its own. Found {workload.prompts} prompts, group_size "
                f"{'as the rollout says' if workload.group_size is None else workload.group_size}, rounds {workload.rounds}; "
                "take fewer prompts or smaller groups"
            )


def model_of(graph: Graph, name: str) -> str:
    """The model of which a node gives weights: the input at the beginning of its updates."""
    while graph[name].kind != "input":
        name = _weights_before(graph[name])
    return name


def _weights_before(node: Node) -> str:
    """The node whose weights a node that gives some begins with."""
    # `after` has no port "model": both of its choices come from one model
    return next((source for port, source in node.inputs if port == "model"), node.inputs[0][1])


def rows_of(graph: Graph, workload: Workload) -> dict[str, float]:
    """Rows that each node gives in one iteration (an update: takes), by name; inside a refill `refill.rollout`, of all rounds."""
    reader = _Reader(graph, workload)
    reader.calls()
    found = dict(reader.rows)
    for node in graph:
        if node.body is not None:
            inner = rows_of(node.body, workload)
            found |= {f"{node.name}.{name}": count * workload.rounds for name, count in inner.items()}
    return found


def _of(call: Call, role: str) -> Call:
    return Call(call.node, role, call.work, call.sequences, call.after, call.steps, call.share)


@dataclass
class _Reader:
    """One walk over a graph's nodes, in their order."""

    graph: Graph
    workload: Workload
    models: dict[str, None] = field(default_factory=dict)
    model: dict[str, str] = field(default_factory=dict)
    """Node that gives weights or uses them -> the model it comes from."""
    rows: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    before: dict[str, frozenset[str]] = field(default_factory=dict)
    """Node -> calls that must have ended before its value is there."""
    tokens: dict[str, frozenset[str]] = field(default_factory=dict)
    """Node -> calls that must have ended before its rows and their tokens are there, whatever other columns wait for."""
    found: list[Call] = field(default_factory=list)

    def calls(self) -> tuple[Call, ...]:
        shares = shares_of(self.graph)
        for node in self.graph:
            self._read(node, shares[node.name])
        return tuple(self.found)

    def _read(self, node: Node, share: float) -> None:
        name = node.name
        waits = frozenset().union(*(self.before[source] for _, source in node.inputs))
        if node.kind == "input":
            if node["kind"] == "weights":
                self.models[name] = None
                self.model[name] = name
        elif gives_weights(node.kind, dict(node.params)):
            self.model[name] = self.model[_weights_before(node)]
        sources = [source for port, source in node.inputs if port == "rows" and source in self.rows]
        self.rows[name] = self._rows(node, [self.rows[source] for source in sources])
        self.steps[name] = max([1, *(self.steps[source] for source in sources)])
        if node.kind == "repeat":
            self.steps[name] *= node.get("epochs", 1) * node.get("minibatches", 1)
        base = frozenset().union(*(self.tokens[source] for source in sources))
        if node.body is not None:
            self._read_body(node, waits, share)
        elif KINDS[node.kind].is_forward:
            self.model.setdefault(name, self.model[node.source("model")])
            read = self.before[node.source("model")] | base
            self._add(node, name, self.model[name], self.rows[name], read, share)
            self.before[name] |= waits
        elif KINDS[node.kind].uses_model:  # an assignment of weights uses none: it is a copy
            self.model.setdefault(name, self.model[node.source("model")])
            self._add(node, name, self.model[name], self.rows[name], waits, share)
        else:
            self.before[name] = waits
        keeps_tokens = KINDS[node.kind].adds_columns or node.kind in ("select", "repeat")
        if node.kind == "apply":  # a filter decides which rows are left
            written = {str(getattr(column, "name", column)) for column in node["operator"].writes}
            keeps_tokens = not node["operator"].is_filter and not TOKENS & written
        self.tokens[name] = base if keeps_tokens else self.before[name]

    def _add(self, node: Node, name: str, model: str, rows: float, waits: frozenset[str], share: float) -> None:
        kind = KINDS[node.kind]
        work = "train" if kind.changes_model else "forward" if kind.is_forward else "generate"
        if work == "train":  # weights change in place: what reads the old ones comes first
            waits |= {c.node for c in self.found if c.work == "forward" and self.model[c.node] == model}
        needed = tuple(call.node for call in self.found if call.node in waits)
        self.found.append(
            Call(name, "", work, max(1, round(rows)), needed, self.steps.get(name, 1) if work == "train" else 1, share)
        )
        self.before[name] = waits | {name}

    def _read_body(self, node: Node, waits: frozenset[str], share: float) -> None:
        """A refill: what its sub-graph does in one round, times the rounds."""
        body = node.body
        assert body is not None
        inner = _Reader(body, self.workload)
        inside = inner.calls()
        for call in inside:
            name = f"{node.name}.{call.node}"
            self.model[name] = inner.model[call.node]
            after = tuple(c.node for c in self.found if c.node in waits) + tuple(f"{node.name}.{n}" for n in call.after)
            rows = max(1, round(call.sequences * self.workload.rounds))
            self.found.append(Call(name, "", call.work, rows, after, call.steps, share))
        self.before[node.name] = waits | {f"{node.name}.{call.node}" for call in inside}
        self.rows[node.name] = max((inner.rows[name] for name in body.outputs), default=0.0)

    def _rows(self, node: Node, given: list[float]) -> float:
        """Rows that a node gives, or for an update, takes."""
        if not given:
            return float(self.workload.prompts)
        match node.kind:
            case "rollout":
                return given[0] * (self.workload.group_size or node.get("n", 1))
            case "concat":
                return sum(given)
            case "repeat":
                return given[0] * float(node.get("epochs", 1))
            case "buffer":
                return float(node["draw"])
        return given[0]


def shares_of(graph: Graph) -> dict[str, float]:
    """In which part of the iterations each node runs: less than 1 only behind an `every`."""
    shares = {node.name: 0.0 for node in graph}
    for root in graph.roots:
        share = 1.0 / graph[root]["steps"] if graph[root].kind == "every" else 1.0
        for name in graph.ancestors(root):
            shares[name] = max(shares[name], share)
    return shares
