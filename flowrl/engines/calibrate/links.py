"""Collectives between the devices of this machine, and what a sharded layer costs however few its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from flowrl.engines.calibrate.compute import dtype_of, passes, stack
from flowrl.engines.calibrate.effort import Effort, LayerShape
from flowrl.engines.calibrate.timing import busy, seconds

Calls = dict[str, Callable[[Tensor, Tensor, dist.ProcessGroup], object]]

OPERATIONS: Calls = {
    "all_gather": lambda whole, part, group: dist.all_gather_into_tensor(whole, part, group=group),
    "reduce_scatter": lambda whole, part, group: dist.reduce_scatter_tensor(part, whole, group=group),
    "all_reduce": lambda whole, part, group: dist.all_reduce(whole, group=group),
    "broadcast": lambda whole, part, group: dist.broadcast(whole, src=0, group=group),
    "all_to_all": lambda whole, part, group: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
}
"""Name -> call on (what every rank holds in the end or before, a rank's part of it, ranks)."""

FEW_LAYERS, MANY_LAYERS = 2, 6
FEW_TOKENS = 8
TINY = LayerShape(64, 4, 2, 128)


def sizes_of_groups(world: int) -> list[int]:
    """2, 4, 8, ... ranks, and all of them."""
    found = [2**power for power in range(1, world.bit_length()) if 2**power <= world]
    return [*found, world] if world > 1 and world not in found else found


def groups(world: int) -> Iterator[tuple[int, dist.ProcessGroup]]:
    """(ranks, the first so many ranks). Every rank must go through all of it."""
    for ranks in sizes_of_groups(world):
        yield ranks, dist.new_group(list(range(ranks)))


def collective(
    name: str, group: dist.ProcessGroup, ranks: int, device: torch.device, effort: Effort
) -> list[tuple[int, float]]:
    """(bytes, seconds) at each size; bytes of the full tensor, for `all_to_all` of one rank's.

    Several are asked for without a wait, as in a training step.
    """
    call, found = OPERATIONS[name], []
    dtype = dtype_of(device)
    element = torch.finfo(dtype).bits // 8
    for size in effort.collective_bytes:
        count = max(1, size // element // ranks)
        whole = torch.ones(count * ranks, dtype=dtype, device=device)
        part = torch.ones(count, dtype=dtype, device=device)
        dist.barrier(group)
        took = seconds(
            lambda whole=whole, part=part: call(whole, part, group),  # type: ignore[misc]
            device,
            rounds=effort.rounds,
            calls=5 if size > 2**22 else 20,
        )
        found.append((count * ranks * element, took))
    return found


def sharded(shape: LayerShape, depth: int, mesh: DeviceMesh) -> torch.nn.Module:
    """Layers cut over the devices of a mesh: fp32 weights and gradients, compute in the device's dtype."""
    with torch.device(mesh.device_type):
        model = stack(shape, depth, recompute=True)
    precision = MixedPrecisionPolicy(param_dtype=dtype_of(torch.device(mesh.device_type)), reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    made: torch.nn.Module = fully_shard(model, mesh=mesh, mp_policy=precision)
    return made


def starts(device: torch.device, effort: Effort, world: int) -> dict[str, float]:
    """`forward` and `train` -> least seconds of a sharded layer, by the difference of a deep stack and a shallow one.

    The layers are so small that the host, which gathers and starts kernels one by one, is what takes the time.
    """
    mesh = init_device_mesh(device.type, (world,))
    states = torch.randn(1, FEW_TOKENS, TINY.hidden, dtype=dtype_of(device), device=device)
    found: dict[int, tuple[float, float]] = {}
    for depth in (FEW_LAYERS, MANY_LAYERS):
        forward, train = passes(sharded(TINY, depth, mesh), states)
        found[depth] = (
            seconds(forward, device, rounds=2 * effort.rounds, calls=3, is_least=True),
            seconds(train, device, rounds=2 * effort.rounds, calls=3, is_least=True),
        )
    few, many = found[FEW_LAYERS], found[MANY_LAYERS]
    each = [max(0.0, b - a) / (MANY_LAYERS - FEW_LAYERS) for a, b in zip(few, many, strict=True)]
    return {"forward": each[0], "train": each[1]}


def shard_s(device: torch.device, effort: Effort, world: int) -> dict[str, float]:
    """`forward` and `train` -> seconds that the device works for each parameter and micro-batch because weights are sharded.

    Casts, copies, sums of gradients: what is left of a sharded layer without its transfers and without what an unsharded layer
    takes. With few tokens, so that products take little.
    """
    one = effort.layers[-1]
    states = torch.randn(1, FEW_TOKENS, one.hidden, dtype=dtype_of(device), device=device)
    with torch.device(device):
        plain = stack(one, FEW_LAYERS, recompute=True).to(dtype_of(device))
    count = sum(weight.numel() for weight in plain.layers.parameters())
    alone = [busy(work, device, rounds=effort.rounds) for work in passes(plain, states)]
    del plain
    cut = sharded(one, FEW_LAYERS, init_device_mesh(device.type, (world,)))
    found = [busy(work, device, rounds=effort.rounds, without="nccl") for work in passes(cut, states, keep=True)]
    each = [max(0.0, b - a) / count for a, b in zip(alone, found, strict=True)]
    return {"forward": each[0], "train": each[1]}
