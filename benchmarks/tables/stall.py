"""How long a trainer that works 3 ms on each batch waits for the next one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.tables.handoff import BATCH
from benchmarks.tables.padding import Batch, pad_list

WORK_S = 0.003
WARM = 8
"""Batches before the ones that count."""


class Trainer:
    """Matrix products that take 3 ms; like a model's, they let other threads of Python run."""

    def __init__(self) -> None:
        width = 512
        self.weight = torch.randn(width, width)
        self.rows = torch.randn(64, width)
        per_64 = min(self._timed() for _ in range(20))
        self.rows = torch.randn(max(int(64 * WORK_S / per_64), 1), width)

    def _timed(self) -> float:
        start = time.perf_counter()
        self.rows @ self.weight
        return time.perf_counter() - start

    def waits(self, batches: Iterable[Any]) -> list[float]:
        """Seconds until each batch came."""
        found = []
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            if next(iterator, None) is None:
                return found[min(WARM, len(found) // 2) :]
            found.append(time.perf_counter() - start)
            self.rows @ self.weight


class _Dataset(torch.utils.data.Dataset):
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.rows[number]


class _Collate:
    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def __call__(self, rows: list[dict[str, Any]]) -> Batch:
        return pad_list(rows, self.names)


def torch_loader(rows: list[dict[str, Any]], names: Sequence[str], workers: int) -> Iterator[Batch] | Any:
    """torch's DataLoader over a list of rows."""
    return torch.utils.data.DataLoader(
        _Dataset(rows),
        batch_size=BATCH,
        shuffle=True,
        collate_fn=_Collate(names),
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def percentiles(seconds: Sequence[float], *wanted: float) -> list[float]:
    return [float(np.percentile(np.asarray(seconds), one)) for one in wanted]
