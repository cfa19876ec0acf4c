"""What a table holds: the fold of the records of its commit log. No input or output happens here.

    record kind   what it changes
    table         settings, once, first
    columns       columns known from now on
    append        rows: numbers, segments, groups, chunks
    segments      new segments in place of old ones (merged, compressed, spilled), or of a column that came later
    settle        a segment that compressing makes no smaller counts as compressed
    evict         rows gone
    node          a consumer of a node came; from now on rows wait for it where the table waits
    claim, done, release     rows handed to a consumer of a node; used; given back
    touch         chunks that were read (tables that evict the least recently used)
    gone          a process ended: what it had claimed is free again
    finish        no more rows will come
    lost          segments whose memory went away with a machine or a process
    snapshot      everything above at once

Every process that has a table open applies the same records in the same order, so all agree about everything.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flowrl.errors import StoreError
from flowrl.schema.types import ColumnType
from flowrl.store.intervals import Pairs, RowSet, common, first_of, length

Record = dict[str, Any]

HOT, PACKED, DISK = "hot", "packed", "disk"
TIERS = (HOT, PACKED, DISK)
"""As they are in memory; compressed in memory; in a file."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Some columns of neighbouring rows, in bytes that never change.

    Example:
        Segment(uid=1 << 40, first=512, rows=256, names=("reward",), tier="hot", place=("arena-1-0", 4096, 1024),
                raw_bytes=1024, stored_bytes=1024, layouts="[...]")
    """

    uid: int
    first: int
    rows: int
    names: tuple[str, ...]
    tier: str
    place: tuple[Any, ...]
    """(arena, offset, bytes) in memory, (file names...) on disk."""
    raw_bytes: int
    """Uncompressed."""
    stored_bytes: int
    layouts: str
    """Where each column lies in the block, as JSON; read when the segment is."""
    sizes: Mapping[str, Sequence[Any]] | None = None
    """By column, of a segment on disk: raw bytes, stored bytes, codec. In memory the layouts say it."""

    @property
    def stop(self) -> int:
        return self.first + self.rows

    def to_json(self, first: int | None = None) -> list[Any]:
        """Args: first: where it lies among the rows, when that was not known before."""
        return [
            self.uid, self.first if first is None else first, self.rows, self.names, self.tier, self.place,
            self.raw_bytes, self.stored_bytes, self.layouts, self.sizes,
        ]  # fmt: skip

    @classmethod
    def from_json(cls, found: Sequence[Any]) -> Segment:
        uid, first, rows, names, tier, place, raw_bytes, stored_bytes, layouts, sizes = found
        return cls(uid, first, rows, tuple(names), tier, tuple(place), raw_bytes, stored_bytes, layouts, sizes)


@dataclass(slots=True)
class Family:
    """Segments of the same columns, by their first row. Rows that were appended together are one family."""

    names: tuple[str, ...]
    ready: RowSet = field(default_factory=RowSet)
    """Rows that some segment of the family has; of evicted rows, perhaps."""
    firsts: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)

    def put(self, segment: Segment) -> None:
        if not self.firsts or segment.first > self.firsts[-1]:
            self.firsts.append(segment.first)
            self.segments.append(segment)
        else:
            place = bisect_right(self.firsts, segment.first)
            self.firsts.insert(place, segment.first)
            self.segments.insert(place, segment)
        self.ready.add(segment.first, segment.stop)

    def drop(self, segment: Segment) -> None:
        place = bisect_left(self.firsts, segment.first)
        while self.segments[place].uid != segment.uid:
            place += 1
        del self.firsts[place], self.segments[place]

    def between(self, start: int, stop: int) -> list[Segment]:
        """Segments that hold any row from `start` to `stop`, in order."""
        low = max(0, bisect_right(self.firsts, start) - 1)
        found = self.segments[low : bisect_left(self.firsts, stop)]
        return found[1:] if found and found[0].stop <= start else found


@dataclass(slots=True)
class ColumnState:
    """A column, and which rows have it."""

    type: ColumnType
    required: bool = True
    """Whether rows must bring it when they are appended; false for a column that is filled later."""
    doc: str = ""
    families: list[Family] = field(default_factory=list)
    """Those with the column; one, unless it came in different company."""

    @property
    def ready(self) -> RowSet:
        """Rows that have the column. Not to be changed."""
        if len(self.families) == 1:
            return self.families[0].ready
        return RowSet(pair for family in self.families for pair in family.ready)

    def between(self, start: int, stop: int) -> list[Segment]:
        """Segments that hold the column of any row from `start` to `stop`, in order."""
        if len(self.families) == 1:
            return self.families[0].between(start, stop)
        return sorted(
            (s for family in self.families for s in family.between(start, stop)), key=lambda segment: segment.first
        )


@dataclass(slots=True)
class NodeState:
    """What the consumers of one node have done."""

    taken: RowSet = field(default_factory=RowSet)
    """Claimed or done."""
    done: RowSet = field(default_factory=RowSet)
    open: dict[str, tuple[int, Pairs]] = field(default_factory=dict)
    """By token: slot of the process that claimed, rows."""


class Catalog:
    """The state of a table. Changed by `apply` only."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.columns: dict[str, ColumnState] = {}
        self.columns_version = 0
        """Grows when a column comes or changes."""
        self.families: dict[tuple[str, ...], Family] = {}
        self.appended = 0
        self.evicted = 0
        self.lost = 0
        """Rows that went away with the memory they were in."""
        self.version = 0
        self.finished = False
        self.alive = RowSet()
        self.nodes: dict[str, NodeState] = {}
        self.chunks: list[int] = []
        """First row of each chunk that has rows."""
        self.groups: list[int] = []
        """First row of each group, of tables that keep groups together."""
        self.segments: dict[int, Segment] = {}
        self.tiers: dict[str, dict[int, Segment]] = {tier: {} for tier in TIERS}
        """The same by tier, as they came there."""
        self.bytes: dict[str, int] = dict.fromkeys(TIERS, 0)
        self.raw_bytes = 0
        self.recent: dict[int, None] = {}
        """Chunks, least recently used first; only where the table evicts by use."""
        self.retired: list[Segment] = []
        """Segments dropped since someone last took this list; their blocks can be used again."""

    # ------------------------------------------------------------------------------------------------------ changing

    def apply(self, record: Record) -> None:
        """Errors: StoreError for a record of a newer version of the table format."""
        handler = getattr(self, f"_apply_{record.get('kind')}", None)
        if handler is None:
            raise StoreError(
                f"the table's log has a record of kind {record.get('kind')!r}, which this version of FlowRL does not know; "
                "open the table with the version that wrote it"
            )
        handler(record)

    def _apply_table(self, record: Record) -> None:
        self.settings = record["settings"]

    def _apply_columns(self, record: Record) -> None:
        for name, kind, required, doc in record["columns"]:
            known = self.columns.get(name)
            if known is None:
                self.columns[name] = ColumnState(ColumnType.parse(kind), required, doc)
            else:
                known.type, known.required = ColumnType.parse(kind), required
        self.version += 1
        self.columns_version += 1

    def _apply_append(self, record: Record) -> None:
        first, rows = record["first"], record["rows"]
        self.appended = first + rows
        skipped = record.get("skipped", 0)
        """Rows that were never stored, because newer ones of the same append fill the table."""
        self.evicted += skipped
        self.alive.add(first + skipped, first + rows)
        self.chunks.extend(record["chunks"])
        self.groups.extend(record.get("groups", ()))
        for found in record["segments"]:
            self._put(Segment.from_json(found))
        if self.settings.get("eviction") == "lru":
            self.recent.update(dict.fromkeys(record["chunks"]))
        self.version += 1

    def _apply_segments(self, record: Record) -> None:
        for uid in record.get("old", ()):
            if uid in self.segments:
                self._retire(self.segments[uid])
        for found in record["new"]:
            segment = Segment.from_json(found)
            if self.alive.meets(segment.first, segment.stop):
                self._put(segment)
            else:  # its rows were evicted while it was being made
                self.retired.append(segment)
        self.version += bool(record.get("change"))

    def _apply_evict(self, record: Record) -> None:
        for start, stop in record["rows"]:
            self._evict(start, stop)
        self.version += 1

    def _apply_claim(self, record: Record) -> None:
        node = self.nodes.get(record["node"])
        if node is None:
            node = self.nodes[record["node"]] = NodeState()
        rows = [(a, b) for a, b in record["rows"]]
        node.taken.update(rows)
        node.open[record["token"]] = (record["slot"], rows)

    def _apply_done(self, record: Record) -> None:
        node, rows = self._claim_of(record)
        if node is None:
            return
        slot, held = node.open.pop(record["token"])
        if rows is None:
            node.done.update(held)
            return
        node.done.update(rows)  # a part of the claim; the rest stays claimed
        left = RowSet(held)
        left.difference_update(rows)
        if left:
            node.open[record["token"]] = (slot, left.pairs())

    def _apply_release(self, record: Record) -> None:
        node, _ = self._claim_of(record)
        if node is not None:
            node.taken.difference_update(node.open.pop(record["token"])[1])

    def _claim_of(self, record: Record) -> tuple[NodeState | None, Pairs | None]:
        """The node of a claim that is open, and the rows a record names. A claim that is not open any more changes nothing:
        whatever lies in the log, the next record must still be read."""
        node = self.nodes.get(record["node"])
        if node is None or record["token"] not in node.open:
            return None, None
        return node, [(a, b) for a, b in record["rows"]] if "rows" in record else None

    def _apply_node(self, record: Record) -> None:
        self.nodes.setdefault(record["node"], NodeState())

    def _apply_touch(self, record: Record) -> None:
        for chunk in record["chunks"]:
            if chunk in self.recent:
                del self.recent[chunk]
                self.recent[chunk] = None

    def _apply_gone(self, record: Record) -> None:
        for node in self.nodes.values():
            for token in [t for t, (slot, _) in node.open.items() if slot == record["slot"]]:
                node.taken.difference_update(node.open.pop(token)[1])

    def _apply_settle(self, record: Record) -> None:
        segment = self.segments.get(record["uid"])
        if segment is None or segment.tier != HOT:
            return
        self.families[segment.names].drop(segment)
        del self.segments[segment.uid], self.tiers[HOT][segment.uid]
        self.bytes[HOT] -= segment.stored_bytes
        self.raw_bytes -= segment.raw_bytes
        self._put(replace(segment, tier=PACKED))

    def _apply_finish(self, record: Record) -> None:
        self.finished = True

    def _apply_lost(self, record: Record) -> None:
        for uid in record["uids"]:
            segment = self.segments.get(uid)
            if segment is None:
                continue
            if any(self.columns[name].required for name in segment.names):
                start, stop = segment.first, segment.stop
                if self.groups:  # a group of which a part is gone is gone
                    start, stop = self.group_of(start)[0], self.group_of(stop - 1)[1]
                self.lost += length(self.alive.clip(start, stop))
                self._evict(start, stop)
            else:  # a column that came later: the rows are still there, without it
                self.families[segment.names].ready.remove(segment.first, segment.stop)
                self._retire(segment)
        self.version += 1

    def _put(self, segment: Segment) -> None:
        self.segments[segment.uid] = segment
        self.tiers[segment.tier][segment.uid] = segment
        self.bytes[segment.tier] += segment.stored_bytes
        self.raw_bytes += segment.raw_bytes
        family = self.families.get(segment.names)
        if family is None:
            family = self.families[segment.names] = Family(segment.names)
            for name in segment.names:
                self.columns[name].families.append(family)
        family.put(segment)

    def _retire(self, segment: Segment) -> None:
        del self.segments[segment.uid], self.tiers[segment.tier][segment.uid]
        self.bytes[segment.tier] -= segment.stored_bytes
        self.raw_bytes -= segment.raw_bytes
        self.families[segment.names].drop(segment)
        self.retired.append(segment)

    def _evict(self, start: int, stop: int) -> None:
        gone = length(self.alive.clip(start, stop))
        if not gone:
            return
        self.alive.remove(start, stop)
        self.evicted += gone
        for family in self.families.values():
            for segment in family.between(start, stop):
                if not self.alive.meets(segment.first, segment.stop):
                    self._retire(segment)
        for index in range(bisect_right(self.chunks, start) - 1, bisect_left(self.chunks, stop)):
            # the newest chunk stays, because it may still grow
            if 0 <= index < len(self.chunks) - 1 and not self.alive.meets(self.chunks[index], self.chunks[index + 1]):
                self.recent.pop(self.chunks[index], None)
        self._forget()

    def _forget(self) -> None:
        """Chunks and groups before the oldest row; in large steps, since taking from a list's front costs its length."""
        oldest = self.alive.span(0)
        limit = self.appended if oldest is None else oldest[0]
        chunk = bisect_right(self.chunks, limit) - 1
        if chunk > 0 and (chunk > 64 or chunk * 2 > len(self.chunks)):
            for first in self.chunks[:chunk]:
                self.recent.pop(first, None)
            del self.chunks[:chunk]
        group = bisect_right(self.groups, limit) - 1
        if group > 0 and (group > 512 or group * 2 > len(self.groups)):
            del self.groups[:group]
        for node in self.nodes.values():
            node.taken.remove(0, limit)
            node.done.remove(0, limit)
        for family in self.families.values():
            family.ready.remove(0, limit)

    # ------------------------------------------------------------------------------------------------------ asking

    def chunk_ranges(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """First row and end of each chunk that has rows between `start` and `stop`."""
        stop = self.appended if stop is None else stop
        place = max(0, bisect_right(self.chunks, start) - 1)
        while place < len(self.chunks) and (first := self.chunks[place]) < stop:
            place += 1
            end = self.chunks[place] if place < len(self.chunks) else self.appended
            if self.alive.meets(first, end):
                yield first, end

    def group_of(self, number: int) -> tuple[int, int]:
        """First row and end of the group a row is in."""
        place = bisect_right(self.groups, number) - 1
        if place < 0:  # rows of a state that knew no groups
            return number, number + 1
        end = self.groups[place + 1] if place + 1 < len(self.groups) else self.appended
        return self.groups[place], end

    def claimed(self) -> RowSet:
        """Rows some consumer has and has not given back or used up."""
        rows = RowSet()
        for node in self.nodes.values():
            for _, pairs in node.open.values():
                rows.update(pairs)
        return rows

    def claimable(self, node: str, columns: Iterable[str], count: int, *, whole_groups: bool = False) -> Pairs:
        """The oldest `count` rows that have the columns and that no consumer of the node has taken."""
        within = [self.alive, *self.ready(columns)]
        without = [self.nodes[node].taken] if node in self.nodes else []
        if not whole_groups:
            return first_of(count, within, without)
        found = RowSet()
        for start, stop in common(within, without):
            first, end = self.group_of(start)
            if first < start:  # the rest of it is not there yet, or is taken
                first, end = self._next_group(end)
            while first < end <= stop:
                if len(found) + end - first > count:
                    return found.pairs()
                found.add(first, end)
                first, end = self._next_group(end)
        return found.pairs()

    def _next_group(self, start: int) -> tuple[int, int]:
        """The group that begins at `start`; none after the last row."""
        return self.group_of(start) if start < self.appended else (start, start)

    def ready(self, columns: Iterable[str]) -> list[RowSet]:
        """Sets of rows that together say which rows have all the columns."""
        found: dict[int, RowSet] = {}
        for name in columns:
            families = self.columns[name].families
            if len(families) == 1:
                found[id(families[0])] = families[0].ready
            else:
                found[id(self.columns[name])] = self.columns[name].ready
        return list(found.values())

    def evictable(self, count: int, *, only_done: bool = False) -> Pairs:
        """The rows to evict so that there are `count` fewer: never claimed ones, and groups as a whole.

        With `only_done`: only rows that the consumers of every node are done with.
        """
        claimed = self.claimed()
        within = [self.alive]
        if only_done:
            if not self.nodes:
                return []
            within += [node.done for node in self.nodes.values()]
        if not self.groups and self.settings.get("eviction") != "lru":
            return first_of(count, within, [claimed])
        found = RowSet()
        for start, stop in self._in_order_of_eviction():
            for a, b in common([RowSet([(start, stop)]), *within], [claimed]):
                while a < b and len(found) < count:
                    end = min(b, a + count - len(found))
                    if self.groups:
                        first, end = self.group_of(a)
                        if claimed.meets(first, end) or not all(self._within(rows, first, end) for rows in within):
                            a = end
                            continue
                    found.update(self.alive.clip(a, end))
                    a = end
            if len(found) >= count:
                break
        return found.pairs()

    def evictable_for(self, num_bytes: int, *, only_done: bool = False) -> Pairs:
        """Rows to evict so that segments of at least `num_bytes` go; empty when nothing can go."""
        found = RowSet()
        claimed = self.claimed()
        freed = 0
        for chunk in self._in_order_of_eviction():
            for start, stop in self._pieces(*chunk):
                if freed >= num_bytes:
                    return found.pairs()
                if self.groups:  # a group that reaches into another piece goes with it
                    start, stop = self.group_of(start)[0], self.group_of(stop - 1)[1]
                if found.covers(start, stop) or claimed.meets(start, stop):
                    continue
                if only_done and not (
                    self.nodes and all(self._within(node.done, start, stop) for node in self.nodes.values())
                ):
                    continue
                found.add(start, stop)
                freed += sum(s.stored_bytes for s in self.between(start, stop) if start <= s.first and s.stop <= stop)
        return found.pairs()

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The rows of a chunk as they lie in segments: bytes are freed when all rows of a segment are gone."""
        name = next((name for name, column in self.columns.items() if column.required), None)
        if name is not None:
            for segment in self.columns[name].between(start, stop):
                yield max(segment.first, start), min(segment.stop, stop)

    def _within(self, rows: RowSet, start: int, stop: int) -> bool:
        return all(rows.covers(a, b) for a, b in self.alive.clip(start, stop))

    def _in_order_of_eviction(self) -> Iterator[tuple[int, int]]:
        if self.settings.get("eviction") != "lru":
            yield from self.chunk_ranges()
            return
        for chunk in list(self.recent):
            place = bisect_right(self.chunks, chunk)
            yield chunk, self.chunks[place] if place < len(self.chunks) else self.appended

    def between(self, start: int, stop: int) -> list[Segment]:
        """All segments with any row from `start` to `stop`."""
        return [segment for family in self.families.values() for segment in family.between(start, stop)]

    def missing(self, column: str, start: int, stop: int) -> Pairs:
        """Rows from `start` to `stop` that are here and lack the column."""
        return list(common([RowSet(self.alive.clip(start, stop))], [self.columns[column].ready]))

    # ------------------------------------------------------------------------------------------------------ as a record

    def snapshot(self) -> Record:
        return {
            "settings": self.settings,
            "columns": [[n, str(c.type), c.required, c.doc] for n, c in self.columns.items()],
            "counts": [self.appended, self.evicted, self.lost, self.version, self.finished],
            "alive": self.alive.pairs(),
            "nodes": {
                name: [node.taken.pairs(), node.done.pairs(), [[t, s, r] for t, (s, r) in node.open.items()]]
                for name, node in self.nodes.items()
            },
            "chunks": self.chunks,
            "groups": self.groups,
            "recent": list(self.recent),
            "segments": [segment.to_json() for segment in self.segments.values()],
        }

    def _apply_snapshot(self, record: Record) -> None:
        state = record["state"]
        before = self.segments
        retired = self.retired
        version = self.columns_version
        self.__init__()  # type: ignore[misc]
        self.settings = state["settings"]
        for name, kind, required, doc in state["columns"]:
            self.columns[name] = ColumnState(ColumnType.parse(kind), required, doc)
        for found in sorted(state["segments"], key=lambda item: item[1]):
            self._put(Segment.from_json(found))
        self.columns_version = version + 1
        self.appended, self.evicted, self.lost, self.version, self.finished = state["counts"]
        self.alive = RowSet(state["alive"])
        for name, (taken, done, claims) in state["nodes"].items():
            open_claims = {token: (slot, [(a, b) for a, b in rows]) for token, slot, rows in claims}
            self.nodes[name] = NodeState(RowSet(taken), RowSet(done), open_claims)
        self.chunks, self.groups = list(state["chunks"]), list(state["groups"])
        self.recent = dict.fromkeys(state["recent"])
        # what this process knew and the snapshot does not was retired in records it has not seen
        self.retired = [*retired, *(s for uid, s in before.items() if uid not in self.segments)]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of an append that become one segment."""

    start: int
    stop: int
    opens: bool
    """Whether a new chunk begins with it."""


def cut(rows: int, open_rows: int, chunk_rows: int, groups: Sequence[int] = ()) -> list[Piece]:
    """Cut an append so that chunks have at most `chunk_rows` rows and a group is in one chunk if it fits in one.

    Args:
        open_rows: rows of the newest chunk; 0 when there is none.
        groups: sizes of groups, in order; none: rows stand alone.
    """
    pieces: list[Piece] = []
    if rows + open_rows > chunk_rows and 2 * rows >= chunk_rows:
        open_rows = 0  # a shorter chunk is better than an append that is cut in two
    start, held, opens = 0, open_rows, open_rows == 0
    ends = np.cumsum(groups).tolist() if groups else None
    while start < rows:
        room = max(0, chunk_rows - held)
        stop = min(rows, start + room)
        if ends is not None and stop < rows:
            place = bisect_right(ends, stop) - 1
            whole = ends[place] if place >= 0 else 0
            if whole > start:
                stop = whole
            elif held:
                stop = start  # the next group starts the next chunk
            # else one group is larger than a chunk, and is cut
        if stop > start:
            pieces.append(Piece(start, stop, opens))
        start, held, opens = stop, 0, True
    return pieces
