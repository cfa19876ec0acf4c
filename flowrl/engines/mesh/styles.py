"""How one module is computed by the ranks of a tensor-parallel group.

[Note: Sharded parameters, plain activations]
Parameters are DTensors, so that FSDP2, checkpoints and resharding know how they lie. While a module runs, its own part of
each stands in the parameter's place as a plain tensor, and activations are plain tensors too: DTensor would settle the
layout of every operation anew for each new shape, milliseconds each, and rows have all shapes. The functions below, and those
of `flowrl.engines.mesh.sequence`, carry activations and their gradients over the group.
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

# newer torch calls them by other names
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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


class AddToParts(torch.autograd.Function):
    """Of the sum of what the ranks have, [rows, tokens, H], the tokens that are this rank's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.length = group, x.shape[1]
        return sum_of_part(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_parts(grads[0], ctx.group, ctx.length), None


def part_of(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[rows, ceil(tokens / ranks), H]: this rank's tokens of [rows, tokens, H]; zeros behind the last one."""
    size, at = dist.get_world_size(group), dist.get_rank(group)
    step = -(-x.shape[1] // size)
    part = x[:, at * step : (at + 1) * step]
    missing = step - part.shape[1]
    return (nn.functional.pad(part, (0, 0, 0, missing)) if missing else part).contiguous()


def sum_of_part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`part_of` the sum over ranks."""
    size = dist.get_world_size(group)
    step = -(-x.shape[1] // size)
    missing = size * step - x.shape[1]
    padded = nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
    given = padded.unflatten(1, (size, step)).transpose(0, 1).flatten(0, 1)
    found = x.new_empty((x.shape[0], step, *x.shape[2:]))
    if found.numel():
        _reduce_scatter(found, given, group=group)
    return found


def all_parts(x: Tensor, group: dist.ProcessGroup, length: int) -> Tensor:
    """[rows, length, H] from every rank's part of it."""
    size, step = dist.get_world_size(group), x.shape[1]
    found = x.new_empty((size * x.shape[0], *x.shape[1:]))
    if found.numel():
        _all_gather(found, x.contiguous(), group=group)
    # put together anew, never a view, in which FSDP2 could not hang its hooks
    return torch.cat([part[:, : max(0, length - at * step)] for at, part in enumerate(found.chunk(size))], 1)


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
    leave: Literal["", "add", "gather", "scatter"] = ""
    """`scatter`: the sum, of which each rank gets the tokens that are its own; see `flowrl.engines.mesh.sequence`."""
    adds_gradients: bool = False
    """Whether every rank's gradient of a whole parameter is a part of it: its input was cut."""

    parts: int = 0
    """Matrices that lie side by side in whole parameters, of each of which a rank takes its part of the outputs; 0: none."""
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
        self.size = mesh.size()
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
        if self.style.leave == "scatter":
            return AddToParts.apply(output, self.group)
        return Gather.apply(output, self.group) if self.style.leave == "gather" else output

    def _own(self, key: str, param: DTensor) -> Tensor:
        is_whole = param.placements[0].is_replicate()
        is_sum = self.style.leave in ("add", "scatter")
        is_added = is_whole and (self.style.adds_gradients or is_sum)
        own: Tensor = param.to_local(grad_placements=[Partial()] if is_added else param.placements)
        if self.style.parts:
            kinds = own.unflatten(-1, (self.style.parts, self.size, -1))
            return kinds.select(-2, self.at).flatten(-2)
        # what is whole, a bias, is part of a sum once
        return own * 0 if is_whole and is_sum and not self.is_first else own

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
BY_TOKENS = BY_HEADS
"""Whole parameters, an input cut by tokens."""
BY_OUTPUT = Style({"weight": Shard(0), "bias": Shard(0)})
"""Of an input that the module around it has gathered; see `flowrl.engines.mesh.sequence`."""
BY_INPUT = Style({"weight": Shard(1)}, leave="scatter")
CONV_BY_OUTPUT = Style({"weight": Shard(1), "bias": Shard(0)}, enter="copy", width="nf")
"""A Conv1D of GPT-2, whose weight is [in, out]."""
CONV_BY_INPUT = Style({"weight": Shard(0)}, leave="add")
CONV_BY_HEADS = Style(enter="copy", adds_gradients=True, parts=3, width="nf")
"""The Conv1D of GPT-2 that makes q, k and v. No one cut of it gives every rank its heads of all three, so it stays whole, and
a rank computes with its columns."""
TOKENS = Style({"weight": Shard(0)}, enter="tokens", leave="add")
LOGITS = Style({"weight": Shard(0), "bias": Shard(0)}, enter="copy", leave="gather")
