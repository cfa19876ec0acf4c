"""torch.compile for a model's layers: each by itself, in scoring and training.

[Note: What is compiled]
Layers of a model are alike, so one of them compiled serves all, whatever the number of tokens. What is around them (embedding,
head, loss) is not compiled, and neither is sampling: a key-value cache has another length at every token. Keys and values that
rows share (`flowrl.engines.prefix`) are such a cache, which would be compiled for each layer anew; so compiled models run a
prompt once for each row, as models do that recompute activations.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from flowrl.errors import ConfigError, EngineError
from flowrl.model import Model
from flowrl.schema.columns import nearest

INDUCTOR = "inductor"
"""Backend of `compile=True`."""
VARIANTS = 64
"""Compiled forms kept of all layers: with and without gradient, mask, one row or more, for each model of a run. After eight,
PyTorch's own limit, layers would run as they are."""


def compile_layers(name: str, model: Model, layers: Sequence[nn.Module], device: torch.device) -> None:
    """Compile each layer as `Model.compile` says, which is not False; it happens when a layer first runs.

    Errors: ConfigError for a model without layers, or a backend that PyTorch does not know; EngineError for one whose compiler is
    not installed.
    """
    if not layers:
        raise ConfigError(
            f"model '{name}' has compile={model.compile!r}, which compiles layer by layer, and it has no list of layers "
            "(an nn.ModuleList); leave compile out"
        )
    backend = _known(name, INDUCTOR if isinstance(model.compile, bool) else model.compile)
    if backend == INDUCTOR:
        _refuse_without_compiler(name, device)
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, VARIANTS)
    for layer in layers:
        layer.compile(backend=backend, dynamic=True)  # rows have all lengths


def uncompiled(model: Model) -> AbstractContextManager[object]:
    """Layers run as they are inside, compiled ones too."""
    return torch.compiler.set_stance("force_eager") if model.compile else nullcontext()


def _known(name: str, backend: str) -> str:
    found = torch._dynamo.list_backends(None)
    if backend not in found:
        raise ConfigError(
            f"model '{name}' has compile={backend!r}, and PyTorch has no such backend; {nearest(backend, found)} "
            "(torch._dynamo.register_backend adds one)"
        )
    return backend


def _refuse_without_compiler(name: str, device: torch.device) -> None:
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        needs = f"a C++ compiler on a CPU, and {compiler!r} is not installed; install one, name it in CXX"
    elif device.type == "cuda" and importlib.util.find_spec("triton") is None:
        needs = "Triton on a GPU, which is not installed; install triton"
    else:
        return
    raise EngineError(f"model '{name}' has compile=True, which needs {needs}, or leave compile out")
