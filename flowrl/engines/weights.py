"""The parameters of a module by name, with fp32 master copies where the module itself is in lower precision.

[Note: Small steps need fp32]
A bfloat16 number has 8 significant bits, so 1.0 - 1e-6 is 1.0 again and a policy trained in it would not move. With
`precision="bf16"` the module runs in bfloat16; gradients of every micro-batch are added up in fp32, and the optimizer (or
an exponential moving average) moves fp32 masters that are then rounded into the module. In fp32 master and parameter
are the same tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.errors import EngineError
from flowrl.schema.columns import nearest


class Weights:
    """Named parameters (tied ones once) and persistent buffers of a module."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.parameters: dict[str, nn.Parameter] = dict(module.named_parameters())
        kept = module.state_dict(keep_vars=True)
        self.buffers: dict[str, Tensor] = {n: b for n, b in module.named_buffers() if n in kept}
        self.masters: dict[str, Tensor] = dict(self.parameters)
        self.has_masters = False
        """True when the module is in lower precision and fp32 masters lead it."""
        self.leads = False
        """True when masters lie elsewhere than the module, in the care of an optimizer; see `lead`."""
        self._sums: dict[str, Sum] = {}
        """Where gradients add up, when that is in neither parameter nor master."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the module."""
        return next(iter(self.parameters.values())).dtype

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) as the module holds them: what a sampler loads."""
        for name, parameter in self.parameters.items():
            yield name, parameter.detach()

    def make_masters(self, dtype: torch.dtype) -> None:
        """Bring the module to `dtype` and, where that is not fp32, keep fp32 masters in which gradients add up."""
        if self.has_masters or dtype == torch.float32:
            return
        self.has_masters = True
        for name, parameter in self.parameters.items():
            master = nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
            parameter.data = parameter.data.to(dtype)
            self.masters[name] = master
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_move_grad_to(master))

    def lead(self, masters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Bring the module to `dtype`, led by fp32 masters of its trained parameters that lie elsewhere, as in host memory.

        Gradients add up in fp32 beside the parameters, as with masters of `make_masters`. Masters of frozen parameters are made
        on the CPU, where the module loses bits.
        """
        self.leads = True
        is_rounded = dtype != torch.float32
        self.has_masters = self.has_masters or is_rounded
        for name, parameter in self.parameters.items():
            if name in masters:
                self.masters[name] = nn.Parameter(masters[name], requires_grad=parameter.requires_grad)
            elif is_rounded:
                host = parameter.detach().to("cpu", torch.float32, copy=True)
                self.masters[name] = nn.Parameter(host, requires_grad=False)
            if is_rounded:
                parameter.data = parameter.data.to(dtype)
                if name in masters:
                    self._sums[name] = Sum()
                    parameter.register_post_accumulate_grad_hook(_move_grad_to(self._sums[name]))

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    def trained(self) -> dict[str, Tensor]:
        """Masters of trained parameters."""
        return {name: self.masters[name] for name in self.trained_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        """What has added up for each trained parameter; those that no gradient has reached are left out."""
        found = ((name, self._holder(name).grad) for name in self.trained_parameters())
        return {name: grad for name, grad in found if grad is not None}

    def drop_gradients(self) -> None:
        for name in self.trained_parameters():
            self._holder(name).grad = None

    def _holder(self, name: str) -> Tensor | Sum:
        return self._sums.get(name) or (self.parameters if self.leads else self.masters)[name]

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the module, in place."""
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    @torch.no_grad()
    def blend(self, source: Weights, decay: float) -> None:
        """self = decay * self + (1 - decay) * source, in place; buffers are copied. Names and shapes must be equal."""
        self.match({n: tuple(t.shape) for n, t in source.masters.items()}, f"model '{source.name}'")
        if decay > 0:
            self.make_masters(self.dtype)
        for name, master in self.masters.items():
            theirs = source.masters[name].to(master.device, master.dtype)
            if decay > 0:
                master.lerp_(theirs, 1 - decay)
            else:
                master.copy_(theirs)
        for name, buffer in self.buffers.items():
            if name in source.buffers:
                buffer.copy_(source.buffers[name])
        self.publish()

    def match(self, shapes: Mapping[str, tuple[int, ...]], whose: str) -> None:
        """Errors: EngineError naming the first parameter that is missing, unknown or of another shape."""
        for name, master in self.masters.items():
            if name not in shapes:
                raise EngineError(
                    f"{whose} has no parameter '{name}', which model '{self.name}' has; {nearest(name, shapes)}"
                )
            if shapes[name] != tuple(master.shape):
                raise EngineError(
                    f"parameter '{name}' of {whose} has shape {shapes[name]} and that of model '{self.name}' "
                    f"{tuple(master.shape)}; both must be of one architecture and size"
                )
        for name in shapes:
            if name not in self.masters:
                raise EngineError(
                    f"{whose} has a parameter '{name}' that model '{self.name}' lacks; {nearest(name, self.masters)}"
                )

    def export(self) -> dict[str, np.ndarray]:
        """Masters and persistent buffers as NumPy arrays of their own; bfloat16 becomes float32, which loses nothing."""
        return {name: self.array(tensor) for name, tensor in (*self.masters.items(), *self.buffers.items())}

    def array(self, tensor: Tensor) -> np.ndarray:
        """All of one of its tensors, or of a tensor laid out like it, as an array of its own."""
        return to_numpy(tensor)

    def placed(self, array: np.ndarray, like: Tensor) -> Tensor:
        """A whole array as a new tensor that lies as `like` does: the inverse of `array`."""
        return torch.from_numpy(np.array(array)).to(
            like.device, like.dtype, copy=True
        )  # else the array owns its memory

    @torch.no_grad()
    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take what `export` gave, in place."""
        shapes = {name: tuple(array.shape) for name, array in arrays.items() if name not in self.buffers}
        self.match(shapes, "the saved state")
        for name, tensor in (*self.masters.items(), *self.buffers.items()):
            if name in arrays:
                self.fill(tensor, torch.from_numpy(np.array(arrays[name])))
        self.publish()

    def fill(self, tensor: Tensor, whole: Tensor) -> None:
        """Write a whole tensor into one of its own."""
        tensor.copy_(whole)

    def whole(self, tensor: Tensor) -> Tensor:
        """All of one of its tensors, on its device."""
        return tensor.detach()

    def checksum(self) -> str:
        """Equal for equal bits, whatever the device and the number of threads: sums of the bits as integers wrap around
        and do not depend on their order."""
        total = 0
        for name, tensor in (*self.masters.items(), *self.buffers.items()):
            flat = self.whole(tensor).reshape(-1).contiguous()
            bits = flat.view(torch.uint8) if flat.element_size() % 4 else flat.view(torch.int32)
            place = torch.arange(1, len(bits) + 1, device=bits.device, dtype=torch.int64)
            number = int((bits.to(torch.int64) * place).sum()) if len(bits) else 0
            total = (total * 1_000_003 + number + len(name)) % 2**64
        return f"{total:016x}"


class Sum:
    """Holds a gradient where its master, in other memory, cannot."""

    grad: Tensor | None = None


def _move_grad_to(master: Tensor | Sum) -> Any:
    def move(parameter: Tensor) -> None:
        grad = parameter.grad
        parameter.grad = None
        if grad is None:
            return
        if master.grad is None:
            master.grad = grad.float()
        else:
            master.grad.add_(grad)

    return move


def to_numpy(tensor: Tensor) -> np.ndarray:
    """A copy on the host; bfloat16 as float32."""
    dtype = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
    array: np.ndarray = tensor.detach().to("cpu", dtype, copy=True).numpy()
    return array
