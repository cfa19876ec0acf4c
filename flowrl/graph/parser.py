"""Reads the text form of a graph: a lexer of lines, a parser of values by precedence, no evaluation of anything."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from flowrl.errors import TextError
from flowrl.graph.code import FunctionRef, Place
from flowrl.graph.expressions import Binary, Col, Expression, Literal, Where
from flowrl.graph.kinds import KINDS
from flowrl.graph.losses import Loss, Product, Scale, Sum, Term
from flowrl.graph.nodes import Graph, Node
from flowrl.graph.operators import Locality, OperatorCall, Read
from flowrl.graph.text import DECLARED_FIELDS, ports_of
from flowrl.graph.values import Component, FrozenMap
from flowrl.schema.columns import Column, nearest
from flowrl.schema.types import DTYPES, ColumnType, Granularity

_TOKEN = re.compile(
    r"""(?P<space>[ ]+|\#.*)
      | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)
      | (?P<op>==|!=|<=|>=|[-+*/<>&|()\[\]{},;:=])""",
    re.VERBOSE,
)
_CONSTANTS = {"None": None, "True": True, "False": False, "inf": math.inf, "nan": math.nan}
_DECLARATIONS = ("operator", "loss", "function", "component")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    """`string`, `number`, `name`, `op` or `end`."""
    text: str
    line: int
    column: int


@dataclass(frozen=True, slots=True)
class _Line:
    """One line that is not empty: how far it is indented, and its tokens (the last one is `end`)."""

    number: int
    indent: int
    tokens: tuple[_Token, ...]
    text: str


def parse(text: str, file: str) -> Graph:
    """See `flowrl.graph.text.from_text`."""
    lines = [line for number, raw in enumerate(text.split("\n"), 1) if (line := _lex(number, raw)) is not None]
    if not lines:
        _fail(1, 1, "'flow' and the flow's name", "an empty text")
    first = _Reader(lines[0])
    if lines[0].indent:
        _fail(lines[0].number, 1, "no indentation before 'flow'", f"{lines[0].indent} spaces")
    first.word("flow")
    name = first.name("the flow's name")
    first.end()
    starts = [i for i, line in enumerate(lines) if line.indent == 0 and i > 0]
    stops = [*starts[1:], len(lines)] if starts else []
    end = starts[0] if starts else len(lines)
    declared: dict[str, Any] = {}
    for start, stop in zip(starts, stops, strict=True):
        _declare(lines[start], lines[start + 1 : stop], declared)
    graph, rest = _flow(name, lines[1:end], file, declared, lines[0].indent)
    if rest:
        _fail(rest[0].number, rest[0].indent + 1, "a line of the flow", "another indentation")
    return graph


def _fail(line: int, column: int, expected: str, found: str) -> NoReturn:
    raise TextError(f"line {line}, column {column}: expected {expected}; found {found}")


def _lex(number: int, raw: str) -> _Line | None:
    raw = raw.rstrip("\r")
    tokens: list[_Token] = []
    at = 0
    while at < len(raw):
        match = _TOKEN.match(raw, at)
        if match is None:
            what = "a string that ends on its line" if raw[at] in "'\"" else "a name, a number, a string or punctuation"
            _fail(number, at + 1, what, repr(raw[at : at + 12]))
        if match.lastgroup != "space":
            tokens.append(_Token(str(match.lastgroup), match.group(), number, at + 1))
        at = match.end()
    if not tokens:
        return None
    indent = tokens[0].column - 1
    return _Line(number, indent, (*tokens, _Token("end", "the end of the line", number, len(raw) + 1)), raw.strip())


class _Reader:
    """Walks over the tokens of one line."""

    def __init__(self, line: _Line) -> None:
        self.line = line
        self.at = 0

    @property
    def next(self) -> _Token:
        return self.line.tokens[self.at]

    def fail(self, expected: str, token: _Token | None = None) -> NoReturn:
        token = token or self.next
        _fail(token.line, token.column, expected, token.text if token.kind == "end" else repr(token.text))

    def take(self) -> _Token:
        token = self.next
        if token.kind != "end":
            self.at += 1
        return token

    def is_op(self, *texts: str) -> bool:
        return self.next.kind == "op" and self.next.text in texts

    def accept(self, *texts: str) -> bool:
        if self.is_op(*texts):
            self.at += 1
            return True
        return False

    def expect(self, text: str, more: str = "") -> None:
        if not self.accept(text):
            self.fail(f"'{text}'{more}")

    def is_word(self, text: str) -> bool:
        return self.next.kind == "name" and self.next.text == text

    def word(self, text: str) -> None:
        if not self.is_word(text):
            self.fail(f"'{text}'")
        self.at += 1

    def accept_word(self, text: str) -> bool:
        if self.is_word(text):
            self.at += 1
            return True
        return False

    def name(self, what: str) -> str:
        """A bare or quoted name."""
        token = self.next
        if token.kind == "string":
            return self.string(what)
        if token.kind != "name":
            self.fail(what)
        return self.take().text

    def string(self, what: str) -> str:
        if self.next.kind != "string":
            self.fail(f"{what} in quotes")
        token = self.take()
        try:
            return str(ast.literal_eval(token.text))
        except (SyntaxError, ValueError):
            self.fail("a string with Python's escapes", token)

    def end(self) -> None:
        if self.next.kind != "end":
            self.fail("the end of the line")

    def column_type(self) -> ColumnType:
        """`TOKEN.f32` or `TOKEN.i32[64, "k"]`."""
        token = self.next
        grain, _, dtype = token.text.partition(".")
        if token.kind != "name" or grain not in Granularity.__members__ or dtype not in DTYPES:
            self.fail(f"a column type such as TOKEN.f32 (granularities {', '.join(Granularity.__members__)})")
        self.at += 1
        inner: list[int | str] = []
        if self.accept("["):
            while not self.accept("]"):
                is_length = self.next.kind == "number" and self.next.text.isdigit()
                inner.append(int(self.take().text) if is_length else self.string("a length or its name"))
                if not self.is_op("]"):
                    self.expect(",", " or ']'")
        return ColumnType(Granularity[grain], dtype, tuple(inner))


# --- the flow ---------------------------------------------------------------------------------------------------------


def _flow(
    name: str, lines: list[_Line], file: str, declared: dict[str, Any], outside: int
) -> tuple[Graph, list[_Line]]:
    """The graph whose lines come first in `lines`, indented more than `outside`; and the lines after it."""
    nodes: dict[str, Node] = {}
    roots: dict[str, tuple[str, ...]] = {}
    depth = lines[0].indent if lines and lines[0].indent > outside else -1
    while lines and lines[0].indent == depth:
        line, lines = lines[0], lines[1:]
        reader = _Reader(line)
        root = next((w for w in ("return", "effects") if reader.is_word(w)), "")
        if root:
            reader.take()
            if root in roots:
                _fail(line.number, line.indent + 1, f"one '{root}' line", "a second one")
            roots[root] = _known_names(reader, nodes)
            reader.end()
            continue
        if roots:
            _fail(line.number, line.indent + 1, "no node after 'return' or 'effects'", repr(line.text))
        node, body_name = _node(reader, nodes, declared, file)
        if body_name is not None:
            body, lines = _flow(body_name, lines, file, declared, depth)
            node = replace(node, body=body)
        nodes[node.name] = node
    if lines and lines[0].indent > max(depth, outside):
        _fail(
            lines[0].number,
            lines[0].indent + 1,
            f"a line indented by {max(depth, 0)} spaces",
            f"{lines[0].indent} spaces",
        )
    return Graph(name, tuple(nodes.values()), roots.get("return", ()), roots.get("effects", ())), lines


def _known_names(reader: _Reader, nodes: dict[str, Node]) -> tuple[str, ...]:
    found = [_source(reader, nodes)]
    while reader.accept(","):
        found.append(_source(reader, nodes))
    return tuple(found)


def _source(reader: _Reader, nodes: dict[str, Node]) -> str:
    token = reader.next
    name = reader.name("the name of a node above")
    if name not in nodes:
        reader.fail(f"the name of a node above ({nearest(name, nodes)})", token)
    return name


def _node(reader: _Reader, nodes: dict[str, Node], declared: dict[str, Any], file: str) -> tuple[Node, str | None]:
    start = reader.next
    name = reader.name("a node's name, 'return' or 'effects'")
    if name in nodes:
        reader.fail(f"a name that no node above has ('{name}' is on line {nodes[name].place.line})", start)
    reader.expect("=")
    kind_token = reader.next
    kind = reader.name("a kind of node")
    if kind not in KINDS:
        reader.fail(f"a kind of node; {nearest(kind, KINDS)}", kind_token)
    reader.expect("(")
    inputs = _inputs(reader, kind, nodes)
    params = _Values(reader, declared).named(")")
    reader.expect(")", " or ','")
    body = reader.name("the name of the body") if reader.accept_word("body") else None
    reader.end()
    place = Place(file, reader.line.number, reader.line.text)
    return Node(name, kind, inputs, tuple(sorted(params.items())), None, place), body


def _inputs(reader: _Reader, kind: str, nodes: dict[str, Node]) -> tuple[tuple[str, str], ...]:
    """Sources up to `;`, or to the end of the call when none has a port."""
    names_ports = _has_semicolon(reader)
    found: list[tuple[str, str]] = []
    first = reader.next
    while not reader.is_op(")", ";"):
        after = reader.line.tokens[min(reader.at + 1, len(reader.line.tokens) - 1)]
        is_named = after.kind == "op" and after.text == "="
        if is_named and not names_ports:
            break  # parameters without any source
        port = ""
        if is_named:
            port = reader.name("a port")
            reader.expect("=")
        found.append((port, _source(reader, nodes)))
        if not reader.is_op(")", ";"):
            reader.expect(",", ", ';' or ')'")
    reader.accept(";")
    if any(port for port, _ in found):
        if not all(port for port, _ in found):
            reader.fail("a port before every source or before none", first)
        return tuple(found)
    ports = ports_of(kind, len(found))
    if len(ports) < len(found):
        reader.fail(f"at most {len(ports)} sources ({', '.join(ports)}) for '{kind}'", first)
    return tuple((port, source) for port, (_, source) in zip(ports, found, strict=True))


def _has_semicolon(reader: _Reader) -> bool:
    return any(t.kind == "op" and t.text == ";" for t in reader.line.tokens[reader.at :])


# --- values -----------------------------------------------------------------------------------------------------------


class _Values:
    """Parses values; loosest first: comparison, `|`, `&`, `+ -`, `* /`."""

    LEVELS = (("==", "!=", "<", "<=", ">", ">="), ("|",), ("&",))

    def __init__(self, reader: _Reader, declared: dict[str, Any]) -> None:
        self.reader = reader
        self.declared = declared

    def named(self, close: str) -> dict[str, Any]:
        """`name=value, ...` up to `close`, which stays."""
        found: dict[str, Any] = {}
        while not self.reader.is_op(close):
            token = self.reader.next
            name = self.reader.name("a parameter's name")
            if name in found:
                self.reader.fail(f"each parameter once ('{name}' is there already)", token)
            self.reader.expect("=")
            found[name] = self.value()
            if not self.reader.is_op(close):
                self.reader.expect(",", f" or '{close}'")
        return found

    def value(self, level: int = 0) -> Any:
        if level == len(self.LEVELS):
            return self._sum()
        left = self.value(level + 1)
        while self.reader.is_op(*self.LEVELS[level]):
            token = self.reader.take()
            left = self._binary(token, left, self.value(level + 1))
        return left

    def _binary(self, token: _Token, left: Any, right: Any) -> Expression:
        sides = []
        for side in (left, right):
            if not isinstance(side, Expression) and not (side is None or isinstance(side, bool | int | float | str)):
                self.reader.fail("columns or constants on both sides", token)
            sides.append(side if isinstance(side, Expression) else Literal(side))
        return Binary(token.text, sides[0], sides[1])

    def _sum(self) -> Any:
        left = self._product()
        if isinstance(left, Loss):
            parts = [left]
            while self.reader.is_op("+"):
                token = self.reader.take()
                part = self._product()
                if not isinstance(part, Loss):
                    self.reader.fail("a loss after '+'", token)
                parts.append(part)
            return Sum(tuple(parts)) if len(parts) > 1 else left
        while self.reader.is_op("+", "-"):
            token = self.reader.take()
            left = self._binary(token, left, self._product())
        return left

    def _product(self) -> Any:
        left = self._atom()
        while self.reader.is_op("*", "/"):
            token = self.reader.take()
            right = self._atom()
            if not isinstance(right, Loss) and not isinstance(left, Loss):
                left = self._binary(token, left, right)
            elif token.text == "*" and isinstance(right, Loss) and isinstance(left, Loss):
                left = Product(left, right)
            elif token.text == "*" and isinstance(right, Loss) and type(left) in (int, float):
                left = Scale(float(left), right)
            else:
                self.reader.fail("a number or a loss, '*' and a loss", token)
        return left

    def _atom(self) -> Any:
        reader = self.reader
        token = reader.next
        if token.kind == "string":
            return reader.string("a value")
        if token.kind == "number":
            reader.take()
            return int(token.text) if token.text.isdigit() else float(token.text)
        if reader.accept("-"):
            number = self._atom()
            if type(number) not in (int, float):
                reader.fail("a number after '-'", token)
            return -number
        if reader.accept("("):
            return self._parenthesis()
        if reader.accept("{"):
            return self._map()
        if token.kind == "name":
            reader.take()
            return self._call(token) if reader.accept("(") else self._bare(token)
        reader.fail("a value")

    def _parenthesis(self) -> Any:
        items: list[Any] = []
        is_tuple = self.reader.is_op(")")
        while not self.reader.is_op(")"):
            items.append(self.value())
            if self.reader.accept(","):
                is_tuple = True
            elif not self.reader.is_op(")"):
                self.reader.fail("',' or ')'")
        self.reader.expect(")")
        return tuple(items) if is_tuple else items[0]

    def _map(self) -> FrozenMap:
        items: list[tuple[str, Any]] = []
        while not self.reader.is_op("}"):
            key = self.reader.string("a key")
            self.reader.expect(":")
            items.append((key, self.value()))
            if not self.reader.is_op("}"):
                self.reader.expect(",", " or '}'")
        self.reader.expect("}")
        return FrozenMap(tuple(items))

    def _bare(self, token: _Token) -> Any:
        if token.text in _CONSTANTS:
            return _CONSTANTS[token.text]
        found = self.declared.get(token.text)
        if isinstance(found, FunctionRef):
            return found
        if found is not None:
            self.reader.fail(f"'(' after '{token.text}', which is no function", self.reader.next)
        functions = [name for name, spec in self.declared.items() if isinstance(spec, FunctionRef)]
        self.reader.fail(f"a value or a declared function ({nearest(token.text, functions)})", token)

    def _call(self, token: _Token) -> Any:
        reader = self.reader
        special = {"col": 1, "lit": 1, "where": 3, "sum": None}
        if token.text in special:
            args = self._arguments(")")
            count = special[token.text]
            if count is not None and len(args) != count:
                reader.fail(f"{count} argument{'s' if count > 1 else ''} for '{token.text}'", token)
            return self._special(token, args)
        spec = self.declared.get(token.text)
        if isinstance(spec, str):
            args = self._arguments(")", positional_only=False)
            kwargs = self.named(")")
            reader.expect(")", " or ','")
            return Component(spec, tuple(args), tuple(sorted(kwargs.items())))
        if not isinstance(spec, OperatorCall | Term):
            reader.fail(f"a declared operator, loss or component ({nearest(token.text, self.declared)})", token)
        config = self.named(")")
        reader.expect(")", " or ','")
        return replace(spec, config=tuple(sorted({**dict(spec.defaults.items), **config}.items())))

    def _arguments(self, close: str, positional_only: bool = True) -> list[Any]:
        """Positional values; consumes `close` when nothing named may follow."""
        reader = self.reader
        found: list[Any] = []
        while not reader.is_op(close):
            after = reader.line.tokens[min(reader.at + 1, len(reader.line.tokens) - 1)]
            if (
                not positional_only
                and reader.next.kind in ("name", "string")
                and after.kind == "op"
                and after.text == "="
            ):
                return found
            found.append(self.value())
            if not reader.is_op(close):
                reader.expect(",", f" or '{close}'")
        if positional_only:
            reader.expect(close)
        return found

    def _special(self, token: _Token, args: list[Any]) -> Any:
        def is_scalar(value: Any) -> bool:
            return value is None or isinstance(value, bool | int | float | str)

        if token.text == "sum" and all(isinstance(a, Loss) for a in args):
            return Sum(tuple(args))
        if token.text == "col" and isinstance(args[0], str):
            return Col(args[0])
        if token.text == "lit" and is_scalar(args[0]):
            return Literal(args[0])
        if token.text == "where" and all(isinstance(a, Expression) or is_scalar(a) for a in args):
            parts = [a if isinstance(a, Expression) else Literal(a) for a in args]
            return Where(parts[0], parts[1], parts[2])
        wanted = {"sum": "losses", "col": "a column's name", "lit": "a constant", "where": "columns and constants"}
        self.reader.fail(f"{wanted[token.text]} inside '{token.text}(...)'", token)


# --- declarations -----------------------------------------------------------------------------------------------------


def _declare(head: _Line, lines: list[_Line], declared: dict[str, Any]) -> None:
    reader = _Reader(head)
    token = reader.next
    word = reader.name(" or ".join(f"'{w}'" for w in _DECLARATIONS))
    if word not in _DECLARATIONS:
        reader.fail(f"'flow' once, then {', '.join(_DECLARATIONS)}", token)
    alias_token = reader.next
    alias = reader.name("a short name")
    if alias in declared:
        reader.fail(f"a short name that is not declared above ('{alias}' is)", alias_token)
    reader.expect("=")
    path = reader.string("'module:name'")
    reader.end()
    fields: dict[str, Any] = {"hash": "", "reads": [], "writes": [], "locality": Locality("row")}
    for line in lines:
        _declared_field(_Reader(line), word, fields)
    if word == "component":
        declared[alias] = path
    elif word == "function":
        declared[alias] = FunctionRef(path, fields["hash"])
    else:
        more = {name: fields.get(name, default) for name, default in DECLARED_FIELDS[word].items()}
        common = {"name": path, "hash": fields["hash"], "config": (), "reads": tuple(fields["reads"])}
        if word == "operator":
            declared[alias] = OperatorCall(
                **common, writes=tuple(fields["writes"]), locality=fields["locality"], **more
            )
        else:
            declared[alias] = Term(**common, locality=fields["locality"], **more)


_FIELDS_OF = {
    "operator": ("hash", "reads", "writes", "locality", *DECLARED_FIELDS["operator"]),
    "loss": ("hash", "reads", "locality", *DECLARED_FIELDS["loss"]),
    "function": ("hash",),
    "component": (),
}


def _declared_field(reader: _Reader, word: str, fields: dict[str, Any]) -> None:
    token = reader.next
    name = reader.name("a field of the declaration")
    if name not in _FIELDS_OF[word]:
        reader.fail(f"a field of '{word}' ({nearest(name, _FIELDS_OF[word])})", token)
    if name == "reads":
        fields["reads"].append(_read(reader))
    elif name == "writes":
        column = reader.name("a column's name")
        reader.expect(":")
        fields["writes"].append(Column(column, reader.column_type()))
    elif name == "locality":
        fields["locality"] = _locality(reader)
    elif name == "hash":
        fields["hash"] = reader.string("a hash")
    else:
        fields[name] = _Values(reader, {}).value()
    reader.end()


def _read(reader: _Reader) -> Read:
    param = column = reader.name("a column's name")
    if reader.accept("="):
        column = reader.name("a column's name")
    kind = reader.column_type() if reader.accept(":") else None
    fallbacks = {"broadcast": "", "live": ""}
    while reader.accept_word("or"):
        token = reader.next
        which = reader.name("'broadcast' or 'live'")
        if which not in fallbacks:
            reader.fail("'broadcast' or 'live'", token)
        fallbacks[which] = reader.name("a column's name")
    return Read(param, column, kind, fallbacks["broadcast"], fallbacks["live"], reader.accept_word("optional"))


def _locality(reader: _Reader) -> Locality:
    token = reader.next
    kind = reader.name("a locality")
    kinds = ("row", "group", "batch", "stateful")
    if kind not in kinds:
        reader.fail(f"a locality; {nearest(kind, kinds)}", token)
    if kind != "group":
        return Locality(kind)
    return Locality("group", reader.name("the column that makes the group"))
