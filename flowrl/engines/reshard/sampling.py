"""Which boxes a run checks: all ranks choose alike, other ones every time."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from flowrl.engines.reshard.buckets import cut
from flowrl.engines.reshard.program import DTYPE_BYTES, Program
from flowrl.engines.reshard.slots import Region

T = TypeVar("T")
SAMPLE_PART = 0.01
SAMPLE_BYTES = 2**20
"""Of one box, at most this much is read."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A box of which both ends are hashed."""

    tensor: str
    sender: int
    receiver: int
    """Equal to the sender for a box that stays."""
    hop: int
    dtype: str
    """In which both are compared: that of the wire, or of the target for a box that stays."""
    source: Region
    target: Region


def samples(
    program: Program, version: int, *, part: float = SAMPLE_PART, most_bytes: int = SAMPLE_BYTES
) -> tuple[Sample, ...]:
    """About `part` of the pieces and of the copies, at least one of each, drawn by `version`."""
    draw = random.Random(f"{program.edge}|{version}")
    copies = [(device, copy) for device, kept in sorted(program.copies.items()) for copy in kept]
    found = []
    for piece in _some(program.pieces, part, draw):
        source, target = _less(piece.source, piece.target, DTYPE_BYTES[piece.dtype], most_bytes, draw)
        found.append(Sample(piece.tensor, piece.sender, piece.receiver, piece.hop, piece.dtype, source, target))
    for device, copy in _some(copies, part, draw):
        dtype = program.dtypes[copy.tensor][1]
        source, target = _less(copy.source, copy.target, DTYPE_BYTES[dtype], most_bytes, draw)
        found.append(Sample(copy.tensor, device, device, 0, dtype, source, target))
    return tuple(found)


def _some(values: Sequence[T], part: float, draw: random.Random) -> list[T]:
    return draw.sample(values, min(len(values), math.ceil(part * len(values)))) if values else []


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
