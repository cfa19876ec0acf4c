"""Settings applied to a graph: models and data are made, and what nothing reads is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.graph.flows import Flow
from flowrl.graph.nodes import Graph, Node
from flowrl.model import Model
from flowrl.recipe.settings import Names, Settings
from flowrl.recipe.targets import find
from flowrl.schema.files import is_there, quoted

NEEDS_USE: dict[str, tuple[set[str], str]] = {
    "optimizer": ({"update"}, "trains"),
    "micro_batch_tokens": ({"update"}, "trains"),
    "gradient_checkpointing": ({"update"}, "trains"),
    "compile": ({"logprobs", "top_logprobs", "values", "score", "update"}, "trains or scores with"),
    "sampler": ({"generate"}, "samples from"),
    "sampler_options": ({"generate"}, "samples from"),
}
"""Field of Model to the uses without which nothing reads it, and these uses in words."""


def names_of(flow: Flow | Graph) -> Names:
    """What settings may name for a flow or a graph."""
    if isinstance(flow, Flow):
        return Names(flow.name, flow.defaults, tuple(flow.parameters))
    return Names(flow.name, {}, tuple(node.name for node in flow.inputs), is_configured=True)


def bind_inputs(graph: Graph, inputs: Mapping[str, Any], settings: Settings, engine: str) -> dict[str, Any]:
    """Inputs of a run: those given in Python, with what the settings say laid over them.

    With the null engine a model needs no source, because nothing is loaded.

    Errors: ConfigError with every setting that nothing reads and every model or data set that cannot be made.
    """
    problems = unread(graph, settings)
    bound = dict(inputs)
    for name, said in settings.models.items():
        try:
            bound[name] = _model(name, said, inputs.get(name), settings, engine)
        except ConfigError as error:
            problems.append(str(error))
    for name, said in settings.data.items():
        try:
            bound[name] = _data(name, said, inputs.get(name), settings)
        except ConfigError as error:
            problems.append(str(error))
    if engine == "null":
        for node in graph.inputs:
            if node["kind"] == "weights":
                bound.setdefault(node.name, Model("null"))
    if problems:
        more = f"{len(problems)} problems in the settings:\n- " if len(problems) > 1 else ""
        raise ConfigError(more + "\n- ".join(problems))
    return bound


def unread(graph: Graph, settings: Settings) -> list[str]:
    """A sentence for each setting of a model or a data set that nothing reads in this graph."""
    if not settings.models and not settings.data:
        return []
    from flowrl.graph.passes import optimise
    from flowrl.runtime.local import uses_of

    nodes = {node.name: node for node in graph.inputs}
    optimised, notes = optimise(graph)
    uses = uses_of(optimised)
    found = []
    for top, names in (("models", settings.models), ("data", settings.data)):
        for name in names:
            problem = _unread_input(graph, nodes.get(name), optimised, top, settings.where(top, name))
            if problem:
                about = [str(note) for note in notes if f"'{name}'" in str(note)]
                found.append(problem + (f" ({about[0]})" if about and name in nodes else ""))
            elif top == "models":
                found.extend(_unread_fields(name, settings, uses.get(name, frozenset())))
    return found


def _unread_input(graph: Graph, node: Node | None, optimised: Graph, top: str, where: str) -> str:
    if node is None:
        return f"{where}: flow '{graph.name}' has no such input, so nothing reads it"
    name, kind = node.name, node["kind"]
    if kind == "rows" and top == "models":
        return f"{where}: '{name}' is a table in flow '{graph.name}'; give it as [data.{name}] or --data {name}=FILE"
    if kind == "weights" and top == "data":
        return f"{where}: '{name}' is a model in flow '{graph.name}'; give it as [models.{name}] or --model {name}=NAME"
    if kind == "unused" or name not in optimised:
        return (
            f"{where}: nothing reads '{name}' in flow '{graph.name}' as it is configured; leave this out, or configure the "
            "flow so that it uses it"
        )
    return ""


def _unread_fields(name: str, settings: Settings, uses: frozenset[str]) -> list[str]:
    found = []
    for key in settings.models[name]:
        needs, words = NEEDS_USE.get(key, (set(), ""))
        if needs and not needs & uses:
            at = (
                settings.where("models", name, key) if key == "optimizer" else f"{settings.where('models', name)} {key}"
            )
            found.append(f"{at}: nothing {words} '{name}' in this flow, so nothing reads '{key}'; leave it out")
    return found


def _model(name: str, said: Mapping[str, Any], given: Any, settings: Settings, engine: str) -> Model:
    where = settings.where("models", name)
    own = {key: value for key, value in said.items() if key not in ("optimizer", "source", "tokenizer")}
    if given is not None and not isinstance(given, Model):
        given = Model(str(given))
    source = said.get("source")
    if source is None and given is None:
        if engine != "null":
            raise ConfigError(
                f"{where} needs source: a Hugging Face name or path, or FILE.py:FUNCTION that builds a module"
            )
        source = "null"
    base: Model = given if given is not None else Model(source)
    try:
        if source is not None:
            own["source"] = _source(source, where)
        if said.get("tokenizer") is not None:
            own["tokenizer"] = _tokenizer(said["tokenizer"], where)
        if "optimizer" in said:
            own["optimizer"] = replace(base.optimizer, **said["optimizer"])
        return replace(base, **own)
    except ConfigError as error:
        raise error if str(error).startswith(where) else ConfigError(f"{where}: {error}") from error


def _source(source: Any, where: str) -> Any:
    """A name or path as it is; `FILE.py:NAME` and `module:NAME` become the object."""
    if not isinstance(source, str):
        return source
    if _is_object(source):
        return find(source)
    if source.startswith((".", "/", "~")) and not is_there(Path(source).expanduser()):
        raise ConfigError(f"{where}: there is nothing at {quoted(source)}")
    return str(Path(source).expanduser()) if source.startswith("~") else source


def _tokenizer(value: Any, where: str) -> Any:
    """A tokenizer object; a function or class is called to make one."""
    if not isinstance(value, str) or not _is_object(value):
        return _source(value, where)
    found = find(value)
    is_tokenizer = hasattr(found, "decode") and not isinstance(found, type)
    return found if is_tokenizer or not callable(found) else found()


def _is_object(text: str) -> bool:
    file, colon, name = text.rpartition(":")
    plain = all(part.isidentifier() for part in file.split("."))
    return bool(colon) and (file.endswith(".py") or plain) and all(part.isidentifier() for part in name.split("."))


def _data(name: str, said: Mapping[str, Any], given: Any, settings: Settings) -> Any:
    from flowrl.runtime.data import Data

    where = settings.where("data", name)
    path = said.get("path")
    if path is None and given is None:
        raise ConfigError(f"{where} needs path: a JSONL or Parquet file")
    if path is not None and not Path(path).expanduser().is_file():
        raise ConfigError(f"{where}: there is no file '{path}'")
    more = {key: value for key, value in said.items() if key != "path"}
    if isinstance(given, Data):
        more = {"batch": given.batch, "shuffle": given.shuffle, **more}
    try:
        return Data(given if path is None else Path(path).expanduser(), name=name, **more)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
