"""Which boxes a run checks: all ranks choose alike, other ones every time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from flowrl.engines.reshard.buckets import cut
from flowrl.engines.reshard.program import DTYPE_BYTES, Program, wire_dtype
from flowrl.engines.reshard.slots import Region

T = TypeVar("T")
SAMPLE_PART = 0.01
SAMPLE_BYTES = 2**16
"""Of one box, at most this much is read."""
MOST_SAMPLES = 256
"""Of pieces, and of copies, in one run."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A box of which both ends are hashed."""

    tensor: str
    sender: int
    receiver: int
    """Equal to the sender for a box that stays."""
    hop: int
    dtype: str
    """In which both are compared: the shorter one of both sides."""
    source: Region
    target: Region


class Sampler:
    """Draws from the boxes of a program."""

    def __init__(self, program: Program, *, part: float = SAMPLE_PART, most_bytes: int = SAMPLE_BYTES) -> None:
        self._program, self._part, self.most_bytes = program, part, most_bytes
        self._copies = [(device, copy) for device, kept in sorted(program.copies.items()) for copy in kept]

    def draw(self, version: int) -> tuple[Sample, ...]:
        """About `part` of the pieces and of the copies, at least one of each; others for each version."""
        draw = random.Random(f"{self._program.edge}|{version}")
        found = []
        for piece in self._some(self._program.pieces, draw):
            source, target = _less(piece.source, piece.target, DTYPE_BYTES[piece.dtype], self.most_bytes, draw)
            found.append(Sample(piece.tensor, piece.sender, piece.receiver, piece.hop, piece.dtype, source, target))
        for device, copy in self._some(self._copies, draw):
            dtype = wire_dtype(*self._program.dtypes[copy.tensor])
            source, target = _less(copy.source, copy.target, DTYPE_BYTES[dtype], self.most_bytes, draw)
            found.append(Sample(copy.tensor, device, device, 0, dtype, source, target))
        return tuple(found)

    @property
    def most_samples(self) -> int:
        """In any run."""
        return self._count(self._program.pieces) + self._count(self._copies)

    def _some(self, values: Sequence[T], draw: random.Random) -> list[T]:
        return draw.sample(values, self._count(values))

    def _count(self, values: Sequence[object]) -> int:
        return min(len(values), MOST_SAMPLES, math.ceil(self._part * len(values)))


def _less(source: Region, target: Region, size: int, most: int, draw: random.Random) -> tuple[Region, Region]:
    """A stretch of at most `most` bytes out of both regions, at the same place, which is drawn."""
    whole = tuple((0, length) for length in source.shape)
    box = whole
    if math.prod(source.shape) * size > most:
        axis = next(at for at, length in enumerate(source.shape) if length > 1)
        row = math.prod(source.shape[axis + 1 :]) * size
        rows = max(1, most // row)
        first = draw.randrange(source.shape[axis] - rows + 1)
        box, _ = cut((*whole[:axis], (first, first + rows), *whole[axis + 1 :]), most // size)
    return source.inside(whole, box), target.inside(whole, box)
