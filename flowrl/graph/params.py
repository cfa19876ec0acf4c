"""Parameters that nodes of each kind have. The language always gives them; a text may have been edited."""

from __future__ import annotations

from flowrl.errors import ConfigError, TextError
from flowrl.graph.averages import Average
from flowrl.graph.code import FunctionRef
from flowrl.graph.losses import Loss
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.operators import OperatorCall

PARAMS: dict[str, tuple[str, ...]] = {
    "input": ("kind",),
    "rollout": ("n", "temperature"),
    "logprobs": ("out",),
    "top_logprobs": ("k", "out"),
    "values": ("out",),
    "score": ("out",),
    "update": ("average", "loss"),
    "assign": ("every",),
    "ema": ("decay", "every"),
    "after": ("step",),
    "apply": ("operator",),
    "combine": ("names", "weights"),
    "select": ("columns", "renamed"),
    "with_columns": ("columns",),
    "join": ("on",),
    "filter": ("keep",),
    "broadcast": ("column", "out", "to"),
    "reduce": ("how",),
    "copy": ("columns",),
    "prompts_from": ("function", "reads"),
    "buffer": ("capacity", "draw"),
    "refill": ("by", "keep", "max_rounds"),
    "repeat": ("epochs", "minibatches"),
    "every": ("steps",),
    "log": ("columns", "how"),
}
"""Kind of node to the parameters it cannot be without."""

COUNTS = frozenset({"n", "k", "every", "epochs", "minibatches", "capacity", "draw", "max_rounds", "steps"})
"""Parameters that are whole numbers of at least 1."""

CLASSES: dict[str, type] = {"operator": OperatorCall, "loss": Loss, "function": FunctionRef}


def refuse_incomplete(graph: Graph) -> None:
    """Errors: TextError for a node that the language could not have made: what runs it would fail far from its line."""
    for node in graph:
        for name in PARAMS.get(node.kind, ()):
            if node.get(name) is None:
                raise _error(node, f"needs the parameter '{name}'")
        for name, value in node.params:
            if name in COUNTS and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise _error(node, f"needs a whole number of at least 1 for '{name}'; found {value!r:.60}")
            if name in CLASSES and not isinstance(value, CLASSES[name]):
                raise _error(node, f"needs a declared {name} for '{name}'; found {value!r:.60}")
        if node.kind == "update":
            try:
                Average.of(node.get)
            except ConfigError as error:
                raise _error(node, f"has an average that cannot be: {error}") from None
        if node.kind == "input" and node["kind"] not in ("rows", "weights", "unused"):
            raise _error(node, f"is rows, weights or unused; found {node['kind']!r:.60}")


def _error(node: Node, text: str) -> TextError:
    return TextError(f"at {node.place}: node '{node.name}' of kind '{node.kind}' {text}")
