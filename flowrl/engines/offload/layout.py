"""Parameters laid end to end in flat memory, and cut into buckets.

[Note: Cuts are multiples of a line]
Every parameter begins at a multiple of `LINE` elements, and so does every bucket. The kernels of AdamW take elements in vectors
and the rest of a tensor one by one; a cut at another place would make another rest, and the last bit of a number may then differ.
With these cuts, a parameter in pieces gets what it gets whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flowrl.errors import ConfigError

LINE = 64
"""Elements. The CPU's kernel shares work among threads in this unit; a device's vectors are shorter."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one parameter in one bucket.

    Example:
        Piece("lm_head.weight", start=128, stop=192, at=64)
    """

    name: str
    start: int
    """In the parameter, flat."""
    stop: int
    at: int
    """In the bucket."""

    @property
    def end(self) -> int:
        """In the bucket."""
        return self.at + self.stop - self.start


@dataclass(frozen=True, slots=True)
class Bucket:
    """A stretch of flat memory."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Where each parameter lies. Counts are elements.

    Example:
        FlatLayout.of({"a": 100, "b": 64}).starts      # {"a": 0, "b": 128}
    """

    starts: Mapping[str, int]
    sizes: Mapping[str, int]
    num_elements: int

    @staticmethod
    def of(sizes: Mapping[str, int]) -> FlatLayout:
        starts, at = {}, 0
        for name, size in sizes.items():
            starts[name] = at
            at += -(-size // LINE) * LINE
        return FlatLayout(starts, dict(sizes), at)

    def buckets(self, most_elements: int) -> tuple[Bucket, ...]:
        """Stretches of at most so many elements, equal but for the last. Errors: ConfigError for less than a line."""
        length = most_elements // LINE * LINE
        if length < LINE:
            raise ConfigError(f"a bucket holds at least {LINE} elements; found {most_elements}")
        found = []
        names = [name for name, size in self.sizes.items() if size]
        first = 0
        for start in range(0, self.num_elements, length):
            stop = min(start + length, self.num_elements)
            while first < len(names) and self.starts[names[first]] + self.sizes[names[first]] <= start:
                first += 1
            pieces = []
            for name in names[first:]:
                begin = self.starts[name]
                if begin >= stop:
                    break
                inside = max(begin, start), min(begin + self.sizes[name], stop)
                pieces.append(Piece(name, inside[0] - begin, inside[1] - begin, inside[0] - start))
            found.append(Bucket(start, stop, tuple(pieces)))
        return tuple(found)
