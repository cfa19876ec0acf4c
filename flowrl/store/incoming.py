"""What `ExperienceTable.append` is given, brought into one form: typed rows that can be cut into pieces and written.

    RowBatch, Arrow table, list of dicts -> Incoming: num_rows, types, groups, piece(start, stop)

A list of dicts whose arrays have the right dtypes already is written without an array in between.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from flowrl.errors import DataError, SchemaError
from flowrl.schema.columns import Column, TableSchema, nearest
from flowrl.schema.standard import STANDARD
from flowrl.schema.types import ColumnType
from flowrl.store.columns import check_storable, inner_lengths
from flowrl.store.layout import Prepared, prepare, prepare_rows
from flowrl.store.rows import RowBatch


@dataclass(frozen=True, slots=True)
class Incoming:
    """Rows to append, all checked that can be checked before the table's state is known."""

    num_rows: int
    types: Mapping[str, ColumnType]
    batch: RowBatch | None
    dicts: Sequence[Mapping[str, Any]]
    """When `batch` is None."""
    groups: tuple[int, ...] = ()
    """Sizes of groups that stay together, in order."""
    fits: int = -1
    """Version of the table's columns that these rows are known to have, or -1."""

    def piece(self, start: int, stop: int) -> Prepared:
        """Errors: as `RowBatch.from_rows`, for rows that are dicts."""
        if self.batch is None:
            rows = self.dicts if stop - start == self.num_rows else self.dicts[start:stop]
            return prepare_rows(rows, self.types)
        rows_ = self.batch if stop - start == self.num_rows else self.batch.slice(start, stop)
        return prepare(rows_.stored, rows_.types, len(rows_))


@dataclass(frozen=True, slots=True)
class Known:
    """What a table's columns are, at one version of them."""

    version: int
    schema: TableSchema | None
    """Columns that rows bring; None before the first rows."""
    later: frozenset[str]
    """Columns that rows need not bring. One that some rows bring and others get later is refused."""
    plain: Mapping[str, ColumnType] | None
    """Types of the columns that rows bring, when no inner length waits for the first value."""

    @classmethod
    def of(cls, columns: TableSchema, later: frozenset[str], version: int) -> Known:
        wanted = TableSchema(tuple(c for c in columns if c.name not in later))
        if not len(wanted):
            return cls(version, None, later, None)
        types = {c.name: c.type for c in wanted}
        known = all(isinstance(n, int) for kind in types.values() for n in inner_lengths(kind))
        return cls(version, wanted, later, types if known else None)


def incoming(
    rows: Any,
    types: Mapping[str, ColumnType] | None,
    known: Known,
    keep_together: str | None,
    checked: Mapping[str, ColumnType] | None = None,
) -> Incoming:
    """Errors: SchemaError for missing, unknown or wrongly typed columns; DataError for missing values.

    Args:
        types: of columns that neither the table nor the standard columns know.
        checked: the types of the last append, which need not be looked at again.
    """
    if types is not checked:
        _check_types(types)
    wanted, later, version = known.schema, known.later, known.version
    if keep_together is None and _are_plain(rows) and rows and rows[0]:
        if known.plain is not None and types is checked and rows[0].keys() == known.plain.keys():
            return Incoming(len(rows), known.plain, None, rows, fits=version)
        found = _plain_types(rows[0], types, wanted)
        if found is not None:
            return Incoming(len(rows), found, None, rows, fits=-1 if wanted is None else version)
    batch = _typed(rows, types, wanted, later)
    groups: tuple[int, ...] = ()
    if keep_together is not None:
        indices = batch.group_indices(keep_together)
        groups = tuple(len(group) for group in indices)
        if indices and not np.array_equal(order := np.concatenate(indices), np.arange(len(batch))):
            batch = batch.take(order)  # rows of a group become neighbours
    return Incoming(len(batch), batch.types, batch, (), groups, -1 if known.plain is None else version)


def _check_types(types: Any) -> None:
    """Types are column types. They may be of more columns than the rows have: one map serves every append."""
    if not types:
        return
    if not isinstance(types, Mapping):
        raise SchemaError(f"types= maps a column's name to its type; found {type(types).__name__}")
    for name, kind in types.items():
        check_storable(name, kind)


def _are_plain(rows: Any) -> bool:
    return isinstance(rows, list) and set(map(type, rows)) <= {dict}


def _plain_types(
    row: Mapping[str, Any], given: Mapping[str, ColumnType] | None, schema: TableSchema | None
) -> dict[str, ColumnType] | None:
    """Types of the columns, when nothing but writing them is left to do."""
    if schema is None:
        known = {**{c.name: c.type for c in STANDARD}, **(given or {})}
        if any(name not in known for name in row):
            return None
        found = {name: known[name] for name in row}
        for name in found:
            Column(name, found[name])  # refuses names that are no identifiers
    else:
        found = {c.name: c.type for c in schema}
        if row.keys() != found.keys() or any(found.get(name, kind) != kind for name, kind in (given or {}).items()):
            return None
    if any(not isinstance(n, int) for kind in found.values() for n in inner_lengths(kind)):
        return None  # an inner length that only a name stands for is known when all rows were looked at
    return found


def _typed(
    rows: Any, types: Mapping[str, ColumnType] | None, schema: TableSchema | None, later: frozenset[str]
) -> RowBatch:
    if not isinstance(rows, RowBatch):
        rows = as_batch(rows, dict(types or {}), schema)
    if schema is None:
        return rows
    for name in schema.names:
        if name not in rows:
            raise SchemaError(
                f"the table has a column '{name}' that the rows to append lack; {nearest(name, rows.names)}"
            )
    for name in rows.names:
        if name in later:
            raise SchemaError(
                f"column '{name}' of the table is filled later; leave it out here and call fill('{name}', numbers, values) "
                "with the numbers that append returns"
            )
        if name not in schema:
            raise SchemaError(
                f"the rows to append have a column '{name}' that the table lacks; drop it, or call "
                f"add_column('{name}', ...) first; {nearest(name, schema.names)}"
            )
    for column in schema:
        if not column.type.accepts(rows.types[column.name]):
            raise SchemaError(f"column '{column.name}' of the table is {column.type}; found {rows.types[column.name]}")
    return rows.select(schema.names).as_types({c.name: c.type for c in schema})


def as_batch(rows: Any, types: dict[str, ColumnType], schema: TableSchema | None) -> RowBatch:
    """An Arrow table or dicts as a batch, typed as said, as the schema says, or as standard columns.

    Errors: SchemaError for a column whose type nobody says; DataError for values that do not fit.
    """
    columns = () if schema is None else tuple(schema)
    known = {**{c.name: c.type for c in STANDARD}, **{c.name: c.type for c in columns}, **types}
    if isinstance(rows, pa.Table | pa.RecordBatch):
        untold = [f.name for f in rows.schema if b"flowrl.type" not in (f.metadata or {})]
        return RowBatch.from_arrow(
            rows, {name: known[name] for name in rows.schema.names if name in known and name in untold}
        )
    if isinstance(rows, Mapping) or not isinstance(rows, Sequence):
        raise SchemaError(
            f"append takes a RowBatch, an Arrow table or a list of dicts; found {type(rows).__name__}. {_instead(rows)}"
        )
    other = next((place for place, row in enumerate(rows) if not isinstance(row, Mapping)), None)
    if isinstance(rows, str | bytes) or other is not None:
        found = rows if isinstance(rows, str | bytes) else rows[other or 0]
        raise SchemaError(
            f"append takes a RowBatch, an Arrow table or a list of dicts; {'' if found is rows else f'row {other} is '}"
            f"{reprlib.repr(found)}"
        )
    if rows and not rows[0]:
        raise SchemaError("row 0 has no columns; a row has at least one")
    names = [c.name for c in columns] if schema is not None else list(rows[0]) if rows else []
    names += [name for row in rows[:1] for name in row if name not in names]
    for name in names:
        if name not in known:
            raise SchemaError(
                f"column '{name}' is no standard column; say its type: append(rows, types={{'{name}': {_likely(rows[0][name])}}})"
            )
    return RowBatch.from_rows(rows, {name: known[name] for name in names})


def _instead(rows: Any) -> str:
    """What to write for other forms of a table."""
    if isinstance(rows, Mapping):
        return "Of lists by column, make dicts by row: [dict(zip(d, row)) for row in zip(*d.values())], or a pyarrow.table(d)"
    if hasattr(rows, "to_arrow"):
        return "Write .to_arrow()"
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):
        return "Write .to_dict('records'), or pyarrow.Table.from_pandas(...)"
    return "Write list(...)" if hasattr(rows, "__iter__") else "Put the rows into a list"


def _likely(value: Any) -> str:
    """The type a value of an undeclared column looks like."""
    if isinstance(value, str | bytes):
        return f"fr.SAMPLE.{type(value).__name__}"
    try:
        array = np.asarray(value)
    except Exception:  # a tensor that NumPy cannot take, or an object of any other library
        return "fr.SAMPLE.f32"
    dtypes = {"b": "bool", "i": "i64", "u": "i64", "U": "str", "f": "f16" if array.dtype == np.float16 else "f32"}
    dtype = dtypes.get(array.dtype.kind, "f32")
    if array.ndim == 0:
        return f"fr.SAMPLE.{dtype}"
    inner = "".join(f", {length}" for length in array.shape[1:])
    return f'fr.SAMPLE.{dtype}["*"{inner}]'


def check_groups(groups: Sequence[int], keep_together: str | None, max_rows: int | None) -> None:
    if max_rows is not None and max(groups, default=0) > max_rows:
        raise DataError(
            f"a group of equal '{keep_together}' has {max(groups)} rows and the table keeps {max_rows}; raise max_rows"
        )
