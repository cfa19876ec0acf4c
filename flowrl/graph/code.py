"""Where code was written and what it says: places for errors, hashes for identity."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from flowrl.errors import TraceError

HASH_LENGTH = 12


@dataclass(frozen=True, slots=True)
class Place:
    """File, line and text where something was written.

    Example:
        Place("examples/grpo.py", 14, "rows = fr.rollout(policy, prompts, n=8)")
    """

    file: str = ""
    line: int = 0
    text: str = ""

    def __str__(self) -> str:
        return f"{_shown(self.file)}:{self.line}" if self.file else "<no source>"


def _shown(file: str) -> str:
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return file


_CORE = str(Path(__file__).resolve().parent.parent)


def here() -> Place:
    """The innermost frame outside FlowRL's own code and outside packs' operator plumbing: the user's line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_CORE):
        frame = frame.f_back
    if frame is None:
        return Place()
    return Place(
        frame.f_code.co_filename, frame.f_lineno, linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    )


def place_of(function: Callable[..., Any]) -> Place:
    """Where a function is defined."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return Place()
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return Place(code.co_filename, code.co_firstlineno, line)


def path_of(function: Callable[..., Any]) -> str:
    """`module:qualname`, the name by which a function is stored in plans and text."""
    module = getattr(function, "__module__", None) or "<unknown>"
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{module}:{name}"


@functools.cache
def code_hash(function: Callable[..., Any]) -> str:
    """Hash of what a function does: its source without comments, docstring, decorators and layout."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        text = ast.unparse(_Bare().visit(tree))
    except (OSError, TypeError, SyntaxError):
        code = getattr(function, "__code__", None)
        # no source (interactive, C): bytecode is the best that is left
        text = repr((code.co_code, code.co_consts, code.co_names)) if code is not None else path_of(function)
    return digest(text)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]


class _Bare(ast.NodeTransformer):
    """Drops docstrings, decorators and annotations."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list = []
        node.returns = None
        if node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
            node.body = node.body[1:] or [ast.Pass()]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node


@dataclass(frozen=True, slots=True)
class FunctionRef:
    """A user's function as a value in a graph: compared by path and code, called where it runs."""

    path: str
    hash: str
    function: Callable[..., Any] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionRef:
        return cls(path_of(function), code_hash(function), function)

    def resolve(self) -> Callable[..., Any]:
        """The function itself; imported by path when the graph came from text."""
        if self.function is not None:
            return self.function
        return resolve(self.path)

    @property
    def place(self) -> Place:
        return place_of(self.function) if self.function is not None else Place()


def resolve(path: str) -> Any:
    """Import what `module:qualname` names."""
    module, _, name = path.partition(":")
    if "<locals>" in name or module == "__main__":
        raise TraceError(f"'{path}' was defined inside a function or a script and cannot be imported from a text form")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
