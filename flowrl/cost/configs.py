"""Model shapes from Hugging Face configs, and those of known published models.

A field that a `config.json` leaves out has the default of its architecture in Transformers.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

from flowrl.cost.shapes import MOST, Experts, LatentAttention, ModelShape
from flowrl.errors import ConfigError
from flowrl.schema.columns import nearest
from flowrl.schema.fields import is_int, is_number, shown

Fields = dict[str, Any]
"""Arguments of a `ModelShape`."""

FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

TIED = {"gemma", "gemma2", "gemma3_text", "gpt2", "smollm3", "starcoder2"}
"""Architectures whose head is the embedding unless the config says otherwise."""

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Kinds of layers that a config may name."""

LEFT_OUT: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma": {"head_dim": 256},
    "qwen3": {"head_dim": 128},
}
"""Values that configs of an architecture may leave out."""


VARIANT = re.compile(r"-(?:instruct|chat|it|base|pt|hf)(?=-|$)")
"""What names of models trained further from one another add, in lower case. Of all models known here, the variants that are
published under such names have the same shape, but for `context`, which is that of the model they come from; a release with a
number of its own (`-Instruct-2507`, `-v0.2`) is another name."""


class _Config:
    """A config read by name, with errors that say what is missing."""

    def __init__(self, source: Mapping[str, Any] | object) -> None:
        self._source = source
        self.kind = str(self.get("model_type", ""))

    def get(self, name: str, default: Any = None) -> Any:
        if isinstance(self._source, Mapping):
            found = self._source.get(name)
        else:
            found = getattr(self._source, name, None)
        return default if found is None else found

    def need(self, *names: str) -> int:
        for name in names:
            found = self.get(name, LEFT_OUT.get(self.kind, {}).get(name))
            if found is not None:
                return self._whole(name, found, 1)
        raise ConfigError(
            f"the config of a {self.kind} model needs {' or '.join(names)}; it has neither value nor default"
        )

    def whole(self, name: str, default: int, *, least: int = 1) -> int:
        """A whole number that may be left out."""
        return self._whole(name, self.get(name, default), least)

    def flag(self, name: str, default: bool) -> bool:
        found = self.get(name, default)
        if not isinstance(found, bool):
            raise ConfigError(f"the config's {name} is true or false; found {shown(found)}")
        return found

    def _whole(self, name: str, found: Any, least: int) -> int:
        most = MOST["layers"] if name in ("num_hidden_layers", "n_layer") else MOST["vocab"]
        if not is_int(found) or not least <= found <= most:
            raise ConfigError(f"the config's {name} is a whole number from {least} to {most:,}; found {shown(found)}")
        return int(found)


def shape_of_config(source: Mapping[str, Any] | object) -> ModelShape:
    """The shape a config describes. ConfigError for an architecture whose modules are not known here."""
    config = _Config(source)
    if not config.kind:
        raise ConfigError(
            f"the config has no model_type, so its architecture is not known; known are {', '.join(sorted(FAMILIES))}"
        )
    if config.kind not in FAMILIES:
        nested = config.get("text_config")
        hint = "; pass its text_config for the language model alone" if nested is not None else ""
        raise ConfigError(
            f"no shapes for model_type {config.kind!r}; known are {', '.join(sorted(FAMILIES))}{hint}. "
            "A ModelShape can be written by hand"
        )
    _check_layer_types(config)
    fields = _gpt2(config) if config.kind == "gpt2" else _common(config)
    fields["context"] = fields.get("positions") or _context(config)
    fields |= FAMILIES[config.kind](config)
    return ModelShape(**fields)


def shape_of_name(name: str) -> ModelShape:
    """The shape of a known model, by its full name or the part after the slash, in any case.

    Variants for instructions and chat have the shape of the model that they were trained from: `Qwen/Qwen2.5-7B-Instruct`.
    """
    known = known_models()
    key = next((key for key in known if key.lower() == name.lower()), None) or _by_short_name(name, known)
    if key is None:
        shorts = {key.rsplit("/", 1)[-1].lower(): key for key in known}
        wanted = VARIANT.sub("", name.lower().rsplit("/", 1)[-1])
        close = difflib.get_close_matches(wanted, shorts, n=3)
        near = f"did you mean {' or '.join(shorts[one] for one in close)}?" if close else nearest("", known) + "."
        raise ConfigError(
            f"no shape is known for {name!r}; {near} Give its config instead: a folder with the model's config.json, or "
            f"that file (--model NAME=FOLDER/config.json; in Python also ModelShape.from_config)"
        )
    return shape_of_config(known[key])


def _by_short_name(name: str, known: Mapping[str, Any]) -> str | None:
    owner, _, short = name.lower().rpartition("/")
    shortened: tuple[Callable[[str], str], ...] = (str, lambda text: VARIANT.sub("", text))
    for shorten in shortened:
        for key in known:
            its_owner, _, its_short = key.lower().rpartition("/")
            if owner in ("", its_owner) and shorten(short) == shorten(its_short):
                return key
    return None


@lru_cache(maxsize=1)
def known_models() -> dict[str, dict[str, Any]]:
    """Name -> the fields of its published config that decide the shape."""
    text = resources.files("flowrl.cost").joinpath("data/models.json").read_text(encoding="utf-8")
    models: dict[str, dict[str, Any]] = json.loads(text)
    return models


# ---------------------------------------------------------------------------------------------------- architectures


def _common(config: _Config) -> Fields:
    heads = config.need("num_attention_heads")
    hidden = config.need("hidden_size")
    head_dim = config.get("head_dim", LEFT_OUT.get(config.kind, {}).get("head_dim"))
    kv_heads = config.get("num_key_value_heads", LEFT_OUT.get(config.kind, {}).get("num_key_value_heads"))
    return {
        "hidden": hidden,
        "layers": config.need("num_hidden_layers"),
        "heads": heads,
        "kv_heads": heads if kv_heads is None else config.whole("num_key_value_heads", kv_heads),
        "head_dim": hidden // heads if head_dim is None else config.whole("head_dim", head_dim),
        "ffn": config.need("intermediate_size"),
        "vocab": config.need("vocab_size"),
        "tied": config.flag("tie_word_embeddings", config.kind in TIED),
    }


def _context(config: _Config) -> int:
    """Tokens of the longest sequence; 0 where the config does not say. Positions may be stretched beyond those of training."""
    said = config.whole("max_position_embeddings", 0, least=0)
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        return said
    factor, before = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    if factor is None or before is None or not is_number(factor) or not is_int(before):
        return said
    return max(said, int(factor * before))


def _check_layer_types(config: _Config) -> None:
    """Raise `ConfigError` for kinds of layers whose modules and costs are not known here: they would be counted as others."""
    kinds = config.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list | tuple):
        raise ConfigError(f"the config's layer_types is a list with the kind of each layer; found {shown(kinds)}")
    unknown = [kind for kind in kinds if not isinstance(kind, str) or kind not in LAYER_TYPES]
    if unknown:
        named = ", ".join([*dict.fromkeys(map(shown, unknown))][:8])
        raise ConfigError(f"the config's layer_types are {' and '.join(LAYER_TYPES)}; found {named}")


def _gpt2(config: _Config) -> Fields:
    hidden, heads = config.need("n_embd", "hidden_size"), config.need("n_head", "num_attention_heads")
    return {
        "hidden": hidden,
        "layers": config.need("n_layer", "num_hidden_layers"),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn": config.whole("n_inner", 4 * hidden),
        "vocab": config.need("vocab_size"),
        "tied": config.flag("tie_word_embeddings", True),
        "positions": config.whole("n_positions", config.whole("max_position_embeddings", 1024)),
        "qkv_bias": True,
        "output_bias": True,
        "ffn_bias": True,
        "norm_bias": True,
        "norms": ("ln_1", "ln_2"),
        "style": "gpt2",
    }


def _nothing(_: _Config) -> Fields:
    return {}


def _attention_bias(config: _Config) -> Fields:
    bias = config.flag("attention_bias", False)
    return {"qkv_bias": bias, "output_bias": bias}


def _llama(config: _Config) -> Fields:
    return _attention_bias(config) | {"ffn_bias": config.flag("mlp_bias", False)}


def _all_windowed(config: _Config) -> Fields:
    if config.get("sliding_window") is None:
        return {}
    return {"window": config.need("sliding_window"), "windowed_layers": tuple(range(config.need("num_hidden_layers")))}


def _qwen2(config: _Config) -> Fields:
    fields: Fields = {"qkv_bias": True}
    if config.flag("use_sliding_window", False) and config.get("sliding_window") is not None:
        layers = config.need("num_hidden_layers")
        first = config.whole("max_window_layers", 28, least=0)
        kinds = config.get("layer_types") or [
            "sliding_attention" if one >= first else "full_attention" for one in range(layers)
        ]
        fields |= {"window": config.need("sliding_window"), "windowed_layers": _windowed(kinds, layers)}
    return fields


def _qwen3(config: _Config) -> Fields:
    return _attention_bias(config) | {"qk_norm": "head"}


def _alternating(config: _Config, every: int) -> Fields:
    """Every `every`-th layer sees everything, the others a window."""
    layers = config.need("num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    return {"window": config.need("sliding_window"), "windowed_layers": _windowed(kinds, layers)}


def _windowed(kinds: Sequence[str], layers: int) -> tuple[int, ...]:
    """Layers that look back through a window."""
    if len(kinds) != layers:
        raise ConfigError(f"the config's layer_types names each of the {layers} layers; found {shown(kinds)}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


def _gemma(config: _Config) -> Fields:
    return _attention_bias(config) | {"is_norm_fp32": True}


def _gemma2(config: _Config) -> Fields:
    return _gemma(config) | {"norms": FOUR_NORMS} | _alternating(config, 2)


def _gemma3(config: _Config) -> Fields:
    every = config.need("sliding_window_pattern")
    return _gemma(config) | {"norms": FOUR_NORMS, "qk_norm": "head"} | _alternating(config, every)


def _phi3(config: _Config) -> Fields:
    return {"style": "fused"} | _all_windowed(config)


def _olmo2(config: _Config) -> Fields:
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    return _attention_bias(config) | {"qk_norm": "full", "norms": norms, "is_norm_fp32": True}


def _starcoder2(config: _Config) -> Fields:
    bias = config.flag("use_bias", True)
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "ffn_bias": bias,
        "norm_bias": True,
        "style": "starcoder2",
    } | _all_windowed(config)


def _mixtral(config: _Config) -> Fields:
    experts = Experts(
        num_experts=config.need("num_local_experts"),
        num_active=config.need("num_experts_per_tok"),
        ffn=config.need("intermediate_size"),
    )
    return {"experts": experts} | _all_windowed(config)


def _sparse_step(config: _Config) -> tuple[int, ...]:
    """Layers that keep a dense block: those named, and those between every `decoder_sparse_step`-th."""
    listed = config.get("mlp_only_layers", ())
    if not isinstance(listed, list | tuple) or not all(map(is_int, listed)):
        raise ConfigError(f"the config's mlp_only_layers is a list of numbers of layers; found {shown(listed)}")
    named, step = set(listed), config.whole("decoder_sparse_step", 1)
    return tuple(layer for layer in range(config.need("num_hidden_layers")) if layer in named or (layer + 1) % step)


def _qwen2_moe(config: _Config) -> Fields:
    experts = Experts(
        num_experts=config.need("num_experts", "num_local_experts"),
        num_active=config.need("num_experts_per_tok"),
        ffn=config.need("moe_intermediate_size"),
        shared_ffn=config.need("shared_expert_intermediate_size"),
        shared_name="shared_expert",
        has_shared_gate=True,
        dense_layers=_sparse_step(config),
    )
    return {"experts": experts, "qkv_bias": config.flag("qkv_bias", True)}


def _qwen3_moe(config: _Config) -> Fields:
    experts = Experts(
        num_experts=config.need("num_experts", "num_local_experts"),
        num_active=config.need("num_experts_per_tok"),
        ffn=config.need("moe_intermediate_size"),
        dense_layers=_sparse_step(config),
    )
    return _qwen3(config) | {"experts": experts}


def _deepseek(config: _Config) -> Fields:
    latent = LatentAttention(
        kv_rank=config.need("kv_lora_rank"),
        nope_dim=config.need("qk_nope_head_dim"),
        rope_dim=config.need("qk_rope_head_dim"),
        value_dim=config.need("v_head_dim"),
        q_rank=None if config.get("q_lora_rank") is None else config.need("q_lora_rank"),
    )
    layers = config.need("num_hidden_layers")
    first_dense = config.whole("first_k_dense_replace", 3 if config.kind == "deepseek_v3" else 0, least=0)
    ffn = config.need("moe_intermediate_size")
    experts = Experts(
        num_experts=config.need("n_routed_experts"),
        num_active=config.need("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn * config.whole("n_shared_experts", 1 if config.kind == "deepseek_v3" else 2, least=0),
        dense_layers=tuple(range(min(first_dense, layers))),
    )
    return _llama(config) | {"latent": latent, "experts": experts}


FAMILIES: Mapping[str, Callable[[_Config], Fields]] = {
    "llama": _llama,
    "mistral": _all_windowed,
    "smollm3": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "starcoder2": _starcoder2,
    "gpt2": _nothing,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
"""`model_type` of a config -> what differs from the common fields."""
