"""From a `flowrl.Model` to a module and its tokenizer.

[Note: A run never changes the module it is given]
A module given as an object, or returned by a function, is copied for each model of a run that names it: a frozen reference
made from the same object as the policy must not be trained with it, and a second run must start where the first did.
"""

from __future__ import annotations

import copy
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from flowrl.engines.heads import CLASSES, with_head
from flowrl.engines.modules import embedding_rows
from flowrl.engines.tokenizers import IdsOnly, adapt_tokenizer
from flowrl.errors import EngineError
from flowrl.model import Model, Tokenizer

HUB_TIMEOUT_S = 10.0
"""Longest wait for the first answer of a model hub."""

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A module ready to run: on its device, in its precision, dropout off."""

    module: nn.Module
    tokenizer: Tokenizer
    hf_tokenizer: Any
    """The Hugging Face tokenizer behind it, saved beside the weights; None for others."""
    new_head: bool
    """True when the value or reward head is untrained."""


@dataclass(frozen=True, slots=True)
class Pretrained:
    """Where `from_pretrained` finds a model."""

    path: str
    options: dict[str, Any]


def load(name: str, model: Model, *, seed: int, trains: bool) -> Loaded:
    """Load a model and put it on its device. Errors: EngineError naming what is missing."""
    device = _device(name, model.device)
    place = find_pretrained(name, model.source) if isinstance(model.source, str | os.PathLike) else None
    # a model that trains in bf16 is loaded in fp32, so that its masters keep all bits
    dtype = torch.bfloat16 if model.precision == "bf16" and not trains else torch.float32
    module = _pretrained(name, place, model.head, dtype) if place else _given(name, model.source, seed)
    new_head = False
    if model.head != "lm":
        module, new_head = with_head(name, module, model.head, seed=seed)
    _refuse_meta(name, module)
    _refuse_headless(name, module, model.head)
    module.to(device)
    cast_parameters(module, dtype)
    module.eval()
    tokenizer, hf_tokenizer = tokenizer_of(name, model, module, place)
    return Loaded(module, tokenizer, hf_tokenizer, new_head)


def tokenizer_of(name: str, model: Model, module: nn.Module, place: Pretrained | None) -> tuple[Tokenizer, Any]:
    """(tokenizer, the Hugging Face one behind it or None) of a model; `place` is where the model came from, if from files."""
    given = model.tokenizer
    if given is None and place is not None:
        given = _tokenizer(name, place.path, place.options)
    elif isinstance(given, str | os.PathLike):
        found = find_pretrained(name, given)
        given = _tokenizer(name, found.path, found.options)
    num_ids = embedding_rows(name, module)
    if given is None:
        return IdsOnly(name, num_ids), None
    tokenizer = adapt_tokenizer(
        name, given, chat_template=model.chat_template, eos_ids=_eos_ids(module), num_ids=num_ids
    )
    return tokenizer, given if isinstance(given, PreTrainedTokenizerBase) else None


def _device(name: str, asked: str | None) -> torch.device:
    try:
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        first = str(error).strip().splitlines()[0]
        raise EngineError(
            f"model '{name}' cannot be put on device {asked!r}: {first}; leave device out for a GPU if there is one, else the CPU"
        ) from error
    return device


def _refuse_headless(name: str, module: nn.Module, head: str) -> None:
    if head != "lm" or not isinstance(module, PreTrainedModel):
        return
    if not module.can_generate() and module.get_output_embeddings() is None:
        raise EngineError(
            f"model '{name}': a {type(module).__name__} has no language-model head, so it gives no token probabilities; give a "
            "...ForCausalLM, or ask for another head: fr.Model(..., head='value')"
        )


def find_pretrained(name: str, source: str | os.PathLike[str]) -> Pretrained:
    """Whether a name is a folder, a GGUF file, in the local cache, or on the hub, found out without waiting for long."""
    text = os.fspath(source)
    path = Path(text).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return Pretrained(str(path.parent), {"gguf_file": path.name})
    if path.is_dir():
        files = sorted(f.name for f in path.glob("*.gguf"))
        if not (path / "config.json").exists() and len(files) == 1:
            return Pretrained(str(path), {"gguf_file": files[0]})
        if not (path / "config.json").exists():
            held = f"{len(files)} .gguf files" if files else "neither"
            raise EngineError(
                f"model '{name}': the folder {path} needs a config.json or exactly one .gguf file; it has {held}; "
                "write a model there with save_pretrained, or name the file"
            )
        return Pretrained(str(path), {})
    looks_like_path = path.is_absolute() or text.startswith((".", "~")) or text.endswith((".gguf", "/"))
    if looks_like_path or not _HUB_NAME.fullmatch(text) or (len(path.parts) > 1 and path.parent.is_dir()):
        raise EngineError(f"model '{name}': there is no folder {path} (looked from {Path.cwd()}); check the path")
    if _is_cached(text):
        return Pretrained(text, {"local_files_only": True})
    _ask_hub(name, text)
    return Pretrained(text, {})


def _is_cached(repo: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repo, "config.json"), str)


def _ask_hub(name: str, repo: str) -> None:
    """One question with a time limit before anything is downloaded."""
    import huggingface_hub as hub

    reason = ""
    if hub.constants.HF_HUB_OFFLINE:
        reason = "HF_HUB_OFFLINE is set"
    else:
        try:
            hub.HfApi().model_info(repo, timeout=HUB_TIMEOUT_S)
        except Exception as error:  # whatever goes wrong on the way to the hub, the remedy is the same
            reason = (
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no answer'}"
            )
    if reason:
        dry = 'for a run without models give engine="null"; otherwise ' if repo == "null" else ""
        raise EngineError(
            f"model '{name}': '{repo}' is no folder here, is not in the local cache, and the hub cannot give it ({reason}); "
            f"{dry}check the spelling, or download it and give its folder"
        )


def _pretrained(name: str, place: Pretrained, head: str, dtype: torch.dtype) -> nn.Module:
    auto: Any = AutoModelForCausalLM
    try:
        if head != "lm":
            config = AutoConfig.from_pretrained(place.path, **place.options)
            written = (getattr(config, "architectures", None) or [""])[0]
            suffix = {"value": "ForTokenClassification", "reward": "ForSequenceClassification"}
            kinds = [kind for kind, ending in suffix.items() if written.endswith(ending) and config.num_labels == 1]
            auto = CLASSES[kinds[0]] if kinds else AutoModel
        loaded, info = auto.from_pretrained(place.path, dtype=dtype, output_loading_info=True, **place.options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EngineError(f"model '{name}' could not be loaded from {place.path}: {first}") from error
    module: nn.Module = loaded
    missing = sorted(info["missing_keys"])
    if missing and head == "lm":
        # Transformers draws them at random and says so in a warning; what such a model samples means nothing
        raise EngineError(
            f"model '{name}': {place.path} has no values for {len(missing)} parameters of a {type(module).__name__} "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}); it is a model of another kind, or incomplete"
        )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()  # of its own: a file that is mapped may be written over
    return module


def _given(name: str, source: Any, seed: int) -> nn.Module:
    if isinstance(source, nn.Module):
        return copy.deepcopy(source)
    if callable(source):
        # models of a run that name one function start equal, whatever was drawn before
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            try:
                built = source()
            except Exception as error:  # the user's function; reported with its model, and chained
                raise EngineError(f"model '{name}': its function failed: {type(error).__name__}: {error}") from error
        if isinstance(built, nn.Module):
            return copy.deepcopy(built)  # it may hand out one module each time it is asked
        raise EngineError(
            f"model '{name}': the function must return a torch module; it returned {type(built).__name__}"
        )
    raise EngineError(
        f"model '{name}' needs a path or name, a function without arguments that builds a module, or a torch module; "
        f"found {type(source).__name__}"
    )


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Floating-point parameters to `dtype`, in place. Buffers stay: rotary frequencies in bfloat16 would be wrong."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point() and parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)


def _refuse_meta(name: str, module: nn.Module) -> None:
    for tensor_name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise EngineError(
                f"model '{name}': '{tensor_name}' is on the meta device and has no values; load the weights first"
            )


def _tokenizer(name: str, path: str, options: dict[str, Any]) -> Any:
    try:
        return AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EngineError(
            f"model '{name}': no tokenizer found in {path} ({first}); give one: fr.Model(..., tokenizer=)"
        ) from error


def _eos_ids(module: nn.Module) -> frozenset[int]:
    found: set[int] = set()
    for holder in (getattr(module, "generation_config", None), getattr(module, "config", None)):
        ids = getattr(holder, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(int(i) for i in found)
