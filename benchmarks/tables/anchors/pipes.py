"""Queues of the standard library and of torch, with rows as they are or padded to the longest they may be."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import multiprocessing as torch_multiprocessing

from benchmarks.tables.handoff import BATCH, Channel
from benchmarks.tables.padding import SCALARS, Batch, Staging, flat_columns, pad_flat, pad_list
from benchmarks.tables.workload import DTYPES, MAX_PROMPT, MAX_RESPONSE


class PickledRows(Channel):
    """`multiprocessing.Queue` with the list of rows; `pad_sequence` on the other side."""

    name = "mp.Queue list[dict]"

    def unpacked(self, chunk: list[dict[str, Any]], names: Sequence[str]) -> Iterator[Batch]:
        for first in range(0, len(chunk), BATCH):
            yield pad_list(chunk[first : first + BATCH], names)


class PickledColumns(Channel):
    """`multiprocessing.Queue` with flat columns, padded by a kernel on the other side."""

    name = "mp.Queue flat columns"

    def packed(self, rows: list[dict[str, Any]], names: Sequence[str]) -> Any:
        return flat_columns(rows, names)

    def unpacked(self, chunk: dict[str, np.ndarray], names: Sequence[str]) -> Iterator[Batch]:
        staging = Staging()
        for first in range(0, len(chunk["reward"]), BATCH):
            yield pad_flat(chunk, names, first, min(first + BATCH, len(chunk["reward"])), staging)


def padded_to_the_most(rows: list[dict[str, Any]], names: Sequence[str]) -> Any:
    """A TensorDict [N] whose columns have the longest lengths there may be: what trainers with fixed shapes pass on."""
    from tensordict import TensorDict

    columns = {}
    for name in names:
        most = MAX_PROMPT if name == "prompt_ids" else MAX_RESPONSE
        made = np.zeros((len(rows), most, *rows[0][name].shape[1:]), DTYPES[name])
        for row, values in zip(made, rows, strict=True):
            row[: len(values[name])] = values[name]
        columns[name] = torch.from_numpy(made)
    for name, dtype in SCALARS.items():
        columns[name] = torch.from_numpy(np.array([row[name] for row in rows], dtype))
    columns["lengths"] = torch.tensor([[len(row["prompt_ids"]), len(row["response_ids"])] for row in rows])
    return TensorDict(columns, batch_size=[len(rows)])


def trimmed(part: Any, names: Sequence[str]) -> Batch:
    """Views that end where the longest row of the batch ends."""
    prompt, response = part["lengths"].max(dim=0).values.tolist()
    made = {name: part[name][:, : prompt if name == "prompt_ids" else response] for name in names}
    return made | {name: part[name] for name in SCALARS}


class DataProtoBytes(Channel):
    """What verl's DataProto does when it is pickled: consolidate the padded TensorDict, `torch.save` it into bytes."""

    name = "DataProto-style bytes"

    def packed(self, rows: list[dict[str, Any]], names: Sequence[str]) -> Any:
        held = io.BytesIO()
        torch.save(padded_to_the_most(rows, names).consolidate(), held)
        return held.getvalue()

    def unpacked(self, chunk: bytes, names: Sequence[str]) -> Iterator[Batch]:
        whole = torch.load(io.BytesIO(chunk), weights_only=False)
        for first in range(0, len(whole), BATCH):
            yield trimmed(whole[first : first + BATCH], names)


class TorchShared(Channel):
    """`torch.multiprocessing.Queue` with the padded TensorDict: its tensors go through shared memory."""

    name = "torch.multiprocessing padded"

    def __init__(self) -> None:
        super().__init__()
        self.queue = torch_multiprocessing.get_context("spawn").Queue()

    def packed(self, rows: list[dict[str, Any]], names: Sequence[str]) -> Any:
        return padded_to_the_most(rows, names)

    def unpacked(self, chunk: Any, names: Sequence[str]) -> Iterator[Batch]:
        for first in range(0, len(chunk), BATCH):
            yield trimmed(chunk[first : first + BATCH], names)
