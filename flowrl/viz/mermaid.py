"""A graph as a Mermaid flowchart, which GitHub, GitLab and mkdocs draw.

    inputs that are models   [( policy )]     cylinder, blue
    inputs that are tables   [[ prompts ]]    framed, green
    nodes that give rows     [ ... ]          plain
    nodes that give weights  ([ ... ])        rounded, orange
    filters and other nodes that decide which rows there are: {{ ... }}

Solid edges carry rows and are labelled with what they carry, dotted ones weights with model and version (`policy@t`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from flowrl.graph.infer import Inference, infer
from flowrl.graph.kinds import KINDS
from flowrl.graph.losses import Loss
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.operators import OperatorCall
from flowrl.graph.types import RowsType, WeightsType
from flowrl.graph.written import written_by

STYLES = {
    "model": "fill:#dbe9f6,stroke:#2c5d8f,color:#111",
    "table": "fill:#e2f0d9,stroke:#4f7f35,color:#111",
    "rows": "fill:#ffffff,stroke:#777777,color:#111",
    "choice": "fill:#fff7d6,stroke:#a58a1f,color:#111",
    "weights": "fill:#fde3cf,stroke:#b35f16,color:#111",
    "output": "fill:#eeeeee,stroke:#333333,color:#111,stroke-dasharray:4 2",
}
"""One Mermaid class per sort of node."""

SHAPES = {
    "model": ("[(", ")]"),
    "table": ("[[", "]]"),
    "rows": ("[", "]"),
    "choice": ("{{", "}}"),
    "weights": ("([", "])"),
    "output": ("((", "))"),
}

_SHOWN = ("n", "temperature", "max_turns", "k", "epochs", "minibatches", "capacity", "draw", "max_rounds", "every", "decay",
          "steps", "step", "on", "how", "by", "of", "average")  # fmt: skip
"""Parameters worth a reader's time."""


def to_mermaid(graph: Graph, inference: Inference | None = None) -> str:
    """The graph as Mermaid text (`flowchart LR`), sub-graphs included.

    Args:
        inference: types of the edges, when they are known already.
    """
    scope = inference or infer(graph)
    lines = ["flowchart LR", *_scope(scope, "", "    ")]
    for number, name in enumerate(graph.outputs):
        lines.append(f"    out{number}{_shape('output', label_of(['returned']))}")
        lines.append(f"    {_id(name, '')} {_arrow(scope, name)} out{number}")
        lines.append(f"    class out{number} output")
    lines += [f"    classDef {name} {style}" for name, style in STYLES.items()]
    return "\n".join(lines) + "\n"


def _scope(scope: Inference, prefix: str, indent: str) -> Iterator[str]:
    by_sort: dict[str, list[str]] = {}
    for node in scope.graph:
        sort = sort_of(node)
        by_sort.setdefault(sort, []).append(_id(node.name, prefix))
        yield f"{indent}{_id(node.name, prefix)}{_shape(sort, label_of(words_of(node)))}"
        if node.name in scope.bodies:
            body = scope.bodies[node.name]
            inside = f"{prefix}{node.name}/"
            title = label_of([f"{node.name}: repeats {body.graph.name}"])
            yield f"{indent}subgraph {_id('body', inside)}[{title}]"
            yield from _scope(body, inside, indent + "    ")
            yield f"{indent}end"
            for port, source in node.inputs:
                inner = "prompts" if port == "rows" else source
                if inner in body.graph:
                    yield f"{indent}{_id(source, prefix)} {_arrow(scope, source)} {_id(inner, inside)}"
            for output in body.graph.outputs:
                yield f"{indent}{_id(output, inside)} {_arrow(body, output)} {_id(node.name, prefix)}"
        else:
            for _, source in node.inputs:
                yield f"{indent}{_id(source, prefix)} {_arrow(scope, source)} {_id(node.name, prefix)}"
    for sort, ids in by_sort.items():
        yield f"{indent}class {','.join(ids)} {sort}"


def sort_of(node: Node) -> str:
    if node.kind == "input":
        return "model" if node["kind"] == "weights" else "table"
    if KINDS[node.kind].gives == "weights":
        return "weights"
    is_choice = node.kind in ("filter", "refill", "buffer", "repeat", "every") or (
        node.kind == "apply" and node["operator"].is_filter
    )
    return "choice" if is_choice else "rows"


def words_of(node: Node) -> list[str]:
    """The lines of a node's label: its name, its kind where that says more, and its telling parameters."""
    operator, loss = node.get("operator") or node.get("keep"), node.get("loss")
    lines = [node.name]
    if isinstance(operator, OperatorCall):
        if operator.short_name != node.name:
            lines.append(operator.short_name)
    elif node.kind not in ("input", node.name):
        lines.append(node.kind)
    if isinstance(loss, Loss):
        lines.append(" + ".join(dict.fromkeys(term.short_name for term in loss.terms())))
    shown = [f"{name}={node.get(name)}" for name in _SHOWN if node.get(name) is not None]
    if shown:
        lines.append(", ".join(shown))
    return lines


def _arrow(scope: Inference, source: str) -> str:
    kind = scope.types[source]
    if isinstance(kind, WeightsType):
        return f"-. {label_of([str(kind.provenance)])} .->"
    node = scope.graph[source]
    added = written_by(node) if node.kind not in ("rollout", "prompts_from") else ()
    what = "rows" if not added else "+ " + ", ".join(added[:3]) + (" ..." if len(added) > 3 else "")
    size = f" x{kind.group_size}" if isinstance(kind, RowsType) and kind.group_size and node.kind == "rollout" else ""
    return f"-- {label_of([what + size])} -->"


def _shape(sort: str, label: str) -> str:
    left, right = SHAPES[sort]
    return f"{left}{label}{right}"


def label_of(lines: list[str]) -> str:
    """A quoted label; characters that Mermaid or HTML would read are written as entities."""
    escaped = (re.sub(r"[^\w .,:+=*/@()-]", lambda m: f"#{ord(m.group())};", line) for line in lines)
    return '"' + "<br/>".join(escaped) + '"'


def _id(name: str, prefix: str) -> str:
    """An identifier of its own for every node: what is no letter or digit becomes its code."""
    return "n_" + re.sub(r"[^A-Za-z0-9]", lambda m: f"_{ord(m.group()):x}_", prefix + name)
