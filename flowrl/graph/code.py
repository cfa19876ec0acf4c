"""Where code was written and what it says: places for errors, hashes for identity."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import pkgutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, Self

from flowrl.errors import PackError, TraceError
from flowrl.graph.names import Chain, definitions, free_names

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
    """`module:qualname`, the name by which a function is stored in plans and text.

    A private module (`_groups`) is how a package is laid out and may change; what it defines is named by the package.
    """
    module = public_module(getattr(function, "__module__", None) or "<unknown>")
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{module}:{name}"


def public_module(module: str) -> str:
    """A module's name up to its first private part: `pack.losses._policy` is `pack.losses`."""
    parts = module.split(".")
    private = (i for i, part in enumerate(parts) if i and part.startswith("_") and not part.startswith("__"))
    return ".".join(parts[: next(private, len(parts))])


@functools.cache
def code_hash(function: Callable[..., Any]) -> str:
    """Hash of what a function does: its source without comments, docstring, decorators and layout, what it closes over, and
    what it uses of its own package.

    The same on every machine and Python: the syntax tree is written by `_dump`, not by `ast.unparse`, whose spelling
    changes with versions.

    [Note: Helpers are part of an operator]
    Functions, classes and module-level constants that the code refers to by name count as well, and what those refer to,
    as long as they are of the same top-level package (of the same file for a script). A constant counts as it is written
    and not as it is valued, which may differ between machines. Other packages have versions; what is looked up at run
    time (`getattr`, imports inside functions, methods of objects) is not seen.
    """
    own = _piece_of(inspect.unwrap(function))
    return digest("\n".join((own.text, *_reached(own))))


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A part of what a function does."""

    text: str
    names: frozenset[Chain]
    """What it takes from its module."""
    scope: dict[str, Any]
    """The module's names."""
    file: str
    package: str
    also: tuple[Any, ...] = ()
    """Functions it holds in its closure."""


def _reached(start: _Piece) -> list[str]:
    """Texts of all that a piece refers to in its package, in an order that depends on nothing else."""
    found: dict[int, _Piece] = {id(start): start}  # the pieces themselves, so that no id is used twice
    stack = [start]
    while stack:
        piece = stack.pop()
        below = [p for chain in piece.names if (p := _named(chain, piece)) is not None]
        below += [_piece_of(function) for function in piece.also if _package(function) == start.package]
        for one in below:
            if id(one) not in found:
                found[id(one)] = one
                stack.append(one)
    return sorted({piece.text for piece in found.values()} - {start.text})


def _named(chain: Chain, piece: _Piece) -> _Piece | None:
    """What a name of a module stands for, when it is of the same package."""
    scope, file, package = piece.scope, piece.file, piece.package
    name = chain[0]
    for part in chain[1:]:
        module = scope.get(name)
        if not isinstance(module, ModuleType) or _top(module.__name__) != package:
            break
        scope, file, name = vars(module), getattr(module, "__file__", None) or "", part
    if name not in scope:  # a builtin
        return None
    value = scope[name]
    if isinstance(value, ModuleType):
        return None
    with contextlib.suppress(ValueError):  # something whose __wrapped__ never ends
        value = inspect.unwrap(value) if callable(value) else value
    if inspect.isfunction(value):
        return _piece_of(value) if _package(value) == package else None
    if inspect.isclass(value):
        cls: Any = value
        return _class_piece(cls) if _package(cls) == package else None
    if name not in _definitions(file):  # made in some other way than by a statement of the file
        return _Piece(f"{name}={value!a}", frozenset(), scope, file, package) if _is_constant(value) else None
    return _constant_piece(name, file, package, scope.get("__name__") or "")


@functools.cache
def _piece_of(function: Callable[..., Any]) -> _Piece:
    code = getattr(function, "__code__", None)
    scope = getattr(function, "__globals__", {})
    try:
        tree = _tree(function)
        text, names = _dump(tree), free_names(tree)
    except (OSError, TypeError, SyntaxError):
        # no source (interactive, C): bytecode is the best that is left
        text = _bytecode(code) if code is not None else path_of(function)
        names = frozenset((name,) for name in code.co_names) if code is not None else frozenset()
    also = tuple(v for v in _cells(function).values() if inspect.isfunction(v) and v is not function)
    return _Piece(
        text + _closed_over(function), names, scope, getattr(code, "co_filename", ""), _package(function), also
    )


@functools.cache
def _class_piece(cls: Any) -> _Piece | None:
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None) or ""
    nodes = [n for n in _definitions(file).get(cls.__name__, ()) if isinstance(n, ast.ClassDef)]
    if module is None or not nodes:
        return None
    names = frozenset(chain for node in nodes for chain in free_names(node))
    return _Piece(" ".join(map(_dump, nodes)), names, vars(module), file, _package(cls))


@functools.cache
def _constant_piece(name: str, file: str, package: str, module: str) -> _Piece | None:
    """A name's assignments as they are written; an import is followed inside the package."""
    scope = vars(sys.modules[module]) if module in sys.modules else {}
    nodes = _definitions(file).get(name, [])
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            home = scope.get("__package__") or ""
            if node.level and not home:
                return None
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), home)
            there = next((a.name for a in node.names if (a.asname or a.name) == name), name)
            other = sys.modules.get(origin)
            if other is None or _top(origin) != package or origin == module:
                return None
            return _constant_piece(there, getattr(other, "__file__", None) or "", package, origin)
    if not nodes:
        return None
    names = frozenset(chain for node in nodes for chain in free_names(node))
    return _Piece(" ".join(map(_dump, nodes)), names - {(name,)}, scope, file, package)


def _definitions(file: str) -> dict[str, list[ast.stmt]]:
    return _parsed("".join(linecache.getlines(file))) if file else {}


_parsed = functools.lru_cache(maxsize=256)(definitions)


def _top(module: str) -> str:
    return module.partition(".")[0]


def _package(value: Any) -> str:
    return _top(getattr(value, "__module__", None) or "")


def _tree(function: Callable[..., Any]) -> ast.AST:
    """Syntax tree of a function's definition or lambda. Errors: OSError when there is no source."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    lines = linecache.getlines(code.co_filename, getattr(function, "__globals__", None))
    found = _definition(lines, code) if code.co_name != "<lambda>" else _lambda(lines, code)
    if found is None:
        raise OSError(f"no source for '{code.co_name}' at {code.co_filename}:{code.co_firstlineno}")
    return found


def _definition(lines: list[str], code: CodeType) -> ast.AST | None:
    """The `def` at a code's first line: its lines up to the first dedent at which they are a whole definition.

    Parsing a few lines is much quicker than tokenizing them (`inspect.getsource`) or parsing the file.
    """
    start = code.co_firstlineno - 1
    head = lines[start] if start < len(lines) else ""
    indent = len(head) - len(head.lstrip())
    for end in range(start + 1, len(lines) + 1):
        last = lines[end] if end < len(lines) else ""
        text = last.lstrip()
        if end < len(lines) and (not text or text.startswith("#") or len(last) - len(text) > indent):
            continue
        try:
            # an `if` takes the indentation, so that strings over several lines stay as they are
            tree = ast.parse(("if 1:\n" if indent else "") + "".join(lines[start:end]))
        except SyntaxError:  # cut inside brackets, a string or the decorators: there is more
            continue
        found = tree.body[0].body[0] if indent and isinstance(tree.body[0], ast.If) else tree.body[0]
        is_it = isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) and found.name == code.co_name
        return found if is_it else None
    return None


def _lambda(lines: list[str], code: CodeType) -> ast.AST | None:
    """The lambda a code was compiled from. It shares its lines with other code, so it is looked up by columns."""
    places = [
        (line, column) for line, _, column, to in code.co_positions() if line is not None and column is not None and to
    ]
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.Lambda) and places:
            start = (node.body.lineno, node.body.col_offset)
            end = (node.body.end_lineno or 0, node.body.end_col_offset or 0)
            if all(start <= place <= end for place in places):
                return node
    return None


def _closed_over(function: Callable[..., Any]) -> str:
    """Values of a function's closure, so that two functions made by one factory differ as their settings do."""
    shown = []
    for name, value in _cells(function).items():
        if isinstance(value, tuple | list | set | frozenset):
            texts = [ascii(v) if _is_constant(v) else type(v).__name__ for v in value]
            shown.append(f"{name}={sorted(texts) if isinstance(value, set | frozenset) else texts}")
        elif _is_constant(value):
            shown.append(f"{name}={value!a}")
        elif inspect.isfunction(value) and value is not function:
            shown.append(f"{name}={path_of(value)}")
    return "".join(f"; {item}" for item in shown)


def _cells(function: Callable[..., Any]) -> dict[str, Any]:
    """What a function closes over, by name."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    found = {}
    for name, cell in zip(names, cells, strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return found


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | bytes)


def _bytecode(code: CodeType) -> str:
    # constants may be code themselves, whose repr holds an address
    constants = [_bytecode(c) if isinstance(c, CodeType) else ascii(c) for c in code.co_consts]
    return f"({code.co_code.hex()}, {constants}, {code.co_names})"


_NO_MEANING = frozenset(
    {"ctx", "kind", "type_comment", "type_ignores", "type_params", "returns", "annotation", "decorator_list"}
)
"""Fields of syntax trees that say nothing of what the code does."""


def _dump(value: Any) -> str:
    if isinstance(value, ast.AST):
        fields = ((n, _telling(value, n, v)) for n, v in ast.iter_fields(value) if n not in _NO_MEANING)
        return f"{type(value).__name__}({','.join(f'{n}={_dump(v)}' for n, v in fields if v is not None and v != [])})"
    if isinstance(value, list):
        return f"[{','.join(map(_dump, value))}]"
    return ascii(value)


def _telling(node: ast.AST, name: str, value: Any) -> Any:
    """A field of a syntax tree without docstring, and with an f-string's neighbouring texts made one."""
    if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        first = value[0] if value else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            return value[1:] or [ast.Pass()]
    return _joined(value) if isinstance(node, ast.JoinedStr) else value


def _joined(parts: list[ast.expr]) -> list[ast.expr]:
    # Pythons differ in how many texts they make of one literal
    made: list[ast.expr] = []
    for part in parts:
        last = made[-1] if made else None
        if isinstance(part, ast.Constant) and isinstance(last, ast.Constant):
            made[-1] = ast.Constant(str(last.value) + str(part.value))
        elif not isinstance(part, ast.Constant) or part.value:
            made.append(part)
    return made


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]


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
        found: Callable[..., Any] = resolve(self.path)
        if inspect.isroutine(found):
            refuse_changed(self.path, self.hash, code_hash(found))
        return found

    @property
    def place(self) -> Place:
        return place_of(self.function) if self.function is not None else Place()


class Decorated:
    """A function with what its decorator declares: named and documented as the function is, found by that name when it is
    unpickled, and never copied, since it never changes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = path_of(function)
        self.place = place_of(function)
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__
        self.__qualname__ = function.__qualname__
        self.__module__ = function.__module__
        self.__wrapped__ = function

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return (resolve, (self.name,))


def reduced(value: Any) -> tuple[Any, ...]:
    """How an operator's or a loss's call is pickled (`__reduce__`): without its function where its name finds that again.

    Under a decorated function's name pickle finds the operator instead of the function, and refuses.
    """
    values = {f.name: getattr(value, f.name) for f in fields(value) if f.name != "function"}
    return (_rebuilt, (type(value), values, None if function_at(value.name) is value.function else value.function))


def _rebuilt(cls: type, values: dict[str, Any], function: Callable[..., Any] | None) -> Any:
    return cls(**values, function=function if function is not None else function_at(values["name"]))


def function_at(path: str) -> Callable[..., Any] | None:
    """The plain function behind the operator or loss that `module:qualname` names, or None where there is none."""
    module, _, name = path.partition(":")
    try:
        return getattr(_imported(module, name), "function", None)
    except (ImportError, AttributeError, ValueError):
        return None


def _imported(module: str, name: str) -> Any:
    """`name` of a module or of one of the private modules in it."""
    home = importlib.import_module(module)
    try:
        return functools.reduce(getattr, name.split("."), home)
    except AttributeError:
        for below in pkgutil.iter_modules(getattr(home, "__path__", ())):
            if below.name.startswith("_") and not below.name.startswith("__"):
                with contextlib.suppress(AttributeError):
                    return _imported(f"{module}.{below.name}", name)
        raise


def resolve(path: str) -> Any:
    """Import what `module:qualname` names."""
    module, _, name = path.partition(":")
    if "<locals>" in name or module == "__main__":
        raise TraceError(
            f"'{path}' was defined inside a function or a script and cannot be imported from a text form; give the flow "
            "itself, e.g. fr.replay(..., flow=...), or define it at the top of a module"
        )
    try:
        return _imported(module, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PackError(
            f"a graph names '{path}', which cannot be imported ({error}); run where its module is, or give the flow itself"
        ) from error


DO_ABOUT_DRIFT = (
    "allow_drift=True runs the code as it is now, which run.json then says; the flow itself, instead of its text, is always "
    "the code as it is now"
)


def refuse_changed(path: str, then: str, now: str) -> None:
    """Errors: TraceError when code that a text names by its hash has another one now."""
    if then and then != now:
        raise TraceError(
            f"'{path}' (hash {then} then, {now} now) has changed since the text of the graph was written; {DO_ABOUT_DRIFT}"
        )
