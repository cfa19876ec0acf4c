"""Master weights and moments of AdamW in host memory: one flat stretch of fp32 for each, over all trained parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flowrl.engines.offload.layout import FlatLayout
from flowrl.engines.offload.memory import HostMemory
from flowrl.errors import EngineError
from flowrl.model import AdamW

ITEM_BYTES = 4
"""Of an element in fp32."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class HostState:
    """What AdamW keeps, in host memory.

    Args:
        name: of the model, in errors.
        parameters: trained ones by name; of a DTensor, the local shard.
        with_masters: keep fp32 weights too, with the parameters' values at first.

    Errors: EngineError for a parameter whose memory is not one stretch; what `HostMemory.take` raises.
    """

    def __init__(self, name: str, parameters: Mapping[str, Tensor], memory: HostMemory, *, with_masters: bool) -> None:
        for key, parameter in parameters.items():
            if not local_of(parameter).is_contiguous():
                raise EngineError(
                    f"parameter '{key}' of model '{name}' is not contiguous (strides {local_of(parameter).stride()}), and an "
                    "optimizer in host memory takes parameters as flat stretches; make it contiguous, or use offload='none'"
                )
        self.shapes = {key: local_of(parameter).shape for key, parameter in parameters.items()}
        self.layout = FlatLayout.of({key: local_of(parameter).numel() for key, parameter in parameters.items()})
        self.kinds = (*(("master",) if with_masters else ()), *MOMENTS)
        """What is kept of each element."""
        self.steps: dict[str, float] = {}
        """Steps taken, of each parameter that has moments."""
        num_bytes = self.layout.num_elements * ITEM_BYTES
        self._regions = {kind: memory.take(num_bytes) for kind in self.kinds}
        self.flat = {kind: region.view(0, num_bytes, torch.float32) for kind, region in self._regions.items()}
        """Kind -> [elements of the layout] fp32 on the CPU; places between parameters hold 0."""
        for flat in self.flat.values():
            flat.zero_()
        if with_masters:
            with torch.no_grad():
                for key, parameter in parameters.items():
                    self.part("master", key).copy_(local_of(parameter))

    @property
    def host_bytes(self) -> int:
        return sum(region.num_bytes for region in self._regions.values())

    def part(self, kind: str, name: str) -> Tensor:
        """One parameter's, in the shape of what this process holds of it."""
        start = self.layout.starts[name]
        return self.flat[kind][start : start + self.layout.sizes[name]].view(self.shapes[name])

    def moments(self, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        """`step`, `exp_avg` and `exp_avg_sq` of each parameter that has moved; of a DTensor, laid out like it."""
        return {
            name: {
                "step": step,
                **{kind: _like(self.part(kind, name), parameters[name]) for kind in MOMENTS},
            }
            for name, step in self.steps.items()
        }

    def held(self, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """As `moments`, of all parameters, in this very memory: of a DTensor, one whose shard is on the host."""
        return {
            name: {
                "step": torch.tensor(self.steps.get(name, 0.0), dtype=torch.float32),
                **{kind: _laid_as(self.part(kind, name), parameter) for kind in MOMENTS},
            }
            for name, parameter in parameters.items()
        }

    def take(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        """What `moments` gave, or whole tensors of processes that hold all; parameters left out start anew."""
        self.steps = {name: float(entry["step"]) for name, entry in entries.items()}
        for kind in MOMENTS:
            for name in self.shapes:
                part = self.part(kind, name)
                if name in entries:
                    part.copy_(local_of(entries[name][kind]))
                else:
                    part.zero_()


def local_of(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flat_of(tensor: Tensor) -> Tensor:
    """[elements] of what this process holds, the same memory."""
    return local_of(tensor.detach()).view(-1)


def adamw_(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: tuple[Sequence[Tensor], Sequence[Tensor]],
    steps: Sequence[Tensor],
    options: AdamW,
    rate: float,
) -> None:
    """One step of AdamW in place, by the kernel that `torch.optim.AdamW(fused=True)` calls.

    Args:
        steps: of each weight, this one counted; where the weights are.
    """
    torch._fused_adamw_(
        list(weights), list(grads), list(moments[0]), list(moments[1]), [], list(steps), lr=rate, beta1=options.betas[0],
        beta2=options.betas[1], weight_decay=options.weight_decay, eps=options.eps, amsgrad=False, maximize=False,
    )  # fmt: skip


def _like(local: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local.to(parameter.device), parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def _laid_as(local: Tensor, parameter: Tensor) -> Tensor:
    """Without moving anything, as `DTensor.from_local` would to the device of the mesh."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor(local, parameter._spec, requires_grad=False)
