"""Lists of copies whose views are made once. What is small or strided runs without Python for each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from flowrl.engines.reshard.slots import Region
from flowrl.errors import EngineError

WIDE = (torch.complex128, torch.int64, torch.int32, torch.int16)
"""16, 8, 4 and 2 bytes. Elements that stand together are moved as one of these, so that a thread of a GPU moves 16 bytes."""


LARGE_BYTES = 2**18
"""From this size on a copy of one stretch into another is a call of its own, which the driver does near the memory's rate."""


class CopyList:
    """Copies of views into views, by kind: large stretches one by one, small ones with one kernel for all, and the others."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        groups: dict[tuple[torch.dtype, torch.dtype, bool], tuple[list[Tensor], list[Tensor]]] = {}
        self._large: list[tuple[Tensor, Tensor]] = []
        for target, source in pairs:
            if not target.numel():
                continue
            target, source = widened(target, source)
            is_stretch = target.is_contiguous() and source.is_contiguous()
            if is_stretch and target.dtype == source.dtype and target.nbytes >= LARGE_BYTES:
                self._large.append((target, source))
                continue
            key = (target.dtype, source.dtype, is_stretch)
            targets, sources = groups.setdefault(key, ([], []))
            targets.append(target)
            sources.append(source)
        self._groups = tuple(groups.values())

    @torch.no_grad()
    def run(self) -> None:
        """Enqueue all of them on the current stream; on a CPU, do them."""
        for targets, sources in self._groups:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        for target, source in self._large:
            target.copy_(source, non_blocking=True)


class Fills:
    """Regions that belong to no tensor."""

    def __init__(self, regions: Iterable[Tensor]) -> None:
        self._regions = list(regions)

    @torch.no_grad()
    def run(self) -> None:
        if self._regions:
            torch._foreach_zero_(self._regions)


def widened(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the same bytes with the longest elements that fit both; as they are where the types differ or nothing fits."""
    if target.dtype != source.dtype or not target.dim() or target.device != source.device:
        return target, source
    if target.is_contiguous() and source.is_contiguous():
        target, source = target.view(-1), source.view(-1)
    if target.is_complex() or target.stride(-1) != 1 or source.stride(-1) != 1:
        return target, source
    for wide in WIDE:
        if wide.itemsize >= target.dtype.itemsize and _fits(target, wide) and _fits(source, wide):
            return target.view(wide), source.view(wide)
    return target, source


def _fits(tensor: Tensor, wide: torch.dtype) -> bool:
    size, unit = tensor.element_size(), wide.itemsize
    steps = (stride * size for stride in tensor.stride()[:-1])
    return (
        tensor.shape[-1] * size % unit == 0
        and tensor.data_ptr() % unit == 0
        and tensor.storage_offset() * size % unit == 0
        and all(step % unit == 0 for step in steps)
    )


def view_of(tensors: Mapping[str, Tensor], region: Region) -> Tensor:
    """The view of a region."""
    whole = tensors[region.storage]
    for axis, (start, length) in enumerate(zip(region.start, region.shape, strict=True)):
        if start or length != whole.shape[axis]:
            whole = whole.narrow(axis, start, length)
    return whole


def bytes_of(tensor: Tensor) -> Tensor:
    """[bytes] uint8 view of a tensor in one stretch. Errors: EngineError where it is not."""
    if not tensor.is_contiguous():
        raise EngineError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} does not lie in one stretch"
        )
    return tensor.view(-1).view(torch.uint8)


def in_slot(slot: Tensor, at: int, num_bytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Part of a slot as a tensor."""
    return slot[at : at + num_bytes].view(dtype).view(shape)
