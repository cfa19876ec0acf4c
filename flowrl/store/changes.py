"""Changes of a table: rows at the end, columns beside them, small segments made one, old rows gone.

append    room -> write (no lock held) -> commit            a reader sees all of an append, or nothing
fill      rows that have come are given a column of their own segment; nothing old is touched
merge     a chunk that is full, and was written in pieces, becomes one segment
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from flowrl.errors import DataError, SchemaError, StoreError, WaitTimeout
from flowrl.schema.columns import Column
from flowrl.schema.ragged import Ragged
from flowrl.schema.standard import STANDARD
from flowrl.schema.types import TOKEN, ColumnType
from flowrl.store import layout as layouts
from flowrl.store.backing import Backing
from flowrl.store.catalog import HOT, Catalog, NodeState, Piece, Record, Segment, cut
from flowrl.store.columns import check_storable, inner_lengths, to_stored
from flowrl.store.incoming import Incoming
from flowrl.store.intervals import Pairs, RowSet, length
from flowrl.store.reading import View, check_columns, parsed_layouts
from flowrl.store.rows import RowBatch
from flowrl.store.writing import write

LONGEST_NAP_S = 0.01
"""Between looks at whether a reader has let go of memory, which no record tells."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a table keeps, and what happens when that is reached."""

    max_rows: int | None = None
    max_bytes: int | None = None
    chunk_rows: int = 256
    on_full: str = "evict"
    timeout_s: float = 60.0


# ------------------------------------------------------------------------------------------------------------- append


def append(backing: Backing, rows: Incoming, bounds: Bounds) -> tuple[range, bool]:
    """Write and commit. Returns the numbers of the rows, and whether a chunk that consists of pieces became full.

    Errors: SchemaError when another process changed the columns meanwhile; StoreError when there is no room; WaitTimeout.
    """
    skipped = _skipped(rows, bounds)
    stored = rows.num_rows - skipped
    with backing.mutex:
        backing.replay()
        catalog = backing.catalog
        _check_not_finished(catalog)
        open_rows = catalog.appended - catalog.chunks[-1] if catalog.chunks and not skipped else 0
    groups = _kept_groups(rows.groups, stored)
    pieces = cut(stored, open_rows, bounds.chunk_rows, groups)
    prepared = [rows.piece(skipped + piece.start, skipped + piece.stop) for piece in pieces]
    nbytes = sum([p.nbytes for p in prepared])
    until = time.monotonic() + bounds.timeout_s
    if bounds.max_bytes is not None or bounds.on_full != "wait":
        make_room(backing, bounds, stored, nbytes, until)
    else:  # a bound in rows is no reason to wait before writing: mostly there is room, and the commit looks anyway
        _check_fits(bounds, stored, nbytes)
    segments: list[Segment] = []
    try:
        for one in prepared:
            segments.append(write(backing, one, 0))
        while True:
            with backing.transaction(bounds.timeout_s) as catalog:
                _check_not_finished(catalog)
                if bounds.on_full == "raise":
                    _raise_if_full(catalog, bounds, stored, nbytes)
                gone = _leaving(backing, bounds, stored, nbytes)
                if not (bounds.on_full == "wait" and _lacking(backing, bounds, stored, nbytes, gone)):
                    first = catalog.appended
                    grown = first - catalog.chunks[-1] if catalog.chunks else 0
                    fits = not skipped and grown + pieces[0].stop <= bounds.chunk_rows if pieces else True
                    if pieces and not pieces[0].opens and not fits:
                        # another process has filled the open chunk since the pieces were cut
                        pieces[0] = replace(pieces[0], opens=True)
                    records = [] if rows.fits == catalog.columns_version else _columns_records(catalog, rows.types)
                    record = _append_record(rows, pieces, segments, groups, first, skipped)
                    backing.tidy()
                    backing.commit(*records, *(gone or ()), record, is_last=True)
                    closed = grown > 0 and (bool(record["chunks"]) or grown + stored >= bounds.chunk_rows)
                    break
            make_room(backing, bounds, stored, nbytes, until)  # another process took it
    except BaseException:
        backing.discard_uncommitted(segments)
        raise
    return range(first, first + rows.num_rows), closed


def _append_record(
    rows: Incoming,
    pieces: Sequence[Piece],
    segments: Sequence[Segment],
    groups: Sequence[int],
    first: int,
    skipped: int,
) -> Record:
    start = first + skipped
    group_starts = np.cumsum([0, *groups[:-1]]).tolist() if groups else []
    return {
        "kind": "append",
        "first": first,
        "rows": rows.num_rows,
        "skipped": skipped,
        "chunks": [start + piece.start for piece in pieces if piece.opens],
        "segments": [s.to_json(start + p.start) for p, s in zip(pieces, segments, strict=True)],
        "groups": [start + group for group in group_starts],
    }


def _skipped(rows: Incoming, bounds: Bounds) -> int:
    """Rows at the front that could not stay even for a moment, since the rest fills the table."""
    if bounds.max_rows is None or rows.num_rows <= bounds.max_rows or bounds.on_full != "evict":
        return 0
    if not rows.groups:
        return rows.num_rows - bounds.max_rows
    kept = 0
    for size in reversed(rows.groups):
        if kept + size > bounds.max_rows:
            break
        kept += size
    return rows.num_rows - kept


def _kept_groups(groups: Sequence[int], stored: int) -> list[int]:
    kept: list[int] = []
    left = stored
    for size in reversed(groups):
        if left <= 0:
            break
        kept.append(size)
        left -= size
    return kept[::-1]


def _check_not_finished(catalog: Catalog) -> None:
    if catalog.finished:
        raise StoreError("the table was finished: finish() says that no more rows will come; append before it")


def _columns_records(catalog: Catalog, types: Mapping[str, ColumnType]) -> list[Record]:
    """Columns that are new (in the first rows), or whose inner length is known from now on."""
    if catalog.columns and (missing := [n for n, c in catalog.columns.items() if c.required and n not in types]):
        raise SchemaError(
            f"the table has a column '{missing[0]}' that the rows to append lack: another process added it meanwhile"
        )
    found = []
    for name, kind in types.items():
        known = catalog.columns.get(name)
        if known is None:
            if any(column.required for column in catalog.columns.values()):
                raise SchemaError(
                    f"the rows to append have a column '{name}' that the table lacks: another process set the table's "
                    "columns first"
                )
            found.append([name, str(kind), True, STANDARD[name].doc if name in STANDARD else ""])
        elif known.type != kind:
            if all(isinstance(n, int) for n in inner_lengths(known.type)) or not known.type.accepts(kind):
                raise SchemaError(
                    f"column '{name}' of the table is {known.type}; found {kind}: another process set the table's columns first"
                )
            found.append([name, str(kind), known.required, known.doc])
    return [{"kind": "columns", "columns": found}] if found else []


# --------------------------------------------------------------------------------------------------------------- room


def make_room(backing: Backing, bounds: Bounds, rows: int, nbytes: int, until: float) -> None:
    """Return when `rows` rows of `nbytes` bytes may be written; with on_full="wait" that takes until consumers are done.

    What has to leave for them leaves in the commit of the rows, except for a bound in bytes: memory is given out again
    before more is taken.

    Args:
        until: when to give up, as `time.monotonic` counts.

    Errors: StoreError when it can never be, or with on_full="raise"; WaitTimeout.
    """
    if bounds.max_rows is None and bounds.max_bytes is None:
        return
    _check_fits(bounds, rows, nbytes)
    if bounds.on_full == "evict" and bounds.max_bytes is None:
        return
    while True:
        with backing.transaction(bounds.timeout_s) as catalog:
            if bounds.on_full == "raise":
                _raise_if_full(catalog, bounds, rows, nbytes)
                return
            gone = _leaving(backing, bounds, rows, nbytes)
            if gone and bounds.max_bytes is not None:
                backing.commit(*gone)
                backing.recycle()
                gone = _leaving(backing, bounds, rows, nbytes)
            lacking = _lacking(backing, bounds, rows, nbytes, gone)
            if not lacking or bounds.on_full == "evict":  # claimed rows stay, beyond the bound if need be
                return
            backing.release_the_dead()
            seen = backing.log.sequence
        left = until - time.monotonic()
        if left <= 0:
            with backing.mutex:
                raise WaitTimeout(_full_text(backing.catalog, bounds, lacking))
        backing.log.wait(seen, min(left, LONGEST_NAP_S))


def _check_fits(bounds: Bounds, rows: int, nbytes: int) -> None:
    if bounds.max_rows is not None and rows > bounds.max_rows:
        raise StoreError(
            f"one append of {rows} rows does not fit into a table of max_rows={bounds.max_rows}; append fewer at a time"
        )
    if bounds.max_bytes is not None and nbytes > bounds.max_bytes:
        raise StoreError(
            f"one append needs {nbytes} bytes and the table keeps max_bytes={bounds.max_bytes}; append fewer rows at a "
            "time or raise max_bytes"
        )


def _leaving(backing: Backing, bounds: Bounds, rows: int, nbytes: int) -> list[Record] | None:
    """The eviction that makes room for what comes; none when there is room; None when rows would have to stay that may
    not: with on_full="wait", those that consumers are not done with."""
    if bounds.on_full == "raise":
        return []
    catalog = backing.catalog
    is_waiting = bounds.on_full == "wait"
    gone = RowSet()
    if bounds.max_rows is not None:
        over = len(catalog.alive) + rows - bounds.max_rows
        if over > 0:
            gone.update(catalog.evictable(over, only_done=is_waiting))
            if is_waiting and len(gone) < over:
                return None
    if bounds.max_bytes is not None:
        # what readers still hold counts with "wait", so that memory stays bounded; more leaves for it
        pinned = backing.pinned_bytes if is_waiting else 0
        over = sum(catalog.bytes.values()) + pinned + nbytes - bounds.max_bytes
        if over > 0:
            gone.update(catalog.evictable_for(over, only_done=is_waiting))
    return [{"kind": "evict", "rows": gone.pairs()}] if gone else []


def _lacking(backing: Backing, bounds: Bounds, rows: int, nbytes: int, gone: list[Record] | None) -> str:
    """What there is too much of still; empty when the rows may come."""
    catalog = backing.catalog
    if gone is None:
        return f"{rows} rows beside {len(catalog.alive)} of max_rows={bounds.max_rows}"
    if bounds.max_bytes is not None:
        pinned = backing.pinned_bytes if bounds.on_full == "wait" else 0
        held = sum(catalog.bytes.values()) + pinned
        if held + nbytes > bounds.max_bytes:
            read = f" ({pinned} of them evicted, and still read by someone)" if pinned else ""
            return f"{nbytes} bytes beside {held}{read} of max_bytes={bounds.max_bytes}"
    return ""


def _raise_if_full(catalog: Catalog, bounds: Bounds, rows: int, nbytes: int) -> None:
    held = sum(catalog.bytes.values())
    if (bounds.max_rows is not None and len(catalog.alive) + rows > bounds.max_rows) or (
        bounds.max_bytes is not None and held + nbytes > bounds.max_bytes
    ):
        raise StoreError(
            f"the table is full: {len(catalog.alive)} rows, {held} bytes, and {rows} rows of {nbytes} bytes to come "
            f"(max_rows={bounds.max_rows}, max_bytes={bounds.max_bytes}); evict rows first, or choose on_full='evict' or 'wait'"
        )


def _full_text(catalog: Catalog, bounds: Bounds, lacking: str) -> str:
    claimed = len(catalog.claimed())
    nodes = "; ".join(f"'{name}' is done with {len(node.done)}" for name, node in catalog.nodes.items())
    return (
        f"waited {bounds.timeout_s:g} s for room for {lacking}. {claimed} rows are claimed; "
        f"{nodes or 'no consumer has claimed any row yet'}. Is the consumer still running? Its claims need .done() or "
        ".release(), and its batches must be let go of"
    )


# ------------------------------------------------------------------------------------------------------------- columns


def add_column(backing: Backing, name: str, values: Any, kind: ColumnType, timeout_s: float) -> None:
    """A column for all rows held; see `ExperienceTable.add_column`."""
    check_storable(name, kind)
    Column(name, kind)
    segments: list[Segment] = []
    with backing.transaction(timeout_s) as catalog:
        if name in catalog.columns:
            raise SchemaError(
                f"the table has a column '{name}' already; columns are never overwritten, choose another name"
            )
        doc = STANDARD[name].doc if name in STANDARD else ""
        if values is None:
            backing.commit({"kind": "columns", "columns": [[name, str(kind), False, doc]]})
            return
        stored, kind = to_stored(name, values, kind, len(catalog.alive))
        whole = RowBatch.of_stored({name: stored}, {name: kind}, len(catalog.alive))
        try:
            segments = _write_runs(backing, whole, _runs(catalog, catalog.alive.pairs()))
            records: list[Record] = [{"kind": "columns", "columns": [[name, str(kind), True, doc]]}]
            if segments:
                records.append({"kind": "segments", "new": [s.to_json() for s in segments]})
            backing.commit(*records)
        except BaseException:
            backing.discard_uncommitted(segments)
            raise


def fill(
    backing: Backing,
    columns: Mapping[str, Any],
    numbers: Any,
    timeout_s: float,
    *,
    keep_existing: bool = False,
    also: Sequence[Record] = (),
) -> int:
    """Columns' values for some rows; see `ExperienceTable.fill`.

    Args:
        also: records to commit with them.
    """
    rows = row_numbers("fill", numbers)
    if len(np.unique(rows)) != len(rows):
        raise SchemaError(f"fill needs each row number once; found {rows.tolist()[:12]}")
    segments: list[Segment] = []
    with backing.transaction(timeout_s) as catalog:
        check_columns(catalog, list(columns))
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= catalog.appended):
            raise DataError(
                f"fill was given row number {rows.min() if rows.min() < 0 else rows.max()}; {catalog.appended} rows "
                "were ever appended, numbered from 0"
            )
        order = np.argsort(rows, kind="stable")
        asked = RowSet.of(rows)
        alive = RowSet(pair for a, b in asked for pair in catalog.alive.clip(a, b))
        filled = 0
        records: list[Record] = []
        try:
            for name, values in columns.items():
                column = catalog.columns[name]
                stored, kind = to_stored(name, values, column.type, len(rows))
                there = _without(alive, column.ready, name, keep_existing)
                if not there:
                    continue
                filled = max(filled, len(there))
                batch = RowBatch.of_stored({name: stored}, {name: kind}, len(rows))
                batch = batch.take(order[np.isin(rows[order], there.numbers(), assume_unique=True)])
                made = _write_runs(backing, batch, _runs(catalog, there.pairs()))
                segments += made
                if kind != column.type:
                    records.append({"kind": "columns", "columns": [[name, str(kind), column.required, column.doc]]})
                records.append({"kind": "segments", "new": [s.to_json() for s in made], "change": True})
            if records or also:
                backing.commit(*records, *also)
        except BaseException:
            backing.discard_uncommitted(segments)
            raise
        return filled


def _without(rows: RowSet, ready: RowSet, name: str, keep_existing: bool) -> RowSet:
    """The rows that lack the column. Errors: SchemaError for one that has it, unless those are to be kept."""
    double = [pair for a, b in rows for pair in ready.clip(a, b)]
    if not double:
        return rows
    if not keep_existing:
        raise SchemaError(
            f"row number {double[0][0]} has a value of '{name}' already; values are never overwritten. Filling it again is "
            f"right when a process died between filling and done(): then fill(..., keep_existing=True), or end the claim with "
            "claim.fill, which does both at once"
        )
    left = rows.copy()
    left.difference_update(double)
    return left


def row_numbers(what: str, numbers: Any) -> np.ndarray:
    """Row numbers as int64 [N]. Errors: SchemaError for anything else."""
    rows = np.asarray(numbers)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise SchemaError(
            f"{what} needs a list of row numbers, as append returns them; found {rows.dtype} of shape {rows.shape}"
        )
    return rows.astype(np.int64)


def _runs(catalog: Catalog, pairs: Pairs) -> Pairs:
    """The rows cut at the bounds of chunks."""
    found = []
    for start, stop in pairs:
        for first, end in catalog.chunk_ranges(start, stop):
            found.append((max(start, first), min(stop, end)))
    return found


def _write_runs(backing: Backing, batch: RowBatch, runs: Pairs) -> list[Segment]:
    """One segment for each run; `batch` has the rows of all of them, in order."""
    name = batch.names[0]
    segments: list[Segment] = []
    at = 0
    try:
        for start, stop in runs:
            piece = batch.slice(at, at + stop - start) if len(runs) > 1 else batch
            at += stop - start
            _check_axis(backing, name, piece, start, stop)
            prepared = layouts.prepare(piece.stored, piece.types, len(piece))
            segments.append(write(backing, prepared, start))
    except BaseException:
        backing.discard_uncommitted(segments)
        raise
    return segments


def _check_axis(backing: Backing, name: str, piece: RowBatch, start: int, stop: int) -> None:
    """TOKEN columns of a row have one value per token, all of them."""
    if piece.types[name].granularity is not TOKEN:
        return
    catalog = backing.catalog
    other = next(
        (
            n
            for n, c in catalog.columns.items()
            if n != name and c.type.granularity is TOKEN and c.ready.covers(start, stop)
        ),
        None,
    )
    if other is None:
        return
    theirs = View.of(backing, [(start, stop)], [other]).lengths(other)
    values: Ragged = piece[name]
    if not np.array_equal(theirs, values.lengths):
        row = int(np.flatnonzero(theirs != values.lengths)[0])
        raise SchemaError(
            f"TOKEN columns of a row have one value per response token; in row {row} '{name}' has "
            f"{values.lengths[row]} and '{other}' has {theirs[row]}"
        )


# --------------------------------------------------------------------------------------------------------------- merge


def merge_full_chunks(backing: Backing, chunk_rows: int, timeout_s: float) -> None:
    """Make one segment of the pieces of each full chunk, newest first, until one is whole already.

    When there is no room for that, or no time, pieces stay pieces: they can be read, and what was appended is appended.
    """
    with suppress(StoreError, WaitTimeout):
        _merge(backing, chunk_rows, timeout_s)


def _merge(backing: Backing, chunk_rows: int, timeout_s: float) -> None:
    while True:
        with backing.transaction(timeout_s) as catalog:
            found = _pieces_of_a_full_chunk(catalog, chunk_rows)
            if not found:
                return
            roots = [backing.root(segment) for segment in found]
        parts = [(parsed_layouts(s), root, s.rows) for s, root in zip(found, roots, strict=True)]
        merged = write(backing, layouts.merge(parts), found[0].first)
        del roots, parts
        is_used = False
        try:
            with backing.transaction(timeout_s) as catalog:
                if not all(s.uid in catalog.segments for s in found):  # evicted meanwhile
                    return
                backing.commit({"kind": "segments", "old": [s.uid for s in found], "new": [merged.to_json()]})
                is_used = True
        finally:
            if not is_used:
                backing.discard_uncommitted([merged])


def _pieces_of_a_full_chunk(catalog: Catalog, chunk_rows: int) -> list[Segment]:
    """Neighbouring hot segments of the same columns that together are a chunk which will not grow."""
    ends = [*catalog.chunks[-3:], catalog.appended]  # older ones were looked at when they became full
    for first, end in reversed(list(pairwise(ends))):
        if end == catalog.appended and end - first < chunk_rows:
            continue
        if not catalog.alive.covers(first, end):
            continue
        by_names: dict[tuple[str, ...], list[Segment]] = {}
        for segment in catalog.between(first, end):
            by_names.setdefault(segment.names, []).append(segment)
        for pieces in by_names.values():
            pieces.sort(key=lambda s: s.first)
            if (
                len(pieces) > 1
                and all(s.tier == HOT for s in pieces)
                and pieces[0].first == first
                and pieces[-1].stop == end
                and all(a.stop == b.first for a, b in pairwise(pieces))
                and not _is_used_up(catalog, first, end)
            ):
                return pieces
    return []


def _is_used_up(catalog: Catalog, first: int, end: int) -> bool:
    """Whether every consumer has most of the rows already, so that making them one would be work for nothing."""
    half = (end - first) / 2
    return bool(catalog.nodes) and all(length(node.taken.clip(first, end)) > half for node in catalog.nodes.values())


# ---------------------------------------------------------------------------------------------------------------- evict


def evict(backing: Backing, pairs: Pairs, timeout_s: float) -> int:
    """Drop rows that nobody has claimed; how many."""
    with backing.transaction(timeout_s) as catalog:
        claimed = catalog.claimed()
        gone = RowSet(pair for a, b in pairs for pair in catalog.alive.clip(a, b))
        gone.difference_update(claimed)
        if catalog.groups:
            whole = RowSet()
            for start, stop in gone.copy():
                at = start
                while at < stop:
                    first, end = catalog.group_of(at)
                    if not claimed.meets(first, end):
                        whole.update(catalog.alive.clip(first, end))
                    at = end
            gone = whole
        if gone:
            backing.commit({"kind": "evict", "rows": gone.pairs()})
        return length(gone)


# ---------------------------------------------------------------------------------------------------------------- saving


def state(backing: Backing) -> dict[str, Any]:
    """Rows and counters, enough for `restore`. In a transaction."""
    catalog = backing.catalog
    pairs = catalog.alive.pairs()
    sets = {name: column.ready for name, column in catalog.columns.items()}
    partial = [name for name, ready in sets.items() if not all(ready.covers(a, b) for a, b in pairs)]
    whole = [n for n in catalog.columns if n not in partial]
    filled = {}
    for name in partial:
        there = [pair for a, b in pairs for pair in sets[name].clip(a, b)]
        filled[name] = [there, View.of(backing, there, [name]).batch().to_ipc()]
    starts = [g for g in catalog.groups if g in catalog.alive]
    return {
        "rows": View.of(backing, pairs, whole).batch().to_ipc() if catalog.columns else None,
        "numbers": pairs,
        "later": [n for n, c in catalog.columns.items() if not c.required],
        "filled": filled,
        "groups": np.diff([*starts, catalog.appended]).tolist() if starts else [],
        "group_rows": list(catalog.groups),
        "nodes": {name: node.done.pairs() for name, node in catalog.nodes.items()},
        "finished": catalog.finished,
        "appended": catalog.appended,
        "evicted": catalog.evicted,
        "version": catalog.version,
    }


def restore(backing: Backing, saved: Mapping[str, Any], bounds: Bounds) -> None:
    """Become the table of `saved`. In a transaction."""
    _check_saved(saved)
    fresh = Catalog()
    fresh.settings = backing.catalog.settings
    segments: list[Segment] = []
    try:
        if saved["rows"] is not None:
            batch = RowBatch.from_ipc(saved["rows"])
            pairs = saved.get("numbers", [(saved["appended"] - len(batch), saved["appended"])] if len(batch) else [])
            groups = saved.get("group_rows") or _positions(saved["groups"], saved["appended"])
            chunks = _restore_rows(backing, batch, pairs, groups, bounds, segments)
            later = saved.get("later", ())
            fresh.apply({"kind": "columns", "columns": [_column(c, c.name not in later) for c in batch.schema]})
            record: Record = {
                "kind": "append", "first": 0, "rows": saved["appended"], "chunks": chunks,
                "segments": [s.to_json() for s in segments], "groups": groups,
            }  # fmt: skip
            fresh.apply(record)
            fresh.alive = RowSet(pairs)
            for there, ipc in saved.get("filled", {}).values():
                part = RowBatch.from_ipc(ipc)
                fresh.apply({"kind": "columns", "columns": [_column(c, False) for c in part.schema]})
                before = len(segments)
                _restore_rows(backing, part, there, [], bounds, segments)
                fresh.apply({"kind": "segments", "new": [s.to_json() for s in segments[before:]]})
        for node, done in saved.get("nodes", {}).items():  # what was claimed and not done is given back
            fresh.nodes[node] = NodeState(RowSet(done), RowSet(done))
        fresh.finished = saved.get("finished", False)
        fresh.appended, fresh.evicted, fresh.version = saved["appended"], saved["evicted"], saved["version"]
        backing.commit({"kind": "snapshot", "state": fresh.snapshot()})
    except BaseException:
        backing.discard_uncommitted(segments)
        raise


def _check_saved(saved: Mapping[str, Any]) -> None:
    """Errors: DataError for something that `state` did not return."""
    lacking = [key for key in ("rows", "groups", "appended", "evicted", "version") if key not in saved]
    if lacking:
        raise DataError(f"restore needs what state() returned; '{lacking[0]}' is missing")
    rows = 0
    if saved["rows"] is not None:
        try:
            rows = len(RowBatch.from_ipc(saved["rows"]))
        except (pa.ArrowException, TypeError, OSError) as error:
            raise DataError(f"restore needs what state() returned; its rows cannot be read: {error}") from error
    pairs = saved.get("numbers", [(saved["appended"] - rows, saved["appended"])] if rows else [])
    if length((a, b) for a, b in pairs) != rows or any(not 0 <= a < b <= saved["appended"] for a, b in pairs):
        raise DataError(
            f"restore needs what state() returned; it has {rows} rows, the numbers {pairs[:4]} and "
            f"{saved['appended']} rows ever appended"
        )


def _column(column: Column, required: bool) -> list[Any]:
    return [column.name, str(column.type), required, column.doc]


def _positions(sizes: Sequence[int], stop: int) -> list[int]:
    """First row of each group, from their sizes; the last one ends at `stop`."""
    return (stop - np.cumsum(sizes[::-1])[::-1]).tolist() if len(sizes) else []


def _restore_rows(
    backing: Backing, batch: RowBatch, pairs: Pairs, groups: list[int], bounds: Bounds, made: list[Segment]
) -> list[int]:
    """Write the rows, numbered as `pairs` says, into `made`; the first row of each chunk."""
    chunks = []
    at = 0
    for start, stop in pairs:
        edges = groups[bisect_right(groups, start) : bisect_left(groups, stop)]
        sizes = np.diff([start, *edges, stop]).tolist() if groups else []
        for piece in cut(stop - start, 0, bounds.chunk_rows, sizes):
            part = batch.slice(at + piece.start, at + piece.stop)
            prepared = layouts.prepare(part.stored, part.types, len(part))
            made.append(write(backing, prepared, start + piece.start))
            chunks.append(start + piece.start)
        at += stop - start
    return chunks


__all__ = [
    "Bounds",
    "add_column",
    "append",
    "evict",
    "fill",
    "make_room",
    "merge_full_chunks",
    "restore",
    "row_numbers",
    "state",
]
