"""Rows in memory: an immutable table of typed columns.

    batch = RowBatch.from_rows([{"prompt_id": "a", "reward": 1.0}], {"prompt_id": PROMPT.str, "reward": SAMPLE.f32})
    batch = batch.with_column("advantage", batch["reward"] - batch["reward"].mean(), SAMPLE.f32)

Operations return a new batch that shares every column it does not change. Arrays are read-only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from flowrl.errors import DataError, OperatorError, SchemaError
from flowrl.schema.columns import Column, TableSchema, nearest
from flowrl.schema.ragged import Ragged
from flowrl.schema.standard import STANDARD
from flowrl.schema.types import TOKEN, ColumnType
from flowrl.shown import shown
from flowrl.store.columns import Values, inner_lengths, readonly, to_arrow, to_stored

__all__ = ["RowBatch", "readonly", "refusing_writes"]

_NUM_ROWS = b"flowrl.num_rows"
"""Arrow schema metadata; written only for a batch without columns, which Arrow cannot count."""


_LONG = 32
"""Mean number of values per row from which rows are copied one by one."""


class RowBatch:
    """N rows of typed columns.

    A column with one value per row is an array [N, *inner]; a TURN or TOKEN column, and one with inner length "*", is a
    `Ragged` with values [T, *inner]. All TOKEN columns have the same row lengths: token i of one belongs to token i of
    another.

    Example:
        RowBatch({"prompt_id": ["a", "a"], "response_ids": [[5, 2], [7]]}, {"prompt_id": PROMPT.str, "response_ids": TOKEN.i32})
    """

    __slots__ = ("_columns", "_num_rows", "_types")

    def __init__(
        self, columns: Mapping[str, Any], types: Mapping[str, ColumnType], num_rows: int | None = None
    ) -> None:
        """Args:
            columns: values by name: arrays, `Ragged`, Arrow arrays or lists (see `flowrl.store.columns.to_stored`).
            types: type of each column, by name.
            num_rows: None takes the first column's length.

        Errors: SchemaError for a wrong length, dtype or shape or a column without type; DataError for missing values.
        """
        untyped = [name for name in columns if name not in types]
        if untyped:
            raise SchemaError(f"column '{untyped[0]}' has no type; {nearest(untyped[0], types)}")
        if num_rows is None:
            num_rows = next((len(values) for values in columns.values()), 0)
        self._num_rows = num_rows
        self._columns: dict[str, Values] = {}
        self._types: dict[str, ColumnType] = {}
        for name, values in columns.items():
            self._put(name, values, types[name])

    def _put(self, name: str, values: Any, kind: ColumnType) -> None:
        Column(name, kind)  # refuses names that are no identifiers
        stored, kind = to_stored(name, values, kind, self._num_rows)
        if isinstance(stored, Ragged) and kind.granularity is TOKEN:
            stored = self._aligned(name, stored)
        self._columns[name] = stored
        self._types[name] = kind

    def _aligned(self, name: str, stored: Ragged) -> Ragged:
        """The column with the offsets all TOKEN columns share."""
        for other, kind in self._types.items():
            if other == name or kind.granularity is not TOKEN:
                continue
            theirs = self._columns[other]
            assert isinstance(theirs, Ragged)
            if theirs.offsets is stored.offsets:
                return stored
            if not np.array_equal(theirs.offsets, stored.offsets):
                row = int(np.flatnonzero(theirs.lengths != stored.lengths)[0])
                raise SchemaError(
                    f"TOKEN columns of a row have one value per response token; in row {row} '{name}' has "
                    f"{stored.lengths[row]} and '{other}' has {theirs.lengths[row]}"
                )
            return Ragged(stored.values, theirs.offsets)
        return stored

    @classmethod
    def of_stored(cls, columns: dict[str, Values], types: dict[str, ColumnType], num_rows: int) -> RowBatch:
        """From columns that are in their stored form and known to be right: nothing is checked, or copied."""
        batch = cls.__new__(cls)
        batch._columns, batch._types, batch._num_rows = columns, types, num_rows
        return batch

    # ------------------------------------------------------------------------------------------------- looking at it

    def __len__(self) -> int:
        return self._num_rows

    def __bool__(self) -> bool:
        return True  # a batch without rows is still a batch; ask len()

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Any:
        """Values of a column: `np.ndarray` [N, *inner] or `Ragged`. Errors: SchemaError with the nearest names."""
        if not isinstance(name, str):
            raise SchemaError(
                f"rows[...] takes a column's name; found {name!r}. For rows use .take(indices) or .slice(a, b)"
            )
        try:
            return self._columns[name]
        except KeyError:
            raise SchemaError(f"rows have no column '{name}'; {nearest(name, self._columns)}") from None

    def get(self, name: str, default: Any = None) -> Any:
        return self._columns.get(name, default)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._columns)

    @property
    def stored(self) -> Mapping[str, Values]:
        """The columns in their stored form, by name; not to be changed."""
        return self._columns

    @property
    def types(self) -> dict[str, ColumnType]:
        """A copy of the columns' types, by name."""
        return dict(self._types)

    @property
    def schema(self) -> TableSchema:
        return TableSchema(tuple(Column(name, kind, _doc(name)) for name, kind in self._types.items()))

    @property
    def nbytes(self) -> int:
        """Bytes of all values; offsets that columns share count once, text as UTF-8."""
        arrays = {id(array): array for values in self._columns.values() for array in _arrays(values)}
        return sum(_text_bytes(array) if array.dtype == object else array.nbytes for array in arrays.values())

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict of plain Python values per row. For people and text files; operators work on columns."""
        columns = {n: v.to_list() if isinstance(v, Ragged) else v.tolist() for n, v in self._columns.items()}
        for row in range(self._num_rows):
            yield {name: values[row] for name, values in columns.items()}

    def to_pylist(self) -> list[dict[str, Any]]:
        return list(self.rows())

    def equals(self, other: RowBatch) -> bool:
        """Same columns in the same order, same types, same values; NaN equals NaN."""
        return (
            list(self._types.items()) == list(other._types.items())
            and len(self) == len(other)
            and all(_same(values, other._columns[name]) for name, values in self._columns.items())
        )

    def __eq__(self, other: object) -> bool:
        return self.equals(other) if isinstance(other, RowBatch) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def _repr_html_(self) -> str:
        return shown("rows", self)

    def __repr__(self) -> str:
        head = f"RowBatch({len(self)} rows, {len(self._columns)} columns, {_human(self.nbytes)})"
        wide = max((len(name) for name in self._columns), default=0)
        lines = [
            f"  {name:<{wide}}  {self._types[name]!s:<14} {_peek(values)}" for name, values in self._columns.items()
        ]
        return "\n".join([head, *lines])

    # ------------------------------------------------------------------------------------------------ other columns

    def with_column(self, name: str, values: Any, kind: ColumnType) -> RowBatch:
        """The rows with one column added, or replaced in place when the name exists; the others are shared.

        Errors: SchemaError when `values` is not one value (or one list) per row of this type; DataError for missing values.
        """
        return self.with_columns({name: values}, {name: kind})

    def with_columns(self, columns: Mapping[str, Any], types: Mapping[str, ColumnType]) -> RowBatch:
        """Several at once; TOKEN columns replaced together may change the rows' lengths."""
        batch = RowBatch.of_stored(dict(self._columns), dict(self._types), self._num_rows)
        replaced = {name: batch._types.pop(name) for name in columns if name in batch._types}
        for name, values in columns.items():
            if name not in types:
                raise SchemaError(f"column '{name}' has no type; {nearest(name, types)}")
            batch._put(name, values, types[name])
        if replaced:  # keep the place of what was replaced
            batch._types = {n: batch._types[n] for n in dict.fromkeys((*self._types, *columns))}
        batch._columns = {name: batch._columns[name] for name in batch._types}
        return batch

    def select(self, names: Iterable[str]) -> RowBatch:
        """The named columns, in that order."""
        names = [names] if isinstance(names, str) else list(names)
        return RowBatch.of_stored({n: self[n] for n in names}, {n: self._types[n] for n in names}, self._num_rows)

    def drop(self, names: Iterable[str]) -> RowBatch:
        gone = {names} if isinstance(names, str) else set(names)
        for name in gone:
            self[name]
        return self.select(n for n in self._columns if n not in gone)

    def rename(self, names: Mapping[str, str]) -> RowBatch:
        """Columns renamed, old name to new; a new name that is taken is refused."""
        for name in names:
            self[name]
        renamed = [names.get(name, name) for name in self._columns]
        twice = [name for name in renamed if renamed.count(name) > 1]
        if twice:
            raise SchemaError(
                f"rename would give two columns the name '{twice[0]}'; drop or rename the other one first"
            )
        for name in names.values():
            Column(name, TOKEN.f32)  # refuses names that are no identifiers
        return RowBatch.of_stored(
            dict(zip(renamed, self._columns.values(), strict=True)),
            dict(zip(renamed, self._types.values(), strict=True)),
            self._num_rows,
        )

    # --------------------------------------------------------------------------------------------------- other rows

    def take(self, indices: Any) -> RowBatch:
        """The given rows in the given order; rows may repeat. `indices` [M] integers, negative ones count from the end."""
        rows = np.asarray(indices)
        if rows.size == 0:
            rows = rows.astype(np.int64).reshape(-1)
        if rows.ndim != 1 or rows.dtype.kind not in "iu":
            raise SchemaError(
                f"take needs a list of row numbers; found {rows.dtype} of shape {rows.shape}. For a mask use filter"
            )
        if rows.size and (int(rows.min()) < -len(self) or int(rows.max()) >= len(self)):
            raise DataError(
                f"take asked for row {rows.max() if rows.max() >= len(self) else rows.min()} of {len(self)} rows"
            )
        rows = rows.astype(np.int64)
        picks: dict[int, _Pick] = {}  # columns that share offsets share the work
        taken: dict[str, Values] = {}
        for name, values in self._columns.items():
            if isinstance(values, Ragged):
                if id(values.offsets) not in picks:
                    picks[id(values.offsets)] = _Pick(values.offsets, rows)
                pick = picks[id(values.offsets)]
                taken[name] = Ragged(_sealed(pick.of(values.values)), pick.offsets)
            else:
                taken[name] = _sealed(values[rows])
        return RowBatch.of_stored(taken, self._types, len(rows))

    def slice(self, start: int, stop: int | None = None) -> RowBatch:
        """Rows `start` to `stop`, without copying. Numbers as in Python's slices."""
        start, stop, _ = slice(start, stop).indices(len(self))
        stop = max(start, stop)
        offsets: dict[int, np.ndarray] = {}
        cut: dict[str, Values] = {}
        for name, values in self._columns.items():
            if isinstance(values, Ragged):
                first, last = values.offsets[start], values.offsets[stop]
                if id(values.offsets) not in offsets:
                    offsets[id(values.offsets)] = _sealed(values.offsets[start : stop + 1] - first)
                cut[name] = Ragged(values.values[first:last], offsets[id(values.offsets)])
            else:
                cut[name] = values[start:stop]
        return RowBatch.of_stored(cut, self._types, stop - start)

    def copy(self) -> RowBatch:
        """The same rows in memory of their own, free of the larger batch they may be a slice of."""
        copied: dict[str, Values] = {}
        for name, values in self._columns.items():
            if isinstance(values, Ragged):
                copied[name] = Ragged(_sealed(values.values.copy()), values.offsets)
            else:
                copied[name] = _sealed(values.copy())
        return RowBatch.of_stored(copied, self._types, self._num_rows)

    def filter(self, mask: Any) -> RowBatch:
        """The rows where `mask` [N] is true."""
        keep = np.asarray(mask)
        if keep.size == 0 and len(self) == 0:
            keep = keep.astype(bool)
        if keep.dtype != np.bool_ or keep.shape != (len(self),):
            raise SchemaError(
                f"filter needs one boolean per row ({len(self)}); found {keep.dtype} of shape {keep.shape}"
            )
        return self.take(np.flatnonzero(keep))

    @staticmethod
    def concat(batches: Sequence[RowBatch]) -> RowBatch:
        """All rows, one batch after another, with the columns that all of them have, typed as in the first.

        Errors: SchemaError when a column's type in the first batch does not accept that of another, or there are none.
        """
        batches = list(batches)
        if not batches:
            raise SchemaError("concat needs at least one batch; for no rows use RowBatch({}, {}, 0)")
        first = batches[0]
        if len(batches) == 1:
            return first
        names = [name for name in first.names if all(name in other for other in batches)]
        types = {name: _common_type(name, [b._types[name] for b in batches]) for name in names}
        batches = [batch.select(names).as_types(types) for batch in batches]
        joined: dict[str, Values] = {}
        offsets: dict[tuple[int, ...], np.ndarray] = {}
        for name in names:
            parts = [batch._columns[name] for batch in batches]
            flat = [part.values if isinstance(part, Ragged) else part for part in parts]
            values = _sealed(np.concatenate([f for f in flat if len(f)] or flat[:1]))
            if isinstance(parts[0], Ragged):
                ragged = [part for part in parts if isinstance(part, Ragged)]
                shared = tuple(id(part.offsets) for part in ragged)
                if shared not in offsets:
                    lengths = np.concatenate([part.lengths for part in ragged])
                    offsets[shared] = _sealed(
                        np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
                    )
                joined[name] = Ragged(values, offsets[shared])
            else:
                joined[name] = values
        return RowBatch.of_stored(joined, types, sum(len(batch) for batch in batches))

    def as_types(self, types: Mapping[str, ColumnType]) -> RowBatch:
        """The rows with the named columns converted; nothing is lost, and what would be is refused (SchemaError)."""
        changed = {name: kind for name, kind in types.items() if self._types.get(name) != kind}
        return self.with_columns({name: self[name] for name in changed}, changed) if changed else self

    def group_indices(self, key: str | Sequence[str]) -> list[np.ndarray]:
        """Row numbers of each group of equal `key`, in order of first appearance; rows of a group keep their order.

        Groups are made by value, never by position: rows may be shuffled or missing.
        """
        names = [key] if isinstance(key, str) else list(key)
        columns = []
        for name in names:
            values = self[name]
            if isinstance(values, Ragged) or values.ndim != 1 or values.dtype.kind == "f":
                raise SchemaError(f"a group key is text, an integer or a bool per row; '{name}' is {self._types[name]}")
            columns.append(values.tolist())
        keys: Iterable[Any] = columns[0] if len(columns) == 1 else zip(*columns, strict=True)
        groups: dict[Any, list[int]] = {}
        for row, value in enumerate(keys):
            groups.setdefault(value, []).append(row)
        return [np.asarray(rows, np.int64) for rows in groups.values()]

    # ------------------------------------------------------------------------------------------------------- Arrow

    def to_arrow(self) -> pa.Table:
        """An Arrow table whose fields carry the column types; numbers are not copied."""
        schema = self.schema.to_arrow()
        if not self._columns:
            schema = schema.with_metadata({**(schema.metadata or {}), _NUM_ROWS: str(self._num_rows).encode()})
        arrays = []
        for name, values in self._columns.items():
            try:
                arrays.append(to_arrow(values, self._types[name]))
            except UnicodeError as error:
                raise DataError(
                    f"column '{name}' has text that is not Unicode (half a surrogate pair, {error}), which Arrow cannot hold; "
                    "decode it with errors='replace', or store it as bytes"
                ) from error
        return pa.Table.from_arrays(arrays, schema=schema)

    @classmethod
    def from_arrow(cls, table: pa.Table | pa.RecordBatch, types: Mapping[str, ColumnType] | None = None) -> RowBatch:
        """Read an Arrow table. `types` is needed for fields that `to_arrow` did not write.

        Errors: SchemaError for a field of unknown granularity or another Arrow type; DataError for nulls.
        """
        given = dict(types or {})
        known = [item for item in table.schema if item.name not in given]
        given.update({c.name: c.type for c in TableSchema.from_arrow(pa.schema(known))})
        num_rows = table.num_rows
        if not table.schema.names:
            num_rows = int((table.schema.metadata or {}).get(_NUM_ROWS, num_rows))
        return cls({name: table.column(name) for name in table.schema.names}, given, num_rows)

    @classmethod
    def from_rows(cls, rows: Sequence[Mapping[str, Any]], types: Mapping[str, ColumnType]) -> RowBatch:
        """From one dict per row. Every row has every column of `types` and no other.

        Errors: DataError naming the row and the column that is missing or unknown.
        """
        for index, row in enumerate(rows):
            for name in types:
                if name not in row:
                    raise DataError(
                        f"row {index} has no value for column '{name}'; it has {', '.join(row) or 'nothing'}"
                    )
                if row[name] is None:
                    raise DataError(
                        f"row {index} has no value for column '{name}': it is None; fill it or drop the row"
                    )
            for name in row:
                if name not in types:
                    raise DataError(f"row {index} has a column '{name}' without type; {nearest(name, types)}")
        return cls({name: [row[name] for row in rows] for name in types}, types, len(rows))

    def to_ipc(self) -> bytes:
        """An Arrow IPC stream that holds these rows and nothing else of the buffers they may be views of."""
        sink = pa.BufferOutputStream()
        table = self.to_arrow()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue())

    @classmethod
    def from_ipc(cls, data: bytes) -> RowBatch:
        """Read what `to_ipc` wrote."""
        with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
            return cls.from_arrow(reader.read_all())

    def __reduce__(self) -> tuple[Any, ...]:
        return (RowBatch.from_ipc, (self.to_ipc(),))


@contextmanager
def refusing_writes(operator: str) -> Iterator[None]:
    """Say what to write instead when `operator` writes into a column it was given.

    Example:
        with refusing_writes("rloo"):
            function(readonly(reward))

    Errors: OperatorError in place of NumPy's "assignment destination is read-only".
    """
    try:
        yield
    except ValueError as error:
        if "read-only" not in str(error):
            raise
        raise OperatorError(
            f"operator '{operator}' wrote into a column it was given ({error}). Columns are shared and never changed in "
            "place: write `reward = reward - reward.mean()` instead of `reward -= reward.mean()`, or copy first (.copy())"
        ) from error


def _sealed(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


class _Pick:
    """Rows of a list column in another order: new `offsets` [M + 1], and the values that belong to them."""

    def __init__(self, offsets: np.ndarray, rows: np.ndarray) -> None:
        self._starts = offsets[:-1][rows]
        self._lengths = np.diff(offsets)[rows]
        self.offsets = _sealed(np.concatenate([np.zeros(1, np.int64), np.cumsum(self._lengths, dtype=np.int64)]))
        self._places: np.ndarray | None = None

    def of(self, flat: np.ndarray) -> np.ndarray:
        """[T, ...] values of the rows."""
        if len(self._starts) and self.offsets[-1] >= _LONG * len(self._starts):
            # a copy per row beats an index per value
            stops = (self._starts + self._lengths).tolist()
            return np.concatenate([flat[a:b] for a, b in zip(self._starts.tolist(), stops, strict=True)])
        if self._places is None:
            inside = np.arange(self.offsets[-1]) - np.repeat(self.offsets[:-1], self._lengths)
            self._places = np.repeat(self._starts, self._lengths) + inside
        return flat[self._places]


def _common_type(name: str, types: list[ColumnType]) -> ColumnType:
    """The first type, with inner lengths filled in from another one when the first has no values yet."""
    for kind in types:
        if not types[0].accepts(kind):
            raise SchemaError(f"column '{name}' is {types[0]} in one batch and {kind} in another; convert one of them")
    known = [kind.inner for kind in types if all(isinstance(n, int) for n in inner_lengths(kind))]
    if any(inner != known[0] for inner in known):
        raise SchemaError(f"column '{name}' has inner lengths {known[0]} in one batch and others in another")
    return replace(types[0], inner=known[0]) if known else types[0]


def _doc(name: str) -> str:
    return STANDARD[name].doc if name in STANDARD else ""


def _arrays(values: Values) -> tuple[np.ndarray, ...]:
    return (values.values, values.offsets) if isinstance(values, Ragged) else (values,)


def _text_bytes(array: np.ndarray) -> int:
    values = array.reshape(-1).tolist()
    if values and isinstance(values[0], bytes):
        return len(b"".join(values))
    text = "".join(values)  # one pass in C; asking every string would cost more than the rows are worth
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _same(mine: Values, theirs: Values) -> bool:
    if isinstance(mine, Ragged) or isinstance(theirs, Ragged):
        return mine == theirs
    return mine.shape == theirs.shape and np.array_equal(mine, theirs, equal_nan=mine.dtype.kind == "f")


def _peek(values: Values, rows: int = 3, width: int = 60) -> str:
    shown = [
        values[row].tolist() if isinstance(values[row], np.ndarray) else values[row]
        for row in range(min(rows, len(values)))
    ]
    text = ", ".join(repr(v.item() if isinstance(v, np.generic) else v) for v in shown)
    more = len(values) > rows or len(text) > width
    return text[:width] + (" ..." if more else "")


def _human(size: int) -> str:
    amount = float(size)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"
