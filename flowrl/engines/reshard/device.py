"""What one device does of a program: its messages, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flowrl.engines.reshard.buckets import PASS_ON_GAP, align
from flowrl.engines.reshard.program import Piece, Program


@dataclass(frozen=True, slots=True)
class Message:
    """One stretch of bytes between two devices. Both ends list the messages of a pair in the same order, with equal sizes."""

    peer: int
    num_bytes: int
    at: int | None
    """Where it begins in this device's slot; None: in the region of `piece`."""
    piece: Piece
    """The piece, or the first of those that share the message."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One device's part of a bucket."""

    index: int
    packs: tuple[Piece, ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    unpacks: tuple[Piece, ...]
    passes_on: bool
    """Something that is sent was received two buckets earlier or before."""

    def peers(self) -> tuple[int, ...]:
        return tuple(sorted({message.peer for message in (*self.sends, *self.receives)}))


def buckets_of(program: Program, device: int) -> tuple[Bucket, ...]:
    """Every bucket of a program as a device sees it, also those in which it does nothing: all devices count alike."""
    mine: list[list[Piece]] = [[] for _ in range(program.num_buckets)]
    for piece in program.pieces:
        if device in (piece.sender, piece.receiver):
            mine[piece.bucket].append(piece)
    found = []
    for index, pieces in enumerate(mine):
        given = [piece for piece in pieces if piece.sender == device]
        taken = [piece for piece in pieces if piece.receiver == device]
        found.append(
            Bucket(
                index,
                tuple(piece for piece in given if piece.packed_at is not None),
                tuple(_messages(given, is_sender=True)),
                tuple(_messages(taken, is_sender=False)),
                tuple(piece for piece in taken if piece.unpacked_at is not None),
                passes_on=any(piece.hop and index >= PASS_ON_GAP for piece in given),
            )
        )
    return tuple(found)


def _messages(pieces: list[Piece], *, is_sender: bool) -> Iterator[Message]:
    """Pieces of a pair that are staged on both sides become one message."""
    run: Message | None = None
    for piece in pieces:
        peer, at = (piece.receiver, piece.packed_at) if is_sender else (piece.sender, piece.unpacked_at)
        is_staged = piece.packed_at is not None and piece.unpacked_at is not None
        if run is not None and is_staged and run.peer == peer:
            run = replace(run, num_bytes=run.num_bytes + align(piece.num_bytes))
            continue
        if run is not None:
            yield run
        run = Message(peer, align(piece.num_bytes), at, piece) if is_staged else None
        if not is_staged:
            yield Message(peer, piece.num_bytes, at, piece)
    if run is not None:
        yield run
