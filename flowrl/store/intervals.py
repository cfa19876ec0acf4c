"""Sets of row numbers, kept as the intervals they are made of.

    rows = RowSet([(0, 256)])
    rows.remove(32, 64)
    rows.pairs()               # [(0, 32), (64, 256)]
    first_of(8, [rows])        # [(0, 8)]: the first 8 of them

Rows are appended, claimed and evicted in runs, so a set of millions of numbers has a handful of intervals.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

Pairs = list[tuple[int, int]]
"""Disjoint, sorted, half-open intervals."""


class RowSet:
    """A set of row numbers. Adding or removing an interval costs the logarithm of the number of intervals."""

    __slots__ = ("_count", "_starts", "_stops")

    def __init__(self, pairs: Iterable[Sequence[int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._count = 0
        for start, stop in pairs:
            self.add(start, stop)

    @classmethod
    def of(cls, numbers: np.ndarray) -> RowSet:
        """From row numbers in any order, repeated or not."""
        made = cls()
        found = np.unique(np.asarray(numbers, np.int64))
        if len(found):
            breaks = np.flatnonzero(np.diff(found) != 1) + 1
            made._starts = found[np.concatenate([[0], breaks])].tolist()
            made._stops = (found[np.concatenate([breaks - 1, [len(found) - 1]])] + 1).tolist()
            made._count = len(found)
        return made

    def __len__(self) -> int:
        return self._count

    def __bool__(self) -> bool:
        return self._count > 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._stops, strict=True)

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self._starts, number) - 1
        return place >= 0 and number < self._stops[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowSet) and self._starts == other._starts and self._stops == other._stops

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"RowSet({self.pairs()})"

    def pairs(self) -> Pairs:
        return list(self)

    def copy(self) -> RowSet:
        made = RowSet()
        made._starts, made._stops, made._count = self._starts.copy(), self._stops.copy(), self._count
        return made

    def numbers(self) -> np.ndarray:
        """All of them, ascending, int64 [N]."""
        if not self._starts:
            return np.zeros(0, np.int64)
        return np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in self])

    def add(self, start: int, stop: int) -> None:
        if stop <= start:
            return
        if self._stops and start >= self._stops[-1]:  # the usual case: at the end
            if start == self._stops[-1]:
                self._stops[-1] = stop
            else:
                self._starts.append(start)
                self._stops.append(stop)
            self._count += stop - start
            return
        low = bisect_left(self._stops, start)
        high = bisect_right(self._starts, stop)
        if low < high:
            self._count -= sum(b - a for a, b in zip(self._starts[low:high], self._stops[low:high], strict=True))
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._starts[low:high] = [start]
        self._stops[low:high] = [stop]
        self._count += stop - start

    def remove(self, start: int, stop: int) -> None:
        starts = self._starts
        if starts and start <= starts[0] < stop < self._stops[0]:  # the usual case: at the front
            self._count -= stop - starts[0]
            starts[0] = stop
            return
        low = bisect_right(self._stops, start)
        high = bisect_left(self._starts, stop)
        if stop <= start or low >= high:
            return
        kept = [(self._starts[low], start), (stop, self._stops[high - 1])]
        kept = [(a, b) for a, b in kept if a < b]
        self._count -= sum(b - a for a, b in zip(self._starts[low:high], self._stops[low:high], strict=True))
        self._count += sum(b - a for a, b in kept)
        self._starts[low:high] = [a for a, _ in kept]
        self._stops[low:high] = [b for _, b in kept]

    def update(self, pairs: Iterable[Sequence[int]]) -> None:
        for start, stop in pairs:
            self.add(start, stop)

    def difference_update(self, pairs: Iterable[Sequence[int]]) -> None:
        for start, stop in pairs:
            self.remove(start, stop)

    def covers(self, start: int, stop: int) -> bool:
        """Whether every number from `start` to `stop` is in the set."""
        place = bisect_right(self._starts, start) - 1
        return stop <= start or (place >= 0 and stop <= self._stops[place])

    def meets(self, start: int, stop: int) -> bool:
        """Whether any number from `start` to `stop` is in the set."""
        return start < stop and bisect_right(self._stops, start) < bisect_left(self._starts, stop)

    def clip(self, start: int, stop: int) -> Pairs:
        """The part between `start` and `stop`."""
        low, high = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        return [
            (max(a, start), min(b, stop)) for a, b in zip(self._starts[low:high], self._stops[low:high], strict=True)
        ]

    def span(self, number: int) -> tuple[int, int] | None:
        """The first interval that reaches beyond `number`."""
        place = bisect_right(self._stops, number)
        return (self._starts[place], self._stops[place]) if place < len(self._starts) else None

    def nth(self, places: np.ndarray) -> np.ndarray:
        """Row numbers of the given places (0 is the smallest number); int64 [M] to int64 [M]."""
        if len(self._starts) == 1:
            return places + self._starts[0]
        starts = np.asarray(self._starts, np.int64)
        before = np.concatenate([[0], np.cumsum(np.asarray(self._stops, np.int64) - starts)])
        home = np.searchsorted(before, places, side="right") - 1
        found: np.ndarray = starts[home] + places - before[home]
        return found


def common(within: Sequence[RowSet], without: Sequence[RowSet] = (), start: int = 0) -> Iterator[tuple[int, int]]:
    """Intervals of the numbers from `start` that are in all of `within` and in none of `without`, ascending."""
    at = start
    while True:
        stop = None
        moved = False
        for rows in within:
            span = rows.span(at)
            if span is None:
                return
            if span[0] > at:
                at, moved = span[0], True
                break
            stop = span[1] if stop is None else min(stop, span[1])
        if moved:
            continue
        assert stop is not None
        for rows in without:
            span = rows.span(at)
            if span is None:
                continue
            if span[0] <= at:
                at, moved = span[1], True
                break
            stop = min(stop, span[0])
        if moved:
            continue
        yield at, stop
        at = stop


def first_of(count: int, within: Sequence[RowSet], without: Sequence[RowSet] = ()) -> Pairs:
    """The first `count` of the numbers that `common` gives."""
    found: Pairs = []
    for start, stop in common(within, without):
        if count <= 0:
            break
        stop = min(stop, start + count)
        found.append((start, stop))
        count -= stop - start
    return found


def length(pairs: Iterable[tuple[int, int]]) -> int:
    """Numbers in disjoint intervals."""
    return sum(stop - start for start, stop in pairs)
