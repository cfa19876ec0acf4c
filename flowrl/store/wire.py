"""What a table's server and its clients say to each other: rows in pages, and errors.

    rows    Arrow record batches whose schema carries the rest of the answer as JSON
    errors  the class's name and its text as JSON

A slice travels as its rows, never with the buffer it was cut from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from flowrl import errors
from flowrl.errors import CheckError, DataError, FlowError, MissingExtra, StoreError
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import ColumnType
from flowrl.store.columns import Values
from flowrl.store.interop import to_arrow
from flowrl.store.rows import RowBatch

PAGE_BYTES = 16 << 20
"""Values in one answer, in bytes. What is larger comes in several."""

ROW_BYTES = 1 << 30
"""The most one row may have: it travels in one message, and a message ends at 2 GiB."""

CLIENT = "flowrl-client"
"""Header that says which client calls."""

_REPLY = b"flowrl.reply"
_TEXT_CHARS = 2000
"""Of an error; it travels in a header, and a header ends at 8 KiB."""


def flight() -> Any:
    """`pyarrow.flight`. Errors: MissingExtra for a pyarrow that was built without it."""
    try:
        from pyarrow import flight as module
    except ImportError as error:
        raise MissingExtra(
            "tables on other hosts need Arrow Flight, which this pyarrow lacks; install one that has it: pip install pyarrow"
        ) from error
    return module


# ---------------------------------------------------------------------------------------------------------------- rows


def pieces(rows: RowBatch) -> Iterator[RowBatch]:
    """The rows in pieces of at most PAGE_BYTES each, or of one row. Errors: DataError for a row over ROW_BYTES."""
    size = rows.nbytes
    if size <= PAGE_BYTES and len(rows):
        yield rows
    elif len(rows) <= 1:
        if size > ROW_BYTES:
            raise DataError(
                f"a row has {size >> 20} MiB and at most {ROW_BYTES >> 20} MiB travel in one; read or write fewer columns at once"
            )
        yield rows
    else:
        middle = len(rows) // 2
        yield from pieces(rows.slice(0, middle))
        yield from pieces(rows.slice(middle))


def pages(batches: Iterable[RowBatch], types: Mapping[str, ColumnType]) -> Iterator[list[RowBatch]]:
    """The same rows in lists of about PAGE_BYTES, typed as said; one empty list when there are none."""
    held: list[RowBatch] = []
    size, gave = 0, False
    for batch in batches:
        for piece in pieces(batch.as_types({name: types[name] for name in batch.names if name in types})):
            if held and size + piece.nbytes > PAGE_BYTES:
                yield held
                held, size, gave = [], 0, True
            held.append(piece)
            size += piece.nbytes
    if held or not gave:
        yield held


def to_message(page: Sequence[RowBatch], reply: Mapping[str, Any]) -> pa.Table:
    """A page with the rest of the answer in its schema."""
    tables = [to_arrow(rows) for rows in page]
    schema = tables[0].schema
    told = {**(schema.metadata or {}), _REPLY: json.dumps({**reply, "rows": [len(rows) for rows in page]}).encode()}
    return pa.concat_tables(tables).replace_schema_metadata(told)


def from_message(table: pa.Table) -> tuple[list[RowBatch], dict[str, Any]]:
    """What `to_message` made: the rows of each piece, which `together` or `aligned` make fit for use, and the answer."""
    reply: dict[str, Any] = json.loads((table.schema.metadata or {})[_REPLY])
    lengths = reply.pop("rows")
    if not table.schema.names:
        return [RowBatch({}, {}, length) for length in lengths], reply
    if sum(lengths) != table.num_rows:
        raise StoreError(f"an answer was to bring {sum(lengths)} rows and brought {table.num_rows}; read again")
    starts = np.cumsum([0, *lengths])[:-1].tolist()
    cut = [table.slice(start, length) for start, length in zip(starts, lengths, strict=True)]
    return [RowBatch.from_arrow(part) for part in cut], reply


def together(parts: Iterable[RowBatch]) -> RowBatch:
    """The pieces as one."""
    held = list(parts)
    return aligned(held[0]) if len(held) == 1 else RowBatch.concat(held)


def aligned(rows: RowBatch) -> RowBatch:
    """The rows with every array at an address its dtype asks for; what came in a message lies anywhere."""
    moved: dict[int, np.ndarray] = {}

    def of(array: np.ndarray) -> np.ndarray:
        if array.flags.aligned:
            return array
        if id(array) not in moved:
            copied = array.copy()
            copied.flags.writeable = False
            moved[id(array)] = copied
        return moved[id(array)]

    columns: dict[str, Values] = {}
    for name in rows.names:
        values = rows[name]
        columns[name] = Ragged(of(values.values), of(values.offsets)) if isinstance(values, Ragged) else of(values)
    return RowBatch(columns, rows.types, len(rows))


# -------------------------------------------------------------------------------------------------------------- errors


def to_failure(call: str, error: Exception) -> tuple[str, bytes]:
    """A short text, and the error as it travels."""
    kind = type(error).__name__
    if isinstance(error, FlowError) and not isinstance(error, CheckError) and hasattr(errors, kind):
        text = str(error)
    else:
        kind, text = StoreError.__name__, f"the server failed at '{call}': {type(error).__name__}: {error}"
    if len(text) > _TEXT_CHARS:
        text = f"{text[:_TEXT_CHARS]} ... ({len(text) - _TEXT_CHARS} more characters)"
    return f"'{call}' failed", json.dumps({"error": kind, "text": text}).encode()


def from_failure(extra: bytes | None) -> FlowError | None:
    """The error that `to_failure` wrote; None when this is none."""
    try:
        told = json.loads(extra or b"null")
        kind = getattr(errors, str(told["error"]))
        return kind(told["text"]) if issubclass(kind, FlowError) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
