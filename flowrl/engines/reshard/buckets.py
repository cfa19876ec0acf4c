"""Pieces dealt into buckets: the same on every rank, none too large for its staging, as few as the bytes allow.

[Note: First bucket with room]
A piece goes into the first bucket in which its sender may still send, its receiver may still receive, and both have staging left
where they need some. A device that is busy early does not make others wait, and a bucket holds pieces of many pairs. A large box
is cut where the room ends, so that buckets are full.

[Note: Two buckets behind]
A device that passes on what it received itself (hop 1) can do so two buckets later: bucket k is unpacked while k + 1 is on the
wire, and only then is k + 2 packed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from flowrl.planner.boxes import Box, volume

ALIGN_BYTES = 256
"""Pieces in a slot begin at multiples of this; GPUs read aligned blocks faster, and any element type may stand there."""
PASS_ON_GAP = 2
"""See [Note: Two buckets behind]."""


def align(num_bytes: int) -> int:
    """Rounded up to a whole number of `ALIGN_BYTES`."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Buckets:
    """Room that is left in each bucket, by device."""

    def __init__(self, limit: int, grain: int) -> None:
        self.limit = limit
        """Bytes that a device sends, receives, and stages in one bucket, each at most this many."""
        self.grain = grain
        """A box is not cut to fill less room than this."""
        self._sent: dict[int, list[int]] = defaultdict(list)
        self._received: dict[int, list[int]] = defaultdict(list)
        self._staged: dict[int, list[int]] = defaultdict(list)
        self._first: dict[tuple[int, int, bool, bool, int], int] = defaultdict(int)

    def deal(
        self,
        box: Box,
        element_bytes: int,
        sender: int,
        receiver: int,
        *,
        packed: bool,
        unpacked: bool,
        earliest: int = 0,
    ) -> Iterator[tuple[int, Box]]:
        """(bucket, part of the box) until all of it has a place."""
        todo = [box]
        while todo:
            rest = todo.pop()
            size = volume(rest) * element_bytes
            needed = min(align(size), self.grain)
            bucket, room = self._find(needed, sender, receiver, packed, unpacked, earliest)
            part, left = (rest, []) if align(size) <= room else cut(rest, room // element_bytes)
            todo.extend(reversed(left))
            taken = align(volume(part) * element_bytes)
            self._add(self._sent[sender], bucket, taken)
            self._add(self._received[receiver], bucket, taken)
            if packed:
                self._add(self._staged[sender], bucket, taken)
            if unpacked:
                self._add(self._staged[receiver], bucket, taken)
            yield bucket, part

    def _find(
        self, needed: int, sender: int, receiver: int, packed: bool, unpacked: bool, earliest: int
    ) -> tuple[int, int]:
        """The first bucket with room for `needed` bytes, and its room."""
        used = [self._sent[sender], self._received[receiver]]
        used += [self._staged[sender]] * packed + [self._staged[receiver]] * unpacked
        least = (
            needed if needed == self.grain else 1 << (needed.bit_length() - 1)
        )  # few kinds, so that all learn from each
        key = (sender, receiver, packed, unpacked, least)
        first = self._first[key]
        while self._room(used, first) < least:
            first += 1  # full for good: what is used only grows
        self._first[key] = first
        bucket = max(earliest, first)
        while (room := self._room(used, bucket)) < needed:
            bucket += 1
        return bucket, room

    def _room(self, used: list[list[int]], bucket: int) -> int:
        """What is left of the limit in a bucket, where each of `used` may be the one that is short."""
        most = 0
        for one in used:
            if bucket < len(one) and one[bucket] > most:
                most = one[bucket]
        return self.limit - most

    @staticmethod
    def _add(used: list[int], bucket: int, num_bytes: int) -> None:
        used.extend([0] * (bucket + 1 - len(used)))
        used[bucket] += num_bytes


def cut(box: Box, most: int) -> tuple[Box, list[Box]]:
    """The first `most` elements of a box, or nearly, as one box; and boxes with the rest, in order.

    Cut along the first dimension that has more than one index, so that what lay in one stretch still does. Needs `most` >= 1.
    """
    for axis, (start, stop) in enumerate(box):
        if stop - start == 1:
            continue
        row = volume(box) // (stop - start)
        if row <= most:
            middle = min(stop, start + most // row)
            left = [] if middle == stop else [(*box[:axis], (middle, stop), *box[axis + 1 :])]
            return (*box[:axis], (start, middle), *box[axis + 1 :]), left
        first, left = cut((*box[:axis], (start, start + 1), *box[axis + 1 :]), most)
        return first, [*left, (*box[:axis], (start + 1, stop), *box[axis + 1 :])]
    return box, []
