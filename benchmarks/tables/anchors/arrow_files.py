"""Arrow's IPC files in /dev/shm, raw and with LZ4: a file per chunk, handed over by name or read again and again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.tables.handoff import BATCH, CHUNK, Channel
from benchmarks.tables.padding import SCALARS, Batch, Staging, flat_columns, pad_flat
from benchmarks.tables.reads import Store, in_batches
from benchmarks.tables.workload import DTYPES, LOGITS, TOP


def record_batch(columns: dict[str, np.ndarray], names: Sequence[str]) -> pa.RecordBatch:
    """Flat columns as large lists over the same memory; booleans as bytes; the 64 logits of a token as 64 list values."""
    made = {}
    for name in names:
        bounds = columns["prompt_offsets" if name == "prompt_ids" else "response_offsets"]
        values = columns[name]
        if values.dtype == np.bool_:
            values = values.view(np.uint8)
        if values.ndim > 1:
            bounds = bounds * values.shape[1]
        made[name] = pa.LargeListArray.from_arrays(pa.array(bounds), pa.array(values.reshape(-1)))
    return pa.RecordBatch.from_pydict({**made, **{name: pa.array(columns[name]) for name in SCALARS}})


def columns_of(batch: pa.RecordBatch, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The flat columns again, without a copy."""
    made = {}
    for name in names:
        column = batch.column(name)
        bounds = np.asarray(column.offsets)
        values = column.values.to_numpy(zero_copy_only=True)
        if name == LOGITS:
            bounds, values = bounds // TOP, values.reshape(-1, TOP)
        made[name] = values.view(DTYPES[name])
        made["prompt_offsets" if name == "prompt_ids" else "response_offsets"] = bounds
    return made | {name: batch.column(name).to_numpy() for name in SCALARS}


def shared_folder() -> Path:
    """In memory where there is /dev/shm."""
    return Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())


class ArrowFiles(Channel):
    """Each chunk is written to a file; its name goes through a queue; the other side maps it and pads with a kernel."""

    name = "Arrow IPC file"
    compression: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="flowrl-bench-", dir=shared_folder())
        self.number = 0

    def packed(self, rows: list[dict[str, Any]], names: Sequence[str]) -> Any:
        batch = record_batch(flat_columns(rows, names), names)
        self.number += 1
        path = os.path.join(self.folder, f"{self.number}.arrow")
        write(path, batch, self.compression)
        return path

    def unpacked(self, chunk: str, names: Sequence[str]) -> Iterator[Batch]:
        columns = columns_of(read(chunk), names)
        os.unlink(chunk)
        staging = Staging()
        for first in range(0, len(columns["reward"]), BATCH):
            yield pad_flat(columns, names, first, min(first + BATCH, len(columns["reward"])), staging)

    def close(self) -> None:
        super().close()
        for path in Path(self.folder).iterdir():
            path.unlink()
        os.rmdir(self.folder)


class ArrowFilesLz4(ArrowFiles):
    name = "Arrow IPC file LZ4"
    compression = "lz4"


def write(path: str, batch: pa.RecordBatch, compression: str | None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)


def read(path: str) -> pa.RecordBatch:
    with pa.memory_map(path) as source:
        return pa.ipc.open_file(source).get_batch(0)


class ArrowReader(Store):
    """A file per chunk, opened once; a row is read from its file and padded as users of Arrow do it.

    With compression a row costs the decompression of its chunk: the format knows no smaller piece.
    """

    name = "Arrow IPC file, a row at a time"
    compression: str | None = None

    def __init__(self, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
        self.names = names
        self.folder = tempfile.mkdtemp(prefix="flowrl-bench-", dir=shared_folder())
        self.paths = []
        for first in range(0, len(rows), CHUNK):
            path = os.path.join(self.folder, f"{first}.arrow")
            write(path, record_batch(flat_columns(rows[first : first + CHUNK], names), names), self.compression)
            self.paths.append(path)
        self.files = [pa.ipc.open_file(pa.memory_map(path)) for path in self.paths]

    def sequential(self) -> Iterator[Batch]:
        for file in self.files:
            batch = file.get_batch(0)
            for first in range(0, batch.num_rows, BATCH):
                yield self._padded([(batch, row) for row in range(first, min(first + BATCH, batch.num_rows))])

    def random(self, order: np.ndarray) -> Iterator[Batch]:
        for part in in_batches(order):
            yield self._padded([(self.files[row // CHUNK].get_batch(0), row % CHUNK) for row in part.tolist()])

    def _padded(self, rows: list[tuple[pa.RecordBatch, int]]) -> Batch:
        made = {}
        for name in self.names:
            parts = [self._row(batch.column(name), row, name) for batch, row in rows]
            made[name] = pad_sequence(parts, batch_first=True)
        return made

    def _row(self, column: Any, row: int, name: str) -> torch.Tensor:
        values = column[row].values.to_numpy(zero_copy_only=True)
        values = values.reshape(-1, TOP) if name == LOGITS else values
        return torch.from_numpy(values.view(DTYPES[name]))

    def add_column(self, name: str, values: np.ndarray) -> None:
        """Files are rewritten: they cannot grow by a column."""
        for number, path in enumerate(self.paths):
            batch = read(path)
            first = number * CHUNK
            grown = batch.append_column(name, pa.array(values[first : first + batch.num_rows]))
            write(path + ".new", grown, self.compression)
            os.replace(path + ".new", path)
        self.files = [pa.ipc.open_file(pa.memory_map(path)) for path in self.paths]

    def close(self) -> None:
        for path in self.paths:
            os.unlink(path)
        os.rmdir(self.folder)


class ArrowLz4Reader(ArrowReader):
    name = "Arrow IPC file LZ4, a row at a time"
    compression = "lz4"
    random_rows = 64


class ArrowLz4ByChunk(ArrowLz4Reader):
    """The same files by someone who decompresses each chunk once for all rows of a batch that lie in it."""

    name = "Arrow IPC file LZ4, once a chunk"

    def random(self, order: np.ndarray) -> Iterator[Batch]:
        for part in in_batches(order):
            opened = {chunk: self.files[chunk].get_batch(0) for chunk in np.unique(part // CHUNK).tolist()}
            yield self._padded([(opened[row // CHUNK], row % CHUNK) for row in part.tolist()])
