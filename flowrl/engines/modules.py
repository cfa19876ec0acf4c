"""Questions to a Transformers-like module: its vocabulary, width, context and output layer."""

from __future__ import annotations

from typing import Any

from torch import nn

from flowrl.errors import ConfigError, EngineError


def text_config(module: nn.Module) -> Any:
    """The config of the language part; None for modules without one."""
    config: Any = getattr(module, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def embedding_rows(name: str, module: nn.Module) -> int:
    """Ids the module can embed, padding of the vocabulary included. Errors: EngineError when it does not say."""
    ask: Any = getattr(module, "get_input_embeddings", None)
    embedding: Any = ask() if callable(ask) else None
    if hasattr(embedding, "weight"):
        return int(embedding.weight.shape[0])
    size = getattr(text_config(module), "vocab_size", None)
    if isinstance(size, int):
        return size
    raise EngineError(f"model '{name}': {type(module).__name__} needs get_input_embeddings() or config.vocab_size")


def repeated_layers(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """(path, layer) of the repeated layers: those that the architecture says must not be split, else the longest list."""
    kinds = {kind for part in module.modules() for kind in (getattr(part, "_no_split_modules", None) or ())}
    found = [(path, part) for path, part in module.named_modules() if type(part).__name__ in kinds]
    if not found:
        lists = [(path, part) for path, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part)]
        if lists:
            path, longest = max(lists, key=lambda pair: len(pair[1]))
            found = [(f"{path}.{index}", layer) for index, layer in enumerate(longest)]
    return [
        (path, part)
        for path, part in found
        if not any(path.startswith(f"{other}.") for other, _ in found if other != path)
    ]


def output_layer(module: nn.Module) -> nn.Module | None:
    """The layer that makes logits of hidden states, if the module says which it is."""
    ask: Any = getattr(module, "get_output_embeddings", None)
    found = ask() if callable(ask) else None
    return found if isinstance(found, nn.Module) else None


def hidden_size(module: nn.Module) -> int | None:
    """Width of the last hidden states, from the config."""
    return _config_number(module, "hidden_size", "n_embd", "d_model")


def context_length(name: str, module: nn.Module, asked: int | None) -> int | None:
    """Longest sequence in tokens: what was asked for or what the config says; None when neither says.

    Errors: ConfigError when more is asked for than the config says.
    """
    own = _config_number(module, "max_position_embeddings", "n_positions", "max_seq_len")
    if asked is not None and own is not None and asked > own:
        raise ConfigError(f"model '{name}' has a context of {own} tokens; max_context={asked} is more; lower it")
    return own if asked is None else asked


def _config_number(module: nn.Module, *fields: str) -> int | None:
    config = text_config(module)
    found = (getattr(config, field, None) for field in fields)
    return next((number for number in found if isinstance(number, int)), None)
