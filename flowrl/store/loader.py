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

from flowrl.errors import ConfigError, SchemaError
from flowrl.schema.columns import nearest
from flowrl.store.batching import Bounds, Units
from flowrl.store.laying import LAYOUTS, Layer, carrier_for, check_carried, check_layout, packed, padded
from flowrl.store.rows import RowBatch
from flowrl.store.settings import check_count
from flowrl.store.source import BatchRows, RowSource, as_source
from flowrl.store.staging import TIMEOUT_S, Ahead, Carrier, Staged

__all__ = ["LAYOUTS", "Batch", "BatchRows", "Loader", "RowSource", "as_source", "packed", "padded"]

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
        reuse: bool = False,
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
            reuse: a batch ends when the next one is asked for: reading it then is a StoreError, and the next one is made in
                its memory, which the processor has in its cache still. An array that was taken out of it and is still held
                stays as it is, as ever; the next batch then lies elsewhere. Without `prefetch`; not for layout "rows".
            timeout_s: longest wait for a batch that is made ahead.

        Errors: ConfigError for options that make no sense; DataError for a row or group that fits in no batch. While
        iterating, errors of the thread are raised where the batch would have come; WaitTimeout after `timeout_s`.
        """
        for name, value in (("batch_rows", batch_rows), ("max_tokens", max_tokens), ("pad_multiple", pad_multiple)):
            if value is not None:
                check_count("loader", name, value)
        for name, value in (("prefetch", prefetch), ("num_workers", num_workers)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"loader needs {name} of 0 or more; found {value!r}")
        check_layout(layout)
        if reuse and (layout == "rows" or prefetch or num_workers):
            raise ConfigError(
                "loader's reuse=True makes a batch in the memory of the one before: it needs layout 'padded' or 'packed', and no "
                "prefetch or num_workers, whose batches are made while the one before is in use"
            )
        if batch_rows is None and max_tokens is None:
            batch_rows = DEFAULT_ROWS
        self.batch_rows, self.max_tokens = batch_rows, max_tokens
        self.shuffle, self.seed, self.layout, self.pad_multiple = shuffle, seed, layout, pad_multiple
        self.device, self.pin, self.reuse, self.timeout_s = device, pin, reuse, timeout_s
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
        self._layer = Layer(self._source, self._columns, layout, pad_multiple)
        self._running: weakref.WeakSet[Ahead[Any]] = weakref.WeakSet()

    def _check_columns(self) -> None:
        for name in self._columns:
            if name not in self._types:
                raise SchemaError(f"rows have no column '{name}'; {nearest(name, self._types)}")
        check_carried(self._types, self._columns, self.layout, self.device, self.pin)

    def _carrier(self) -> Carrier:
        """One that no epoch uses at the moment; its memory is used again."""
        try:
            return self._idle.pop()
        except IndexError:
            pass
        return carrier_for(self.device, self.pin, self.prefetch)

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
            if self.reuse:
                yield from self._made_in_one(epoch, carrier)
                return
            for rows in self.batches(epoch):
                yield self._layer.lay_out(rows, carrier)
        finally:
            self._idle.append(carrier)

    def _made_in_one(self, epoch: int, carrier: Carrier) -> Iterator[Staged]:
        """Each batch in the memory of the one before, which ends; the last one of an epoch does not."""
        batch: Staged | None = None
        for rows in self.batches(epoch):
            if batch is not None:
                batch.end()
            batch = self._layer.lay_out(rows, carrier)
            yield batch

    def close(self) -> None:
        """End the threads and let go of the memory. Iterating again starts anew."""
        for ahead in list(self._running):
            ahead.close()
        self._layer.forget()
        self._idle.clear()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
