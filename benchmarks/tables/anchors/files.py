"""Stores with files: Hugging Face datasets (in memory here) and Lance."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.tables.anchors.arrow_files import columns_of, record_batch, shared_folder
from benchmarks.tables.handoff import BATCH, CHUNK
from benchmarks.tables.padding import SCALARS, Batch, Staging, flat_columns, pad_flat
from benchmarks.tables.reads import Store, in_batches


class HuggingFace(Store):
    """A Dataset in memory; batches in its NumPy format, padded with `pad_sequence`."""

    name = "HF datasets numpy"
    form = "numpy"

    def __init__(self, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
        import datasets

        datasets.disable_progress_bars()
        chunks = [record_batch(flat_columns(rows[i : i + CHUNK], names), names) for i in range(0, len(rows), CHUNK)]
        self.held = datasets.Dataset(pa.Table.from_batches(chunks)).with_format(self.form)
        self.names = names

    def _padded(self, batch: dict[str, Any]) -> Batch:
        made = {
            name: pad_sequence([torch.as_tensor(row) for row in batch[name]], batch_first=True) for name in self.names
        }
        return made | {name: torch.as_tensor(batch[name]) for name in SCALARS}

    def sequential(self) -> Iterator[Batch]:
        for batch in self.held.iter(batch_size=BATCH):
            yield self._padded(batch)

    def random(self, order: np.ndarray) -> Iterator[Batch]:
        for part in in_batches(order):
            yield self._padded(self.held[part.tolist()])

    def add_column(self, name: str, values: np.ndarray) -> None:
        self.held.add_column(name, values)


class HuggingFaceTorch(HuggingFace):
    name = "HF datasets torch"
    form = "torch"


class Lance(Store):
    """A Lance data set in /dev/shm, padded with a kernel."""

    name = "Lance"
    random_rows = 512

    def __init__(self, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
        import lance

        self.folder, self.names = tempfile.mkdtemp(prefix="flowrl-bench-", dir=shared_folder()), names
        chunks = [record_batch(flat_columns(rows[i : i + CHUNK], names), names) for i in range(0, len(rows), CHUNK)]
        self.held = lance.write_dataset(pa.Table.from_batches(chunks), f"{self.folder}/rows")
        self.staging = Staging()

    def _padded(self, batch: pa.RecordBatch) -> Batch:
        return pad_flat(columns_of(batch, self.names), self.names, 0, batch.num_rows, self.staging)

    def sequential(self) -> Iterator[Batch]:
        for batch in self.held.to_batches(batch_size=BATCH, columns=[*self.names, *SCALARS]):
            yield self._padded(batch)

    def random(self, order: np.ndarray) -> Iterator[Batch]:
        for part in in_batches(order):
            taken = self.held.take(part.tolist(), columns=[*self.names, *SCALARS])
            yield self._padded(taken.combine_chunks().to_batches()[0])

    def add_column(self, name: str, values: np.ndarray) -> None:
        new = pa.table({name: pa.array(values)})
        self.held.add_columns(new.to_reader(), reader_schema=new.schema)

    def close(self) -> None:
        self.held = None
        shutil.rmtree(self.folder)
