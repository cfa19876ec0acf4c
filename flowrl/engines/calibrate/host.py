"""The host of the devices: copies to and from it, and Adam on its CPUs. All processes do so at the same time."""

from __future__ import annotations

import torch

from flowrl.engines.calibrate.effort import Effort
from flowrl.engines.calibrate.timing import seconds


def copies(device: torch.device, effort: Effort) -> dict[str, list[tuple[int, float]]]:
    """`to_device` and `to_host` -> (bytes, seconds) from and into page-locked memory. On a CPU, from memory to memory."""
    found: dict[str, list[tuple[int, float]]] = {"to_device": [], "to_host": []}
    for size in effort.host_copy_bytes:
        here = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda").random_()
        there = torch.empty(size, dtype=torch.uint8, device=device)
        for name, source, target in (("to_device", here, there), ("to_host", there, here)):

            def work(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
                target.copy_(source, non_blocking=True)

            found[name].append((size, seconds(work, device, rounds=effort.rounds, calls=4)))
    return found


def adam_params_s(effort: Effort, processes: int) -> float:
    """Parameters per second of this process: fp32 Adam on the CPU, its part of the cores."""
    count = effort.host_adam_params // processes
    weight = torch.nn.Parameter(torch.randn(count))
    weight.grad = torch.randn(count)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return count / seconds(optimizer.step, torch.device("cpu"), rounds=effort.rounds)
