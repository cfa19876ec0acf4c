"""Which rows make a batch: units (a row, or a group) in an order, cut where a batch is full.

Everything is arrays over all rows, made once for a loader or an epoch; what is done for a single batch is a search in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flowrl.errors import ConfigError, DataError
from flowrl.schema.types import TOKEN
from flowrl.store.source import RowSource

_WINDOW = 64
"""Units looked at first when padding decides how many fit."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a batch may hold."""

    rows: int | None
    tokens: int | None
    """Prompt and response; with `is_padded`, padding counts."""
    is_padded: bool = False
    multiple: int = 1
    """Padded lengths are rounded up to a multiple of this."""


class Units:
    """Rows that go together, U units of N rows.

    Example: rows 0 and 2 are one group, row 1 another
        rows [0, 2, 1], starts [0, 2, 3]
    """

    def __init__(self, source: RowSource, group_by: str | None, bounds: Bounds) -> None:
        """Errors: ConfigError when tokens bound a batch and the rows have none; DataError for a unit that fits in no batch."""
        self._bounds, self._group_by = bounds, group_by
        groups = source.group_indices(group_by) if group_by else None
        if groups is None:
            self.starts = np.arange(source.num_rows + 1, dtype=np.int64)
            self.rows = self.starts[:-1]
        else:
            self.rows = np.concatenate(groups) if groups else np.zeros(0, np.int64)
            self.starts = np.zeros(len(groups) + 1, np.int64)
            np.cumsum([len(group) for group in groups], out=self.starts[1:])
        self._is_grouped = groups is not None
        self.counts = np.diff(self.starts) if self._is_grouped else np.ones(source.num_rows, np.int64)
        """Rows of each unit, [U]."""
        self._tokens = self._prompt = self._response = np.zeros(0, np.int64)
        if bounds.tokens is not None:
            self._measure(source)
        self._check_fits()

    def __len__(self) -> int:
        return len(self.counts)

    def _measure(self, source: RowSource) -> None:
        types = source.types
        of_tokens = next((name for name, kind in types.items() if kind.granularity is TOKEN), None)
        if of_tokens is None and "prompt_ids" not in types:
            raise ConfigError("max_tokens needs rows with tokens (a TOKEN column or prompt_ids); use batch_rows")
        none = np.zeros(source.num_rows, np.int64)
        prompt = (source.lengths("prompt_ids") if "prompt_ids" in types else none)[self.rows]
        response = (none if of_tokens is None else source.lengths(of_tokens))[self.rows]
        if self._is_grouped and len(self):
            first = self.starts[:-1]
            self._tokens = np.add.reduceat(prompt + response, first)
            prompt, response = np.maximum.reduceat(prompt, first), np.maximum.reduceat(response, first)
        else:
            self._tokens = prompt + response
        multiple = self._bounds.multiple
        self._prompt, self._response = -(-prompt // multiple) * multiple, -(-response // multiple) * multiple

    def _check_fits(self) -> None:
        # at the beginning, not in the middle of an epoch
        most, most_tokens = self._bounds.rows, self._bounds.tokens
        if most_tokens is None and not self._is_grouped:
            return  # one row always does
        is_wrong = np.zeros(len(self), np.bool_)
        if most is not None:
            is_wrong |= self.counts > most
        if most_tokens is not None:
            needed = self.counts * (self._prompt + self._response) if self._bounds.is_padded else self._tokens
            is_wrong |= needed > most_tokens
        if not is_wrong.any():
            return
        unit = int(np.argmax(is_wrong))
        count = int(self.counts[unit])
        if most is not None and count > most:
            raise DataError(
                f"a group of equal '{self._group_by}' has {count} rows and a batch takes {most}; raise batch_rows"
            )
        what = f"a group of {count} rows has" if self._is_grouped else f"row {self.rows[self.starts[unit]]} has"
        raise DataError(
            f"{what} {needed[unit]} tokens and a batch takes {most_tokens}; raise max_tokens or filter such rows out first"
        )

    def batches(self, order: np.ndarray | None) -> Iterator[np.ndarray]:
        """Rows of each batch, int64 [M], as full as the bounds let them be. `order` [U] of the units; None as they are."""
        rows, starts = self._ordered(order)
        bounds = self._bounds
        if bounds.tokens is None and bounds.rows is not None and not self._is_grouped:
            for first in range(0, len(rows), bounds.rows):
                yield rows[first : first + bounds.rows]
            return
        tokens = None
        if bounds.tokens is not None and not bounds.is_padded:
            tokens = np.zeros(len(self) + 1, np.int64)
            np.cumsum(self._tokens if order is None else self._tokens[order], out=tokens[1:])
        first, window = 0, _WINDOW
        while first < len(self):
            stop = len(self)
            if bounds.rows is not None:
                stop = int(np.searchsorted(starts, starts[first] + bounds.rows, "right")) - 1
            if tokens is not None and bounds.tokens is not None:
                stop = min(stop, int(np.searchsorted(tokens, tokens[first] + bounds.tokens, "right")) - 1)
            elif bounds.tokens is not None:
                stop = self._padded_stop(order, starts, first, stop, window, bounds.tokens)
                window = 2 * (stop - first)
            yield rows[starts[first] : starts[stop]]
            first = stop

    def _ordered(self, order: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Rows by unit, and where each unit starts, in that order."""
        if order is None:
            return self.rows, self.starts
        if not self._is_grouped:
            return order, self.starts
        counts = self.counts[order]
        starts = np.zeros(len(self) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        inside = np.arange(len(self.rows)) - np.repeat(starts[:-1], counts)
        return self.rows[np.repeat(self.starts[:-1][order], counts) + inside], starts

    def _padded_stop(
        self, order: np.ndarray | None, starts: np.ndarray, first: int, stop: int, window: int, most: int
    ) -> int:
        """Units from `first` on whose padding fits; at most up to `stop`."""
        while True:
            last = min(stop, first + window)
            units = slice(first, last) if order is None else order[first:last]
            longest = np.maximum.accumulate(self._prompt[units]) + np.maximum.accumulate(self._response[units])
            needed = (starts[first + 1 : last + 1] - starts[first]) * longest  # never falls from one to the next
            fit = int(np.searchsorted(needed, most, "right"))
            if fit < last - first or last == stop:
                return first + fit
            window *= 2
