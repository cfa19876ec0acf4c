"""The shape of a model from what a person names it by: a published name, a folder, a config, an `fr.Model`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.model import Model


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
    if isinstance(source, str | Path):
        path = Path(source)
        file = path / "config.json" if path.is_dir() else path
        if path.is_dir() and not file.is_file():
            raise ConfigError(
                f"the folder '{path}' has no config.json; give the folder of a model in Transformers' form"
            )
        if not file.is_file() and path.suffix == ".json":
            raise ConfigError(f"there is no file '{path}'")
        if not file.is_file():
            return ModelShape.of(str(source))
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{file} is no JSON config: {error}") from error
        return ModelShape.from_config(config)
    if isinstance(source, Mapping) or hasattr(source, "model_type"):
        return ModelShape.from_config(source)
    if hasattr(source, "config"):  # a module that was built already
        return ModelShape.from_config(source.config)
    raise ConfigError(
        "needs a published name, a folder with a config.json, a config, an fr.Model or a ModelShape; "
        f"found {type(source).__name__}"
    )
