"""Pass: infer the type of every edge: columns, provenance, versions, groups. Finds FR-C01, FR-C02 and FR-C03 on the way.

A column that is missing is reported once and then taken as present, so that one typo gives one problem.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from flowrl.errors import Problem
from flowrl.graph.averages import Average
from flowrl.graph.expression_types import expression_problems, expression_type
from flowrl.graph.expressions import Binary, Col, Expression, Literal, Where, to_source
from flowrl.graph.losses import is_live, reads_of
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.operators import OperatorCall, Read
from flowrl.graph.params import refuse_incomplete
from flowrl.graph.renaming import how_to_rename
from flowrl.graph.types import ColumnInfo, EdgeType, RowsType, WeightsType
from flowrl.graph.written import ROLLOUT_WRITES, adds_to, flags_rows, written_by
from flowrl.schema import standard as s
from flowrl.schema.columns import Column, Provenance, nearest
from flowrl.schema.types import COARSE_TO_FINE, PROMPT, SAMPLE, TOKEN, TURN, ColumnType, Granularity

Writers = dict[str, tuple[str, ...]]


@dataclass
class Inference:
    """Types of all edges of a graph, by node name, and the problems met."""

    graph: Graph
    types: dict[str, EdgeType] = field(default_factory=dict)
    bodies: dict[str, Inference] = field(default_factory=dict)
    """Inference of sub-graphs, by the node that holds them."""
    problems: list[Problem] = field(default_factory=list)
    writers: Writers = field(default_factory=dict)
    """For each column name, operators known to write it (for fixes)."""
    given: dict[str, tuple[Column, ...]] = field(default_factory=dict)
    """For each input whose data set is known, the columns it has."""
    _reported: set[tuple[str, str]] = field(default_factory=set)

    def rows(self, name: str) -> RowsType:
        found = self.types[name]
        return found if isinstance(found, RowsType) else RowsType()

    def weights(self, name: str) -> WeightsType:
        found = self.types[name]
        return found if isinstance(found, WeightsType) else WeightsType(name, 0, name)

    def report(self, code: str, node: Node, found: str, fix: str) -> None:
        place = node.place
        self.problems.append(Problem(code, node.name, str(place), place.text, found, fix))

    def all_problems(self) -> list[Problem]:
        nested = [problem for body in self.bodies.values() for problem in body.all_problems()]
        return [*self.problems, *nested]

    # --- reading columns -------------------------------------------------------------------------------------------

    def read(self, node: Node, rows: RowsType, name: str, kind: ColumnType | None = None) -> ColumnInfo | None:
        """Look a column up; FR-C01 when it is missing, FR-C02 when it is of another granularity or type."""
        info = rows.columns.get(name)
        if info is None:
            self._missing(node, rows, name)
            return None
        if kind is not None and not kind.accepts(info.type):
            self._mismatch(node, name, kind, info)
        return info

    def read_key(self, node: Node, rows: RowsType, name: str) -> None:
        """Look a column up that tells rows apart; FR-C02 when it is a list or a fraction."""
        info = self.read(node, rows, name)
        if info is not None and (info.type.granularity.is_ragged or info.type.inner):
            self.report(
                "FR-C02", node, f"takes '{name}' as a key, and it is {info.type}: several values for each row",
                "a key is one value per row, such as 'prompt_id' or 'sample_id'",
            )  # fmt: skip

    def _missing(self, node: Node, rows: RowsType, name: str) -> None:
        key = (rows.rowset, name)
        if key in self._reported:
            return
        self._reported.add(key)
        self.report(
            "FR-C01", node, f"reads column '{name}', which nothing before it writes", self._how_to_get(node, rows, name)
        )

    def _how_to_get(self, node: Node, rows: RowsType, name: str) -> str:
        """The fix for a missing column: where it comes from, or the nearest names."""
        later = [n.name for n in self.graph if name in (*written_by(n), *adds_to(n)) and n.name != node.name]
        if later:
            return (
                f"node '{later[0]}' writes it, on another branch or later: pass on the rows that '{later[0]}' gives "
                "(a select on the way must keep it)"
            )
        # a name that is close to one the model computes live can only have been meant in a loss
        live = s.LIVE if node.kind == "update" and name not in s.STANDARD else ()
        hint = nearest(name, (*rows.columns, *live))
        known = self.writers.get(name, ())
        if known:
            calls = " or ".join(f"{path.partition('.')[2]}(rows)" for path in known[:3])
            more = f", and {len(known) - 3} more in `flowrl ops list`" if len(known) > 3 else ""
            return f"apply an operator that writes it, {calls} (of {', '.join(known[:3])}{more}); {hint}"
        lacking = self._data_set_without(node, name)
        if lacking:
            return how_to_rename(name, lacking, self.given[lacking])
        if rows.is_input:
            return (
                f"{hint}; a column that only your data set has is declared with "
                f'@fr.flow(columns={{"{rows.rowset}": {{"{name}": fr.PROMPT.str}}}})'
            )
        return hint

    def _data_set_without(self, node: Node, name: str) -> str:
        """The input before `node` whose data set could have brought the column, and is known not to; or empty."""
        for source in self.graph.inputs:
            declared = dict(source.get("columns", ()))
            if source.name in self.given and (name in s.DATA_COLUMNS or name in declared):
                if source.name in self.graph.ancestors(node.name):
                    return source.name
        return ""

    def _mismatch(self, node: Node, name: str, kind: ColumnType, info: ColumnInfo) -> None:
        asked, found = kind.granularity, info.type.granularity
        declare = f"declare the parameter as fr.{info.type}"
        if asked is found or (found is PROMPT and asked is SAMPLE):
            fix = f"convert it where '{info.writer}' writes it, or {declare}"
        elif found is TURN or (asked is TURN and found is TOKEN):
            fix = f"{declare}, and find in the operator which tokens belong to which turn"
        elif COARSE_TO_FINE.index(asked) > COARSE_TO_FINE.index(found):
            fix = f"rows = fr.broadcast(rows, '{name}', to=fr.{asked!r}) repeats it, or {declare}"
        elif found is SAMPLE:
            fix = f"rows = fr.reduce(rows, 'mean', by='prompt_id') makes one row per prompt, or {declare}"
        else:
            fix = (
                f"rows = fr.reduce(rows, 'mean', of='{name}', out='{name}_mean') makes one value per row, or {declare}"
            )
        self.report("FR-C02", node, f"reads '{name}' as {kind}; '{info.writer}' writes it as {info.type}", fix)

    def read_all(self, node: Node, rows: RowsType, reads: tuple[Read, ...]) -> None:
        for read in reads:
            self.read_declared(node, rows, read)

    def read_declared(self, node: Node, rows: RowsType, read: Read) -> None:
        """Check one declared read with its fallbacks."""
        if read.column in rows.columns:
            self.read(node, rows, read.column, read.type)
        elif read.broadcast and read.broadcast in rows.columns:
            self.read(node, rows, read.broadcast)
        elif not (read.is_optional or read.live):
            if read.broadcast:
                self._missing_either(node, rows, read)
            else:
                self.read(node, rows, read.column, read.type)

    def _missing_either(self, node: Node, rows: RowsType, read: Read) -> None:
        fix = self._how_to_get(node, rows, read.column)
        if read.broadcast in self.writers or any(read.broadcast in written_by(n) for n in self.graph):
            fix = self._how_to_get(node, rows, read.broadcast)
        found = f"reads column '{read.column}' (or '{read.broadcast}'), and nothing before it writes either"
        self.report("FR-C01", node, found, fix)

    # --- writing columns -------------------------------------------------------------------------------------------

    def write(
        self, node: Node, rows: RowsType, *columns: Column, provenance: Provenance | None = None, replaces: bool = False
    ) -> RowsType:
        """Add columns; FR-C03 when one is there already, written by another node."""
        for column in columns:
            before = rows.columns.get(column.name)
            if before is None or replaces or (before.writer == rows.rowset and rows.is_input):
                continue
            found = f"writes '{column.name}', which node '{before.writer}' has already written"
            self.report("FR-C03", node, found, _other_name(node, column.name))
        return rows.with_columns(node.name, *columns, provenance=provenance)


def infer(
    graph: Graph,
    *,
    outer: Mapping[str, EdgeType] | None = None,
    writers: Writers | None = None,
    given: Mapping[str, Iterable[Column]] | None = None,
) -> Inference:
    """Types of every edge.

    Args:
        outer: types of a sub-graph's inputs.
        writers: for each column name, operators that could write it; they go into fixes.
        given: for each input whose data set is known, the columns it has; other inputs offer `DATA_COLUMNS`.
    """
    refuse_incomplete(graph)
    known = {name: tuple(columns) for name, columns in (given or {}).items()}
    found = Inference(graph, writers=writers or {}, given=known)
    outer = {**{n: _data_rows(n, cs) for n, cs in known.items()}, **(outer or {})}
    for node in graph:
        if node.kind == "input" and node.name in outer:
            found.types[node.name] = outer[node.name]
        else:
            found.types[node.name] = INFER[node.kind](node, found)
    return found


def _data_rows(name: str, columns: tuple[Column, ...]) -> RowsType:
    """A known data set on an edge. Models tokenize text where they meet it, so text stands for its token columns too."""
    names = {column.name for column in columns}
    made = [c for text, c in ((s.PROMPT_TEXT, s.PROMPT_IDS), (s.RESPONSE, s.RESPONSE_IDS)) if text.name in names]
    if "response" in names or "response_ids" in names:
        made.append(s.LOSS_MASK)
    rows = RowsType(rowset=name, tokens=name, is_input=True)
    return rows.with_columns(name, *columns, *(c for c in made if c.name not in names))


def _other_name(node: Node, column: str) -> str:
    if node.kind in ("logprobs", "values", "score"):
        return f'give it another name: fr.{node.kind}(model, rows, out="{column}_2")'
    if node.kind in ("reduce", "broadcast"):
        return f'give it another name: out="{column}_2"'
    if node.kind == "apply":
        call = node["operator"].short_name
        combine = (
            f"; two rewards of the same rows add up: first(rows) + 0.5 * {call}(rows)" if column == "reward" else ""
        )
        return f"say that it may replace the column: {call}(rows, replace=True){combine}"
    return f"rename the first one before: rows.with_columns({column}_before=rows['{column}'])"


# --- one function per kind --------------------------------------------------------------------------------------------

TOKEN_COLUMNS = (s.PROMPT_IDS, s.RESPONSE_IDS)


def _input(node: Node, found: Inference) -> EdgeType:
    if node["kind"] == "weights":
        return WeightsType(node.name, 0, node.name)
    declared = tuple(Column(name, ColumnType.parse(kind)) for name, kind in node.get("columns", ()))
    rows = RowsType(rowset=node.name, tokens=node.name, is_input=True)
    return rows.with_columns(node.name, *s.DATA_COLUMNS, *declared)


def _rollout(node: Node, found: Inference) -> EdgeType:
    model = found.weights(node.source("model"))
    prompts = found.rows(node.source("rows"))
    if "prompt_ids" not in prompts.columns:
        found.read(node, prompts, "prompt")
    found.read(node, prompts, "prompt_id", s.PROMPT_ID.type)
    kept = {n: i for n, i in prompts.columns.items() if i.type.granularity is PROMPT}
    if "prompt_ids" not in kept:
        kept["prompt_ids"] = ColumnInfo(s.PROMPT_IDS.type, node.name)
    n = node["n"]
    # rows of a data set and prompts made by prompts_from have one row per prompt_id; those of another rollout may have more
    size = n if prompts.sampled_by is None else None if prompts.group_size is None else n * prompts.group_size
    writes = (*ROLLOUT_WRITES, *((s.ROLE,) if node.get("role") is not None else ()))
    rows = RowsType(
        columns=kept,
        rowset=node.name,
        tokens=node.name,
        token_model=model.model,
        group_size=size,
        sampled_by=model.provenance,
        has_foreign_tokens=node.get("environment") is not None,
    )
    rows = rows.with_columns(node.name, *writes, provenance=model.provenance)
    own = replace(rows.columns["loss_mask"], is_copy_of="loss_mask")
    return replace(rows, columns={**rows.columns, "loss_mask": own})


def _forward(*columns_of: Callable[[Node], Column]) -> Callable[[Node, Inference], EdgeType]:
    def infer_forward(node: Node, found: Inference) -> EdgeType:
        model = found.weights(node.source("model"))
        rows = found.rows(node.source("rows"))
        for column in TOKEN_COLUMNS:
            found.read(node, rows, column.name, column.type)
        return found.write(node, rows, *(make(node) for make in columns_of), provenance=model.provenance)

    return infer_forward


def _update(node: Node, found: Inference) -> EdgeType:
    model = found.weights(node.source("model"))
    rows = found.rows(node.source("rows"))
    for column in TOKEN_COLUMNS:
        found.read(node, rows, column.name, column.type)
    mask = node.get("mask", "loss_mask")
    if not (rows.is_input and mask == "loss_mask"):
        found.read(node, rows, mask, TOKEN.bool)
    stored = tuple(r for r in reads_of(node["loss"]) if not is_live(r))
    for read in stored:
        is_there = read.column in rows.columns or read.broadcast in rows.columns
        if read.column in LOGPROBS and not (is_there or read.is_optional or read.live):
            _missing_logprobs(node, found, rows, read.column, model)
        else:
            found.read_declared(node, rows, read)
    for key in (node["loss"].group_key(), Average.of(node.get).key):
        if key:
            found.read(node, rows, key)
    return WeightsType(model.model, model.version + 1, node.name)


LOGPROBS = ("rollout_logprobs", "old_logprobs")
"""Columns of log-probabilities that a loss compares the live ones with; FR-V01 when they are not there."""


def _missing_logprobs(node: Node, found: Inference, rows: RowsType, name: str, model: WeightsType) -> None:
    if name == "old_logprobs":
        fix = f'rows = fr.logprobs({model.model}, rows, out="old_logprobs")'
    elif rows.sampled_by is None:
        fix = f"sample the rows with fr.rollout({model.model}, prompts, ...), or take a loss without a correction for sampling"
    else:
        fix = f"keep the column that fr.rollout wrote: rows.select('{name}', ...)"
    why = "the loss compares the policy with the one that sampled"
    found.report("FR-V01", node, f"reads '{name}', which nothing before it writes; {why}", fix)


def _next_version(node: Node, found: Inference) -> EdgeType:
    target = found.weights(node.source("model"))
    return WeightsType(target.model, target.version + 1, node.name)


def _after(node: Node, found: Inference) -> EdgeType:
    then, otherwise = found.weights(node.source("then")), found.weights(node.source("otherwise"))
    if then.model != otherwise.model:
        found.report(
            "FR-W01",
            node,
            f"chooses between weights of two models, '{then.model}' and '{otherwise.model}'",
            "both sides must be versions of one model; fr.assign copies weights from one model to another",
        )
    return WeightsType(then.model, max(then.version, otherwise.version), node.name)


def _apply(node: Node, found: Inference) -> EdgeType:
    rows = found.rows(node.source("rows"))
    operator: OperatorCall = node["operator"]
    found.read_all(node, rows, operator.reads)
    if operator.locality.key:
        found.read_key(node, rows, operator.locality.key)
    result = found.write(node, rows, *operator.writes, replaces=operator.replaces)
    if flags_rows(operator):
        result = result.with_columns(node.name, s.ROW_ERROR)
    if operator.narrows and operator.narrows in rows.columns:
        mask = rows.columns[operator.narrows].is_copy_of
        narrowed = {c.name: replace(result.columns[c.name], is_copy_of=mask) for c in operator.writes if _is_mask(c)}
        result = replace(result, columns={**result.columns, **narrowed})
    if operator.is_filter:
        size = None
        result = replace(result, rowset=node.name, group_size=size)
    return result


def _is_mask(column: Column) -> bool:
    return column.type.granularity is Granularity.TOKEN and column.type.dtype == "bool"


def _combine(node: Node, found: Inference) -> EdgeType:
    branches = [found.rows(source) for source in node.sources("rows")]
    first = branches[0]
    columns: dict[str, ColumnInfo] = {}
    for name, branch in zip(node["names"], branches, strict=True):
        if branch.rowset != first.rowset:
            found.report(
                "FR-C02",
                node,
                f"adds rewards of different rows: one branch has the rows of '{first.rowset}', another of '{branch.rowset}'",
                "rewards add up on branches of the same rows; fr.join brings columns of other rows over",
            )
        info = found.read(node, branch, "reward", s.REWARD.type)
        columns.update({k: v for k, v in branch.columns.items() if k != "reward"})
        if info is not None:
            columns[f"reward/{name}"] = replace(info, writer=node.name)
    merged = replace(first, columns=columns)
    errors = (s.ROW_ERROR,) if s.ROW_ERROR.name in columns else ()
    return merged.with_columns(node.name, s.REWARD, *errors)


def _select(node: Node, found: Inference) -> EdgeType:
    rows = found.rows(node.source("rows"))
    renamed = dict(node["renamed"])
    kept = {k: rows.columns[k] for k in s.KEYS if k in rows.columns and k not in renamed}
    for name in node["columns"]:
        info = found.read(node, rows, name)
        if info is not None:
            kept[name] = info
    for new, old in renamed.items():
        info = found.read(node, rows, old)
        if info is not None:
            kept[new] = replace(info, type=_key_type(new, info.type))
    return replace(rows, columns=kept)


def _key_type(name: str, kind: ColumnType) -> ColumnType:
    # a key keeps its own granularity whatever it is made from: source_id (PROMPT) renamed to sample_id is SAMPLE
    return s.STANDARD[name].type if name in s.KEYS and kind.dtype == "str" else kind


def _with_columns(node: Node, found: Inference) -> EdgeType:
    rows = found.rows(node.source("rows"))
    columns = []
    for name, expression in node["columns"]:
        for read in expression.columns():
            found.read(node, rows, read)
        for problem, fix in expression_problems(expression, rows):
            found.report("FR-C02", node, problem, fix)
        columns.append(Column(name, expression_type(expression, rows)))
    result = rows.with_columns(node.name, *columns)
    masks = {name: replace(result.columns[name], is_copy_of=mask)
             for name, expression in node["columns"] if (mask := _narrowed(expression, rows))}  # fmt: skip
    return replace(result, columns={**result.columns, **masks})


def _narrowed(expression: Expression, rows: RowsType) -> str:
    """The mask that an expression can only make smaller (`mask & other`, `where(other, mask, False)`), or empty."""
    match expression:
        case Col(name):
            return rows.columns[name].is_copy_of if name in rows.columns else ""
        case Binary("&", left, right):
            return _narrowed(left, rows) or _narrowed(right, rows)
        case Where(_, then, Literal(False)):
            return _narrowed(then, rows)
        case Where(_, Literal(False), otherwise):
            return _narrowed(otherwise, rows)
    return ""


def _join(node: Node, found: Inference) -> EdgeType:
    left, right = found.rows(node.source("rows")), found.rows(node.source("right"))
    key = node["on"]
    found.read_key(node, left, key)
    found.read_key(node, right, key)
    columns = dict(left.columns)
    for name, info in right.columns.items():
        if name in (key, *s.KEYS):
            continue
        if name == s.ROW_ERROR.name:
            columns[name] = ColumnInfo(s.ROW_ERROR.type, node.name)  # one text per row, whatever failed on either side
            continue
        if name in columns:
            found.report(
                "FR-C03",
                node,
                f"both sides have a column '{name}' (from '{columns[name].writer}' and '{info.writer}')",
                f"select what you need from the right side, renamed: right.select(other_{name}='{name}')",
            )
            continue
        kind = info.type
        if node.get("collect") and (kind.granularity.is_ragged or kind.inner[:1] == ("*",)):
            found.report(
                "FR-C02", node, f"collects '{name}', which is {kind}: a list of lists is not stored",
                f"reduce it first: fr.reduce(right, 'mean', of='{name}'), or select what you need of the right side",
            )  # fmt: skip
        elif node.get("collect"):
            kind = ColumnType(TURN, kind.dtype, kind.inner)
        elif kind.granularity is TOKEN and left.tokens != right.tokens:
            found.report(
                "FR-C02",
                node,
                f"brings '{name}' over, one value per token of other responses than those on the left",
                f"right = fr.reduce(right, 'mean', of='{name}') makes one value per row; select what you need of the right side",
            )
        columns[name] = replace(info, type=kind, writer=node.name)
    return replace(left, columns=columns)


def _concat(node: Node, found: Inference) -> EdgeType:
    tables = [found.rows(source) for source in node.sources("rows")]
    first = tables[0]
    common = {name: info for name, info in first.columns.items() if all(name in t.columns for t in tables)}
    for table in tables[1:]:
        for name in common:
            if not common[name].type.accepts(table.columns[name].type):
                found._mismatch(node, name, common[name].type, table.columns[name])
    models = {t.sampled_by.model if t.sampled_by else "" for t in tables}
    versions = {t.sampled_by.version if t.sampled_by else None for t in tables}
    sampled_by = None
    if len(models) == 1 and first.sampled_by is not None:
        sampled_by = first.sampled_by if len(versions) == 1 else Provenance(first.sampled_by.model, None)
    token_models = {t.token_model for t in tables}
    return RowsType(
        columns={n: _joined_provenance(n, i, tables) for n, i in common.items()},
        rowset=node.name,
        tokens=node.name,
        token_model=first.token_model if len(token_models) == 1 else "",
        group_size=first.group_size if len({t.group_size for t in tables}) == 1 else None,
        sampled_by=sampled_by,
        has_foreign_tokens=any(t.has_foreign_tokens for t in tables),
        splits=tuple(dict.fromkeys(split for t in tables for split in t.splits)),
        is_mixed=any(t.is_mixed for t in tables),
        steps=max(t.steps for t in tables),
    )


def _joined_provenance(name: str, info: ColumnInfo, tables: list[RowsType]) -> ColumnInfo:
    others = [t.columns[name] for t in tables]
    models = {o.provenance.model if o.provenance else "" for o in others}
    mask = info.is_copy_of if len({o.is_copy_of for o in others}) == 1 else ""
    if all(o.provenance == info.provenance for o in others):
        return replace(info, is_copy_of=mask)
    mixed = Provenance(info.provenance.model, None) if info.provenance and len(models) == 1 else None
    return replace(info, provenance=mixed, is_copy_of=mask)


def _filter(node: Node, found: Inference) -> EdgeType:
    rows = found.rows(node.source("rows"))
    for name in node["keep"].columns():
        found.read(node, rows, name)
    for problem, fix in expression_problems(node["keep"], rows):
        found.report("FR-C02", node, problem, fix)
    kind = expression_type(node["keep"], rows)
    if kind.granularity.is_ragged:
        fix = "reduce it first: rows = fr.reduce(rows, 'mean', of='column') makes one value per row"
        found.report("FR-C02", node, f"keeps rows by '{to_source(node['keep'])}', which is a list per row", fix)
    elif kind.dtype != "bool":
        fix = "compare it: rows['reward'] > 0"
        found.report(
            "FR-C02", node, f"keeps rows by '{to_source(node['keep'])}', which is {kind} and no yes or no", fix
        )
    return replace(rows, rowset=node.name, group_size=None)


def _broadcast(node: Node, found: Inference) -> EdgeType:
    rows = found.rows(node.source("rows"))
    info = found.read(node, rows, node["column"])
    target = Granularity[node["to"]]
    kind = info.type if info is not None else SAMPLE.f32
    if kind.granularity is TURN and target is TOKEN:
        fix = "an operator that knows where turns begin writes it: @fr.operator(writes={'name': fr.TOKEN.f32})"
        found.report("FR-C02", node, f"broadcasts '{node['column']}', a list per turn, to TOKEN", fix)
    elif COARSE_TO_FINE.index(kind.granularity) >= COARSE_TO_FINE.index(target):
        fix = "fr.reduce goes the other way" if kind.granularity is not target else "use the column as it is"
        found.report("FR-C02", node, f"broadcasts '{node['column']}' to {target!r}, but it is {kind} already", fix)
    return found.write(
        node, rows, Column(node["out"], replace(kind, granularity=target)), replaces=node["out"] == node["column"]
    )


def _reduce(node: Node, found: Inference) -> EdgeType:
    rows = found.rows(node.source("rows"))
    if "of" in dict(node.params):
        info = found.read(node, rows, node["of"])
        if info is not None and not info.type.granularity.is_ragged:
            fix = "reduce over rows of a key instead: fr.reduce(rows, how, by='prompt_id')"
            found.report(
                "FR-C02", node, f"reduces '{node['of']}', which is {info.type}: one value per row already", fix
            )
        dtype = "i32" if node["how"] == "count" else "f32"
        return found.write(node, rows, Column(node["out"], ColumnType(SAMPLE, dtype)))
    found.read_key(node, rows, node["by"])
    kept = {n: i for n, i in rows.columns.items() if not i.type.granularity.is_ragged}
    return replace(rows, columns=kept, rowset=node.name, tokens="", group_size=1, splits=())


def _prompts_from(node: Node, found: Inference) -> EdgeType:
    rows = found.rows(node.source("rows"))
    for name in node["reads"]:
        found.read(node, rows, name)
    found.read(node, rows, "sample_id")
    kept = {"answer": rows.columns["answer"]} if "answer" in rows.columns else {}
    made = RowsType(columns=kept, rowset=node.name, tokens=node.name, group_size=None)
    return made.with_columns(node.name, s.PROMPT_ID, s.PROMPT_TEXT, s.SOURCE_ID)


def _buffer(node: Node, found: Inference) -> EdgeType:
    rows = found.rows(node.source("rows"))
    columns = {
        name: replace(info, provenance=Provenance(info.provenance.model, None)) if info.provenance else info
        for name, info in rows.columns.items()
    }
    by = node.get("by", "")
    if by:
        found.read_key(node, rows, by)
    mixed = replace(rows.sampled_by, version=None) if rows.sampled_by else None
    return replace(
        rows,
        columns=columns,
        rowset=node.name,
        sampled_by=mixed,
        splits=(*rows.splits, (node.name, by)),
        is_mixed=True,
        group_size=rows.group_size if by else None,
    )


def _refill(node: Node, found: Inference) -> EdgeType:
    assert node.body is not None
    prompts = node.source("rows")
    outer: dict[str, EdgeType] = {"prompts": found.types[prompts]}
    given = {"prompts": found.given[prompts]} if prompts in found.given else {}
    for port, source in node.inputs:
        if port != "rows":
            outer[source] = found.types[source]
    body = infer(node.body, outer=outer, writers=found.writers, given=given)
    found.bodies[node.name] = body
    rows = body.rows(node.body.outputs[0])
    operator: OperatorCall = node["keep"]
    last = node.body[node.body.outputs[0]]
    body.read_all(last, rows, operator.reads)
    body.read_key(last, rows, node["by"])
    result = rows.with_columns(node.name, *operator.writes)
    columns = {n: replace(i, writer=node.name) for n, i in result.columns.items()}
    return replace(result, columns=columns, rowset=node.name, tokens=node.name, group_size=None)


def _repeat(node: Node, found: Inference) -> EdgeType:
    rows = found.rows(node.source("rows"))
    by = node.get("by", "")
    if by:
        found.read_key(node, rows, by)
    splits = (*rows.splits, (node.name, by)) if node["minibatches"] > 1 else rows.splits
    return replace(rows, steps=rows.steps * node["epochs"] * node["minibatches"], splits=splits)


def _same_rows(node: Node, found: Inference) -> EdgeType:
    rows = found.rows(node.source("rows"))
    for name in node.get("columns", ()):
        info = found.read(node, rows, name)
        if info is not None and not info.type.is_numeric and node.get("how", "count") != "count":
            fix = f"count it (how='count'), or make a number of it: fr.where(rows['{name}'] == '...', 1.0, 0.0)"
            found.report("FR-C02", node, f"logs the {node['how']} of '{name}', which is {info.type}", fix)
    return rows


def _copy(node: Node, found: Inference) -> EdgeType:
    rows = found.rows(node.source("rows"))
    for new, old in node["columns"]:
        info = found.read(node, rows, old)
        if info is not None:
            rows = replace(rows, columns={**rows.columns, new: replace(info, writer=node.name)})
    return rows


def _out(kind: ColumnType) -> Callable[[Node], Column]:
    return lambda node: Column(node["out"], kind)


INFER: dict[str, Callable[[Node, Inference], EdgeType]] = {
    "input": _input,
    "rollout": _rollout,
    "logprobs": _forward(_out(TOKEN.f32)),
    "top_logprobs": _forward(
        lambda node: Column(f"{node['out']}_ids", TOKEN.i32[node["k"]]),
        lambda node: Column(f"{node['out']}_logprobs", TOKEN.f32[node["k"]]),
    ),
    "values": _forward(_out(TOKEN.f32)),
    "score": _forward(_out(SAMPLE.f32)),
    "update": _update,
    "assign": _next_version,
    "ema": _next_version,
    "after": _after,
    "apply": _apply,
    "combine": _combine,
    "select": _select,
    "with_columns": _with_columns,
    "join": _join,
    "concat": _concat,
    "filter": _filter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "copy": _copy,
    "prompts_from": _prompts_from,
    "buffer": _buffer,
    "refill": _refill,
    "repeat": _repeat,
    "every": _same_rows,
    "log": _same_rows,
}
