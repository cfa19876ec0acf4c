"""What part of the host-to-device bandwidth a loader's batches reach, on batches of several MB.

python -m benchmarks.loader_gpu

Needs a CUDA device. Bandwidth is that of one copy from page-locked memory of a batch's size, measured in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import flowrl as fr
from benchmarks.common import median, table
from benchmarks.loader import rows_of
from flowrl.store.kernels import choose
from flowrl.store.loader import Loader

TARGET = 0.8
ROUNDS = 7


def bandwidth(nbytes: int) -> float:
    """GB/s of copies from page-locked memory, one after another on a stream."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    spent = []
    for _ in range(ROUNDS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        spent.append((time.perf_counter() - start) / 20)
    return nbytes / median(spent[2:]) / 1e9


def copy_times(loader: Loader) -> list[tuple[int, float]]:
    """(bytes, seconds on the device) of each batch's copy, by events around it."""
    from flowrl.store.to_torch import CudaCarrier

    found: list[tuple[int, Any, Any]] = []
    (carrier,) = loader._idle
    assert isinstance(carrier, CudaCarrier)
    ship = carrier.ship

    def timed(arrays: Any, block: Any, nbytes: int) -> Any:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = carrier._stream or torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(
                1_000_000
            )  # all of it is asked for before the device begins: no time of Python is counted
        first.record(stream)
        made = ship(arrays, block, nbytes)
        last.record(stream)
        found.append((nbytes, first, last))
        return made

    carrier.ship = timed  # type: ignore[method-assign]
    try:
        for _ in loader:
            pass
    finally:
        carrier.ship = ship  # type: ignore[method-assign]
    torch.cuda.synchronize()
    return [(nbytes, first.elapsed_time(last) / 1e3) for nbytes, first, last in found]


def throughput(loader: Loader, work: Callable[[], Any] | None = None) -> tuple[float, float, float, float]:
    """(GB/s, rows/s, p50 and p99 of the wait for a batch in us) of an epoch."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    nbytes = rows = 0
    waits = []
    iterator = iter(loader)
    while True:
        start = time.perf_counter()
        part = next(iterator, None)
        if part is None:
            break
        waits.append(time.perf_counter() - start)
        assert isinstance(part, dict)
        nbytes += sum(tensor.nbytes for tensor in part.values())
        rows += len(part["reward"])
        if work is not None:
            work()
        del part
    torch.cuda.synchronize()
    spent = time.perf_counter() - begun
    return nbytes / spent / 1e9, rows / spent, *(1e6 * float(np.percentile(waits, q)) for q in (50, 99))


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernel {choose()}")
    lines = []
    for what, count, width, layout in (
        ("W2 padded", 2048, 64, "padded"), ("W2 packed", 2048, 64, "packed"), ("W1 padded", 4096, 0, "padded"),
        ("W1 packed", 4096, 0, "packed"),
    ):  # fmt: skip
        rows = fr.ExperienceTable()
        rows.append(rows_of(count, width))
        options: dict[str, Any] = {"batch_rows": 32, "layout": layout, "shuffle": True, "pad_multiple": 64}
        for prefetch in (0, 2):
            loader = rows.loader(device="cuda", prefetch=prefetch, **options)
            throughput(loader)
            copies = copy_times(loader)
            mean = sum(nbytes for nbytes, _ in copies) // len(copies)
            limit = bandwidth(mean)
            rate = median([nbytes / seconds / 1e9 for nbytes, seconds in copies])
            runs = [throughput(loader) for _ in range(ROUNDS)]
            weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

            def work(weight: Any = weight) -> None:
                for _ in range(8):
                    weight @ weight
                torch.cuda.current_stream().synchronize()

            waits = [throughput(loader, work)[2:] for _ in range(3)]
            lines.append(
                [
                    what, prefetch, f"{mean / 1e6:.2f}", f"{limit:.1f}", f"{rate:.1f}", f"{rate / limit:.2f}",
                    f"{median([run[0] for run in runs]):.1f}", f"{median([run[1] for run in runs]) / 1e3:.1f}k",
                    f"{median([w[0] for w in waits]):.0f} / {median([w[1] for w in waits]):.0f}",
                ]
            )  # fmt: skip
    header = ["rows", "prefetch", "MB a batch", "limit GB/s", "copy GB/s", "ratio", "drain GB/s", "drain rows/s"]
    print(table([*header, "wait p50 / p99 us"], lines))
    print(f"target: copies at {TARGET} of the limit")


if __name__ == "__main__":
    main()
