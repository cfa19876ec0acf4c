"""Batches from rows: which rows go together, in which order, in which layout, on which device, how far ahead.

    rows -> units (a row, or a group)  -> order (by seed and epoch) -> batches (by rows or tokens) -> layout -> device

Layouts, for N rows with T tokens, the longest with L:

    "rows"     a `RowBatch`
    "packed"   dict: list columns flat [T, ...] and `cu_seqlens` [N + 1] int32
    "padded"   dict: list columns [N, L, ...], zeros to the right, and `mask` [N, L] bool
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flowrl.errors import ConfigError, DataError, SchemaError
from flowrl.schema.columns import nearest
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import TOKEN
from flowrl.store.batching import Bounds, Units
from flowrl.store.columns import Values, is_list_column
from flowrl.store.kernels import Gather
from flowrl.store.rows import RowBatch
from flowrl.store.source import BatchRows, RowSource, as_source
from flowrl.store.staging import TIMEOUT_S, Ahead, ArrayCarrier, Carrier, Staged

__all__ = ["LAYOUTS", "Batch", "BatchRows", "Loader", "RowSource", "as_source", "packed", "padded"]

LAYOUTS = ("rows", "packed", "padded")
DEFAULT_ROWS = 32

Batch = RowBatch | dict[str, Any]
"""Rows, or arrays (NumPy's, or torch's with `device`) by name."""


class Loader:
    """Batches of a fixed set of rows; each time it is iterated is one epoch, shuffled by (seed, epoch).

    Example:
        for batch in table.loader(max_tokens=4096, layout="packed", shuffle=True, device="cuda", prefetch=2):
            batch["response_ids"], batch["cu_seqlens"]        # tensors on the GPU; the next two are on their way

    Made by `ExperienceTable.loader`; the rows are those the table held then, whatever is appended or evicted later. A batch
    that is kept stays as it is; memory is that of the batches in use, whatever the number of rows. `close()`, leaving a
    `with` block, or dropping the loader ends its threads.
    """

    def __init__(
        self,
        rows: RowBatch | RowSource,
        *,
        batch_rows: int | None = None,
        max_tokens: int | None = None,
        columns: Sequence[str] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        group_by: str | None = None,
        layout: str = "rows",
        pad_multiple: int = 1,
        device: Any = None,
        pin: bool | None = None,
        prefetch: int = 0,
        num_workers: int = 0,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Args:
            batch_rows: most rows of a batch (32 unless `max_tokens` is given).
            max_tokens: most tokens of a batch, prompt and response; with layout "padded", padding counts.
            columns: those to give; None gives all.
            shuffle: a new order of rows (of groups with `group_by`) each epoch.
            group_by: rows with equal value of this column stay in one batch.
            layout: "rows", "packed" or "padded".
            pad_multiple: "padded": lengths are rounded up to a multiple of this.
            device: None gives NumPy arrays; "cpu", "cuda", ... (or a torch.device) gives tensors there. Text has no tensors:
                leave it out with `columns`.
            pin: batches are made in page-locked memory, from which a GPU copies by itself while others work. None: yes for
                a CUDA device.
            prefetch: batches that one thread makes ahead. At most `prefetch` + 1 are alive at a time (two without a thread),
                on the device too, as long as the caller keeps none.
            num_workers: what torch's DataLoader calls it. Means `prefetch` of at least twice as many, with one thread: worker
                processes would have to copy what a thread reads in place.
            timeout_s: longest wait for a batch that is made ahead.

        Errors: ConfigError for options that make no sense; DataError for a row or group that fits in no batch. While
        iterating, errors of the thread are raised where the batch would have come; WaitTimeout after `timeout_s`.
        """
        for name, value in (("batch_rows", batch_rows), ("max_tokens", max_tokens), ("pad_multiple", pad_multiple)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"loader needs {name} of at least 1; found {value!r}")
        for name, value in (("prefetch", prefetch), ("num_workers", num_workers)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"loader needs {name} of 0 or more; found {value!r}")
        if layout not in LAYOUTS:
            raise ConfigError(
                f"loader's layout is one of {', '.join(LAYOUTS)}; found {layout!r}; {nearest(str(layout), LAYOUTS)}"
            )
        if batch_rows is None and max_tokens is None:
            batch_rows = DEFAULT_ROWS
        self.batch_rows, self.max_tokens = batch_rows, max_tokens
        self.shuffle, self.seed, self.layout, self.pad_multiple = shuffle, seed, layout, pad_multiple
        self.device, self.pin, self.timeout_s = device, pin, timeout_s
        self.prefetch = max(prefetch, 2 * num_workers)
        self.epoch = 0
        """Of the next iteration; set it to repeat or skip one."""
        self._source = as_source(rows)
        self._types = self._source.types
        self._columns = (
            list(self._types) if columns is None else [columns] if isinstance(columns, str) else list(columns)
        )
        self._check_columns()
        self._units = Units(self._source, group_by, Bounds(batch_rows, max_tokens, layout == "padded", pad_multiple))
        self._idle: list[Carrier] = []
        self._idle.append(self._carrier())  # refuses a device that is not there
        self._gather: Gather | None = None
        self._keep: Any = None
        """What the gather's addresses need alive; False when rows cannot be read by address."""
        self._running: weakref.WeakSet[Ahead[Any]] = weakref.WeakSet()

    def _check_columns(self) -> None:
        for name in self._columns:
            if name not in self._types:
                raise SchemaError(f"rows have no column '{name}'; {nearest(name, self._types)}")
        self._numbers = [name for name in self._columns if self._types[name].is_numeric]
        self._texts = [name for name in self._columns if not self._types[name].is_numeric]
        if self.device is None and self.pin:
            raise ConfigError("pin=True is for tensors; say device='cuda', or device='cpu' for page-locked tensors")
        if self.device is None:
            return
        if self.layout == "rows":
            raise ConfigError("layout 'rows' gives a RowBatch, which has no device; use layout='packed' or 'padded'")
        if self._texts:
            raise ConfigError(
                f"column '{self._texts[0]}' is {self._types[self._texts[0]]} and cannot be a tensor; leave it out: "
                f"columns={self._numbers}"
            )

    def _carrier(self) -> Carrier:
        """One that no epoch uses at the moment; its memory is used again."""
        try:
            return self._idle.pop()
        except IndexError:
            pass
        if self.device is None:
            return ArrayCarrier(self.prefetch)
        from flowrl.store.to_torch import tensor_carrier  # imports torch

        return tensor_carrier(self.device, self.pin, self.prefetch)

    # ----------------------------------------------------------------------------------------------------- iterating

    def batches(self, epoch: int) -> Iterator[np.ndarray]:
        """Row numbers of each batch of an epoch."""
        if not self.shuffle:
            return self._units.batches(None)
        generator = np.random.default_rng([self.seed & 0xFFFFFFFFFFFFFFFF, epoch])
        return self._units.batches(generator.permutation(len(self._units)))

    def __iter__(self) -> Iterator[Batch]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        carrier = self._carrier()
        made = self._made(epoch, carrier)
        if not self.prefetch:
            return made if self.layout == "rows" else map(carrier.receive, made)
        ahead = Ahead(made, self.prefetch, carrier=carrier, timeout_s=self.timeout_s)
        self._running.add(ahead)
        return ahead

    def _made(self, epoch: int, carrier: Carrier) -> Iterator[Any]:
        try:
            if self.layout == "rows":
                for rows in self.batches(epoch):
                    yield self._source.rows(rows, self._columns)
                return
            if self._keep is None:
                self._find_places()
            for rows in self.batches(epoch):
                yield self._lay_out(rows, carrier)
        finally:
            self._idle.append(carrier)

    def _find_places(self) -> None:
        found = self._source.places(self._numbers) if self._numbers else None
        if found is None:
            self._keep = False
        else:
            self._gather, self._keep = Gather(found), found

    def _lay_out(self, rows: np.ndarray, carrier: Carrier) -> Staged:
        gather = self._gather
        texts = self._texts
        others: RowBatch | None = None
        if gather is None:  # read what is compressed or on disk first; then the rest is as below
            batch = self._source.rows(rows, self._columns)
            others = batch.select(texts) if texts else None
            if self._numbers:
                places = BatchRows(batch).places(self._numbers)
                gather, rows = Gather(places), np.arange(len(rows))
        elif texts:
            others = self._source.rows(rows, texts)
        arrays: dict[str, Any] = {}
        block, nbytes = None, 0

        def take(size: int) -> np.ndarray:
            nonlocal block, nbytes
            block, nbytes = carrier.pool.take(size), size
            return block

        if gather is not None:
            if self.layout == "packed":
                arrays = gather.packed(rows, take=take)
            else:
                arrays = gather.padded(rows, multiple=self.pad_multiple, take=take)
        if others is not None:
            arrays = self._with_texts(arrays, others)
        return carrier.ship(arrays, block, nbytes)

    def _with_texts(self, arrays: dict[str, Any], texts: RowBatch) -> dict[str, Any]:
        is_packed = self.layout == "packed"
        both = {**(packed(texts) if is_packed else padded(texts, multiple=self.pad_multiple)), **arrays}
        what = "cu_seqlens" if is_packed else "mask"
        made: dict[str, Any] = {}
        for name in self._columns:
            kind = self._types[name]
            made[name] = both[name]
            if is_list_column(kind):
                axis = what if kind.granularity is TOKEN else f"{name}.{what}"
                made[axis] = both[axis]
        return made

    def close(self) -> None:
        """End the threads and let go of the memory. Iterating again starts anew."""
        for ahead in list(self._running):
            ahead.close()
        self._gather, self._keep = None, None
        self._idle.clear()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


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


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
