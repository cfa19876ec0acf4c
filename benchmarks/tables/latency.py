"""From the append of a group of 8 rows until another process has them padded."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.tables.handoff import WAIT_S
from benchmarks.tables.padding import pad_list
from benchmarks.tables.workload import GROUP, Workload

WARM = 50


def measure(
    workload: Workload, names: tuple[str, ...], put: Callable[[list[dict[str, Any]]], Any], seen: Any, groups: int
) -> list[float]:
    """Seconds for each group; the next is put when the last has arrived.

    Args: seen: a connection that brings the time at which the consumer had the group padded.
    """
    found = []
    for number in range(WARM + groups):
        first = number * GROUP % workload.size.rows
        rows = workload.rows(names, first, first + GROUP)
        start = time.perf_counter()
        put(rows)
        if not seen.poll(WAIT_S):
            raise SystemExit(f"a group of {GROUP} rows did not arrive within {WAIT_S:.0f} s")
        found.append(seen.recv() - start)
    return found[WARM:]


def _piped(source: Any, seen: Any, names: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    while (rows := source.recv()) is not None:
        pad_list(rows, names)
        seen.send(time.perf_counter())


def through_a_pipe(workload: Workload, names: tuple[str, ...], groups: int) -> list[float]:
    """Rows pickled into a pipe, padded by `pad_sequence`."""
    context = multiprocessing.get_context("spawn")
    out, rows = context.Pipe()
    seen, told = context.Pipe()
    process = context.Process(target=_piped, args=(rows, told, names), daemon=True)
    process.start()
    try:
        return measure(workload, names, out.send, seen, groups)
    finally:
        out.send(None)
        process.join(10)
        if process.is_alive():
            process.kill()
