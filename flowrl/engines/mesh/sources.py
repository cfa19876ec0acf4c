"""Where weights come from while a module is cut: one whole tensor at a time, on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from flowrl.errors import EngineError
from flowrl.schema.columns import nearest

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Source(Protocol):
    """Gives tensors by the names of a module's state dict."""

    def read(self, name: str) -> Tensor | None:
        """All of one tensor on the host; None when it is not there."""
        ...


class StateDict:
    """Tensors that are in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def read(self, name: str) -> Tensor | None:
        return self.tensors.get(name)


class Safetensors:
    """Tensors of safetensors files, mapped: only what is read is loaded.

    Files of a bare backbone lack the prefix that the names of a model with a head have, and the reverse.
    """

    def __init__(self, files: list[Path], prefix: str) -> None:
        self._files = ExitStack()
        self._prefix = f"{prefix}."
        self._where: dict[str, Any] = {}
        for path in files:
            opened = self._files.enter_context(safe_open(str(path), framework="pt", device="cpu"))
            self._where.update(dict.fromkeys(opened.keys(), opened))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._where)

    def read(self, name: str) -> Tensor | None:
        for known in (name, name.removeprefix(self._prefix), self._prefix + name):
            if known in self._where:
                found: Tensor = self._where[known].get_tensor(known)
                return found
        return None

    def close(self) -> None:
        self._files.close()


def safetensors_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a model's folder; empty when it has none."""
    import json

    root = Path(folder)
    if (root / SINGLE).exists():
        return [root / SINGLE]
    index = root / INDEX
    if not index.exists():
        return []
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [root / name for name in sorted(set(names))]


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While open, parameters of modules that are built take no memory. Buffers are real: rotary frequencies that are not saved
    with the weights could not be had otherwise."""
    register: Callable[..., None] = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            meta = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            meta.__dict__.update(param.__dict__)
            module._parameters[name] = meta

    nn.Module.register_parameter = on_meta  # type: ignore
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def empty_module(name: str, config: Any) -> nn.Module:
    """A causal language model of a Transformers config without weights: parameters on the meta device, buffers real."""
    from transformers import AutoModelForCausalLM

    with parameters_on_meta(), torch.no_grad():
        try:
            module: nn.Module = AutoModelForCausalLM.from_config(config)
        except (ValueError, KeyError, ImportError) as error:
            raise EngineError(
                f"model '{name}': Transformers cannot build a {type(config).__name__}: {error}"
            ) from error
    tie: Any = getattr(module, "tie_weights", None)
    if callable(tie):
        tie()
    return module.eval()


def missing(module: nn.Module, source: Safetensors) -> list[str]:
    """Names of parameters that a source does not have; a tied one counts once."""
    known = source.names
    prefix = source._prefix
    found = []
    for name, _ in module.named_parameters():
        if not known & {name, name.removeprefix(prefix), prefix + name}:
            found.append(name)
    return found


def materialise(
    module: nn.Module,
    prefix: str,
    source: Source,
    device: torch.device,
    dtype: torch.dtype | None,
    frozen: torch.dtype | None = None,
) -> None:
    """Give the parameters and buffers of a module that are not there yet their values, on a device.

    Args:
        prefix: of the module's names in the whole model; "" or ending in a dot.
        dtype: of parameters; None keeps theirs.
        frozen: of parameters that do not train; None: `dtype`.

    Errors: EngineError naming a tensor without values, or of another shape.
    """
    made: dict[int, nn.Parameter] = {}
    for path, part in module.named_modules():
        start = f"{prefix}{path}." if path else prefix
        for key, param in part._parameters.items():
            if param is None or hasattr(param, "device_mesh"):
                continue
            if id(param) not in made:
                value = _value(start + key, param, source)
                wanted = dtype if param.requires_grad or frozen is None else frozen
                kind = param.dtype if wanted is None or not param.is_floating_point() else wanted
                real = nn.Parameter(value.to(device, kind, copy=True), requires_grad=param.requires_grad)
                made[id(param)] = made[id(real)] = real
            part._parameters[key] = made[id(param)]
        for key, buffer in part._buffers.items():
            if buffer is None:
                continue
            stored = None if key in part._non_persistent_buffers_set else source.read(start + key)
            if buffer.is_meta and stored is None:
                raise EngineError(
                    f"buffer '{start}{key}' has no values; build the module with its buffers off the meta device"
                )
            part._buffers[key] = (buffer if stored is None else stored.to(buffer.dtype)).to(device)


def _value(name: str, param: Tensor, source: Source) -> Tensor:
    found = source.read(name)
    if found is None and not param.is_meta:
        return param.detach()
    if found is None:
        names = getattr(source, "names", None) or getattr(source, "tensors", {})
        raise EngineError(f"the weights have no '{name}'; {nearest(name, names)}")
    if found.shape != param.shape:
        raise EngineError(
            f"the weights have '{name}' in shape {tuple(found.shape)}, and the model needs {tuple(param.shape)}; they are of a "
            "model of another size"
        )
    return found
