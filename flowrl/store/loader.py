"""Batches from rows: which rows go together, in which order, in which layout.

    rows -> units (a row, or a group)  -> order (by seed and epoch) -> batches (by rows or tokens) -> layout

Layouts, for N rows with T tokens, the longest with L:

    "rows"     a `RowBatch`
    "packed"   dict: list columns flat [T, ...] and `cu_seqlens` [N + 1] int32
    "padded"   dict: list columns [N, L, ...], zeros to the right, and `mask` [N, L] bool
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flowrl.errors import ConfigError, DataError
from flowrl.schema.columns import nearest
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import TOKEN
from flowrl.store.columns import Values
from flowrl.store.rows import RowBatch
from flowrl.store.source import BatchRows, RowSource, as_source

__all__ = ["LAYOUTS", "BatchRows", "Loader", "RowSource", "as_source", "packed", "padded"]

LAYOUTS = ("rows", "packed", "padded")
DEFAULT_ROWS = 32

Batch = RowBatch | dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class _Size:
    """Of rows that go together."""

    rows: int = 0
    tokens: int = 0
    longest: tuple[int, int] = (0, 0)
    """Tokens of the longest prompt and of the longest response."""

    def __add__(self, other: _Size) -> _Size:
        longest = (max(self.longest[0], other.longest[0]), max(self.longest[1], other.longest[1]))
        return _Size(self.rows + other.rows, self.tokens + other.tokens, longest)


class Loader:
    """Batches of a fixed set of rows; each time it is iterated is one epoch, shuffled by (seed, epoch).

    Example:
        for batch in table.loader(max_tokens=4096, group_by="prompt_id", layout="packed", shuffle=True):
            batch["response_ids"], batch["cu_seqlens"]

    Made by `ExperienceTable.loader`; the rows are those the table held then, whatever is appended or evicted later.
    """

    def __init__(
        self,
        rows: RowBatch,
        *,
        batch_rows: int | None = None,
        max_tokens: int | None = None,
        columns: Sequence[str] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        group_by: str | None = None,
        layout: str = "rows",
        pad_multiple: int = 1,
    ) -> None:
        """Args:
            batch_rows: most rows of a batch (32 unless `max_tokens` is given).
            max_tokens: most tokens of a batch, prompt and response; with layout "padded", padding counts.
            columns: those to give; None gives all.
            shuffle: a new order of rows (of groups with `group_by`) each epoch.
            group_by: rows with equal value of this column stay in one batch.
            layout: "rows", "packed" or "padded".
            pad_multiple: "padded": lengths are rounded up to a multiple of this.

        Errors: ConfigError for options that make no sense; DataError for a row or group that fits in no batch.
        """
        for name, value in (("batch_rows", batch_rows), ("max_tokens", max_tokens), ("pad_multiple", pad_multiple)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"loader needs {name} of at least 1; found {value!r}")
        if layout not in LAYOUTS:
            raise ConfigError(
                f"loader's layout is one of {', '.join(LAYOUTS)}; found {layout!r}; {nearest(str(layout), LAYOUTS)}"
            )
        if batch_rows is None and max_tokens is None:
            batch_rows = DEFAULT_ROWS
        self.batch_rows, self.max_tokens = batch_rows, max_tokens
        self.shuffle, self.seed, self.layout, self.pad_multiple = shuffle, seed, layout, pad_multiple
        self.epoch = 0
        """Of the next iteration; set it to repeat or skip one."""
        self._rows = rows if columns is None else rows.select(columns)
        self._units = rows.group_indices(group_by) if group_by else list(np.arange(len(rows)).reshape(-1, 1))
        self._sizes = _sizes(rows, self._units, needed=max_tokens is not None)
        self._check_fits(group_by)

    def _check_fits(self, group_by: str | None) -> None:
        # at the beginning, not in the middle of an epoch
        for unit, size in zip(self._units, self._sizes, strict=True):
            if self.batch_rows is not None and size.rows > self.batch_rows:
                raise DataError(
                    f"a group of equal '{group_by}' has {size.rows} rows and a batch takes {self.batch_rows}; raise batch_rows"
                )
            if self.max_tokens is not None and self._tokens(size) > self.max_tokens:
                what = f"a group of {size.rows} rows has" if group_by else f"row {unit[0]} has"
                raise DataError(
                    f"{what} {self._tokens(size)} tokens and a batch takes {self.max_tokens}; raise max_tokens or filter "
                    "such rows out first"
                )

    def _tokens(self, size: _Size) -> int:
        if self.layout == "padded":
            return size.rows * sum(_round_up(longest, self.pad_multiple) for longest in size.longest)
        return size.tokens

    def batches(self, epoch: int) -> Iterator[np.ndarray]:
        """Row numbers of each batch of an epoch."""
        order = np.arange(len(self._units))
        if self.shuffle:
            order = np.random.default_rng([self.seed & 0xFFFFFFFFFFFFFFFF, epoch]).permutation(len(self._units))
        held: list[np.ndarray] = []
        size = _Size()
        for number in order.tolist():
            grown = size + self._sizes[number]
            too_many = self.batch_rows is not None and grown.rows > self.batch_rows
            too_long = self.max_tokens is not None and self._tokens(grown) > self.max_tokens
            if held and (too_many or too_long):
                yield np.concatenate(held)
                held, grown = [], self._sizes[number]
            held.append(self._units[number])
            size = grown
        if held:
            yield np.concatenate(held)

    def __iter__(self) -> Iterator[Batch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        lay_out: dict[str, Callable[[RowBatch], Batch]] = {
            "rows": lambda rows: rows,
            "packed": packed,
            "padded": lambda rows: padded(rows, multiple=self.pad_multiple),
        }
        return (lay_out[self.layout](self._pick(rows)) for rows in self.batches(epoch))

    def _pick(self, rows: np.ndarray) -> RowBatch:
        if np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
            return self._rows.slice(int(rows[0]), int(rows[0]) + len(rows))  # neighbours need no copy
        return self._rows.take(rows)


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _sizes(rows: RowBatch, units: list[np.ndarray], *, needed: bool) -> list[_Size]:
    """Size of each unit. Errors: ConfigError when tokens are `needed` and there are none."""
    none = np.zeros(len(rows), np.int64)
    prompt = rows["prompt_ids"].lengths if "prompt_ids" in rows else none
    tokens = next((rows[name] for name, kind in rows.types.items() if kind.granularity is TOKEN), None)
    if needed and tokens is None and "prompt_ids" not in rows:
        raise ConfigError("max_tokens needs rows with tokens (a TOKEN column or prompt_ids); use batch_rows")
    if not needed:
        return [_Size(len(unit)) for unit in units]
    response = none if tokens is None else tokens.lengths
    sizes = []
    for unit in units:
        p, r = prompt[unit], response[unit]
        sizes.append(_Size(len(unit), int(p.sum() + r.sum()), (int(p.max(initial=0)), int(r.max(initial=0)))))
    return sizes


def packed(rows: RowBatch) -> dict[str, np.ndarray]:
    """List columns flat, end to end.

    `cu_seqlens` [N + 1] int32 bounds the rows of TOKEN columns (as variable-length attention kernels read it),
    `<column>.cu_seqlens` those of every other list column.
    """
    made: dict[str, np.ndarray] = {}
    for name, values, axis in _axes(rows, "cu_seqlens"):
        if not isinstance(values, Ragged):
            made[name] = values
            continue
        if values.offsets[-1] > np.iinfo(np.int32).max:
            raise DataError(
                f"column '{name}' has {values.offsets[-1]} values in one batch; int32 bounds end at 2^31. Make it smaller"
            )
        made[name] = values.values
        made[axis] = values.offsets.astype(np.int32)
    return made


def padded(rows: RowBatch, *, multiple: int = 1) -> dict[str, np.ndarray]:
    """List columns filled up to the longest row, on the right, with zeros (empty text).

    `mask` [N, L] is true where a TOKEN column has a value, `<column>.mask` where another list column has one.
    """
    made: dict[str, np.ndarray] = {}
    for name, values, axis in _axes(rows, "mask"):
        if not isinstance(values, Ragged):
            made[name] = values
            continue
        length = _round_up(int(values.lengths.max(initial=0)), multiple)
        mask = np.arange(length) < values.lengths[:, None]
        fill = np.zeros((len(rows), length, *values.values.shape[1:]), values.dtype)
        if values.dtype == object:
            fill[...] = "" if rows.types[name].dtype == "str" else b""
        start = 0
        for row, stop in enumerate(values.offsets[1:].tolist()):  # a copy per row beats an index per value
            fill[row, : stop - start] = values.values[start:stop]
            start = stop
        made[name] = fill
        made[axis] = mask
    return made


def _axes(rows: RowBatch, what: str) -> Iterator[tuple[str, Values, str]]:
    """(column, values, name of the array that says where its rows end)."""
    for name, kind in rows.types.items():
        yield name, rows[name], what if kind.granularity is TOKEN else f"{name}.{what}"
