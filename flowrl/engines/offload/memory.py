"""Host memory for a device: pinned where there is CUDA, kept when it is given back, and used again.

[Note: Exact sizes]
PyTorch's own pinned allocator rounds every size up to a power of two, which would double what a large model takes. So memory is
mapped in its exact size, touched by all threads, and then registered with the driver as one range.
"""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

from flowrl.errors import EngineError

PAGE = mmap.PAGESIZE
SPARE = 1.25
"""A kept region serves a request that is at most this much smaller."""
SMALL_BYTES = 2**20
"""Less than this is not worth a new region."""


class Region:
    """A stretch of host memory; pinned as long as this object lives, whoever holds a view of it.

    Args:
        num_bytes: its size; rounded up to whole pages.
        is_pinned: whether CUDA copies from and to it without a copy between, at the rate of the link.

    Errors: EngineError when there is no memory, or it cannot be pinned.
    """

    def __init__(self, num_bytes: int, *, is_pinned: bool) -> None:
        self.num_bytes = -(-max(num_bytes, 1) // PAGE) * PAGE
        try:
            pages = mmap.mmap(-1, self.num_bytes)
        except (OSError, ValueError) as error:
            raise EngineError(
                f"there are no {self.num_bytes / 2**30:.1f} GiB of host memory for state that leaves the device; offload less"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                pages.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without large pages: only slower to pin
        self.data: Tensor = torch.frombuffer(pages, dtype=torch.uint8)
        """[num_bytes] uint8, on the CPU; 0 at first."""
        if is_pinned:
            self.data.zero_()  # by all threads: the driver would bring pages in one by one
            _register(self.data)
            weakref.finalize(self, _unregister, self.data).atexit = False

    def view(self, start_bytes: int, num_bytes: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """A flat part of it."""
        return self.data[start_bytes : start_bytes + num_bytes].view(dtype)


class HostMemory:
    """Regions of one process for one device. What is given back serves later requests.

    Example:
        memory = HostMemory(torch.device("cuda"))
        region = memory.take(2**30)
        memory.give(region)
    """

    def __init__(self, device: torch.device) -> None:
        self.is_pinned = device.type == "cuda"
        self._free: list[Region] = []
        self.num_made = 0
        """Regions made so far."""
        self.held_bytes = 0
        """Of all its regions, in use or not."""

    def take(self, num_bytes: int) -> Region:
        """A region of at least so many bytes; its content is whatever it was. Errors: EngineError as of `Region`."""
        most = max(num_bytes * SPARE, num_bytes + SMALL_BYTES)
        fitting = [region for region in self._free if num_bytes <= region.num_bytes <= most]
        if fitting:
            best = min(fitting, key=lambda region: region.num_bytes)
            self._free.remove(best)
            return best
        region = Region(num_bytes, is_pinned=self.is_pinned)
        self.num_made += 1
        self.held_bytes += region.num_bytes
        return region

    def give(self, region: Region) -> None:
        """Take a region back; copies from and to it must have ended."""
        self._free.append(region)

    def trim(self) -> None:
        """Give free regions back to the system."""
        self.held_bytes -= sum(region.num_bytes for region in self._free)
        self._free.clear()


def _register(data: Tensor) -> None:
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(data.data_ptr(), data.numel(), 0))
    if code:
        raise EngineError(
            f"the driver refused to pin {data.numel() / 2**30:.1f} GiB of host memory (CUDA error {code}); raise the limit of "
            "locked memory (ulimit -l unlimited), or offload less"
        )


def _unregister(data: Tensor) -> None:
    torch.cuda.synchronize()  # a copy may still be on its way
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(data.data_ptr())
