"""The shape of a model from what a person names it by: a published name, a folder, a config, an `fr.Model`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.model import Model
from flowrl.schema.fields import shown
from flowrl.schema.files import is_file, is_folder, quoted, read_file, read_json


def shape_of(source: Any, name: str, head: str = "lm") -> ModelShape:
    """The shape of the model that a flow calls `name`. No weights are read and no network is used.

    Args:
        source: a `ModelShape`; a published name; a folder with a `config.json`, or that file; a config (object or dict); an
            `fr.Model` whose source is one of these.
        head: what the flow uses it for, where `source` does not say: `lm`, `value` or `reward`.

    Errors: ConfigError that says what was needed.
    """
    if isinstance(source, ModelShape):
        return source
    if isinstance(source, Model):
        found = shape_of(source.source, name, head if source.head == "lm" else source.head)
        return found if source.head == "lm" else found.with_head(source.head)
    try:
        found = _read(source)
    except ConfigError as error:
        raise ConfigError(f"model '{name}': {error}") from error
    return found if head == "lm" else found.with_head(head)


def _read(source: Any) -> ModelShape:
    if source == "":
        raise ConfigError("needs a published name, a folder with a config.json, or that file; found ''")
    if isinstance(source, str | Path):
        path = Path(source)
        file = path / "config.json" if is_folder(path) else path
        if is_folder(path) and not is_file(file):
            raise ConfigError(
                f"the folder '{path}' has no config.json; give the folder of a model in Transformers' form"
            )
        if not is_file(file) and path.suffix == ".json":
            raise ConfigError(f"there is no file {quoted(path)}")
        if not is_file(file):
            return ModelShape.of(str(source))
        config = read_json(read_file(file, "the config"), f"{quoted(file)}, a model's config,")
        if not isinstance(config, dict):
            raise ConfigError(
                f"{quoted(file)}, a model's config, is a JSON object with its model_type; found {shown(config)}"
            )
        return ModelShape.from_config(config)
    if isinstance(source, Mapping) or hasattr(source, "model_type"):
        return ModelShape.from_config(source)
    if hasattr(source, "config"):  # a module that was built already
        return ModelShape.from_config(source.config)
    raise ConfigError(
        "needs a published name, a folder with a config.json, a config, an fr.Model or a ModelShape; "
        f"found {type(source).__name__}"
    )
