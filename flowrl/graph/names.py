"""Which names a piece of code takes from its module: the free names of a syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

Chain = tuple[str, ...]
"""A name and the attributes taken from it: `("helpers", "mean")` for `helpers.mean`."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_UNREAD = frozenset({"decorator_list", "annotation", "returns", "type_params"})
"""Parts of a definition that say nothing of what it does when it is called."""


def free_names(tree: ast.AST) -> frozenset[Chain]:
    """Names that code reads and binds nowhere itself, with their attributes. Annotations and decorators are left out.

    It follows Python's scopes from the tree alone, so every Python version finds the same names.
    """
    return frozenset(_free(tree, frozenset()))


def _free(node: ast.AST, bound: frozenset[str]) -> Iterator[Chain]:
    chain = _chain(node)
    if chain is not None:
        if chain[0] not in bound:
            yield chain
        return
    if isinstance(node, _FUNCTIONS):
        yield from _all_free((*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)), bound)
        body = node.body if isinstance(node.body, list) else [node.body]
        parameters = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
        yield from _all_free(body, (bound | parameters | _bound_by(body)) - _declared_global(body))
        return
    if isinstance(node, _COMPREHENSIONS):
        bound |= _bound_by([g.target for g in node.generators])
    for name, value in ast.iter_fields(node):
        if name not in _UNREAD:
            yield from _all_free(value if isinstance(value, list) else [value], bound)


def _all_free(values: Iterable[object], bound: frozenset[str]) -> Iterator[Chain]:
    for value in values:
        if isinstance(value, ast.AST):
            yield from _free(value, bound)


def _chain(node: ast.AST) -> Chain | None:
    """The chain that `a.b.c` reads, or None for other code."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (node.id, *reversed(parts)) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else None


def _bound_by(body: Iterable[ast.AST]) -> frozenset[str]:
    """Names that statements bind in their own scope."""
    found: set[str] = set()
    for node in _same_scope(body):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name.partition(".")[0])
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                found.add(name)
            case ast.MatchMapping(rest=str(name)):
                found.add(name)
    return frozenset(found)


def _declared_global(body: Iterable[ast.AST]) -> frozenset[str]:
    return frozenset(name for node in _same_scope(body) if isinstance(node, ast.Global) for name in node.names)


def _same_scope(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Every node below that belongs to the same scope: definitions themselves, but nothing inside them."""
    for node in body:
        yield node
        if isinstance(node, _COMPREHENSIONS):  # `:=` inside one binds outside of it
            yield from (n.target for n in ast.walk(node) if isinstance(n, ast.NamedExpr))
        elif not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            yield from _same_scope(ast.iter_child_nodes(node))


def definitions(source: str) -> dict[str, list[ast.stmt]]:
    """For each name of a module, the statements at its top (also inside `if`, `try` and the like) that bind it."""
    found: dict[str, list[ast.stmt]] = {}
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return found
    stack: list[ast.stmt] = list(reversed(tree.body))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            blocks = (*node.body, *getattr(node, "orelse", ()), *getattr(node, "finalbody", ()))
            handled = tuple(s for handler in getattr(node, "handlers", ()) for s in handler.body)
            stack.extend(reversed((*blocks, *handled)))
            continue
        for name in sorted(_bound_by([node])):
            found.setdefault(name, []).append(node)
    return found
