"""Tensors that leave the device for host memory and come back, the same objects.

    here --begin_offload--> leaving --finish--> parked --begin_onload--> coming --finish--> here

[Note: What is freed is the storage]
A tensor that leaves keeps its object, shape and views; its storage is emptied, which gives the device memory back whoever else
looks at it (a tied parameter, the flat buffer behind a DTensor's shard). A plain parameter shows NaN meanwhile, as one number
in every place: an operation on an emptied storage would read from address 0.

[Note: Order without waiting]
Copies run in streams of their own. The current stream waits for a copy out before the storage is emptied, and the allocator
hands memory on in the order of that stream, so nobody writes there before the copy has ended. What comes in is allocated in the
current stream, and its copy begins behind what that stream had been given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flowrl.engines.offload.lanes import lanes_for
from flowrl.engines.offload.memory import HostMemory, Region
from flowrl.engines.offload.state import local_of
from flowrl.errors import EngineError

ALIGN = 256
"""Bytes at a multiple of which each storage begins in host memory."""


class Place(StrEnum):
    """Where parked tensors are."""

    HERE = "on the device"
    LEAVING = "on its way to the host"
    """May be read, not written."""
    PARKED = "parked in host memory"
    COMING = "on its way to the device"
    """May not be used."""


NEXT = {
    Place.HERE: Place.LEAVING,
    Place.LEAVING: Place.PARKED,
    Place.PARKED: Place.COMING,
    Place.COMING: Place.HERE,
}


class Parked:
    """Tensors that leave and come back together.

    Args:
        name: in errors.
        tensors: those that there are now; of a DTensor, the local shard. What is not on `device` is passed over.
        faces: of these, what others may touch meanwhile; see [Note: What is freed is the storage].

    Example:
        parked = Parked("policy", module.parameters, HostMemory(device), device)
        parked.offload()                       # its memory on the device is free
        parked.onload()
        parked.offload(writes=False)           # unchanged since: nothing is copied
    """

    def __init__(
        self,
        name: str,
        tensors: Callable[[], Iterable[Tensor]],
        memory: HostMemory,
        device: torch.device,
        *,
        faces: Callable[[], Iterable[Tensor]] = lambda: (),
    ) -> None:
        self.name = name
        self.place = Place.HERE
        self._tensors, self._faces = tensors, faces
        self._memory, self._device = memory, device
        self._lanes = lanes_for(device)
        self._away: list[torch.UntypedStorage] = []
        """Storages that are not, or not for long, here."""
        self._sizes: list[int] = []
        self._kept: list[tuple[Tensor, Tensor]] = []
        """(what shows NaN, its own data)."""
        self._copied: list[tuple[int, int, int]] = []
        """What the host's copy is of; see `_stamps`."""
        self._region: Region | None = None

    @property
    def is_here(self) -> bool:
        return self.place is Place.HERE

    @property
    def host_bytes(self) -> int:
        """Of its copy."""
        return 0 if self._region is None else self._region.num_bytes

    # ------------------------------------------------------------------------------------------------------- both ways

    def offload(self, *, writes: bool = True) -> int:
        """To the host, unless it is there; bytes copied. See `begin_offload`."""
        if self.place is Place.PARKED:
            return 0
        copied = self.begin_offload(writes=writes)
        self.finish()
        return copied

    def onload(self) -> int:
        """To the device, unless it is there; bytes copied. See `begin_onload`."""
        if self.place is Place.HERE:
            return 0
        copied = self.begin_onload()
        self.finish()
        return copied

    @torch.no_grad()
    def begin_offload(self, *, writes: bool = True) -> int:
        """Copy to the host, beside whatever the current stream does; bytes copied.

        Args:
            writes: False when nothing has changed since it came in: the copy on the hosts is still good. Without one, or when
                PyTorch knows of a change (a tensor written in place, other tensors), it is copied all the same.

        The device copies one thing in each direction at a time: a number read from it meanwhile waits until this is out.

        Errors: EngineError when it is not on the device, has memory that cannot be given back, or the host has too little.
        """
        self._move(Place.LEAVING)
        try:
            self._away = self._storages()
            self._sizes = [storage.nbytes() for storage in self._away]
            now = self._stamps()
            if not writes and now == self._copied:
                return 0
            host = self._host_views(keep=False)
        except BaseException:
            self.place, self._away = Place.HERE, []
            raise
        self._lanes.begin()
        with self._lanes.on("out"):
            for storage, there in zip(self._away, host, strict=True):
                there.copy_(self._bytes(storage), non_blocking=True)
        self._copied = now
        return sum(self._sizes)

    @torch.no_grad()
    def begin_onload(self) -> int:
        """Copy to the device, beside whatever the current stream does; bytes copied.

        Errors: EngineError when it is not parked; the allocator's when the device has too little memory: it stays parked then.
        """
        self._move(Place.COMING)
        try:
            for storage, num_bytes in zip(self._away, self._sizes, strict=True):
                storage.resize_(num_bytes)
        except BaseException:
            for storage in self._away:
                storage.resize_(0)
            self.place = Place.PARKED
            raise
        self._lanes.begin()
        with self._lanes.on("in"):
            for storage, there in zip(self._away, self._host_views(keep=True), strict=True):
                self._bytes(storage).copy_(there, non_blocking=True)
        return sum(self._sizes)

    def finish(self) -> None:
        """The current stream goes on behind the copies; what left frees its memory on the device."""
        was = self.place
        self._move(Place.PARKED if was is Place.LEAVING else Place.HERE)
        self._lanes.end()
        if was is Place.COMING:
            for tensor, data in self._kept:
                tensor.data = data
            self._kept, self._away = [], []
            return
        for tensor in self._faces():
            if not isinstance(tensor, DTensor) and tensor.numel():
                self._kept.append((tensor, tensor.data))
                tensor.data = _face(tensor)
        for storage in self._away:
            storage.resize_(0)

    def close(self) -> None:
        """Give the host's copy back; it must be here."""
        if self._region is not None:
            self._lanes.settle()
            self._memory.give(self._region)
        self._region, self._copied = None, []

    # --------------------------------------------------------------------------------------------------------- details

    def _move(self, to: Place) -> None:
        if NEXT[self.place] is not to:
            raise EngineError(
                f"the state of '{self.name}' is {self.place}, so it cannot be {to} next; from there it goes {NEXT[self.place]}"
            )
        self.place = to

    def _storages(self) -> list[torch.UntypedStorage]:
        """Each once, in the order of the tensors."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors():
            local = local_of(tensor)
            storage = local.untyped_storage()
            if local.device != self._device or not storage.nbytes():
                continue
            if not storage.resizable():
                raise EngineError(
                    f"a tensor of '{self.name}', {tuple(tensor.shape)} {tensor.dtype}, lies in memory that is not PyTorch's own "
                    "(a mapped file, an array), which cannot be given back; copy the model first, or do not park it"
                )
            found.setdefault(storage._cdata, storage)
        return list(found.values())

    def _stamps(self) -> list[tuple[int, int, int]]:
        """(address of the storage object, bytes, writes that PyTorch has counted) of each tensor."""
        locals_ = [local_of(tensor) for tensor in self._tensors()]
        return [
            (
                one.untyped_storage()._cdata,
                one.untyped_storage().nbytes(),
                -1 if one.is_inference() else one._version,
            )
            for one in locals_
        ]

    def _host_views(self, *, keep: bool) -> list[Tensor]:
        """A place in host memory for each storage; the copy there is lost unless it is kept."""
        starts, total = [], 0
        for num_bytes in self._sizes:
            starts.append(total)
            total += -(-num_bytes // ALIGN) * ALIGN
        if not keep:
            self._copied = []
            if self._region is not None and self._region.num_bytes < total:
                self.close()
            if self._region is None:
                self._region = self._memory.take(total)
        assert self._region is not None
        return [self._region.view(start, size) for start, size in zip(starts, self._sizes, strict=True)]

    def _bytes(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)


def _face(tensor: Tensor) -> Tensor:
    """What stands for a tensor that is away: of its shape, on the CPU, and no number."""
    nothing = torch.nan if tensor.is_floating_point() else 0
    return torch.full((), nothing, dtype=tensor.dtype).expand(tensor.shape)
