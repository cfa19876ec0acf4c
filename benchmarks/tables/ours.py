"""The experience table, the ways the other stores are measured."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

import flowrl as fr
from benchmarks.tables.handoff import AHEAD, BATCH, CHUNK, WAIT_S, Channel
from benchmarks.tables.latency import measure
from benchmarks.tables.padding import Batch
from benchmarks.tables.reads import Store
from benchmarks.tables.workload import GROUP, LOGITS, TOP, W1, W2, Workload
from flowrl.schema.types import ColumnType
from flowrl.store import kernels

TYPES: dict[str, ColumnType] = {LOGITS: fr.TOKEN.f16[TOP]}
"""Of the columns that are no standard ones."""
KERNELS = ("numba", "numpy")


def name_of(kernel: str) -> str:
    return f"ExperienceTable, {kernel}"


class TableChannel(Channel):
    """`append` here, `stream` there. At most four chunks of rows that nobody has used: append waits for room."""

    def __init__(self, kernel: str) -> None:
        self.name, self.kernel = name_of(kernel), kernel
        self.tables = {
            names: fr.ExperienceTable(max_rows=AHEAD * CHUNK, on_full="wait", timeout_s=WAIT_S) for names in (W1, W2)
        }
        self.streams: dict[tuple[str, ...], Any] = {}

    def begin(self, names: Sequence[str], num_rows: int, *, check: bool) -> None:
        self.table = self.tables[tuple(names)]

    def put(self, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
        self.table.append(rows, TYPES)

    def batches(self, names: Sequence[str], num_rows: int) -> Iterator[Batch]:
        stream = self.streams.get(tuple(names))
        if stream is None:
            table = self.tables[tuple(names)]
            stream = self.streams[tuple(names)] = table.stream(
                "train", BATCH, layout="padded", timeout_s=WAIT_S, ahead=CHUNK // BATCH
            )
        got = 0
        with kernels.forced(self.kernel):
            while got < num_rows:
                batch = next(stream)
                got += len(batch["response_ids"])
                yield {name: torch.from_numpy(values) for name, values in batch.items()}

    def close(self) -> None:
        for table in self.tables.values():
            table.close()


class TableStore(Store):
    """A table in shared memory, read by its loader."""

    def __init__(self, rows: list[dict[str, Any]], names: Sequence[str], kernel: str = "auto") -> None:
        self.name, self.kernel, self.names = name_of(kernel), kernel, tuple(names)
        self.table = fr.ExperienceTable()
        for first in range(0, len(rows), CHUNK):
            self.table.append(rows[first : first + CHUNK], TYPES)

    def _read(self, layout: str = "padded", **options: Any) -> Iterator[Any]:
        with (
            kernels.forced(self.kernel),
            contextlib.closing(
                self.table.loader(BATCH, columns=self.names, layout=layout, device="cpu", **options)
            ) as loader,
        ):
            yield from loader

    def sequential(self) -> Iterator[Batch]:
        return self._read()

    def random(self, order: np.ndarray) -> Iterator[Batch]:
        """In an order of its own."""
        return self._read(shuffle=True)

    def reusing(self, *, shuffle: bool = False) -> Iterator[Batch]:
        """Each batch in the memory of the one before."""
        return self._read(shuffle=shuffle, reuse=True)

    def packed(self) -> Iterator[Batch]:
        """Values end to end; yields what `speed` counts."""
        for batch in self._read("packed"):
            yield {"response_ids": batch["cu_seqlens"][1:]}

    def prefetched(self) -> Any:
        """A loader with a thread that makes batches ahead."""
        return self.table.loader(BATCH, columns=self.names, layout="padded", device="cpu", shuffle=True, prefetch=2)

    def add_column(self, name: str, values: np.ndarray) -> None:
        self.table.add_column(name, values, fr.SAMPLE.f32)

    def close(self) -> None:
        self.table.close()


# ----------------------------------------------------------------------------------------------------------------- bytes


def stored_bytes(workload: Workload, names: Sequence[str], num_rows: int, **options: Any) -> tuple[int, int]:
    """(bytes of the values as a sampler gives them, bytes that the table holds)"""
    everything = np.arange(num_rows)
    raw = workload.payload(tuple(name for name in names if name != "response"), everything)
    with fr.ExperienceTable(**options) as table:
        for first in range(0, num_rows, CHUNK):
            stop = min(first + CHUNK, num_rows)
            rows = [
                {name: workload.one(name, row) for name in names if name != "response"} for row in range(first, stop)
            ]
            if "response" in names:
                for row, values in zip(range(first, stop), rows, strict=True):
                    values["response"] = workload.texts[row]
            table.append(rows, TYPES)
        if "response" in names:
            raw += sum(len(text.encode()) for text in workload.texts[:num_rows])
        if options.get("compression") is not None:
            table.compress()
        return raw, table.stats().stored_bytes


# --------------------------------------------------------------------------------------------------------------- latency


def _watch(table: Any, kernel: str, spin: bool, seen: Any) -> None:
    """The consumer: claims 8 rows, pads them, says when."""
    torch.set_num_threads(1)
    with table, kernels.forced(kernel):
        seen.send("ready")
        while (claimed := _next(table, spin, seen)) is not None:
            with claimed:
                claimed.padded()
                seen.send(time.perf_counter())


def _next(table: Any, spin: bool, seen: Any) -> Any:
    if not spin:
        return table.claim("train", GROUP, at_least=GROUP, wait_s=WAIT_S)
    while not seen.poll(0):
        if (claimed := table.claim("train", GROUP, at_least=GROUP)) is not None:
            return claimed
    return None


def group_latency(workload: Workload, names: tuple[str, ...], kernel: str, groups: int, *, spin: bool) -> list[float]:
    """Seconds from append to padded in another process."""
    context = multiprocessing.get_context("spawn")
    seen, told = context.Pipe()
    with fr.ExperienceTable(max_rows=CHUNK, on_full="wait", timeout_s=WAIT_S) as table:
        process = context.Process(target=_watch, args=(table, kernel, spin, told), daemon=True)
        process.start()
        try:
            if not seen.poll(WAIT_S):
                raise SystemExit(f"the consumer did not start within {WAIT_S:.0f} s")
            seen.recv()
            return measure(workload, names, lambda rows: table.append(rows, TYPES), seen, groups)
        finally:
            table.finish()
            seen.send("enough")
            process.join(10)
            if process.is_alive():
                process.kill()
