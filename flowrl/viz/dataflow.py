"""What flows between the nodes of a plan: rows with their columns, versions of weights, order alone; and what each move takes.

With the graph a node is a node of the graph, also one that was left out; without it, a step of the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flowrl.errors import ConfigError
from flowrl.graph.flows import Flow
from flowrl.graph.infer import Inference, infer
from flowrl.graph.kinds import KINDS
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.passes import needed_columns, optimise
from flowrl.graph.types import RowsType, WeightsType
from flowrl.planner.roles import rows_of
from flowrl.planner.rows import column_bytes
from flowrl.planner.steps import Plan, Step
from flowrl.planner.tasks import Lane, StepKind
from flowrl.planner.workload import Workload
from flowrl.viz.mermaid import sort_of, words_of
from flowrl.viz.palette import KINDS as STEP_KINDS
from flowrl.viz.scene import Bar, Scene, called, cpus_of

DATA, WEIGHTS, CONTROL = "data", "weights", "control"
NOWHERE = "inputs, and work outside of meshes"


@dataclass(frozen=True, slots=True)
class Point:
    """A node of the drawing."""

    name: str
    sort: str
    """As in Mermaid: `model`, `table`, `rows`, `choice`, `weights`; `step` without a graph."""
    lines: tuple[str, ...]
    """What it is, its name first."""
    band: str
    """The mesh it runs on."""
    hue: int | None
    bars: tuple[Bar, ...]
    """The computations it consists of."""
    why_pruned: str = ""

    @property
    def seconds(self) -> float:
        """Predicted, of its computations together."""
        return sum(bar.end_s - bar.start_s for bar in self.bars)


@dataclass(frozen=True, slots=True)
class Flows:
    """An edge of the drawing."""

    source: str
    target: str
    kind: str
    """`data`, `weights` or `control`."""
    what: str = ""
    """Model and version of weights."""
    columns: tuple[str, ...] = ()
    """That the source's rows carry on."""
    pruned: tuple[str, ...] = ()
    """Columns that nothing behind the source reads: not computed, not moved, or dropped."""
    carried_bytes: int = 0
    """Predicted, of the columns it carries, whether they move or stay; 0 where the workload is not known."""
    num_bytes: int = 0
    """Predicted, moved by its steps."""
    seconds: float = 0.0
    """Predicted, of its steps."""
    moves: tuple[Bar, ...] = ()
    is_back: bool = False
    """To the next iteration."""
    is_pruned: bool = False


@dataclass(frozen=True, slots=True)
class Dataflow:
    """Nodes and edges of a plan's drawing."""

    points: tuple[Point, ...]
    """Each behind those it comes from."""
    edges: tuple[Flows, ...]
    has_graph: bool

    @property
    def bands(self) -> dict[str, list[Point]]:
        """The nodes of each mesh, by first node."""
        found: dict[str, list[Point]] = {}
        for point in self.points:
            found.setdefault(point.band, []).append(point)
        return found


def dataflow(scene: Scene, graph: Flow | Graph | None = None) -> Dataflow:
    """The drawing's nodes and edges.

    Args:
        graph: the flow that was planned, or its graph, before or after passes; then columns are known.

    Raises `ConfigError` for a graph that is not the plan's.
    """
    if graph is None:
        return _of_steps(scene)
    whole = graph.graph() if isinstance(graph, Flow) else graph
    kept, notes = optimise(whole)
    if scene.plan.graph_hash not in (whole.hash, kept.hash):
        raise ConfigError(
            f"the plan is of a graph with the hash {scene.plan.graph_hash}, and '{whole.name}' has {whole.hash} "
            f"({kept.hash} after pruning); give the flow that was planned, with the same configuration: flow(group_size=8)"
        )
    reasons = {note.node: note.text for note in notes}
    points = tuple(_point(scene, node, kept, reasons) for node in whole)
    moved = _moves(scene)
    edges = tuple(_edges(scene.plan, whole, kept, moved))
    shown = {bar.index for edge in edges for bar in edge.moves}
    past = tuple(_past(kept, moved, shown))
    return Dataflow(points, (*edges, *past, *_back(scene.bars, kept)), has_graph=True)


def of_graph(graph: Flow | Graph) -> Dataflow:
    """The same of a graph that was not planned: no meshes, bytes or seconds."""
    whole = graph.graph() if isinstance(graph, Flow) else graph
    kept, notes = optimise(whole)
    reasons = {note.node: note.text for note in notes}
    points = []
    for node in whole:
        why = "" if node.name in kept else reasons.get(node.name, "nothing needs it: left out")
        points.append(Point(node.name, sort_of(node), tuple(words_of(node)), "", None, (), why))
    scope, needed = infer(whole), needed_columns(kept)
    edges = [
        replace(_typed(scope, source, needed), target=target, is_pruned=not is_live)
        for source, target, is_live in _pairs(whole, kept)
    ]
    return Dataflow(tuple(points), (*edges, *_back((), kept)), has_graph=True)


# ------------------------------------------------------------------------------------------------------- with a graph


def _point(scene: Scene, node: Node, kept: Graph, reasons: dict[str, str]) -> Point:
    bars = tuple(bar for bar in scene.bars if _is_of(bar.step.node, node.name) and bar.step.kind is StepKind.COMPUTE)
    why = "" if node.name in kept else reasons.get(node.name, "nothing needs it: left out")
    hue = bars[0].hue if bars and bars[0].role else None
    return Point(node.name, sort_of(node), tuple(words_of(node)), _band(scene.plan, bars), hue, bars, why)


def _is_of(step_node: str, name: str) -> bool:
    """Steps inside a sub-graph are named after it: `refill.rollout`."""
    return step_node == name or step_node.startswith((f"{name}.", f"{name}/"))


def _band(plan: Plan, bars: Sequence[Bar]) -> str:
    if not bars:
        return NOWHERE
    step = bars[0].step
    if Lane.HOST in step.lanes:
        return cpus_of(step.mesh.nodes(plan.cluster.devices_per_node))
    return called(plan, step.mesh.devices)


def _edges(plan: Plan, whole: Graph, kept: Graph, moved: dict[tuple[str, str], tuple[Bar, ...]]) -> Iterator[Flows]:
    scope, needed = infer(whole), needed_columns(kept)
    rows = {} if plan.workload is None else rows_of(kept, plan.workload)
    for source, target, is_live in _pairs(whole, kept):
        edge = replace(_typed(scope, source, needed), target=target, is_pruned=not is_live)
        if edge.is_pruned:
            yield edge
        else:
            sized = replace(edge, carried_bytes=_carried(scope, edge, rows, plan.workload))
            yield _with_moves(sized, moved.get((source, target), ()))


def _pairs(whole: Graph, kept: Graph) -> Iterator[tuple[str, str, bool]]:
    """(from, to, whether it is left after pruning); where a node was left out, an edge goes past it."""
    live = {(source, node.name): None for node in kept for _, source in node.inputs}
    for source, target in dict.fromkeys((source, node.name) for node in whole for _, source in node.inputs) | live:
        yield source, target, (source, target) in live


def _past(kept: Graph, moved: dict[tuple[str, str], tuple[Bar, ...]], shown: set[int]) -> Iterator[Flows]:
    """Rows that move past the nodes between their maker and their reader: no edge of the graph has these moves."""
    tables = [node.name for node in kept.inputs if node["kind"] == "rows"]
    for (source, target), bars in moved.items():
        new = tuple(bar for bar in bars if bar.index not in shown)
        start = source or (tables[0] if tables else "")
        if new and start in kept and target in kept and start != target:
            shown |= {bar.index for bar in new}
            columns = tuple(dict.fromkeys(name for bar in new for name in bar.step.reads))
            yield _with_moves(Flows(start, target, DATA, columns=columns), new)


def _carried(scope: Inference, edge: Flows, rows: dict[str, float], workload: Workload | None) -> int:
    if workload is None or edge.kind != DATA:
        return 0
    known = scope.rows(edge.source).columns
    count = rows.get(edge.source, float(workload.prompts))
    return round(sum(column_bytes(known[name].type, name, count, workload) for name in edge.columns))


def _typed(scope: Inference, source: str, needed: dict[str, frozenset[str]]) -> Flows:
    kind = scope.types[source]
    if isinstance(kind, WeightsType):
        return Flows(source, "", WEIGHTS, what=str(kind.provenance))
    assert isinstance(kind, RowsType)
    carried = needed.get(source, frozenset())
    return Flows(
        source,
        "",
        DATA,
        columns=tuple(name for name in kind.columns if name in carried),
        pruned=() if kind.is_input else tuple(name for name in kind.columns if name not in carried),
    )


def _back(bars: Sequence[Bar], kept: Graph) -> Iterator[Flows]:
    """From weights that the flow returns to what samples from their model: the weights of the next iteration."""
    resharded = [bar for bar in bars if bar.step.kind is StepKind.RESHARD]
    for node in (kept[name] for name in kept.outputs):
        if not _gives_weights(node) or node.kind == "input":
            continue
        model = _model_of(kept, node)
        for reader in kept:
            models = [_model_of(kept, kept[one]) for _, one in reader.inputs if _gives_weights(kept[one])]
            if reader.kind in ("rollout", "refill") and model in models:
                moves = tuple(bar for bar in resharded if model in bar.step.reads or _is_of(bar.step.node, node.name))
                edge = Flows(node.name, reader.name, WEIGHTS, what=f"{model} t → t+1", is_back=True)
                yield _with_moves(edge, moves)


def _gives_weights(node: Node) -> bool:
    return node["kind"] == "weights" if node.kind == "input" else KINDS[node.kind].gives == "weights"


def _model_of(graph: Graph, node: Node) -> str:
    """The input whose weights a node gives a version of; empty for none."""
    while node.kind != "input":
        first = next((source for _, source in node.inputs if _gives_weights(graph[source])), None)
        if first is None:
            return ""
        node = graph[first]
    return node.name


# ---------------------------------------------------------------------------------------------------- moves and steps


def _with_moves(edge: Flows, moves: tuple[Bar, ...]) -> Flows:
    return replace(
        edge,
        moves=moves,
        num_bytes=sum(bar.step.predicted.num_bytes for bar in moves),
        seconds=sum(bar.end_s - bar.start_s for bar in moves),
    )


def _is_move(step: Step) -> bool:
    return step.kind is not StepKind.COMPUTE


def _reached(scene: Scene) -> Iterator[tuple[Bar, Bar, tuple[Bar, ...]]]:
    """Every computation, a computation it waits for, and the moves between the two."""
    by_name = {bar.step.name: bar for bar in scene.bars}

    def back(bar: Bar, through: tuple[Bar, ...]) -> Iterator[tuple[Bar, tuple[Bar, ...]]]:
        for name in bar.step.after:
            one = by_name[name]
            if _is_move(one.step):
                yield from back(one, (one, *through))
            else:
                yield one, through

    for bar in scene.bars:
        if not _is_move(bar.step):
            for source, moves in back(bar, ()):
                yield source, bar, moves


def _moves(scene: Scene) -> dict[tuple[str, str], tuple[Bar, ...]]:
    """Moves of rows between the computations of two nodes of the graph; "" for what moves rows of the data set."""
    found: dict[tuple[str, str], dict[int, Bar]] = {}
    for source, target, moves in _reached(scene):
        edge = found.setdefault((source.step.node.partition(".")[0], target.step.node.partition(".")[0]), {})
        edge |= {bar.index: bar for bar in moves if bar.step.kind is StepKind.TRANSFER}
    for bar in scene.bars:
        if not _is_move(bar.step):
            first = [one for one in scene.bars if one.step.name in bar.step.after and not one.step.after]
            edge = found.setdefault(("", bar.step.node.partition(".")[0]), {})
            edge |= {one.index: one for one in first if one.step.kind is StepKind.TRANSFER}
    return {edge: tuple(bars.values()) for edge, bars in found.items()}


def _of_steps(scene: Scene) -> Dataflow:
    points = tuple(
        Point(
            bar.step.name,
            "step",
            tuple(dict.fromkeys((bar.step.name, bar.step.node))),
            _band(scene.plan, (bar,)),
            bar.hue if bar.role else None,
            (bar,),
        )
        for bar in scene.bars
        if not _is_move(bar.step)
    )
    found: dict[tuple[str, str], dict[int, Bar]] = {}
    for source, target, moves in _reached(scene):
        brought = {bar.index: bar for bar in moves if _is_for(bar.step, target.step)}
        found.setdefault((source.step.name, target.step.name), {}).update(brought)
    edges = [_step_edge(source, target, tuple(moves.values())) for (source, target), moves in found.items()]
    direct = {(edge.source, edge.target) for edge in edges}
    implied = {pair for pair in direct if _goes_around(pair, direct)}
    edges = [edge for edge in edges if edge.moves or (edge.source, edge.target) not in implied]
    return Dataflow(points, (*edges, *_back_of_steps(scene)), has_graph=False)


def _is_for(move: Step, target: Step) -> bool:
    """Whether a computation waits for a move because of what it brings, and not for the order alone."""
    if move.kind is StepKind.RESHARD:
        return Lane.COMPUTE in target.lanes and move.mesh.overlaps(target.mesh)
    return move.kind in (StepKind.TRANSFER, StepKind.ONLOAD)


def _step_edge(source: str, target: str, moves: tuple[Bar, ...]) -> Flows:
    kinds = {bar.step.kind for bar in moves}
    kind = DATA if StepKind.TRANSFER in kinds else WEIGHTS if kinds else CONTROL
    columns = tuple(dict.fromkeys(name for bar in moves for name in bar.step.reads))
    what = ", ".join(dict.fromkeys(STEP_KINDS[bar.step.kind][1].partition(" ")[0] for bar in moves))
    edge = Flows(source, target, kind, what=what, columns=columns if kind == DATA else ())
    return _with_moves(edge, moves)


def _goes_around(pair: tuple[str, str], edges: set[tuple[str, str]]) -> bool:
    """Whether a longer way leads from one end to the other, so that the edge says nothing new."""
    todo = [target for source, target in edges if source == pair[0] and target != pair[1]]
    met = set(todo)
    while todo:
        at = todo.pop()
        if at == pair[1]:
            return True
        new = {target for source, target in edges if source == at} - met
        met |= new
        todo += new
    return False


def _back_of_steps(scene: Scene) -> Iterator[Flows]:
    """Reshards whose mesh's first computation has begun before: they are for the next iteration."""
    computing = [bar for bar in scene.bars if not _is_move(bar.step) and Lane.COMPUTE in bar.step.lanes]
    by_name = {bar.step.name: bar for bar in scene.bars}
    for bar in scene.bars:
        if bar.step.kind is not StepKind.RESHARD:
            continue
        first = next((one for one in computing if one.step.mesh.overlaps(bar.step.mesh)), None)
        sources = [by_name[name] for name in bar.step.after if not _is_move(by_name[name].step)]
        if first is not None and sources and first.end_s <= bar.start_s:
            edge = Flows(sources[-1].step.name, first.step.name, WEIGHTS, what=", ".join(bar.step.reads), is_back=True)
            yield _with_moves(edge, (bar,))
