"""Sequence parallelism: between blocks every rank of a tensor-parallel group has its part of the tokens (arXiv 2205.05198).

    embedding        whole
    first layer      takes its part of the tokens
      norm           of the part
      attention      gathers all tokens, computes its heads, adds up and keeps its part
      norm           of the part
      feed-forward   the same with its part of the width
    last layer       gathers all tokens
    last norm, head  whole

What layers keep of their norms and residuals for the backward pass is so divided among the ranks, and what goes over the group is
as much as with sums: one sum is a sum of parts and a gather. Rows have all lengths, so parts are padded to one size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flowrl.engines.mesh.styles import all_parts, part_of, sum_of_part


class Part(torch.autograd.Function):
    """Of [rows, tokens, H], equal on all ranks, the tokens that are this rank's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.length = group, x.shape[1]
        return part_of(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_parts(grads[0], ctx.group, ctx.length), None


class Whole(torch.autograd.Function):
    """All tokens, for what all ranks compute alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, length: int) -> Tensor:
        ctx.group = group
        return all_parts(x, group, length)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return part_of(grads[0], ctx.group), None, None


class Shared(torch.autograd.Function):
    """All tokens, of which each rank makes its part of something: gradients are added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, length: int) -> Tensor:
        ctx.group = group
        return all_parts(x, group, length)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return sum_of_part(grads[0], ctx.group), None, None


def cut_sequence(layers: Sequence[nn.Module], attention: str, block: str, mesh: DeviceMesh) -> None:
    """Hang the ends of the parts into layers. Their norms and products have styles of their own (`plans`).

    Args:
        attention, block: names of a layer's attention and feed-forward modules.
    """
    group, size = mesh.get_group(), mesh.size()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (Part.apply(args[0], group), *args[1:]), kwargs

    def attend(module: nn.Module, args: Any, kwargs: Any) -> Any:
        whole = Shared.apply(kwargs["hidden_states"], group, _length(kwargs))
        return args, {**kwargs, "hidden_states": whole}

    def feed(module: nn.Module, args: Any) -> Any:
        return (Shared.apply(args[0], group, size * args[0].shape[1]), *args[1:])

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return Whole.apply(output, group, _length(kwargs))

    layers[0].register_forward_pre_hook(enter, with_kwargs=True)
    for layer in layers:
        layer.get_submodule(attention).register_forward_pre_hook(attend, with_kwargs=True)
        layer.get_submodule(block).register_forward_pre_hook(feed)
    layers[-1].register_forward_hook(leave, with_kwargs=True)


def _length(kwargs: Any) -> int:
    """Tokens of a row, from the rotary factors [1 or rows, tokens, head], which every layer gets whole."""
    return int(kwargs["position_embeddings"][0].shape[1])
