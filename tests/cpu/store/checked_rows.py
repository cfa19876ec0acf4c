"""Rows that tell whether they are right: every value follows from the row's number."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.schema.ragged import Ragged
from flowrl.schema.types import SAMPLE, TOKEN, ColumnType
from flowrl.store import folders
from flowrl.store.rows import RowBatch

FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")
LONG_S = 60.0

TYPES: dict[str, ColumnType] = {
    "number": SAMPLE.i64,
    "response_ids": TOKEN.i32,
    "rollout_logprobs": TOKEN.f32,
    "response": SAMPLE.str,
    "loss_mask": TOKEN.bool,
}


def lengths_of(numbers: np.ndarray, longest: int = 24) -> np.ndarray:
    """Tokens of each row."""
    return 1 + numbers * 7 % longest


def columns_of(numbers: np.ndarray, longest: int = 24) -> dict[str, Any]:
    """Values of the rows with these numbers."""
    lengths = lengths_of(numbers, longest)
    offsets = np.zeros(len(numbers) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    token = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    ids = (np.repeat(numbers, lengths) * 31 + token).astype(np.int32)
    return {
        "number": numbers,
        "response_ids": Ragged(ids, offsets),
        "rollout_logprobs": Ragged((ids % 1000).astype(np.float32) + np.float32(0.5), offsets),
        "response": np.asarray([f"row {n}" for n in numbers.tolist()], dtype=object),
        "loss_mask": Ragged(ids % 3 == 0, offsets),
    }


def batch_of(start: int, stop: int, *, longest: int = 24, names: tuple[str, ...] = tuple(TYPES)) -> RowBatch:
    """Rows `start` to `stop` as a batch."""
    columns = columns_of(np.arange(start, stop), longest)
    return RowBatch({n: columns[n] for n in names}, {n: TYPES[n] for n in names}, stop - start)


def dicts_of(start: int, stop: int) -> list[dict[str, Any]]:
    """The same as dicts of arrays."""
    columns = columns_of(np.arange(start, stop))
    return [{name: values[row] for name, values in columns.items()} for row in range(stop - start)]


def check_rows(batch: Any, numbers: np.ndarray | None = None, *, longest: int = 24) -> np.ndarray:
    """Assert that each row's values follow from its number (and that these are `numbers`); the numbers."""
    found = np.array(batch["number"])
    if numbers is not None:
        assert np.array_equal(found, numbers), f"expected rows {numbers[:5]}..., found {found[:5]}... ({len(found)})"
    wanted = columns_of(found, longest)
    for name in batch.names:
        if name not in wanted or name == "number":
            continue
        mine, theirs = batch[name], wanted[name]
        if isinstance(mine, Ragged):
            assert np.array_equal(mine.offsets, theirs.offsets), f"lengths of {name} in rows {found[:3]}..."
            assert np.array_equal(mine.values, theirs.values), f"values of {name} in rows {found[:3]}..."
        else:
            assert mine.tolist() == theirs.tolist(), f"values of {name} in rows {found[:3]}..."
    return found


def check_padded(batch: dict[str, np.ndarray]) -> np.ndarray:
    """The same for a batch in layout "padded"."""
    numbers = batch["number"].copy()
    lengths = lengths_of(numbers)
    ids, mask = batch["response_ids"], batch["mask"]
    column = np.arange(ids.shape[1])[None, :]
    wanted = np.where(column < lengths[:, None], numbers[:, None] * 31 + column, 0)
    assert np.array_equal(ids, wanted), f"tokens of rows {numbers[:3]}..."
    assert np.array_equal(mask, column < lengths[:, None]), f"mask of rows {numbers[:3]}..."
    return numbers


def until(condition: Callable[[], bool], what: str, timeout_s: float = LONG_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.001)


def memory_bytes(name: str) -> int:
    """What a table takes in shared memory, as the system counts it."""
    total = 0
    for file in (folders.shm_folder() / name).glob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_blocks * 512
    return total


def tables_in_memory() -> set[str]:
    """Folders of tables in shared memory, whosever they are."""
    above = folders.shm_folder()
    return {entry.name for entry in os.scandir(above) if entry.is_dir()} if above.exists() else set()


def has_files(folder: Path) -> bool:
    return folder.exists() and any(folder.iterdir())
