"""Rows to segments: what an append, a later column and a merge write.

    rows -> prepared (checked, counted) -> a block of our own (the only copy) -> a record in the log

Nothing of it can be seen before the record is committed; what a process had written when it died is no part of the table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flowrl.schema.types import ColumnType
from flowrl.store import layout as layouts
from flowrl.store.arena import Block
from flowrl.store.backing import Backing
from flowrl.store.catalog import HOT, PACKED, Segment
from flowrl.store.codecs import choose, encode_buffer
from flowrl.store.columns import NUMPY_DTYPES

ALIGN = layouts.ALIGN

_encode = json.JSONEncoder(separators=(",", ":")).encode


def write(backing: Backing, prepared: layouts.Prepared, first: int) -> Segment:
    """Prepared rows as a segment in memory; not committed. Errors: StoreError when there is no memory."""
    block, into = backing.allocate(prepared.nbytes)
    try:
        prepared.write(into)
    except BaseException:
        backing.discard([block])
        raise
    return Segment(
        uid=backing.new_uid(),
        first=first,
        rows=prepared.num_rows,
        names=tuple([column.name for column in prepared.layouts]),
        tier=HOT,
        place=(block.arena, block.offset, block.nbytes),
        raw_bytes=block.nbytes,
        stored_bytes=block.nbytes,
        layouts=_text(prepared.layouts),
    )


def _text(columns: Sequence[layouts.ColumnLayout]) -> str:
    """The layouts as text: a line that is the same for every segment of these columns, and a line of buffers."""
    # types are told apart by identity, which is fastest; the line keeps its own, so that no other comes to have their ids
    key = tuple([(c.name, id(c.type), c.encoding, c.inner, c.once) for c in columns])
    same = _lines.get(key)
    if same is None:
        if len(_lines) >= _MOST_LINES:
            _lines.clear()
        line = _encode([[c.name, str(c.type), c.encoding, c.inner, int(c.once)] for c in columns])
        same = _lines[key] = (line, [c.type for c in columns])
    buffers = ",".join([f"[{','.join([b.to_text() for b in column.buffers])}]" for column in columns])
    return f"{same[0]}\n[{buffers}]"


_MOST_LINES = 1024
_lines: dict[tuple[Any, ...], tuple[str, list[ColumnType]]] = {}


def sizes_of(columns: Sequence[layouts.ColumnLayout]) -> dict[str, list[Any]]:
    """By column: raw bytes, stored bytes, codec of its values. A buffer that columns share counts for the first of them."""
    seen: set[tuple[int, int]] = set()
    sizes: dict[str, list[Any]] = {}
    for column in columns:
        own = [b for b in column.buffers if (b.offset, b.stored) not in seen]
        seen.update((b.offset, b.stored) for b in own)
        raw = sum(b.stored if b.raw is None else b.raw for b in own)
        codec = column.buffers[0].codec if column.buffers else "none"
        sizes[column.name] = [raw, sum(b.stored for b in own), codec]
    return sizes


def codecs_for(columns: Sequence[layouts.ColumnLayout], values: Mapping[str, Any], compression: str) -> dict[str, str]:
    """A codec for each column, from a sample of these rows."""
    return {column.name: choose(values[column.name], column.type, compression) for column in columns}


def compress(
    backing: Backing, segment: Segment, root: np.ndarray, codecs: Mapping[str, str]
) -> tuple[Segment, Block] | None:
    """The same segment with its columns encoded, in a new block; None when that saves nothing."""
    columns = layouts.parsed(segment.layouts)
    pieces: list[bytes | np.ndarray] = []
    placed: dict[tuple[int, int], layouts.Buffer] = {}
    # an empty buffer starts where the next one does, so the offset alone does not tell them apart
    at = 0
    made = []
    for column in columns:
        codec = codecs.get(column.name, "none")
        buffers = []
        for number, buffer in enumerate(column.buffers):
            known = placed.get((buffer.offset, buffer.stored))
            if known is None:
                piece = root[buffer.offset : buffer.offset + buffer.stored]
                # offsets grow steadily, which LZ4 alone does not see; they are small beside the values
                wanted = codec if number == 0 else "none"
                known, kept = _encoded(piece, wanted, column, at)
                placed[buffer.offset, buffer.stored] = known
                pieces.append(kept)
                at += -(-known.stored // ALIGN) * ALIGN
            buffers.append(known)
        made.append(column._replace(buffers=tuple(buffers)))
    if at >= segment.stored_bytes:
        return None
    block, into = backing.allocate(at)
    for buffer, kept in zip(placed.values(), pieces, strict=True):
        into[buffer.offset : buffer.offset + buffer.stored] = np.frombuffer(kept, np.uint8)
    packed = replace(
        segment,
        uid=backing.new_uid(),
        tier=PACKED,
        place=(block.arena, block.offset, block.nbytes),
        stored_bytes=block.nbytes,
        layouts=_text(made),
    )
    return packed, block


def _encoded(
    piece: np.ndarray, codec: str, column: layouts.ColumnLayout, at: int
) -> tuple[layouts.Buffer, bytes | np.ndarray]:
    if codec != "none" and len(piece):
        itemsize = 1 if column.encoding in ("bits", "text", "texts") else NUMPY_DTYPES[column.type.dtype].itemsize
        kept = encode_buffer(piece, codec, itemsize=itemsize, inner=column.inner)
        if len(kept) < len(piece):
            return layouts.Buffer(at, len(kept), codec, len(piece)), kept
    return layouts.Buffer(at, len(piece)), piece
