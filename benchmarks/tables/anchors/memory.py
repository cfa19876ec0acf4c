"""Stores in the memory of one process: a list, a TensorDict padded to the most, cpprb, torchrl."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.tables.anchors.arrow_files import shared_folder
from benchmarks.tables.anchors.pipes import padded_to_the_most
from benchmarks.tables.handoff import BATCH
from benchmarks.tables.padding import SCALARS, Batch, pad_list
from benchmarks.tables.reads import Store, in_batches


class ListOfRows(Store):
    """A list of dicts, padded with torch's `pad_sequence`."""

    name = "list + pad_sequence"

    def __init__(self, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
        self.rows, self.names = [{name: np.copy(value) for name, value in row.items()} for row in rows], names

    def sequential(self) -> Iterator[Batch]:
        for first in range(0, len(self.rows), BATCH):
            yield pad_list(self.rows[first : first + BATCH], self.names)

    def random(self, order: np.ndarray) -> Iterator[Batch]:
        for part in in_batches(order):
            yield pad_list([self.rows[row] for row in part], self.names)

    def add_column(self, name: str, values: np.ndarray) -> None:
        for row, value in zip(self.rows, values.tolist(), strict=True):
            row[name] = value


class PaddedTensorDict(Store):
    """A TensorDict padded to the most; a batch is cut to its longest row and copied."""

    name = "tensordict padded, trimmed"

    def __init__(self, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
        self.held, self.names = padded_to_the_most(rows, names), names

    def _trimmed(self, part: Any, copy: Any) -> Batch:
        prompt, response = part["lengths"].max(dim=0).values.tolist()
        made = {name: copy(part[name][:, : prompt if name == "prompt_ids" else response]) for name in self.names}
        return made | {name: copy(part[name]) for name in SCALARS}

    def sequential(self) -> Iterator[Batch]:
        for first in range(0, len(self.held), BATCH):
            yield self._trimmed(self.held[first : first + BATCH], torch.clone)

    def random(self, order: np.ndarray) -> Iterator[Batch]:
        for part in in_batches(order):
            yield self._trimmed(self.held[torch.from_numpy(part)], lambda values: values)  # indexing has copied

    def add_column(self, name: str, values: np.ndarray) -> None:
        self.held[name] = torch.from_numpy(values)


class Cpprb(Store):
    """cpprb's ReplayBuffer with rows of a fixed shape."""

    name = "cpprb"

    def __init__(self, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
        from cpprb import ReplayBuffer

        padded = {name: value.numpy() for name, value in padded_to_the_most(rows, names).items() if name != "lengths"}
        shapes = {
            name: {"shape": value.shape[1:], "dtype": value.dtype} for name, value in padded.items() if value.ndim > 1
        }
        scalars = {name: {"shape": (1,), "dtype": value.dtype} for name, value in padded.items() if value.ndim == 1}
        self.held, self.num_rows = ReplayBuffer(len(rows), shapes | scalars), len(rows)
        self.held.add(**padded)

    def _read(self, part: np.ndarray) -> Batch:
        return {name: torch.from_numpy(value) for name, value in self.held._encode_sample(part).items()}

    def sequential(self) -> Iterator[Batch]:
        return self.random(np.arange(self.num_rows))

    def random(self, order: np.ndarray) -> Iterator[Batch]:
        for part in in_batches(order):
            yield self._read(part)


class TorchrlMemmap(Store):
    """torchrl's ReplayBuffer over LazyMemmapStorage in /dev/shm, padded to the most."""

    name = "torchrl LazyMemmap"

    def __init__(self, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
        from torchrl.data import LazyMemmapStorage, ReplayBuffer

        self.folder = tempfile.mkdtemp(prefix="flowrl-bench-", dir=shared_folder())
        self.held, self.num_rows = (
            ReplayBuffer(storage=LazyMemmapStorage(len(rows), scratch_dir=self.folder)),
            len(rows),
        )
        self.held.extend(padded_to_the_most(rows, names))

    def sequential(self) -> Iterator[Batch]:
        for first in range(0, self.num_rows, BATCH):
            part = self.held[first : min(first + BATCH, self.num_rows)]
            yield {name: value.clone() for name, value in part.items()}

    def random(self, order: np.ndarray) -> Iterator[Batch]:
        for part in in_batches(order):
            yield dict(self.held[torch.from_numpy(part)].items())

    def close(self) -> None:
        self.held = None
        shutil.rmtree(self.folder)
