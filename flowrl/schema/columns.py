"""Columns, where their values come from, and the table schema they make."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowrl.errors import SchemaError
from flowrl.schema.types import ColumnType

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Provenance:
    """Which model wrote a column's numbers, and with which of its versions.

    Example:
        Provenance(model="policy", version=0)      # before any update of this iteration
        Provenance(model="policy", version=None)   # rows of several versions mixed (a replay buffer)
    """

    model: str
    """Name of the flow input that holds the model."""
    version: int | None
    """Updates of that model so far in the iteration; None when rows of several versions are mixed."""

    def __str__(self) -> str:
        return f"{self.model}@{'mixed' if self.version is None else f't+{self.version}' if self.version else 't'}"


@dataclass(frozen=True, slots=True)
class Column:
    """A named, typed column.

    Example:
        Column("reward", SAMPLE.f32, "scalar per response")
    """

    name: str
    type: ColumnType
    doc: str = field(default="", compare=False)
    from_data: bool = field(default=False, compare=False)
    """True when a data set may bring it (a prompt's answer), false when only a node writes it."""

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("/", "_").replace("@", "_").replace(".", "_").isidentifier():
            raise SchemaError(
                f"a column name is an identifier, parts separated by '/', '.' or '@' allowed; found {self.name!r}"
            )


@dataclass(frozen=True, slots=True)
class TableSchema:
    """Ordered columns of a table; lowers to a `pyarrow.Schema` whose fields carry granularity and doc as metadata."""

    columns: tuple[Column, ...] = ()

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for column in self.columns:
            if column.name in seen:
                raise SchemaError(f"a table has one column of each name; '{column.name}' is there twice")
            seen.add(column.name)

    def __contains__(self, name: object) -> bool:
        return any(column.name == name for column in self.columns)

    def __iter__(self) -> Iterator[Column]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        raise SchemaError(f"no column '{name}'; {nearest(name, self.names)}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.name for column in self.columns)

    def with_column(self, column: Column) -> TableSchema:
        """A new schema with `column` added, or replaced in place when the name exists."""
        if column.name in self:
            return TableSchema(tuple(column if c.name == column.name else c for c in self.columns))
        return TableSchema((*self.columns, column))

    def select(self, names: Iterable[str]) -> TableSchema:
        return TableSchema(tuple(self[name] for name in names))

    def to_arrow(self) -> pa.Schema:
        """The Arrow schema. Field metadata: `flowrl.type`, `flowrl.doc`; schema metadata: `flowrl.schema_version`."""
        import pyarrow as pa

        fields = [
            pa.field(c.name, c.type.to_arrow(), metadata={"flowrl.type": str(c.type), "flowrl.doc": c.doc})
            for c in self.columns
        ]
        return pa.schema(fields, metadata={"flowrl.schema_version": json.dumps(1)})

    @classmethod
    def from_arrow(cls, schema: pa.Schema) -> TableSchema:
        """Read back what `to_arrow` wrote; fields without our metadata are refused by name."""
        columns = []
        for item in schema:
            found = (item.metadata or {}).get(b"flowrl.type")
            if found is None:
                raise SchemaError(
                    f"Arrow field '{item.name}' ({item.type}) carries no 'flowrl.type' metadata, so its granularity is unknown; "
                    f"say its type: types={{'{item.name}': fr.SAMPLE.f32}}, or whatever its values are"
                )
            doc = (item.metadata or {}).get(b"flowrl.doc", b"").decode()
            columns.append(Column(item.name, ColumnType.parse(found.decode()), doc))
        return cls(tuple(columns))


def nearest(name: str, known: Iterable[str]) -> str:
    """A short hint: the nearest known names, or all of them when none is near."""
    names = list(dict.fromkeys(known))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(f"'{c}'" for c in close) + "?"
    if not names:
        return "there are none"
    shown = ", ".join(f"'{n}'" for n in sorted(names)[:12])
    return f"there are {shown}" + (" ..." if len(names) > 12 else "")
