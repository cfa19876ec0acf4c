"""How much memory a piece of work takes: the device's peak where there is CUDA, else what the process has resident."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, Protocol


class Meter(Protocol):
    """Measures one piece of work after the other."""

    what: str
    """`device`: peak of the device's allocator during the work. `process`: resident memory of the process after it."""

    def begin(self) -> None: ...

    def end(self) -> int:
        """Bytes since `begin`, 0 where the system does not tell. What was launched on a device has ended when it returns."""
        ...


class CudaMeter:
    """Peak of what PyTorch's allocator has handed out on the current device, of this process."""

    what = "device"

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda

    def begin(self) -> None:
        self._cuda.synchronize()
        self._cuda.reset_peak_memory_stats()

    def end(self) -> int:
        self._cuda.synchronize()  # else the work is charged to whatever comes next
        return int(self._cuda.max_memory_allocated())


class ProcessMeter:
    """Resident memory of the whole process: Python, libraries and all."""

    what = "process"

    def begin(self) -> None:
        """Nothing: only the amount at the end is known."""

    def end(self) -> int:
        return resident_bytes()


def open_meter(devices: Iterable[str]) -> Meter:
    """A meter for models on these devices (`Host.device`). PyTorch is not imported for it: what is on a GPU has done so."""
    torch: Any = sys.modules.get("torch")
    is_cuda = torch is not None and any(device.startswith("cuda") for device in devices)
    return CudaMeter(torch) if is_cuda else ProcessMeter()


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system has no /proc."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0
