"""Rows to cheaper places, in the background: plain in memory -> compressed in memory -> files.

    hot      plain bytes in shared memory          up to hot_bytes
    packed   the same, columns encoded where it pays   hot and packed up to memory_bytes
    disk     a file per segment                    up to max_bytes in all, then rows are evicted

The oldest full chunks move first. Everything can be read wherever it lies. A move is one commit: the new segment in, the old
one out; a reader that holds the old one keeps it. A process that dies in between leaves a file nobody knows, which the next
one to open the table removes.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from flowrl.errors import WaitTimeout
from flowrl.store.backing import Backing
from flowrl.store.catalog import DISK, HOT, PACKED, Catalog, Segment
from flowrl.store.codecs import load
from flowrl.store.reading import Part, Source, View, parsed_layouts
from flowrl.store.rows import RowBatch
from flowrl.store.spill import bytes_alone, write_segment
from flowrl.store.writing import codecs_for, compress, sizes_of

SEGMENTS = "segments"
"""Folder of the files, in the table's own."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """How much lies where."""

    compression: str | None = None
    hot_bytes: int | None = None
    memory_bytes: int | None = None
    folder: Path | None = None
    """Of the table on disk; None keeps everything in memory."""

    @property
    def moves(self) -> bool:
        return (self.compression is not None and self.hot_bytes is not None) or (
            self.folder is not None and self.memory_bytes is not None
        )


class Mover:
    """Moves segments between tiers; on a thread of its own, or when asked."""

    def __init__(self, backing: Backing, tiers: Tiers) -> None:
        self._backing, self._tiers = backing, tiers
        self._codecs: dict[tuple[str, str], dict[str, str]] = {}
        """By tier and compression, then by column; chosen on the first segment that moves."""
        self._alone: dict[str, float] = {}
        """By column: bytes in a file for each one in memory, measured on the first segment that is written."""
        self._working = threading.Lock()
        self._state = threading.Condition()
        self._busy = self._again = self._stopping = False
        """A thread is at work; it is to look once more before it ends; none is to begin."""
        self.error: BaseException | None = None
        """Why the thread gave up, to be raised at the next change."""
        _living.add(self)

    # ------------------------------------------------------------------------------------------------------ one move

    def compress(self, segment: Segment) -> bool:
        """Hot to packed; a segment that encoding makes no smaller stays as it is, and counts as packed from then on.

        False when it was not there any more.
        """
        with self._backing.transaction() as catalog:
            if catalog.segments.get(segment.uid) != segment or segment.tier != HOT:
                return False
            root = self._backing.root(segment)
        compression = "lz4" if self._tiers.compression == "auto" else self._tiers.compression or "lz4"
        codecs = self._choose(segment, PACKED, compression, partial(self._read, segment, root))
        found = compress(self._backing, segment, root, codecs)
        del root
        if found is None:
            with self._backing.transaction() as catalog:
                if segment.uid in catalog.segments:
                    self._backing.commit({"kind": "settle", "uid": segment.uid})
            return True
        made, block = found
        with self._backing.transaction() as catalog:
            if segment.uid in catalog.segments:
                self._backing.commit({"kind": "segments", "old": [segment.uid], "new": [made.to_json()]})
                return True
        self._backing.discard([block])
        return False

    def spill(self, segment: Segment) -> bool:
        """To a file. False when it was not there any more."""
        folder = self._tiers.folder
        assert folder is not None
        with self._backing.transaction() as catalog:
            if catalog.segments.get(segment.uid) != segment or segment.tier == DISK:
                return False
            root = self._backing.root(segment)
        batch = self._read(segment, root)
        compression = {"auto": "zstd", None: "none"}.get(self._tiers.compression, self._tiers.compression)
        codecs: Mapping[str, str] = dict.fromkeys(batch.names, "none")
        if compression != "none":
            codecs = self._choose(segment, DISK, str(compression), lambda _: batch)
        uid = self._backing.new_uid()
        path = folder / SEGMENTS / f"{segment.first:012d}-{uid:x}.arrow"
        path.parent.mkdir(parents=True, exist_ok=True)
        stored, files = write_segment(path, batch.stored, batch.types, len(batch), codecs, first=segment.first)
        shares = self._shares(batch, codecs)
        total = sum(shares.values()) or 1.0
        sizes = {
            name: [raw, round(stored * shares[name] / total), codecs.get(name, "none")]
            for name, (raw, _, _) in sizes_of(parsed_layouts(segment)).items()
        }
        made = Segment(
            uid, segment.first, segment.rows, segment.names, DISK, tuple(str(Path(f).relative_to(folder)) for f in files),
            segment.raw_bytes, stored, segment.layouts, sizes,
        )  # fmt: skip
        with self._backing.transaction() as catalog:
            if segment.uid in catalog.segments:
                self._backing.commit({"kind": "segments", "old": [segment.uid], "new": [made.to_json()]})
                return True
        for name in made.place:
            (folder / name).unlink(missing_ok=True)
        return False

    def _read(self, segment: Segment, root: np.ndarray, names: Sequence[str] | None = None) -> RowBatch:
        types = {one.name: one.type for one in parsed_layouts(segment)}
        part = Part(segment.first, segment.stop, (Source(segment, root, segment.names),))
        return View([part], types, self._backing).batch(names)

    def _shares(self, batch: RowBatch, codecs: Mapping[str, str]) -> dict[str, float]:
        """About what each column takes of a file: as measured alone once, for the bytes it has here."""
        unknown = {name: values for name, values in batch.stored.items() if name not in self._alone}
        raw = {name: float(batch.select([name]).nbytes) for name in batch.names}
        for name, size in bytes_alone(unknown, batch.types, len(batch), codecs).items():
            self._alone[name] = size / max(raw[name], 1.0)
        return {name: raw[name] * self._alone[name] for name in batch.names}

    def _choose(
        self, segment: Segment, place: str, compression: str, read: Callable[[Sequence[str]], RowBatch]
    ) -> Mapping[str, str]:
        """A codec for each column; `read` gives the values of those for which none is chosen yet."""
        known = self._codecs.setdefault((place, compression), {})
        unknown = [one for one in parsed_layouts(segment) if one.name not in known]
        if unknown:
            known.update(codecs_for(unknown, read([one.name for one in unknown]).stored, compression))
        return {name: known[name] for name in segment.names}

    # ------------------------------------------------------------------------------------------------- what is to move

    def next_move(self) -> Callable[[], bool] | None:
        """The move that the bounds ask for, or None."""
        with self._backing.mutex:
            self._backing.replay()
            catalog = self._backing.catalog
            tiers = self._tiers
            if tiers.folder is not None and tiers.memory_bytes is not None:
                over = catalog.bytes[HOT] + catalog.bytes[PACKED] - tiers.memory_bytes
                if over > 0 and (segment := oldest(catalog, (HOT, PACKED))) is not None:
                    return partial(self.spill, segment)
            if tiers.compression is not None and tiers.hot_bytes is not None:
                over = catalog.bytes[HOT] - tiers.hot_bytes
                if over > 0 and (segment := oldest(catalog, (HOT,))) is not None:
                    return partial(self.compress, segment)
            return None

    def catch_up(self) -> None:
        """Make every move that the bounds ask for, on this thread."""
        with self._working:
            while not self._stopping and (move := self.next_move()) is not None:
                move()

    # ------------------------------------------------------------------------------------------------------- the thread

    def poke(self) -> None:
        """Rows have come: begin to move what has to. Never raises; see `raise_error`."""
        if not self._tiers.moves or self.next_move() is None:
            return
        if self._tiers.compression is not None:
            load()  # in this thread: a fork in the middle of an import leaves half a module in the child
        with self._state:
            self._again = True
            if not self._busy and not self._stopping:
                self._busy = True
                threading.Thread(target=self._run, name="flowrl-table-mover", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._state:
                if not self._again or self._stopping:
                    self._busy = False
                    self._state.notify_all()
                    return
                self._again = False
            try:
                self.catch_up()
            except BaseException as error:  # rows stay where they are, and the next change says why
                with self._state:
                    self.error, self._busy, self._again = error, False, False
                    self._state.notify_all()
                return

    def raise_error(self) -> None:
        """Raise what the thread met (a full disk), once."""
        with self._state:
            error, self.error = self.error, None
        if error is not None:
            raise error

    def flush(self, timeout_s: float) -> None:
        """Wait until nothing has to move. Errors: WaitTimeout; whatever the thread met."""
        self.raise_error()
        self.poke()
        with self._state:
            if not self._state.wait_for(lambda: not self._busy, timeout_s):
                raise WaitTimeout(
                    f"waited {timeout_s:g} s for rows to be compressed and written to files; is the disk slow?"
                )
        self.raise_error()

    def stop(self, timeout_s: float = 30.0) -> None:
        with self._state:
            self._stopping = True
            self._state.wait_for(lambda: not self._busy, timeout_s)

    def in_child(self) -> None:
        """After a fork, in the child, which has no thread."""
        self._working, self._state = threading.Lock(), threading.Condition()
        self._busy = self._again = False


def oldest(catalog: Catalog, tiers: tuple[str, ...]) -> Segment | None:
    """The first segment of a full chunk that lies in one of the tiers and is not claimed."""
    claimed = catalog.claimed()
    grows = catalog.appended
    if catalog.chunks and catalog.appended - catalog.chunks[-1] < catalog.settings.get("chunk_rows", 256):
        grows = catalog.chunks[-1]
    for tier in reversed(tiers):  # what is compressed is older than what is not
        for segment in catalog.tiers[tier].values():
            if segment.stop <= grows and not claimed.meets(segment.first, segment.stop):
                return segment
    return None


_living: weakref.WeakSet[Mover] = weakref.WeakSet()


def _in_child() -> None:
    for mover in _living:
        mover.in_child()


os.register_at_fork(after_in_child=_in_child)
