"""Rows to padded batches, the ways other stores' users do it: lists with `pad_sequence`, flat columns with a kernel.

The kernel is numba's when it is there, so that a store which hands over flat columns is not slowed by Python here.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from benchmarks.tables.workload import DTYPES

Batch = dict[str, torch.Tensor]

SCALARS: dict[str, Any] = {"reward": np.float32, "sample_index": np.int32}


def pad_list(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Batch:
    """A list of rows to padded tensors [N, L, ...]."""
    made = {name: pad_sequence([torch.from_numpy(row[name]) for row in rows], batch_first=True) for name in names}
    for name, dtype in SCALARS.items():
        if name in rows[0]:
            made[name] = torch.from_numpy(np.array([row[name] for row in rows], dtype))
    return made


def flat_columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, np.ndarray]:
    """A list of rows to values end to end and the int64 bounds of its rows, one pair for prompts and one for responses."""
    made = {name: np.concatenate([row[name] for row in rows]) for name in names}
    made["prompt_offsets"] = np.cumsum([0, *(len(row["prompt_ids"]) for row in rows)])
    made["response_offsets"] = np.cumsum([0, *(len(row["response_ids"]) for row in rows)])
    for name, dtype in SCALARS.items():
        made[name] = np.array([row[name] for row in rows], dtype)
    return made


def pad_slices(columns: Mapping[str, np.ndarray], names: Sequence[str], first: int, stop: int) -> Batch:
    """Rows [first, stop) of flat columns by `pad_sequence` over views of the rows: what a user without a kernel writes."""
    made = {}
    for name in names:
        bounds = columns["prompt_offsets" if name == "prompt_ids" else "response_offsets"][first : stop + 1].tolist()
        rows = [torch.from_numpy(columns[name][a:b]) for a, b in pairwise(bounds)]
        made[name] = pad_sequence(rows, batch_first=True)
    for name in SCALARS:
        if name in columns:
            made[name] = torch.from_numpy(columns[name][first:stop])
    return made


class Staging:
    """Buffers that padded batches are written into, again and again."""

    def __init__(self) -> None:
        self._buffers: dict[str, np.ndarray] = {}

    def room(self, name: str, num_bytes: int) -> np.ndarray:
        held = self._buffers.get(name)
        if held is None or held.nbytes < num_bytes:
            held = self._buffers[name] = np.empty(num_bytes + num_bytes // 4, np.uint8)
        return held[:num_bytes]


@functools.cache
def _kernel() -> Callable[[np.ndarray, np.ndarray, int, np.ndarray], None]:
    def pad(values: np.ndarray, starts: np.ndarray, stops: np.ndarray, out: np.ndarray) -> None:
        """Bytes [starts[i], stops[i]) into out[i], zeros behind them."""
        for i in range(len(starts)):
            size = stops[i] - starts[i]
            out[i, :size] = values[starts[i] : stops[i]]
            out[i, size:] = 0

    try:
        import numba
    except ImportError:
        return pad
    return numba.njit(nogil=True)(pad)


def pad_flat(columns: Mapping[str, np.ndarray], names: Sequence[str], first: int, stop: int, staging: Staging) -> Batch:
    """Rows [first, stop) of flat columns, padded into the staging buffers."""
    made = {}
    for name in names:
        bounds = columns["prompt_offsets" if name == "prompt_ids" else "response_offsets"][first : stop + 1]
        values = columns[name]
        length = int(np.diff(bounds).max())
        width = values.itemsize * int(np.prod(values.shape[1:], dtype=np.int64))
        out = staging.room(name, (stop - first) * length * width).reshape(stop - first, length * width)
        _kernel()(values.reshape(-1).view(np.uint8), bounds[:-1] * width, bounds[1:] * width, out)
        made[name] = torch.from_numpy(out.view(values.dtype).reshape(stop - first, length, *values.shape[1:]))
    for name in SCALARS:
        if name in columns:
            made[name] = torch.from_numpy(np.asarray(columns[name][first:stop]))
    return made


def digest(batch: Mapping[str, Any], names: Sequence[str]) -> dict[str, int]:
    """A checksum of each column, whatever the padding behind its rows, added up over rows so that batches may differ.

    Lengths are those of the ids: a padded id is 0 where ids of the workload are at least 1.
    """
    found = dict.fromkeys(names, 0)
    lengths = {name: row_lengths(np.asarray(batch[name])) for name in ("prompt_ids", "response_ids") if name in batch}
    for name in names:
        values = np.asarray(batch[name]).astype(DTYPES[name], copy=False)  # some stores widen integers
        for row, length in zip(values, lengths["prompt_ids" if name == "prompt_ids" else "response_ids"], strict=True):
            part = np.ascontiguousarray(row[:length])
            if not np.array_equal(row[length:], np.zeros_like(row[length:])):
                raise SystemExit(f"column {name} is not zero behind its rows")
            found[name] += zlib.crc32(part.view(np.uint8).tobytes())
    return found


def row_lengths(ids: np.ndarray) -> np.ndarray:
    """How many ids stand before the zeros at the end of each row."""
    return ids.shape[1] - (ids[:, ::-1] != 0).argmax(axis=1)


def add(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
