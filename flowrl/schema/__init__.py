"""What a row is: column types, table schemas, the standard columns, ragged values."""

from flowrl.schema.columns import Column, Provenance, TableSchema, nearest
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import PROMPT, SAMPLE, TOKEN, TURN, ColumnType, Granularity

__all__ = [
    "PROMPT",
    "SAMPLE",
    "TOKEN",
    "TURN",
    "Column",
    "ColumnType",
    "Granularity",
    "Provenance",
    "Ragged",
    "TableSchema",
    "nearest",
]
