"""Batches as torch tensors, on the CPU or on a device. The one file of the store that imports torch, and only in functions.

    gathered block (page-locked) --one copy, on a stream of its own--> block on the device -> tensors, views of it

All arrays of a batch lie in one block, so one copy moves them all.

[Note: When memory of the device is used again] The consumer's stream waits for a batch's copy, never the processor. A block on
the device is recorded as used by the consumer's stream, so the allocator gives it out again only when the work that was
asked of that stream is done. Before the next block is taken, the thread that makes batches waits until the consumer's stream
has passed the point where it had dropped an older batch: however far a consumer runs ahead of its device, no more
batches lie there than it was promised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.store.staging import ArrayCarrier, Carrier, Staged, StagingPool

if TYPE_CHECKING:
    import torch

_PINNED_BLOCKS = 2
"""One is copied from while the other is filled."""


def tensor_carrier(device: Any, pin: bool | None, ahead: int) -> Carrier:
    """Args:
        device: what `torch.device` takes.
        pin: make batches in page-locked memory; None: where the device is CUDA's.
        ahead: batches made ahead by a thread; 0 for none.

    Errors: ConfigError for a device that is unknown or not there, and for page-locked memory without one.
    """
    import torch

    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"loader's device is one of torch's, such as 'cpu' or 'cuda'; found {device!r}") from error
    if (wanted.type == "cuda" or pin) and not torch.cuda.is_available():
        what = f"device={str(wanted)!r}" if wanted.type == "cuda" else "pin=True"
        raise ConfigError(f"loader got {what} and torch finds no CUDA device here; use device='cpu' without pin")
    if wanted.type == "cuda":
        if (wanted.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"loader got device={str(wanted)!r} and there are {torch.cuda.device_count()} CUDA devices"
            )
        return CudaCarrier(wanted, pin is not False, ahead)
    allocate = pinned if pin else None
    return HostCarrier(wanted, ahead, allocate)


def pinned(nbytes: int) -> np.ndarray:
    """Page-locked memory, uint8 [nbytes]."""
    import torch

    block: np.ndarray = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return block


class HostCarrier(ArrayCarrier):
    """Tensors that are views of the staging block; on another device than the CPU, plain copies of them."""

    def __init__(self, device: torch.device, ahead: int, allocate: Callable[[int], np.ndarray] | None = None) -> None:
        super().__init__(ahead)
        if allocate is not None:
            self.pool = StagingPool(allocate, most=ahead + 2)
        import torch

        self._device, self._is_here = device, device.type == "cpu"
        self._from_numpy = torch.from_numpy

    def ship(self, arrays: Mapping[str, np.ndarray], block: np.ndarray | None, nbytes: int) -> Staged:
        tensors: Iterable[torch.Tensor] = map(self._from_numpy, arrays.values())
        if not self._is_here:
            tensors = (tensor.to(self._device) for tensor in tensors)
        return Staged(zip(arrays, tensors, strict=True))


class _Moved(Staged):
    """A batch on the device, and when it will be there."""

    __slots__ = ("buffer", "copied")

    buffer: torch.Tensor
    copied: torch.cuda.Event | None


class CudaCarrier:
    """Tensors on a CUDA device, copied while the consumer works."""

    def __init__(self, device: torch.device, pin: bool, ahead: int) -> None:
        import torch

        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._is_pinned = pin
        # without a thread the copy is asked of the consumer's own stream: there is nothing to overlap
        self._stream = torch.cuda.Stream(self._device) if ahead else None
        self.pool: StagingPool = _PinnedPool() if pin else StagingPool(most=_PINNED_BLOCKS)
        self._dtypes: dict[np.dtype[Any], torch.dtype] = {}

    def ship(self, arrays: Mapping[str, np.ndarray], block: np.ndarray | None, nbytes: int) -> Staged:
        import torch

        batch = _Moved()
        batch.copied = None
        if block is None:
            return batch
        stream = self._stream or torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream):
            # whole multiples of 64 bytes, so that all of it can be seen as any dtype
            buffer = torch.empty(-(-nbytes // 64) * 64, dtype=torch.uint8, device=self._device)
            buffer[:nbytes].copy_(torch.from_numpy(block[:nbytes]), non_blocking=self._is_pinned)
            if isinstance(self.pool, _PinnedPool):
                self.pool.is_read_until(block, stream.record_event(torch.cuda.Event(blocking=True)))
            if self._stream is not None:
                batch.copied, batch.buffer = stream.record_event(), buffer
        base = block.__array_interface__["data"][0]
        seen: dict[np.dtype[Any], torch.Tensor] = {}
        for name, array in arrays.items():
            dtype, size = array.dtype, array.itemsize
            typed = seen.get(dtype)
            if typed is None:
                typed = seen[dtype] = buffer.view(self._dtype(dtype))
            offset = array.__array_interface__["data"][0] - base
            batch[name] = typed.as_strided(array.shape, [step // size for step in array.strides], offset // size)
        return batch

    def _dtype(self, dtype: np.dtype[Any]) -> torch.dtype:
        import torch

        found = self._dtypes.get(dtype)
        if found is None:
            found = self._dtypes[dtype] = torch.from_numpy(np.empty(0, dtype)).dtype
        return found

    def receive(self, batch: Staged) -> Staged:
        if isinstance(batch, _Moved) and batch.copied is not None:
            import torch

            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(batch.copied)
            batch.buffer.record_stream(stream)
            batch.copied = None
            del batch.buffer  # the tensors hold it
        return batch

    def used(self) -> Callable[[], None]:
        import torch

        event = torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(blocking=True))
        wait: Callable[[], None] = event.synchronize
        return wait


class _PinnedPool(StagingPool):
    """Page-locked blocks, each used again when the device has read it."""

    def __init__(self) -> None:
        super().__init__(pinned, most=_PINNED_BLOCKS)
        self._reading: deque[tuple[np.ndarray, torch.cuda.Event]] = deque()

    def is_read_until(self, block: np.ndarray, event: torch.cuda.Event) -> None:
        self._reading.append((block, event))

    def take(self, nbytes: int) -> np.ndarray:
        reading = self._reading
        while reading and (len(reading) >= self._most or reading[0][1].query()):
            _, event = reading.popleft()
            event.synchronize()
            del event, _
        return super().take(nbytes)
