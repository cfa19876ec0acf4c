"""What flows on the edges of a graph, as far as it is known before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from flowrl.schema.columns import Column, Provenance, TableSchema
from flowrl.schema.types import ColumnType


@dataclass(frozen=True, slots=True)
class ColumnInfo:
    """A column on an edge: its type, the node that wrote it and, for numbers a model computed, which model and version."""

    type: ColumnType
    writer: str
    provenance: Provenance | None = None
    is_copy_of: str = ""
    """For a mask made only by narrowing another one: that column's name."""


@dataclass(frozen=True, slots=True)
class RowsType:
    """A table on an edge."""

    columns: dict[str, ColumnInfo] = field(default_factory=dict)
    rowset: str = ""
    """Node that decided which rows there are; adding columns keeps it, filters and rollouts do not."""
    tokens: str = ""
    """Node that decided the tokens; equal values mean equal response_ids for equal rows."""
    token_model: str = ""
    """Input whose model's tokenizer made the token ids; empty for a data set's."""
    group_size: int | None = None
    """Rows per prompt_id, where known."""
    sampled_by: Provenance | None = None
    """Model and version that sampled the response tokens; None for a data set's."""
    has_foreign_tokens: bool = False
    """True when an environment wrote some of the response tokens."""
    splits: tuple[tuple[str, str], ...] = ()
    """(node, key kept together or empty) of every split of the rows since they were made."""
    steps: int = 1
    """Optimizer steps an update takes over one pass of these rows (`repeat`)."""
    is_mixed: bool = False
    """True when rows of several policy versions are mixed (`buffer`)."""
    is_input: bool = False
    """True for a data set: its columns are what a data set may have, to be checked when it is given."""

    def with_columns(self, writer: str, *columns: Column, provenance: Provenance | None = None) -> RowsType:
        """The same rows with columns added or replaced."""
        added = {c.name: ColumnInfo(c.type, writer, provenance) for c in columns}
        return replace(self, columns={**self.columns, **added})

    def schema(self) -> TableSchema:
        return TableSchema(tuple(Column(name, info.type) for name, info in self.columns.items()))


@dataclass(frozen=True, slots=True)
class WeightsType:
    """A version of a model."""

    model: str
    """Name of the flow's input that holds the model."""
    version: int = 0
    """Updates so far in this iteration."""
    node: str = ""
    """Node that made it."""

    @property
    def provenance(self) -> Provenance:
        return Provenance(self.model, self.version)


EdgeType = RowsType | WeightsType
