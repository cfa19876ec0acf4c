"""The program of a weights edge: which bytes go where, in which bucket, at which place of its staging. Made once, run often.

Nothing here depends on which process asks: all ranks make the same program from the same arguments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from operator import attrgetter

from flowrl.engines.reshard.buckets import ALIGN_BYTES, PASS_ON_GAP, Buckets, align
from flowrl.engines.reshard.slots import Recipe, Region, Shelf, Slot, lay
from flowrl.errors import ConfigError
from flowrl.planner.boxes import Box, Holding, Tensor, intersect, volume
from flowrl.planner.reshard import BUCKET_BYTES, Move, Reshard, reshard

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
DIRECT_BYTES = 2**20
"""Shorter pieces go through a bucket together, even where they lie in one stretch: a message each would cost more."""

Dtype = str | Callable[[Tensor], str]


@dataclass(frozen=True, slots=True)
class Copy:
    """A box that a device holds and needs: from its shard straight into the live parameter."""

    tensor: str
    box: Box
    source: Region
    target: Region
    num_bytes: int
    """In the target."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box, or a part of one, that one device sends to another in one bucket."""

    tensor: str
    box: Box
    sender: int
    receiver: int
    bucket: int
    hop: int
    """1: the sender received it in an earlier bucket; it is read from the sender's target."""
    dtype: str
    """On the wire: the shorter of both sides' types."""
    num_bytes: int
    """On the wire."""
    source: Region
    target: Region
    packed_at: int | None = None
    """Where it lies in the sender's slot; None: sent from where it is."""
    unpacked_at: int | None = None
    """Where it arrives in the receiver's slot; None: it arrives in the parameter."""


@dataclass(frozen=True, slots=True)
class Program:
    """All that happens on a weights edge, on all devices.

    Example:
        tensors = ModelShape.of("Qwen/Qwen2.5-7B").modules()
        program_for(tensors, Holding(Layout.parse("f2"), range(2)), Holding(Layout.parse("t2"), range(2), kv_heads=4))
    """

    edge: str
    source: Mapping[int, Shelf]
    """By device; what it holds before."""
    target: Mapping[int, Shelf]
    dtypes: Mapping[str, tuple[str, str]]
    """Tensor -> its element types (in the source, in the target)."""
    copies: Mapping[int, tuple[Copy, ...]]
    pieces: tuple[Piece, ...]
    """By bucket, and inside one by sender and receiver."""
    num_buckets: int
    bucket_bytes: int
    slot_bytes: Mapping[int, int]
    """Staging of one slot, by device; a device has two slots."""

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({*self.source, *self.target}))

    @property
    def wire_bytes(self) -> int:
        """What all devices send together, without what alignment adds."""
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def local_bytes(self) -> int:
        """What all devices copy from their own shards."""
        return sum(copy.num_bytes for copies in self.copies.values() for copy in copies)

    def peers(self) -> dict[tuple[int, int], int]:
        """Bytes by (sender, receiver)."""
        found: dict[tuple[int, int], int] = defaultdict(int)
        for piece in self.pieces:
            found[piece.sender, piece.receiver] += piece.num_bytes
        return dict(sorted(found.items()))


def compile_program(
    tensors: Iterable[Tensor],
    found: Reshard,
    *,
    source_dtype: Dtype = "bfloat16",
    target_dtype: Dtype = "bfloat16",
    source_recipe: Recipe | None = None,
    target_recipe: Recipe | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    direct_bytes: int = DIRECT_BYTES,
    is_on_host: bool = False,
    edge: str = "",
) -> Program:
    """A program for the moves that the planner found.

    Args:
        bucket_bytes: the most that a device sends, receives and stages in one bucket; a whole number of 256 bytes.
        direct_bytes: pieces from this size on that lie in one stretch are not staged.
        is_on_host: the source's shards lie in host memory, so that all that is sent is staged on the device.
        edge: what errors call it; default: the two layouts.

    Errors: ConfigError where the moves, with what is kept, do not give each device each element exactly once.
    """
    if bucket_bytes < ALIGN_BYTES or bucket_bytes % ALIGN_BYTES:
        raise ConfigError(f"bucket_bytes is a whole number of {ALIGN_BYTES} bytes; found {bucket_bytes}")
    listed = {tensor.name: tensor for tensor in tensors}
    dtypes = {name: (_dtype(source_dtype, one), _dtype(target_dtype, one)) for name, one in listed.items()}
    source = {
        device: lay(listed.values(), found.source, rank, source_recipe)
        for rank, device in enumerate(found.source.devices)
    }
    target = {
        device: lay(listed.values(), found.target, rank, target_recipe)
        for rank, device in enumerate(found.target.devices)
    }
    copies = {device: _kept(source.get(device), shelf, dtypes) for device, shelf in target.items()}
    dealt = _Deal(source, target, dtypes, bucket_bytes, direct_bytes, is_on_host).pieces(found.moves)
    pieces, slot_bytes = _placed(dealt)
    check_coverage(target, copies, pieces)
    return Program(
        edge or f"{found.source.layout} -> {found.target.layout}",
        source,
        target,
        dtypes,
        copies,
        pieces,
        1 + max((piece.bucket for piece in pieces), default=-1),
        bucket_bytes,
        {device: slot_bytes.get(device, 0) for device in {*source, *target}},
    )


@lru_cache(maxsize=64)
def program_for(
    tensors: Sequence[Tensor],
    source: Holding,
    target: Holding,
    *,
    devices_per_node: int | None = None,
    source_dtype: str = "bfloat16",
    target_dtype: str = "bfloat16",
    source_recipe: Recipe | None = None,
    target_recipe: Recipe | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    direct_bytes: int = DIRECT_BYTES,
    is_on_host: bool = False,
    edge: str = "",
) -> Program:
    """`compile_program` of `reshard`, remembered for each set of arguments. `tensors` is a tuple of values that hash."""
    found = reshard(tensors, source, target, devices_per_node=devices_per_node)
    return compile_program(
        tensors,
        found,
        source_dtype=source_dtype,
        target_dtype=target_dtype,
        source_recipe=source_recipe,
        target_recipe=target_recipe,
        bucket_bytes=bucket_bytes,
        direct_bytes=direct_bytes,
        is_on_host=is_on_host,
        edge=edge,
    )


def wire_dtype(source: str, target: str) -> str:
    """The type on the wire: the shorter one, and of two equally long the target's."""
    return source if DTYPE_BYTES[source] < DTYPE_BYTES[target] else target


def _dtype(given: Dtype, tensor: Tensor) -> str:
    found = given if isinstance(given, str) else given(tensor)
    if found not in DTYPE_BYTES:
        raise ConfigError(
            f"{tensor.name} has elements of type {found!r}; a weights edge moves {', '.join(DTYPE_BYTES)}"
        )
    return found


def _kept(own: Shelf | None, need: Shelf, dtypes: Mapping[str, tuple[str, str]]) -> tuple[Copy, ...]:
    if own is None:
        return ()
    found: list[Copy] = []
    for name, slots in need.slots.items():
        size = DTYPE_BYTES[dtypes[name][1]]
        for here, there in product(own.slots.get(name, ()), slots):
            box = intersect(here.box, there.box)
            if box is not None:
                regions = here.region.inside(here.box, box), there.region.inside(there.box, box)
                found.append(Copy(name, box, *regions, num_bytes=volume(box) * size))
    return tuple(found)


class _Deal:
    """Turns moves into pieces with a bucket."""

    def __init__(
        self,
        source: Mapping[int, Shelf],
        target: Mapping[int, Shelf],
        dtypes: Mapping[str, tuple[str, str]],
        bucket_bytes: int,
        direct_bytes: int,
        is_on_host: bool,
    ) -> None:
        self.source, self.target, self.dtypes = source, target, dtypes
        self.direct_bytes, self.is_on_host = direct_bytes, is_on_host
        self.buckets = Buckets(bucket_bytes, max(ALIGN_BYTES, bucket_bytes // 16 // ALIGN_BYTES * ALIGN_BYTES))
        self.arrived: dict[tuple[str, Box, int], int] = {}
        """(tensor, box, device) -> the last bucket in which a part of it arrives there."""

    def pieces(self, moves: Iterable[Move]) -> list[Piece]:
        found: list[Piece] = []
        for move in sorted(moves, key=attrgetter("hop")):  # first all that comes from holders; the order is kept inside
            for piece in self._of(move):
                found.append(piece)
                key = (move.tensor, move.box, move.target)
                self.arrived[key] = max(self.arrived.get(key, 0), piece.bucket)
        return found

    def _of(self, move: Move) -> Iterable[Piece]:
        name = move.tensor
        given, taken = self.dtypes[name]
        wire = wire_dtype(given, taken)
        giving = self.target if move.hop else self.source
        held = taken if move.hop else given
        earliest = self.arrived[name, move.box, move.source] + PASS_ON_GAP if move.hop else 0
        from_shelf, to_shelf = giving[move.source], self.target[move.target]
        for here, there, box in _shared(from_shelf.slots[name], to_shelf.slots[name], move.box):
            source, target = here.region.inside(here.box, box), there.region.inside(there.box, box)
            size = DTYPE_BYTES[wire]
            is_small = volume(box) * size < self.direct_bytes
            packed = (
                is_small
                or held != wire
                or (self.is_on_host and not move.hop)
                or not source.is_contiguous(from_shelf.shapes[source.storage])
            )
            unpacked = is_small or taken != wire or not target.is_contiguous(to_shelf.shapes[target.storage])
            dealt = self.buckets.deal(
                box, size, move.source, move.target, packed=packed, unpacked=unpacked, earliest=earliest
            )
            for bucket, part in dealt:
                yield Piece(
                    name, part, move.source, move.target, bucket, move.hop, wire, volume(part) * size,
                    source.inside(box, part), target.inside(box, part),
                    0 if packed else None, 0 if unpacked else None,
                )  # fmt: skip


def _shared(given: tuple[Slot, ...], taken: tuple[Slot, ...], box: Box) -> Iterable[tuple[Slot, Slot, Box]]:
    """Parts of a box that lie in one slot on either side."""
    if len(given) == len(taken) == 1:
        yield given[0], taken[0], box  # a move lies inside what its sender holds and its receiver needs
        return
    for here, there in product(given, taken):
        first = intersect(here.box, box)
        both = None if first is None else intersect(there.box, first)
        if both is not None:
            yield here, there, both


def _placed(pieces: Iterable[Piece]) -> tuple[tuple[Piece, ...], dict[int, int]]:
    """Pieces in order, each with its places in the slots, and the bytes of a slot by device.

    A slot holds what is sent, then what is received. Pieces of a pair that are staged on both sides stand first and side by side,
    in the same order on both, so that they are one message.
    """
    ordered = sorted(
        pieces,
        key=lambda piece: (
            piece.bucket, piece.sender, piece.receiver, piece.packed_at is None or piece.unpacked_at is None,
        ),
    )  # fmt: skip
    used: dict[tuple[int, int], int] = defaultdict(int)
    packed_at: list[int | None] = []
    for piece in ordered:
        packed_at.append(None if piece.packed_at is None else used[piece.bucket, piece.sender])
        if piece.packed_at is not None:
            used[piece.bucket, piece.sender] += align(piece.num_bytes)
    placed: list[Piece] = []
    for piece, at in zip(ordered, packed_at, strict=True):
        arrives_at = None if piece.unpacked_at is None else used[piece.bucket, piece.receiver]
        if arrives_at is not None:
            used[piece.bucket, piece.receiver] += align(piece.num_bytes)
        placed.append(  # not by `replace`, which takes three times as long
            Piece(
                piece.tensor, piece.box, piece.sender, piece.receiver, piece.bucket, piece.hop, piece.dtype, piece.num_bytes,
                piece.source, piece.target, at, arrives_at,
            )
        )  # fmt: skip
    slot_bytes: dict[int, int] = defaultdict(int)
    for (_, device), num_bytes in used.items():
        slot_bytes[device] = max(slot_bytes[device], num_bytes)
    return tuple(placed), dict(slot_bytes)


def check_coverage(
    target: Mapping[int, Shelf], copies: Mapping[int, tuple[Copy, ...]], pieces: Iterable[Piece]
) -> None:
    """Errors: ConfigError unless each device gets each element that it needs, once."""
    given: dict[tuple[int, str], list[Box]] = defaultdict(list)
    for device, kept in copies.items():
        for copy in kept:
            given[device, copy.tensor].append(copy.box)
    for piece in pieces:
        given[piece.receiver, piece.tensor].append(piece.box)
    needed = {(device, name): slots for device, shelf in target.items() for name, slots in shelf.slots.items()}
    seen: set[tuple[tuple[Box, ...], tuple[Box, ...]]] = set()
    for key in needed.keys() | given.keys():
        boxes, need = given.get(key, []), tuple(slot.box for slot in needed.get(key, ()))
        case = (tuple(sorted(boxes)), need)
        if case in seen:
            continue  # tensors alike get alike boxes
        seen.add(case)
        inside = sum(volume(both) for box in boxes for one in need if (both := intersect(box, one)) is not None)
        total = sum(map(volume, boxes))
        if total != inside or total != sum(map(volume, need)) or _overlap(case[0]):
            raise ConfigError(
                f"device {key[0]} needs {sum(map(volume, need))} elements of {key[1]}; the program gives it {total}, of which "
                f"{inside} are needed{' and some come twice' if _overlap(case[0]) else ''}; both sides must list one model"
            )


def _overlap(boxes: tuple[Box, ...]) -> bool:
    """Whether two of the boxes, which are sorted, share an element."""
    for index, box in enumerate(boxes):
        for other in boxes[index + 1 :]:
            if box and other[0][0] >= box[0][1]:
                break  # all that follow begin behind this one
            if intersect(box, other) is not None:
                return True
    return False
