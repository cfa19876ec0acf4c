"""How one module is computed by the ranks of a tensor-parallel group.

[Note: Sharded parameters, plain activations]
Parameters are DTensors, so that FSDP2, checkpoints and resharding know how they lie. While a module runs, its own part of
each stands in the parameter's place as a plain tensor, and activations are plain tensors too: DTensor would settle the
layout of every operation anew for each new shape, milliseconds each, and rows have all shapes. Three functions below carry
activations and their gradients over the group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement


class Copy(torch.autograd.Function):
    """The same on all ranks, used by each for its part: gradients are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _added(grads[0], ctx.group), None


class Add(torch.autograd.Function):
    """The sum of what the ranks have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _added(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Gather(torch.autograd.Function):
    """The last dimension put together from the ranks' parts, which are of one size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.width, ctx.at = x.shape[-1], dist.get_rank(group)
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        if x.numel():
            dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(-1, ctx.at * ctx.width, ctx.width).contiguous(), None


def _added(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    if total.numel():
        dist.all_reduce(total, group=group)
    return total


@dataclass(frozen=True, slots=True)
class Style:
    """How parameters lie, and what happens to a module's input and output.

    Example:
        Style({"weight": Shard(0), "bias": Shard(0)}, enter="copy")        # a linear layer cut by its output
    """

    params: Mapping[str, Placement] = field(default_factory=dict)
    """Parameter -> how it lies; others are whole on every rank."""
    enter: Literal["", "copy", "tokens"] = ""
    """`copy`: see `Copy`. `tokens`: ids of other ranks' rows are looked up by those."""
    leave: Literal["", "add", "gather"] = ""
    adds_gradients: bool = False
    """Whether every rank's gradient of a whole parameter is a part of it: its input was cut."""

    width: str = ""
    """Attribute of the module that says how wide its output is, if it has one: here, of this rank's part."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Lay out a module's parameters and hang its two ends into hooks. Every rank has the same values: nothing is sent."""
        for key, param in list(module.named_parameters(recurse=False)):
            if not isinstance(param, DTensor):
                placed = distribute_tensor(param.data, mesh, [self.params.get(key, Replicate())], src_data_rank=None)
                module.register_parameter(key, nn.Parameter(placed, requires_grad=param.requires_grad))
        if self.width:
            setattr(module, self.width, getattr(module, self.width) // mesh.size())
        ends = _Ends(self, mesh)
        module.register_forward_pre_hook(ends.enter)
        module.register_forward_hook(ends.leave, always_call=True)


class _Ends:
    """The hooks of one module."""

    def __init__(self, style: Style, mesh: DeviceMesh) -> None:
        self.style = style
        self.group = mesh.get_group()
        self.is_first = mesh.get_local_rank() == 0
        self.at = mesh.get_local_rank()
        self.outside: Tensor | None = None
        self.padding: int | None = None

    def enter(self, module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        for key, param in module._parameters.items():
            if isinstance(param, DTensor):
                module.__dict__[key] = self._own(key, param)  # found before the parameter of that name
        if self.style.enter == "copy":
            return (Copy.apply(inputs[0], self.group), *inputs[1:])
        if self.style.enter == "tokens":
            return (self._own_ids(module, inputs[0]), *inputs[1:])
        return inputs

    def leave(self, module: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        for key in module._parameters:
            module.__dict__.pop(key, None)
        if self.style.enter == "tokens":
            module.padding_idx = self.padding
        if output is None:  # the module raised
            return None
        if self.outside is not None:
            output, self.outside = output.masked_fill(self.outside[..., None], 0), None
        if self.style.leave == "add":
            return Add.apply(output, self.group)
        return Gather.apply(output, self.group) if self.style.leave == "gather" else output

    def _own(self, key: str, param: DTensor) -> Tensor:
        is_whole = param.placements[0].is_replicate()
        is_added = is_whole and (self.style.adds_gradients or self.style.leave == "add")
        own: Tensor = param.to_local(grad_placements=[Partial()] if is_added else param.placements)
        # what is whole, a bias, is part of a sum once
        return own * 0 if is_whole and self.style.leave == "add" and not self.is_first else own

    def _own_ids(self, module: Any, ids: Tensor) -> Tensor:
        """[...] ids among this rank's rows; any, for rows of other ranks, whose vectors are made 0 afterwards."""
        rows = module.__dict__["weight"].shape[0]
        first = self.at * rows
        self.outside = (ids < first) | (ids >= first + rows)
        self.padding = module.padding_idx
        if self.padding is not None:  # its row gets no gradient
            module.padding_idx = self.padding - first if first <= self.padding < first + rows else None
        return (ids - first).masked_fill(self.outside, 0)


WHOLE = Style()
"""Every rank of the group has and computes all of it."""
BY_HEADS = Style(adds_gradients=True)
"""Whole parameters, an input cut by heads."""
BY_OUTPUT = Style({"weight": Shard(0), "bias": Shard(0)}, enter="copy")
BY_INPUT = Style({"weight": Shard(1)}, leave="add")
CONV_BY_OUTPUT = Style({"weight": Shard(1), "bias": Shard(0)}, enter="copy", width="nf")
"""A Conv1D of GPT-2, whose weight is [in, out]."""
CONV_BY_INPUT = Style({"weight": Shard(0)}, leave="add")
TOKENS = Style({"weight": Shard(0)}, enter="tokens", leave="add")
LOGITS = Style({"weight": Shard(0), "bias": Shard(0)}, enter="copy", leave="gather")
