"""The canonical text of a graph: what a person reads, what names a run (its hash), and what parses back.

    flow grpo
      prompts = input(kind="rows")
      policy = input(kind="weights")
      rollout = rollout(policy, prompts; n=8, temperature=1.0)
      exact = apply(rollout; operator=exact())
      group_norm = apply(exact; operator=group_norm(eps=1e-06))
      update = update(policy, group_norm; average="token_mean", loss=ppo_clip(clip=0.2) + 0.001 * kl(kind="k3"))
      return update

    operator exact = "my_project.rewards:exact"
      hash "5f0c37a1f2c6"
      reads response: SAMPLE.str
      ...

One line per node: the nodes it reads, then after `;` its parameters. Operators, losses, functions and components are named
there and declared below with all that a check or a plan needs, so that reading a text imports nothing.

[Note: The text is the identity]
A graph's hash is the hash of this text, so nothing may enter it that differs between machines: no object addresses, no
paths of files, no `repr` of strings (which characters it escapes depends on Python's Unicode tables), no set order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from flowrl.errors import TextError
from flowrl.graph.code import FunctionRef
from flowrl.graph.expressions import Binary, Col, Expression, Literal, Where
from flowrl.graph.kinds import KINDS
from flowrl.graph.losses import Loss, Product, Scale, Sum, Term, told
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.operators import Locality, OperatorCall, Read
from flowrl.graph.values import Component, FrozenMap
from flowrl.schema.types import ColumnType

INDENT = "  "
WORDS = frozenset(
    {"None", "True", "False", "inf", "nan", "col", "lit", "where", "sum", "flow", "body", "return", "effects",
     "operator", "loss", "function", "component", "or", "optional"}
)  # fmt: skip
"""Words of the text itself; a name that is one of them is written in quotes."""

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_BREAKS = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def to_text(graph: Graph) -> str:
    """The canonical text of a graph; `from_text` reads it back to an equal one."""
    declared = _Declared()
    lines = [f"flow {quoted_name(graph.name)}", *_body(graph, declared, INDENT)]
    for (word, spec), alias in declared.aliases.items():
        lines.extend(("", *_declaration(word, spec, alias)))
    return "\n".join(lines) + "\n"


def from_text(text: str, *, file: str = "<text>") -> Graph:
    """Read a graph from its text. No operator's module is imported; places of nodes are lines of the text.

    Errors: TextError with line, column, what was expected and what was found.
    """
    from flowrl.graph.parser import parse

    if not isinstance(text, str):
        raise TextError(f"from_text needs the text of a graph; found {type(text).__name__}")
    return parse(text, file)


def quoted(text: str) -> str:
    """A string in double quotes on one line, the same on every machine."""
    return _BREAKS.sub(lambda m: f"\\u{ord(m.group()):04x}", json.dumps(text, ensure_ascii=False))


def quoted_name(name: str) -> str:
    """A name bare where it can be, in quotes otherwise."""
    return quoted(name) if name in WORDS else _bare(name)


def _bare(name: str) -> str:
    # a parameter's name may be a word of the text: '=' follows it
    return name if _PLAIN.fullmatch(name) else quoted(name)


def is_positional(node: Node) -> bool:
    """Whether the ports of a node's inputs follow from their order."""
    return tuple(port for port, _ in node.inputs) == ports_of(node.kind, len(node.inputs))


def ports_of(kind: str, count: int) -> tuple[str, ...]:
    """The ports that `count` sources written without port names go to; fewer when the kind has fewer."""
    known = KINDS[kind]
    extra = known.ports[-1:] * (count - len(known.ports)) if known.is_variadic else ()
    return (*known.ports, *extra)[:count]


class _Declared:
    """Short names for what is declared below the nodes, given in order of first use."""

    def __init__(self) -> None:
        self.aliases: dict[tuple[str, Any], str] = {}
        self._taken: set[str] = set(WORDS)

    def alias(self, word: str, spec: Any, path: str) -> str:
        key = (word, spec)
        if key not in self.aliases:
            stem = re.sub(r"[^A-Za-z0-9_]", "_", path.rpartition(":")[2].rpartition(".")[2]).strip("_") or word
            stem = stem if not stem[0].isdigit() else f"_{stem}"
            name, count = stem, 1
            while name in self._taken:
                count += 1
                name = f"{stem}_{count}"
            self._taken.add(name)
            self.aliases[key] = name
        return self.aliases[key]


def _body(graph: Graph, declared: _Declared, indent: str) -> Iterator[str]:
    for node in graph:
        line = f"{indent}{quoted_name(node.name)} = {_call(node, declared)}"
        if node.body is None:
            yield line
        else:
            yield f"{line} body {quoted_name(node.body.name)}"
            yield from _body(node.body, declared, indent + INDENT)
    for word, names in (("return", graph.outputs), ("effects", graph.effects)):
        if names:
            yield f"{indent}{word} {', '.join(map(quoted_name, names))}"


def _call(node: Node, declared: _Declared) -> str:
    if is_positional(node):
        sources = ", ".join(quoted_name(source) for _, source in node.inputs)
    else:
        sources = ", ".join(f"{_bare(port)}={quoted_name(source)}" for port, source in node.inputs)
    params = _named(node.params, declared)
    separator = "; " if sources and params else ";" if sources and not is_positional(node) else ""
    return f"{node.kind}({sources}{separator}{params})"


def _named(items: tuple[tuple[str, Any], ...], declared: _Declared) -> str:
    return ", ".join(f"{_bare(name)}={_value(value, declared)}" for name, value in items)


def _value(value: Any, declared: _Declared) -> str:
    match value:
        case None | True | False:
            return repr(value)
        case str():
            return quoted(value)
        case int():
            return int.__repr__(value)
        case float():
            return float.__repr__(value)  # a NumPy float's own repr would name its type
        case tuple():
            inside = ", ".join(_value(v, declared) for v in value)
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        case FrozenMap(items):
            return "{" + ", ".join(f"{quoted(k)}: {_value(v, declared)}" for k, v in items) + "}"
        case Literal(constant):
            return f"lit({_value(constant, declared)})"
        case Expression():
            return _expression(value, declared)
        case Loss():
            return _loss(value, declared)
        case OperatorCall():
            alias = declared.alias("operator", replace(value, config=(), function=None), value.name)
            return f"{alias}({_named(told(value), declared)})"
        case FunctionRef():
            return declared.alias("function", replace(value, function=None), value.path)
        case Component(name, args, kwargs):
            alias = declared.alias("component", name, name)
            given = [*(_value(a, declared) for a in args), *([_named(kwargs, declared)] if kwargs else [])]
            return f"{alias}({', '.join(given)})"
    raise TextError(
        f"a {type(value).__name__} has no text form; parameters of nodes are frozen by flowrl.graph.values.freeze"
    )


def _expression(expression: Expression, declared: _Declared) -> str:
    def part(inner: Expression) -> str:
        if isinstance(inner, Literal):
            return _value(inner.value, declared)
        text = _expression(inner, declared)
        return f"({text})" if isinstance(inner, Binary) else text

    match expression:
        case Col(name):
            return f"col({quoted(name)})"
        case Binary(op, left, right):
            return f"{part(left)} {op} {part(right)}"
        case Where(condition, then, otherwise):
            inside = ", ".join(
                part(p) if isinstance(p, Literal) else _expression(p, declared) for p in (condition, then, otherwise)
            )
            return f"where({inside})"
    raise TextError(f"no text for the expression {type(expression).__name__}")


def _loss(loss: Loss, declared: _Declared) -> str:
    def factor(part: Loss) -> str:
        text = _loss(part, declared)
        return text if isinstance(part, Term) or (isinstance(part, Sum) and len(part.parts) < 2) else f"({text})"

    match loss:
        case Term():
            alias = declared.alias("loss", replace(loss, config=(), function=None), loss.name)
            return f"{alias}({_named(told(loss), declared)})"
        case Sum(parts):
            added = [
                f"({_loss(p, declared)})" if isinstance(p, Sum) and len(p.parts) > 1 else _loss(p, declared)
                for p in parts
            ]
            return " + ".join(added) if len(parts) > 1 else f"sum({', '.join(added)})"
        case Scale(number, part):
            return f"{float.__repr__(number)} * {factor(part)}"
        case Product(left, right):
            return f"{factor(left)} * {factor(right)}"
    raise TextError(f"no text for the loss {type(loss).__name__}")


def type_text(kind: ColumnType) -> str:
    """`TOKEN.f32`, `TOKEN.i32[64]`, `PROMPT.i32["*"]`."""
    inner = ", ".join(str(n) if isinstance(n, int) else quoted(n) for n in kind.inner)
    return f"{kind.granularity.value}.{kind.dtype}" + (f"[{inner}]" if kind.inner else "")


def _declaration(word: str, spec: Any, alias: str) -> Iterator[str]:
    path = spec if isinstance(spec, str) else spec.path if isinstance(spec, FunctionRef) else spec.name
    yield f"{word} {alias} = {quoted(path)}"
    if isinstance(spec, str):
        return
    yield f"{INDENT}hash {quoted(spec.hash)}"
    if isinstance(spec, FunctionRef):
        return
    for read in spec.reads:
        yield f"{INDENT}reads {_read(read)}"
    if isinstance(spec, OperatorCall):
        for column in spec.writes:
            yield f"{INDENT}writes {quoted_name(column.name)}: {type_text(column.type)}"
    yield f"{INDENT}locality {_locality(spec.locality)}"
    for name, default in DECLARED_FIELDS[word].items():
        value = getattr(spec, name)
        if value != default:
            yield f"{INDENT}{name} {_value(value, _Declared())}"


_WRITTEN_APART = frozenset({"name", "hash", "config", "reads", "writes", "locality", "function"})

DECLARED_FIELDS: dict[str, dict[str, Any]] = {
    word: {f.name: f.default for f in fields(kind) if f.name not in _WRITTEN_APART}
    for word, kind in (("operator", OperatorCall), ("loss", Term))
}
"""Fields of a declaration that are written when they differ from these."""


def _read(read: Read) -> str:
    name = (
        quoted_name(read.column)
        if read.param == read.column
        else f"{quoted_name(read.param)} = {quoted_name(read.column)}"
    )
    kind = f": {type_text(read.type)}" if read.type is not None else ""
    fallback = f" or broadcast {quoted_name(read.broadcast)}" if read.broadcast else ""
    fallback += f" or live {quoted_name(read.live)}" if read.live else ""
    return f"{name}{kind}{fallback}{' optional' if read.is_optional else ''}"


def _locality(locality: Locality) -> str:
    return f"{locality.kind} {quoted_name(locality.key)}" if locality.key else locality.kind
