"""What the machine allows: the bytes of each batch copied at once, and its padding cleared, into one buffer or two."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.tables.handoff import BATCH
from benchmarks.tables.workload import Workload


class Limit:
    """Copies of the values of 32 rows after another, with nothing to look up."""

    def __init__(self, workload: Workload, names: tuple[str, ...], num_rows: int) -> None:
        self.sources = [workload.values[name].reshape(-1).view(np.uint8) for name in names]
        self.num_rows = num_rows
        self.parts: list[tuple[list[tuple[int, int]], int]] = []
        """Of each batch: bounds in bytes in every column, and bytes of padding."""
        for first in range(0, num_rows, BATCH):
            stop = min(first + BATCH, num_rows)
            bounds, padding = [], 0
            for name in names:
                offsets, width = workload.offsets(name), workload.width(name)
                bounds.append((int(offsets[first]) * width, int(offsets[stop]) * width))
                longest = int(np.diff(offsets[first : stop + 1]).max())
                padding += (stop - first) * longest * width - (bounds[-1][1] - bounds[-1][0])
            self.parts.append((bounds, padding))
        most = max(sum(b - a for a, b in bounds) + padding for bounds, padding in self.parts)
        self.staging = [np.zeros(most, np.uint8) for _ in range(2)]

    def speed(self, *, padded: bool, buffers: int = 1) -> float:
        """Rows a CPU second.

        Args: buffers: how many take turns. A loader whose last batch is still held while it makes the next one has two.
        """
        start = time.process_time()
        for number, (bounds, padding) in enumerate(self.parts):
            staging, at = self.staging[number % buffers], 0
            for source, (first, stop) in zip(self.sources, bounds, strict=True):
                staging[at : at + stop - first] = source[first:stop]
                at += stop - first
            if padded:
                staging[at : at + padding] = 0
        return self.num_rows / max(time.process_time() - start, 1e-9)
