"""All rows of a store as padded batches of 32, one after the other and in a random order; and a column added to them.

Measured in CPU seconds of this process, all of its threads together, so that a store which uses two cores is not ahead for
it and a neighbour on the machine disturbs less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.tables.handoff import BATCH
from benchmarks.tables.padding import Batch, add, digest


class Store:
    """Holds rows; `rows` is a list of dicts of arrays."""

    name = ""
    random_rows = 4096
    """Rows that a random pass reads: fewer where it would take long."""

    def __init__(self, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
        raise NotImplementedError

    def sequential(self) -> Iterator[Batch]:
        raise NotImplementedError

    def random(self, order: np.ndarray) -> Iterator[Batch]:
        """Batches of the rows in this order."""
        raise NotImplementedError

    def close(self) -> None:
        pass


def in_batches(order: np.ndarray) -> Iterator[np.ndarray]:
    yield from np.split(order, range(BATCH, len(order), BATCH))


class Rows:
    """What the stores are filled with, and what must come out of them again."""

    def __init__(self, rows: list[dict[str, Any]], names: Sequence[str]) -> None:
        self.rows, self.names = rows, tuple(names)
        self.digests = [digest({name: row[name][None] for name in names}, names) for row in rows]

    def digest(self, numbers: Sequence[int]) -> dict[str, int]:
        found = dict.fromkeys(self.names, 0)
        for number in numbers:
            found = add(found, self.digests[number])
        return found


def speed(batches: Iterator[Batch], num_rows: int, clock: Callable[[], float] = time.process_time) -> float:
    """Rows a second."""
    start = clock()
    got = sum(len(batch["response_ids"]) for batch in batches)
    seconds = clock() - start
    if got != num_rows:
        raise SystemExit(f"{got} of {num_rows} rows were read")
    return num_rows / max(seconds, 1e-9)


def check(store: Store, rows: Rows, order: np.ndarray) -> None:
    """The bytes that come out are those that went in."""
    check_batches(f"{store.name}, in order", store.sequential(), rows, range(len(rows.rows)))
    check_batches(f"{store.name}, at random", store.random(order), rows, order.tolist())


def check_batches(what: str, batches: Iterator[Batch], rows: Rows, numbers: Sequence[int]) -> None:
    """These are the rows of these numbers."""
    found = dict.fromkeys(rows.names, 0)
    for batch in batches:
        found = add(found, digest(batch, rows.names))
    if found != rows.digest(numbers):
        raise SystemExit(f"{what}: other values came out")
