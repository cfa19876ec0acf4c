"""The measured sharding audit: what a module that is there takes on this rank, parameter by parameter."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from flowrl.cost.audit import Audit, Part
from flowrl.engines.offload.state import local_of


def audit_module(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, worth: float = 0.01) -> Audit:
    """What a module, its gradients and its optimizer's state take on this rank. Nothing is communicated.

    Ask between steps, while gradients are there and layers are sharded: what FSDP2 has gathered for a moment looks like what is
    never sharded (`model.reshard()` gives it back). A parameter that is no DTensor counts as whole on every rank of the job.

    Args:
        optimizer: left out, its state is not counted. Scalars, such as counters of steps, never are.
        worth: share of the rank's bytes that a finding must waste to be a problem.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    rank = dist.get_rank() if world > 1 else 0
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    state: Any = {} if optimizer is None else optimizer.state
    parts = tuple(
        _part(name, parameter, state.get(parameter, {}), world, has_accelerator=accelerator is not None)
        for name, parameter in model.named_parameters()
    )
    return Audit(f"{type(model).__name__} on rank {rank} of {world}", parts, is_predicted=False, worth=worth)


def _part(name: str, parameter: nn.Parameter, state: dict[str, Any], world: int, *, has_accelerator: bool) -> Part:
    devices, copies = _spread(parameter, world)
    local = local_of(parameter)
    gradient = None if parameter.grad is None else local_of(parameter.grad)
    kept = [local_of(value) for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
    host = 0

    def on_device(*tensors: torch.Tensor) -> int:
        nonlocal host
        host += sum(_bytes(one) for one in tensors if has_accelerator and one.device.type == "cpu")
        return sum(_bytes(one) for one in tensors if not (has_accelerator and one.device.type == "cpu"))

    param_bytes = on_device(local)
    grad_bytes = 0 if gradient is None else on_device(gradient)
    optimizer_bytes = on_device(*kept)
    return Part(
        name=name,
        shape=tuple(parameter.shape),
        dtype=_dtype(parameter),
        devices=devices,
        copies=copies,
        whole_bytes=parameter.numel() * parameter.element_size(),
        param_bytes=param_bytes,
        grad_bytes=grad_bytes,
        grad_dtype="" if gradient is None else _dtype(gradient),
        optimizer_bytes=optimizer_bytes,
        uneven_bytes=_uneven_bytes(parameter, devices, copies),
        state_excess_bytes=sum(max(0, one.numel() - local.numel()) * one.element_size() for one in kept),
        host_bytes=host,
        is_trained=parameter.requires_grad,
    )


def _spread(parameter: torch.Tensor, world: int) -> tuple[int, int]:
    """Ranks that share a parameter, and how many of them hold the same of it."""
    if not isinstance(parameter, DTensor):
        return world, world
    mesh = parameter.device_mesh
    copied = (mesh.size(axis) for axis, placement in enumerate(parameter.placements) if _dim(placement) is None)
    return mesh.size(), math.prod(copied)


def _uneven_bytes(parameter: torch.Tensor, devices: int, copies: int) -> int:
    """What the fullest rank has over an even share: torch cuts `ceil(rows / shards)` rows for the first ranks."""
    if not isinstance(parameter, DTensor):
        return 0
    sizes = list(parameter.shape)
    for axis, placement in enumerate(parameter.placements):
        dim = _dim(placement)
        if dim is not None:
            sizes[dim] = -(-sizes[dim] // parameter.device_mesh.size(axis))
    even = parameter.numel() * copies / devices
    return round((math.prod(sizes) - even) * parameter.element_size())


def _dim(placement: Placement) -> int | None:
    """The dimension that a placement cuts; None for one that cuts nothing. Shards of shards are a class of their own in torch,
    which `is_shard` denies."""
    return None if placement.is_replicate() or placement.is_partial() else int(placement.dim)  # type: ignore[attr-defined]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
