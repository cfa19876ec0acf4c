"""Seconds of work on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def seconds(
    work: Callable[[], object],
    device: torch.device,
    *,
    rounds: int,
    calls: int = 1,
    warmups: int = 2,
    is_least: bool = False,
) -> float:
    """Median over rounds of the seconds of one call, `calls` of them asked for without a wait; with `is_least` the least of them,
    for differences of small times, which whatever else a host does would drown.

    On a GPU by its own clock, so that the host's wait for the end is not counted.
    """
    for _ in range(warmups):
        work()
    found = []
    for _ in range(rounds):
        if device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            first.record()
            for _ in range(calls):
                work()
            last.record()
            torch.cuda.synchronize(device)
            found.append(first.elapsed_time(last) / 1e3 / calls)
        else:
            begun = time.perf_counter()
            for _ in range(calls):
                work()
            found.append((time.perf_counter() - begun) / calls)
    return min(found) if is_least else statistics.median(found)


def busy(work: Callable[[], object], device: torch.device, *, rounds: int, without: str = "") -> float:
    """Mean seconds that a GPU works on one call: the sum of its kernels, whatever the host takes to start them.

    Kernels with `without` in their name are left out. On a CPU, and where kernels cannot be traced, as `seconds`.
    """
    if device.type != "cuda":
        return seconds(work, device, rounds=rounds)
    for _ in range(2):
        work()
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            work()
        torch.cuda.synchronize(device)
    kernels = [one for one in profile.key_averages() if not without or without not in one.key.lower()]
    found = sum(one.self_device_time_total for one in kernels) / 1e6 / rounds
    return found or seconds(work, device, rounds=rounds)
