"""Which columns each edge must carry: a backward analysis from what the flow returns.

    needed on a node's output  =  union over its readers of what they need of their input
    needed on its input        =  what it reads itself + what is needed on its output and it passes on

A node that only adds columns none of which is needed is *idle*: it hands the need through and reads nothing itself, so
that what only idle nodes read is not needed either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flowrl.graph.averages import Average
from flowrl.graph.infer import Inference, infer
from flowrl.graph.kinds import KINDS
from flowrl.graph.losses import is_live, reads_of
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.operators import OperatorCall, Read
from flowrl.graph.types import RowsType
from flowrl.graph.written import adds_to, written_by
from flowrl.schema import standard as s
from flowrl.schema.types import PROMPT

Names = frozenset[str]
NONE: Names = frozenset()
TOKENS = frozenset({"prompt_ids", "response_ids", "temperature"})
"""What a model reads of rows: token ids and the temperature they were sampled at."""
TEXT = frozenset({"prompt", "response"})
"""What token ids are made from where a data set brings none."""


def needed_columns(graph: Graph, *, inference: Inference | None = None) -> dict[str, Names]:
    """For each node that gives rows, the columns its output must carry; nodes that nothing needs are absent.

    Keys (prompt_id, sample_id, source_id) are always carried. Nodes of a sub-graph are named `refill/rollout`.
    """
    found: dict[str, Names] = {}
    _collect(needs_of(inference or infer(graph)), "", found)
    return found


def own_reads(node: Node, needs: Needs) -> list[Names]:
    """For each input of a node, the columns that its own work looks at: those it only passes on are left out.

    A join looks at what it brings over, a buffer and a reduction over rows at all that they give. What a node without need does
    (see `Needs.is_idle`) is not done. Weights have no columns.
    """
    if needs.is_idle(node) or node.kind == "refill":  # a refill of its own only asks which rows to keep
        return [NONE for _ in node.inputs]
    moves_all = node.kind in ("join", "buffer", "every") or (node.kind == "reduce" and node.get("by") is not None)
    found = _READS[node.kind](node, needs.rows.get(node.name, NONE) if moves_all else NONE, needs)
    if node.kind == "join":  # what stands on the left stays where it is
        found = [
            frozenset({node["on"]}) if port == "rows" else names
            for (port, _), names in zip(node.inputs, found, strict=True)
        ]
    known = [needs.scope.types[source] for _, source in node.inputs]
    return [
        names & frozenset(rows.columns) if isinstance(rows, RowsType) else NONE
        for names, rows in zip(found, known, strict=True)
    ]


class Needs:
    """Needed columns of one scope: `rows` by node name, `bodies` by the node that holds the sub-graph."""

    def __init__(self, scope: Inference) -> None:
        self.scope = scope
        self.rows: dict[str, Names] = {}
        self.bodies: dict[str, Needs] = {}

    def is_idle(self, node: Node) -> bool:
        """Whether a node only adds columns that nobody needs. Filters and nodes with a memory never are."""
        if not _may_be_left_out(node) or node.name not in self.rows:
            return False
        return not self.rows[node.name] & frozenset((*written_by(node), *adds_to(node)))


def needs_of(scope: Inference, outputs: Names | None = None) -> Needs:
    """Analyse one scope. `outputs`: what is needed of the rows it returns; None means every column."""
    graph, needs = scope.graph, Needs(scope)
    alive = graph.ancestors(*graph.roots)
    for root in graph.roots:
        if isinstance(scope.types[root], RowsType):
            has_all = outputs is None if root in graph.outputs else graph[root].kind == "every"
            _add(needs, root, scope.rows(root).columns if has_all else outputs or NONE)
    for node in reversed(graph.nodes):
        if node.name not in alive:
            continue
        asked = needs.rows.get(node.name, NONE)
        asked_of = _hand_through(node, asked) if needs.is_idle(node) else _READS[node.kind](node, asked, needs)
        for (_, source), names in zip(node.inputs, asked_of, strict=True):
            if isinstance(scope.types[source], RowsType):
                _add(needs, source, names)
    return needs


def _add(needs: Needs, name: str, columns: Iterable[str]) -> None:
    known = needs.scope.rows(name).columns
    names = frozenset(columns) | frozenset(s.KEYS)
    needs.rows[name] = needs.rows.get(name, NONE) | (names & frozenset(known))


def _collect(needs: Needs, prefix: str, found: dict[str, Names]) -> None:
    for node in needs.scope.graph:
        if node.name in needs.rows:
            found[prefix + node.name] = needs.rows[node.name]
        if node.name in needs.bodies:
            _collect(needs.bodies[node.name], f"{prefix}{node.name}/", found)


def _may_be_left_out(node: Node) -> bool:
    if node.kind == "apply":
        operator: OperatorCall = node["operator"]
        return not (operator.is_filter or operator.state_param or operator.locality.kind == "stateful")
    return KINDS[node.kind].adds_columns or (node.kind == "reduce" and node.get("of") is not None)


def _hand_through(node: Node, asked: Names) -> list[Names]:
    return [asked if port == "rows" else NONE for port, _ in node.inputs]


# --- one function per kind: what is needed of each input ---------------------------------------------------------------

_Reads = Callable[[Node, Names, Needs], list[Names]]


def _rows_of(node: Node, needs: Needs) -> RowsType:
    return needs.scope.rows(node.sources("rows")[0])


def _on_rows(node: Node, names: Iterable[str]) -> list[Names]:
    wanted = frozenset(names)
    return [wanted if port == "rows" else NONE for port, _ in node.inputs]


def _declared(reads: Iterable[Read], rows: RowsType) -> set[str]:
    """Columns that declared reads take, each with the fallback that applies."""
    names = ((r.column if r.column in rows.columns else r.broadcast) for r in reads)
    return {name for name in names if name}


def _nothing(node: Node, asked: Names, needs: Needs) -> list[Names]:
    return [NONE for _ in node.inputs]


def _passed_on(*params: str) -> _Reads:
    """What is asked of the output, without what the node writes, and the columns some parameters name."""

    def reads(node: Node, asked: Names, needs: Needs) -> list[Names]:
        named = {node[p] for p in params if node.get(p)}
        return _on_rows(node, (asked - frozenset(written_by(node))) | named)

    return reads


def _rollout(node: Node, asked: Names, needs: Needs) -> list[Names]:
    prompts = _rows_of(node, needs)
    of_prompt = {name for name, info in prompts.columns.items() if info.type.granularity is PROMPT}
    # an environment is given the whole prompt row
    wanted = of_prompt if node.get("environment") is not None else asked & of_prompt
    return _on_rows(node, wanted | {"prompt", "prompt_ids", "prompt_id"})


def _forward(node: Node, asked: Names, needs: Needs) -> list[Names]:
    return _on_rows(node, (asked - frozenset(written_by(node))) | _tokens(_rows_of(node, needs)))


def _tokens(rows: RowsType) -> Names:
    return TOKENS if rows.token_model else TOKENS | TEXT


def _update(node: Node, asked: Names, needs: Needs) -> list[Names]:
    rows = _rows_of(node, needs)
    stored = _declared((r for r in reads_of(node["loss"]) if not is_live(r)), rows)
    group = {node["loss"].group_key(), Average.of(node.get).key} - {""}
    versions = {"min_policy_version", "max_policy_version"}  # staleness is recorded when rows are used
    return _on_rows(node, stored | group | _tokens(rows) | versions | {node.get("mask", "loss_mask")})


def _operator_reads(operator: OperatorCall, rows: RowsType) -> set[str]:
    return _declared(operator.reads, rows) | ({operator.locality.key} - {""})


def _apply(node: Node, asked: Names, needs: Needs) -> list[Names]:
    own = _operator_reads(node["operator"], _rows_of(node, needs))
    return _on_rows(node, (asked - frozenset(written_by(node))) | own)


def _combine(node: Node, asked: Names, needs: Needs) -> list[Names]:
    return _on_rows(node, (asked - frozenset(written_by(node))) | {"reward"})


def _select(node: Node, asked: Names, needs: Needs) -> list[Names]:
    renamed = dict(node["renamed"])
    return _on_rows(node, {renamed.get(name, name) for name in asked})


def _with_columns(node: Node, asked: Names, needs: Needs) -> list[Names]:
    computed = {c for name, expression in node["columns"] if name in asked for c in expression.columns()}
    return _on_rows(node, (asked - frozenset(written_by(node))) | computed)


def _join(node: Node, asked: Names, needs: Needs) -> list[Names]:
    left = frozenset(needs.scope.rows(node.source("rows")).columns)
    key = frozenset({node["on"]})
    of_right = asked - left | asked & {s.ROW_ERROR.name}  # the errors of both sides are joined
    return [(asked & left) | key if port == "rows" else of_right | key for port, _ in node.inputs]


def _filter(node: Node, asked: Names, needs: Needs) -> list[Names]:
    return _on_rows(node, asked | frozenset(node["keep"].columns()))


def _reduce(node: Node, asked: Names, needs: Needs) -> list[Names]:
    own = {node[p] for p in ("of", "by") if node.get(p)}
    return _on_rows(node, (asked - frozenset(written_by(node))) | own)


def _copy(node: Node, asked: Names, needs: Needs) -> list[Names]:
    sources = {old for new, old in node["columns"] if new in asked}
    return _on_rows(node, (asked - frozenset(written_by(node))) | sources)


def _prompts_from(node: Node, asked: Names, needs: Needs) -> list[Names]:
    return _on_rows(node, {*node["reads"], "sample_id", *(asked & {"answer"})})


def _log(node: Node, asked: Names, needs: Needs) -> list[Names]:
    return _on_rows(node, asked | frozenset(node["columns"]))


def _every(node: Node, asked: Names, needs: Needs) -> list[Names]:
    return _on_rows(node, _rows_of(node, needs).columns)


def _refill(node: Node, asked: Names, needs: Needs) -> list[Names]:
    body = needs.scope.bodies[node.name]
    keep: OperatorCall = node["keep"]
    own = _operator_reads(keep, body.rows(body.graph.outputs[0])) | {node["by"]}
    inner = needs_of(body, (asked - frozenset(written_by(node))) | own)
    needs.bodies[node.name] = inner
    return [inner.rows.get("prompts" if port == "rows" else source, NONE) for port, source in node.inputs]


_READS: dict[str, _Reads] = {
    "input": _nothing,
    "rollout": _rollout,
    "logprobs": _forward,
    "top_logprobs": _forward,
    "values": _forward,
    "score": _forward,
    "update": _update,
    "assign": _nothing,
    "ema": _nothing,
    "after": _nothing,
    "apply": _apply,
    "combine": _combine,
    "select": _select,
    "with_columns": _with_columns,
    "join": _join,
    "concat": _passed_on(),
    "filter": _filter,
    "broadcast": _passed_on("column"),
    "reduce": _reduce,
    "copy": _copy,
    "prompts_from": _prompts_from,
    "buffer": _passed_on("by"),
    "refill": _refill,
    "repeat": _passed_on("by"),
    "every": _every,
    "log": _log,
}
