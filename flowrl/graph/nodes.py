"""What should be computed: frozen nodes in a frozen graph.

A `Node` says what, never where or when (that is a plan's `Step`). Nodes are kept in the order they were written, which is
a topological order; networkx views are made from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from flowrl.errors import TraceError
from flowrl.graph.code import Place, digest
from flowrl.shown import shown

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, slots=True)
class Node:
    """One occurrence of a kind of work.

    Example:
        Node("rollout", "rollout", inputs=(("model", "policy"), ("rows", "prompts")), params=(("n", 8), ("temperature", 1.0)))
    """

    name: str
    """Unique in its graph; made from the operator's or kind's name, numbered when it repeats."""
    kind: str
    """Key of `flowrl.graph.kinds.KINDS`."""
    inputs: tuple[tuple[str, str], ...] = ()
    """(port, name of the node whose value goes in); a port may repeat (`concat`)."""
    params: tuple[tuple[str, Any], ...] = ()
    """Sorted by name; every value is frozen and has a text form."""
    body: Graph | None = None
    """The sub-graph of a node that runs one (`refill`)."""
    place: Place = field(default=Place(), compare=False)
    """Where it was written; no part of identity."""

    def __getitem__(self, param: str) -> Any:
        for name, value in self.params:
            if name == param:
                return value
        raise KeyError(param)

    def get(self, param: str, default: Any = None) -> Any:
        return next((value for name, value in self.params if name == param), default)

    def sources(self, port: str) -> tuple[str, ...]:
        return tuple(source for name, source in self.inputs if name == port)

    def source(self, port: str) -> str:
        found = self.sources(port)
        if len(found) != 1:
            raise KeyError(f"node '{self.name}' has {len(found)} inputs on port '{port}'")
        return found[0]

    def with_params(self, **params: Any) -> Node:
        return replace(self, params=tuple(sorted({**dict(self.params), **params}.items())))

    def renamed(self, names: Mapping[str, str]) -> Node:
        """The same node with its own name and its sources' names replaced."""
        inputs = tuple((port, names.get(source, source)) for port, source in self.inputs)
        return replace(self, name=names.get(self.name, self.name), inputs=inputs)


@dataclass(frozen=True, slots=True)
class Graph:
    """A flow as a value: equal when it computes the same, hashable, printable, never changed in place.

    `outputs` are what the flow returns; `effects` are nodes kept for what they do (a log, an evaluation every 50 steps).
    """

    name: str
    nodes: tuple[Node, ...] = ()
    outputs: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for node in self.nodes:
            if node.name in seen:
                raise TraceError(f"graph '{self.name}' has two nodes named '{node.name}'")
            for port, source in node.inputs:
                if source not in seen:
                    raise TraceError(
                        f"node '{node.name}' reads '{source}' on port '{port}', which no earlier node of graph "
                        f"'{self.name}' is called"
                    )
            seen.add(node.name)
        for name in (*self.outputs, *self.effects):
            if name not in seen:
                raise TraceError(f"graph '{self.name}' returns '{name}', which none of its nodes is called")

    def __getitem__(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return any(node.name == name for node in self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def __str__(self) -> str:
        from flowrl.graph.text import to_text

        return to_text(self)

    def _repr_html_(self) -> str:
        return shown("graph", self)

    def _repr_pretty_(self, printer: Any, is_cycle: bool) -> None:
        """IPython where it shows no pages: the canonical text."""
        printer.text(str(self))

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes that stand for the flow's parameters."""
        return tuple(node for node in self.nodes if node.kind == "input")

    @property
    def roots(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.outputs, *self.effects)))

    @property
    def hash(self) -> str:
        """Stable over processes and machines; names a run's algorithm."""
        return digest(str(self))

    def add(self, node: Node) -> Graph:
        return replace(self, nodes=(*self.nodes, node))

    def consumers(self, name: str) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if any(source == name for _, source in node.inputs))

    def ancestors(self, *names: str) -> frozenset[str]:
        """The named nodes and all they depend on."""
        by_name = {node.name: node for node in self.nodes}
        found: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo.extend(source for _, source in by_name[name].inputs)
        return frozenset(found)

    def to_networkx(self) -> nx.MultiDiGraph:
        """Nodes by name with the `Node` as attribute `node`; one edge per input with its `port`."""
        import networkx as nx

        graph = nx.MultiDiGraph(name=self.name)
        for node in self.nodes:
            graph.add_node(node.name, node=node)
            for index, (port, source) in enumerate(node.inputs):
                graph.add_edge(source, node.name, key=index, port=port)
        return graph

    def slice(self, *, until: str) -> Graph:
        """The part of the flow that computes node `until`; that node becomes its only output.

        Node names are those of the printed text; a column name also works and means the last node that writes it.
        """
        from flowrl.graph.edit import slice_until

        return slice_until(self, until)

    def rename(self, names: Mapping[str, str]) -> Graph:
        """Nodes renamed, e.g. `{"policy": "actor"}`."""
        from flowrl.graph.edit import rename

        return rename(self, names)

    def namespace(self, prefix: str, *, keep: tuple[str, ...] = ()) -> Graph:
        """Every node's name prefixed with `prefix.`, except those in `keep`."""
        return self.rename({node.name: f"{prefix}.{node.name}" for node in self.nodes if node.name not in keep})

    def check(self, **options: Any) -> tuple[Any, ...]:
        """All problems of the graph; see `flowrl.graph.checks.find_problems`."""
        from flowrl.graph.checks import find_problems

        return find_problems(self, **options)
