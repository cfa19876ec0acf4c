"""Rows of a source in a layout: the way of a batch, for the loader and for claims.

source -> places of the number columns, once -> one gather per batch into staging -> carrier (arrays, tensors, a device)
          or, for rows that are compressed or in files, a RowBatch per batch, gathered from there
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.errors import ConfigError, DataError
from flowrl.schema.columns import nearest
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import TOKEN, ColumnType
from flowrl.store.columns import Values, is_list_column
from flowrl.store.kernels import Gather
from flowrl.store.rows import RowBatch
from flowrl.store.source import BatchRows, RowSource
from flowrl.store.staging import ArrayCarrier, Carrier, Staged

LAYOUTS = ("rows", "packed", "padded")


def check_layout(layout: str) -> None:
    """Errors: ConfigError for a layout that there is not."""
    if layout not in LAYOUTS:
        raise ConfigError(f"a layout is one of {', '.join(LAYOUTS)}; found {layout!r}; {nearest(str(layout), LAYOUTS)}")


def check_carried(
    types: Mapping[str, ColumnType], columns: Sequence[str], layout: str, device: Any, pin: bool | None
) -> None:
    """Errors: ConfigError when batches of these columns and layout cannot be tensors on the device."""
    if device is None and pin:
        raise ConfigError("pin=True is for tensors; say device='cuda', or device='cpu' for page-locked tensors")
    if device is None:
        return
    if layout == "rows":
        raise ConfigError("layout 'rows' gives a RowBatch, which has no device; use layout='packed' or 'padded'")
    numbers = [name for name in columns if types[name].is_numeric]
    texts = [name for name in columns if name not in numbers]
    if texts:
        raise ConfigError(
            f"column '{texts[0]}' is {types[texts[0]]} and cannot be a tensor; leave it out: columns={numbers}"
        )


def carrier_for(device: Any, pin: bool | None, ahead: int) -> Carrier:
    """What takes batches to a device, or leaves them arrays where there is none."""
    if device is None:
        return ArrayCarrier(ahead)
    from flowrl.store.to_torch import tensor_carrier  # imports torch

    return tensor_carrier(device, pin, ahead)


class Layer:
    """Lays out rows of one source. Places are found at the first batch and held until `forget`."""

    def __init__(self, source: RowSource, columns: Sequence[str], layout: str, multiple: int) -> None:
        self.source, self.columns, self.layout, self.multiple = source, list(columns), layout, multiple
        self._types = source.types
        self._numbers = [name for name in self.columns if self._types[name].is_numeric]
        self._texts = [name for name in self.columns if not self._types[name].is_numeric]
        self._gather: Gather | None = None
        self._keep: Any = None
        """What the gather's addresses need alive; False when rows cannot be read by address."""

    def forget(self) -> None:
        """Let go of the memory; the next batch finds the places anew."""
        self._gather, self._keep = None, None

    def lay_out(self, rows: np.ndarray, carrier: Carrier) -> Staged:
        """The rows of the source (int64 [M]) as "packed" or "padded"; not for layout "rows"."""
        if self._keep is None:
            found = self.source.places(self._numbers) if self._numbers else None
            if found is None:
                self._keep = False
            else:
                self._gather, self._keep = Gather(found), found
        gather = self._gather
        texts = self._texts
        others: RowBatch | None = None
        if gather is None:  # read what is compressed or on disk first; then the rest is as below
            batch = self.source.rows(rows, self.columns)
            others = batch.select(texts) if texts else None
            if self._numbers:
                places = BatchRows(batch).places(self._numbers)
                gather, rows = Gather(places or []), np.arange(len(rows))
        elif texts:
            others = self.source.rows(rows, texts)
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
                arrays = gather.padded(rows, multiple=self.multiple, take=take)
        if others is not None:
            arrays = self._with_texts(arrays, others)
        return carrier.ship(arrays, block, nbytes)

    def _with_texts(self, arrays: dict[str, Any], texts: RowBatch) -> dict[str, Any]:
        is_packed = self.layout == "packed"
        both = {**(packed(texts) if is_packed else padded(texts, multiple=self.multiple)), **arrays}
        what = "cu_seqlens" if is_packed else "mask"
        made: dict[str, Any] = {}
        for name in self.columns:
            kind = self._types[name]
            made[name] = both[name]
            if is_list_column(kind):
                axis = what if kind.granularity is TOKEN else f"{name}.{what}"
                made[axis] = both[axis]
        return made


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
