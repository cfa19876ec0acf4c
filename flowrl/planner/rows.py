"""What the work of a flow does with rows: which columns each piece reads, who made them, how many bytes they are.

Read off the graph after pruning, so that a column nobody needs is neither read nor moved. Bytes are

    rows * width            SAMPLE columns
    prompts * width         PROMPT columns: stored once for all responses of a prompt
    rows * tokens * width   TOKEN columns, with the workload's mean response length
    rows * turns * width    TURN columns
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flowrl.graph.infer import Inference, infer
from flowrl.graph.kinds import KINDS
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.operators import OperatorCall
from flowrl.graph.passes.needs import Needs, needs_of, own_reads
from flowrl.graph.written import adds_to, written_by
from flowrl.planner.roles import rows_of
from flowrl.planner.workload import Workload
from flowrl.schema.types import RAGGED, ColumnType, Granularity

ROW_KINDS = frozenset(
    {
        "apply",
        "combine",
        "with_columns",
        "join",
        "filter",
        "broadcast",
        "reduce",
        "prompts_from",
        "buffer",
        "refill",
        "log",
    }
)
"""Kinds of node that work on the values of rows. The others of those that give rows rename, repeat or list them."""
DECIDING = frozenset({"rollout", "filter", "prompts_from", "buffer", "refill"})
"""Kinds of node that decide which rows there are."""
PROMPT_TEXTS, RESPONSE_TEXTS = frozenset({"prompt"}), frozenset({"response"})
WIDTHS = {"bool": 1, "u8": 1, "i32": 4, "i64": 8, "f16": 2, "f32": 4, "f64": 8}
"""Bytes of one value."""


@dataclass(frozen=True, slots=True)
class RowConstants:
    """Numbers of work on rows. Every default is assumed until a run has measured it."""

    batch_row_s: float = 2e-6
    """Of an operator over whole columns, per row that a node's CPUs work on."""
    each_row_s: float = 2e-4
    """Of an operator that is called once for each row (most rewards), per row; divided by its threads."""
    host_memory_bytes_s: float = 10e9
    """Of a copy from one process's tables to another's on one node."""
    text_token_bytes: float = 4.0
    """Of text, per token."""
    text_bytes: float = 24.0
    """Of a short text: an id, a reason, an answer."""
    turns: float = 4.0
    """Of a response, where a column has one value per turn."""
    inner: int = 8
    """Of an inner length that no configuration value decides."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column that some work reads."""

    name: str
    num_bytes: int
    """Of all rows of an iteration."""
    makers: tuple[str, ...]
    """Work that wrote it; none for what the data set brings."""


@dataclass(frozen=True, slots=True)
class RowWork:
    """One node that works on rows: a call of a model, or an operator."""

    name: str
    """Of its step: the node's; inside a refill `refill.rollout`."""
    kind: str
    """Of the node."""
    rows: float
    reads: tuple[Column, ...]
    """By name."""
    after: tuple[str, ...]
    """Work that made what it reads, or decided which rows there are."""
    seconds: float = 0.0
    """On the CPUs of one node. Of a call of a model 0: that is the planner's to say."""
    is_whole: bool = False
    """Whether it must see all rows of an iteration on one host."""

    @property
    def is_call(self) -> bool:
        return KINDS[self.kind].uses_model and self.kind != "refill"


def column_bytes(
    kind: ColumnType, name: str, rows: float, workload: Workload, constants: RowConstants | None = None
) -> float:
    """Bytes of a column of `rows` rows."""
    keep = constants or RowConstants()
    prompt_tokens, tokens = workload.prompt_lengths.mean, workload.response_lengths.mean
    if kind.is_numeric:
        width = float(WIDTHS[kind.dtype])
    elif name in PROMPT_TEXTS | RESPONSE_TEXTS:
        width = keep.text_token_bytes * (prompt_tokens if name in PROMPT_TEXTS else tokens)
    else:
        width = keep.text_bytes
    for length in kind.inner:
        lists = prompt_tokens if kind.granularity is Granularity.PROMPT else keep.inner
        width *= length if isinstance(length, int) else lists if length == RAGGED else keep.inner
    many = {Granularity.TOKEN: tokens, Granularity.TURN: keep.turns}.get(kind.granularity, 1.0)
    count = min(rows, float(workload.prompts)) if kind.granularity is Granularity.PROMPT else rows
    return count * many * width


def row_work(graph: Graph, workload: Workload, constants: RowConstants | None = None) -> tuple[RowWork, ...]:
    """All work on rows that a flow asks for, in the order of the graph. Nodes that nothing needs are left out."""
    scope = infer(graph)
    reader = _Reader(scope, needs_of(scope), workload, constants or RowConstants(), rows_of(graph, workload))
    return tuple(reader.all())


@dataclass
class _Reader:
    """One scope: a graph, or the body of a refill."""

    scope: Inference
    needs: Needs
    workload: Workload
    keep: RowConstants
    rows: dict[str, float]
    prefix: str = ""
    outer: tuple[_Reader, str] | None = None
    """Of a body: the scope around it, and the node there that gives its prompts."""

    def __post_init__(self) -> None:
        self.graph = self.scope.graph
        self.alive = self.graph.ancestors(*self.graph.roots)
        self._makers: dict[tuple[str, str], frozenset[str]] = {}

    def all(self) -> list[RowWork]:
        found: list[RowWork] = []
        for node in self.graph:
            if node.name in self.alive and not self.needs.is_idle(node):
                found += self._of(node)
        return found

    def _of(self, node: Node) -> list[RowWork]:
        found: list[RowWork] = []
        if node.body is not None:
            found += self._inside(node).all()
        if node.kind in ROW_KINDS or KINDS[node.kind].uses_model:
            found.append(self._work(node))
        return found

    def _inside(self, node: Node) -> _Reader:
        body = self.scope.bodies[node.name]
        needs = self.needs.bodies.get(node.name) or needs_of(body)
        prefix = f"{self.prefix}{node.name}."
        return _Reader(body, needs, self.workload, self.keep, self.rows, prefix, (self, node.source("rows")))

    def _work(self, node: Node) -> RowWork:
        name = self.prefix + node.name
        if node.kind == "refill":  # the rows of its body, and which of them are kept
            inside = self._inside(node)
            last = inside.graph.outputs[0]
            wanted = {*(read.column for read in node["keep"].reads), node["by"]} & set(inside.scope.rows(last).columns)
            reads, after = inside.columns(last, wanted), inside.deciders(last)
            rows = self.rows[f"{self.prefix}{node.name}.{last}"]
        else:
            ports = [
                (source, names) for (_, source), names in zip(node.inputs, own_reads(node, self.needs), strict=True)
            ]
            ports = [(source, names) for source, names in ports if self._gives_rows(source)]
            listed = [column for source, names in ports for column in self.columns(source, names)]
            reads = _joined(listed)
            after = frozenset().union(*(self.deciders(source) for source, _ in ports))
            rows = max((self.rows.get(self.prefix + source, 0.0) for source, _ in ports), default=0.0)
        after |= frozenset().union(*(column.makers for column in reads))
        seconds = 0.0 if KINDS[node.kind].uses_model and node.kind != "refill" else self._seconds(node, rows)
        ordered = tuple(sorted(reads, key=lambda column: column.name))
        return RowWork(name, node.kind, rows, ordered, tuple(sorted(after - {name})), seconds, _is_whole(node))

    def _gives_rows(self, source: str) -> bool:
        return bool(self.scope.rows(source).columns) or source in self.needs.rows

    def _seconds(self, node: Node, rows: float) -> float:
        operator = _operator(node)
        if operator is not None and operator.each_row:
            return rows * self.keep.each_row_s / max(1, operator.threads)
        return rows * self.keep.batch_row_s

    def columns(self, source: str, names: frozenset[str] | set[str]) -> list[Column]:
        """Columns of a node's rows, with who made them and their bytes."""
        known = self.scope.rows(source).columns
        while self._node(source) is not None and self.graph[source].kind == "repeat":  # the same rows, read again
            source = self.graph[source].source("rows")
        rows = self.rows.get(self.prefix + source, float(self.workload.prompts))
        found = []
        for name in sorted(names):
            size = column_bytes(known[name].type, name, rows, self.workload, self.keep)
            found.append(Column(name, round(size), tuple(sorted(self.makers(source, name)))))
        return found

    # ------------------------------------------------------------------------------------------------- who made what

    def makers(self, name: str, column: str) -> frozenset[str]:
        """Work that wrote a column as node `name` gives it."""
        key = (name, column)
        if key not in self._makers:
            self._makers[key] = self._find_makers(name, column)
        return self._makers[key]

    def _find_makers(self, name: str, column: str) -> frozenset[str]:
        node = self._node(name)
        if node is None or node.kind == "input":
            return self._from_outside(lambda reader, source: reader.makers(source, column))
        if column in (*written_by(node), *adds_to(node)) and node.kind not in ("select", "copy"):
            return self._own(node)
        if node.kind in ("refill", "buffer") or (node.kind == "reduce" and node.get("by") is not None):
            return self._own(node)
        if node.kind == "rollout" and column not in self.scope.rows(node.source("rows")).columns:
            return self._own(node)
        renamed = (
            dict(node["renamed"]) if node.kind == "select" else dict(node["columns"]) if node.kind == "copy" else {}
        )
        sources = [source for _, source in node.inputs if column in self.scope.rows(source).columns or renamed]
        if node.kind == "join" and column not in self.scope.rows(node.source("rows")).columns:
            return self._own(node)
        if node.kind != "concat":
            sources = sources[:1]
        return frozenset().union(*(self.makers(source, renamed.get(column, column)) for source in sources))

    def deciders(self, name: str) -> frozenset[str]:
        """Work that decided which rows node `name` gives."""
        node = self._node(name)
        if node is None or node.kind == "input":
            return self._from_outside(lambda reader, source: reader.deciders(source))
        operator = _operator(node)
        decides = node.kind in DECIDING or (node.kind == "reduce" and node.get("by") is not None)
        if decides or (node.kind == "apply" and operator is not None and operator.is_filter):
            return self._own(node)
        sources = [source for port, source in node.inputs if port == "rows"]
        return frozenset().union(*(self.deciders(source) for source in sources))

    def _own(self, node: Node) -> frozenset[str]:
        return frozenset({self.prefix + node.name})

    def _node(self, name: str) -> Node | None:
        return self.graph[name] if name in self.graph else None

    def _from_outside(self, ask: _Ask) -> frozenset[str]:
        return frozenset() if self.outer is None else ask(*self.outer)


def _joined(columns: list[Column]) -> list[Column]:
    """Columns of one name from several inputs are one entry."""
    found: dict[str, Column] = {}
    for one in columns:
        known = found.get(one.name)
        if known is not None:
            makers = tuple(sorted({*known.makers, *one.makers}))
            one = Column(one.name, known.num_bytes + one.num_bytes, makers)
        found[one.name] = one
    return list(found.values())


def _operator(node: Node) -> OperatorCall | None:
    found = node["operator"] if node.kind == "apply" else node["keep"] if node.kind == "refill" else None
    return found if isinstance(found, OperatorCall) else None


def _is_whole(node: Node) -> bool:
    operator = _operator(node)
    if operator is not None:
        return operator.locality.kind in ("batch", "stateful")
    return node.kind in ("buffer", "log")


_Ask = Callable[[_Reader, str], frozenset[str]]
