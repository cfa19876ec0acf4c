"""Find what `FILE.py:NAME`, `package.module:NAME` or `graph.txt` names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from flowrl.errors import ConfigError, FlowError, TraceError
from flowrl.graph.code import Place, digest
from flowrl.graph.flows import Flow
from flowrl.schema.columns import nearest
from flowrl.schema.files import is_file, is_folder, quoted

_CORE = str(Path(__file__).resolve().parent.parent)


def find(target: str, *, base: Path | None = None) -> Any:
    """The object a target names.

    Args:
        target: `FILE.py:NAME` or `module.sub:NAME`; without `:NAME`, the only flow defined there. `FILE.txt` is a graph in its
            text form.
        base: folder that relative files are looked for in; None takes the working directory.

    Errors: ConfigError when there is no such file, module or name; TraceError when importing it raises.
    """
    where, name = split_target(target)
    if where.endswith(".txt"):
        return _read_graph(_existing(where, base), name)
    module = import_file(_existing(where, base)) if where.endswith(".py") else _import_module(where)
    if name:
        return _attribute(module, where, name)
    flows = flows_in(module)
    if len(flows) == 1:
        return next(iter(flows.values()))
    if not flows:
        raise ConfigError(f"{where} defines no flow (a function with @fr.flow); name what you mean: {where}:NAME")
    raise ConfigError(f"{where} defines {len(flows)} flows; name one of them: {_listed(where, flows)}")


def split_target(target: str) -> tuple[str, str]:
    """(file or module, name or empty) of a target."""
    where, colon, name = target.rpartition(":")
    if not colon:
        where, name = target, ""
    if not where or (colon and not name):
        raise ConfigError(f"a target is FILE.py:NAME or module.sub:NAME, NAME optional; found {target!r}")
    return where, name


def flows_in(module: ModuleType) -> dict[str, Flow]:
    """The flows a module defines, by name; those it imports from elsewhere are left out."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, Flow)}
    return {name: flow for name, flow in found.items() if flow.__module__ == module.__name__}


def import_file(path: Path) -> ModuleType:
    """Import a Python file under the name it has from the working directory (`examples/grpo.py` is `examples.grpo`), else
    under its bare name, so that the operators it defines are found again by name.

    The working directory and the file's folder go to the end of `sys.path`: the file may import its neighbours, and a
    neighbour never hides an installed package.
    """
    path = path.resolve()
    _add_to_path(Path.cwd())
    _add_to_path(path.parent)
    for name in _module_names(path):
        loaded = sys.modules.get(name)
        if loaded is not None and _file_of(loaded) == path:
            return loaded
        if loaded is None and _spec_file(name) == path:
            return _guarded(path.name, lambda name=name: importlib.import_module(name))
    return _guarded(path.name, lambda: _import_apart(path))


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _module_names(path: Path) -> Iterator[str]:
    if path.is_relative_to(Path.cwd()):
        parts = path.relative_to(Path.cwd()).with_suffix("").parts
        if all(part.isidentifier() for part in parts):
            yield ".".join(parts)
    if path.stem.isidentifier():
        yield path.stem


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def _spec_file(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # a parent is no package, or fails to import
        return None
    return Path(spec.origin).resolve() if spec is not None and spec.origin and spec.has_location else None


def _import_apart(path: Path) -> ModuleType:
    """Import a file whose plain name belongs to another module, or is no identifier."""
    name = f"{path.stem}_{digest(str(path))[:6]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"'{path}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"'{name}' is neither a Python file (FILE.py), a graph (FILE.txt) nor the name of a module")
    _add_to_path(Path.cwd())
    try:
        return _guarded(name, lambda: importlib.import_module(name))
    except TraceError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}."):
            hint = f"; the file '{name}.py' is written {name}.py" if is_file(f"{name}.py") else ""
            raise ConfigError(f"there is no module '{cause.name}'{hint}") from cause
        raise


def _guarded(what: str, run: Any) -> ModuleType:
    """Import; whatever the file raises becomes one error with the line that raised it."""
    try:
        module: ModuleType = run()
        return module
    except FlowError:
        raise
    except (Exception, SystemExit) as error:
        raise TraceError(f"importing {what} raised {described(error)}") from error


def described(error: BaseException) -> str:
    """`NameError: name 'x' is not defined, at flow.py:3`: an exception in one line, with the user's line that raised it."""
    text = str(error).strip()
    place = raised_at(error)
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        place, text = Place(error.filename, error.lineno), error.msg
    return f"{type(error).__name__}{': ' if text else ''}{text}{f', at {place}' if place.file else ''}"


def raised_at(error: BaseException) -> Place:
    """The innermost line outside FlowRL and outside installed packages that an exception passed through."""
    found = Place()
    step: TracebackType | None = error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        is_library = file.startswith(("<", _CORE, sys.base_prefix)) or "site-packages" in file
        if not is_library:
            found = Place(file, step.tb_lineno)
        step = step.tb_next
    return found


def _existing(where: str, base: Path | None) -> Path:
    path = (base or Path()) / Path(where).expanduser()
    if not is_file(path):
        folder = path.parent
        there = [p.name for p in folder.glob(f"*{path.suffix}")] if is_folder(folder) else []
        hint = f"; {nearest(path.name, there)}" if there else ""
        raise ConfigError(f"there is no file {quoted(where)}{hint}")
    return path


def _attribute(module: ModuleType, where: str, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
            hint = nearest(name, public)
            flows = flows_in(module)
            close = f"; {hint}" if hint.startswith("did you mean") or not flows else ""
            listed = f"; flows there: {_listed(where, flows)}" if flows else "; it defines no flow"
            raise ConfigError(f"{where} has no '{name}'{close}{listed}")
        found = getattr(found, part)
    return found


def _listed(where: str, flows: dict[str, Flow]) -> str:
    return ", ".join(f"{where}:{name}" for name in flows)


def _read_graph(path: Path, name: str) -> Any:
    from flowrl.graph.text import from_text

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' cannot be read as UTF-8 text: {error}") from error
    graph = from_text(text, file=str(path))
    if name and name != graph.name:
        raise ConfigError(f"{path} holds the graph '{graph.name}'; found the name '{name}'")
    return graph
