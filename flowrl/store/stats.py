"""What a table holds, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flowrl.store.backing import Backing
from flowrl.store.catalog import TIERS, Catalog, ColumnState
from flowrl.store.intervals import length
from flowrl.store.reading import parsed_layouts
from flowrl.store.writing import sizes_of


@dataclass(frozen=True, slots=True)
class ColumnStats:
    """One column.

    Example:
        ColumnStats(type="TOKEN.i32", raw_bytes=9_472_000, stored_bytes=3_830_000, codecs={"lz4": 3_830_000},
                    tiers={"packed": 3_830_000}, rows=4096, required=True)
    """

    type: str
    raw_bytes: int
    """Of its values and offsets as they are used, repeated prompts counted once; offsets that TOKEN columns share count for
    the first of them."""
    stored_bytes: int
    """In memory and in files."""
    codecs: Mapping[str, int]
    """Stored bytes by codec; "none" is plain."""
    tiers: Mapping[str, int]
    """Stored bytes by tier: hot (plain in memory), packed (compressed in memory), disk; those that have some of it."""
    rows: int
    """Rows that have a value."""
    required: bool
    """False for a column that is filled after the rows have come."""

    @property
    def ratio(self) -> float:
        """Raw bytes for each stored one."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 1.0


@dataclass(frozen=True, slots=True)
class TableStats:
    """One table, at one version."""

    name: str
    rows: int
    appended: int
    evicted: int
    lost: int
    """Rows whose memory went away before they were written to a file."""
    version: int
    chunks: int
    segments: int
    finished: bool
    raw_bytes: int
    stored_bytes: int
    tiers: Mapping[str, int]
    """Stored bytes: hot (plain in memory), packed (compressed in memory), disk."""
    reserved_bytes: int
    """Memory this process holds for the table, free blocks included."""
    pinned_bytes: int
    """Of rows that are gone and that somebody still reads."""
    claimed: int
    """Rows that consumers have and are not done with."""
    columns: Mapping[str, ColumnStats]

    @property
    def ratio(self) -> float:
        """Raw bytes for each stored one."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def _rows_with(catalog: Catalog, column: ColumnState) -> int:
    ready = column.ready
    return length(pair for start, stop in catalog.alive for pair in ready.clip(start, stop))


def stats(backing: Backing, name: str) -> TableStats:
    """Count what the catalog knows; no row is read."""
    with backing.mutex:
        backing.replay()
        catalog = backing.catalog
        raw = dict.fromkeys(catalog.columns, 0)
        stored = dict.fromkeys(catalog.columns, 0)
        codecs: dict[str, dict[str, int]] = {column: {} for column in catalog.columns}
        tiers: dict[str, dict[str, int]] = {column: {} for column in catalog.columns}
        for segment in catalog.segments.values():
            sizes = segment.sizes or sizes_of(parsed_layouts(segment))
            for column, (raw_bytes, stored_bytes, codec) in sizes.items():
                raw[column] += raw_bytes
                stored[column] += stored_bytes
                codecs[column][codec] = codecs[column].get(codec, 0) + stored_bytes
                tiers[column][segment.tier] = tiers[column].get(segment.tier, 0) + stored_bytes
        columns = {
            column: ColumnStats(
                type=str(state.type),
                raw_bytes=raw[column],
                stored_bytes=stored[column],
                codecs=codecs[column],
                tiers={tier: tiers[column][tier] for tier in TIERS if tier in tiers[column]},
                rows=_rows_with(catalog, state),
                required=state.required,
            )
            for column, state in catalog.columns.items()
        }
        return TableStats(
            name=name,
            rows=len(catalog.alive),
            appended=catalog.appended,
            evicted=catalog.evicted,
            lost=catalog.lost,
            version=catalog.version,
            chunks=sum(1 for _ in catalog.chunk_ranges()),
            segments=len(catalog.segments),
            finished=catalog.finished,
            raw_bytes=catalog.raw_bytes,
            stored_bytes=sum(catalog.bytes.values()),
            tiers={tier: catalog.bytes[tier] for tier in TIERS},
            reserved_bytes=0 if backing.arenas is None else backing.arenas.reserved_bytes,
            pinned_bytes=backing.pinned_bytes,
            claimed=len(catalog.claimed()),
            columns=columns,
        )
