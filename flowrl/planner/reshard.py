"""What moves when the weights of a model change their layout, exactly.

For every parameter p a device r receives what it needs and does not hold, each element once:

    recv(r) = sum over p of element_bytes * (|need_r(p)| - |need_r(p) ∩ own_r(p)|)

need and own are boxes (`flowrl.planner.boxes`). Engines that join q, k and v, or gate and up, hold the same bytes elsewhere in
their storage, so that the boxes are those of the separate matrices. A tied head is listed once.

[Note: Which ranks stand together]
FSDP gives rank r of S the rows [r R / S, (r + 1) R / S). These rows lie in the tensor-parallel block of the same device when
the tp index is r div (S / tp), and for few ranks when it is r mod tp. The first moves less, but its tp groups stand S / tp
devices apart, and so across nodes as soon as the mesh spans nodes. `aligned` gives the same saving the other way round: the
engine keeps its neighbouring tp ranks and the trainer's shards are dealt to the devices in the order that suits them.

[Note: Once into a node]
What no device of a node holds and several of its devices need (replicas) comes in once: to the one that has received least from
other nodes so far, which passes it on. Every device still receives each byte once; only the way differs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flowrl.errors import ConfigError
from flowrl.mesh import Cluster
from flowrl.planner.boxes import Box, Boxes, Holding, Tensor, intersect, subtract, volume, without

BUCKET_BYTES = 128 * 2**20


@dataclass(frozen=True, slots=True)
class Move:
    """A box of a tensor that one device sends to another.

    Example:
        Move("model.layers.0.self_attn.o_proj.weight", ((0, 1792), (1792, 3584)), source=0, target=1, num_bytes=6422528)
    """

    tensor: str
    box: Box
    source: int
    target: int
    num_bytes: int
    hop: int = 0
    """1: the sender does not hold the box from the start but receives it by a move of hop 0."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one device in a reshard."""

    need_bytes: int = 0
    """What it holds afterwards."""
    kept_bytes: int = 0
    """What it needs and holds already; copied on the device, not sent."""
    received_bytes: int = 0
    sent_bytes: int = 0
    received_across_bytes: int = 0
    """Of what it receives, from other nodes."""
    sent_across_bytes: int = 0
    held_bytes: int = 0
    """What it holds before."""


@dataclass(frozen=True, slots=True)
class Reshard:
    """All moves of one change of layout, and what they add to on each device."""

    source: Holding
    target: Holding
    moves: tuple[Move, ...]
    """In the order of the tensors."""
    traffic: dict[int, Traffic]
    """By device."""

    @property
    def received_bytes(self) -> int:
        """The most that any device receives."""
        return max(one.received_bytes for one in self.traffic.values())

    @property
    def sent_bytes(self) -> int:
        """The most that any device sends."""
        return max(one.sent_bytes for one in self.traffic.values())

    @property
    def need_bytes(self) -> int:
        """The most that any device holds afterwards."""
        return max(one.need_bytes for one in self.traffic.values())

    @property
    def total_bytes(self) -> int:
        """What all devices receive together."""
        return sum(one.received_bytes for one in self.traffic.values())

    @property
    def across_bytes(self) -> int:
        """What all devices receive from other nodes."""
        return sum(one.received_across_bytes for one in self.traffic.values())

    def time_s(
        self,
        cluster: Cluster,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        host_bytes_per_element: int = 0,
        element_bytes: int = 2,
        is_copied: bool = False,
    ) -> float:
        """Predicted seconds: `max over r of wire(r) + buckets * alpha_s`, and what stands before and behind the wire.

        `wire(r)` is the larger of received and sent bytes over the bandwidth, for the links inside a node and for the network
        card, whichever takes longer. `host_bytes_per_element` > 0: the source shards lie in host memory, in numbers of that many
        bytes, and are loaded first over PCIe. `is_copied`: what a device needs is then copied once more into the engine's
        storage, `2 * need / B_hbm` with a read and a write.
        """
        return wire_s(
            self.traffic,
            cluster,
            bucket_bytes=bucket_bytes,
            host_bytes_per_element=host_bytes_per_element,
            element_bytes=element_bytes,
            is_copied=is_copied,
        )


def wire_s(
    traffic: Mapping[int, Traffic],
    cluster: Cluster,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    host_bytes_per_element: int = 0,
    element_bytes: int = 2,
    is_copied: bool = False,
) -> float:
    """Predicted seconds of a traffic. Arguments and formula as of `Reshard.time_s`."""
    inside, across = cluster.inside.bytes_s, cluster.across.bytes_s
    wire = load = copy = 0.0
    for one in traffic.values():
        near = max(one.received_bytes - one.received_across_bytes, one.sent_bytes - one.sent_across_bytes)
        far = max(one.received_across_bytes, one.sent_across_bytes)
        wire = max(wire, near / inside, far / across)
        load = max(load, one.held_bytes / element_bytes * host_bytes_per_element / cluster.host_link.bytes_s)
        copy = max(copy, 2 * one.need_bytes / (cluster.device.hbm_bytes_s * cluster.efficiency.hbm))
    buckets = math.ceil(max(one.received_bytes for one in traffic.values()) / bucket_bytes)
    return wire + buckets * cluster.alpha_s + load + (copy if is_copied else 0.0)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box that devices of one node lack, and the devices that hold all of it."""

    targets: tuple[int, ...]
    """One device where a device of the same node holds the box; else all those of the node that need it."""
    box: Box
    holders: tuple[int, ...]
    elements: int


@dataclass(frozen=True, slots=True)
class _Geometry:
    """What a tensor's shape says, whatever its name: tensors alike share it."""

    pieces: tuple[_Piece, ...]
    need: dict[int, int]
    kept: dict[int, int]
    held: dict[int, int]

    def flows(self) -> dict[tuple[tuple[int, ...], tuple[int, ...]], int]:
        """Elements by who needs them and who holds them."""
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = defaultdict(int)
        for piece in self.pieces:
            found[piece.targets, piece.holders] += piece.elements
        return found


def reshard(
    tensors: Iterable[Tensor],
    source: Holding,
    target: Holding,
    *,
    element_bytes: int | Callable[[Tensor], int] = 2,
    devices_per_node: int | None = None,
) -> Reshard:
    """The moves that bring every device of `target` what it needs, with the fewest bytes.

    What a device of the same node holds comes from there, the rest once into each node; see [Note: Once into a node]. Of the
    devices that can send, the one that has sent the fewest bytes so far does, then the one with the lowest number.
    `devices_per_node` None: all devices are on one node. The answer depends on its arguments only.

    Raises `ConfigError` when the source holds some element nowhere, or a layout does not fit a tensor.
    """
    per_node = devices_per_node or 1 + max(*source.devices, *target.devices)
    seen: dict[tuple[object, ...], _Geometry] = {}
    ledger = _Ledger(per_node)
    for tensor in tensors:
        key = _likeness(tensor, source, target)
        if key not in seen:
            seen[key] = _geometry(tensor, source, target, per_node)
        found = seen[key]
        size = element_bytes if isinstance(element_bytes, int) else element_bytes(tensor)
        for name, counts in (("need", found.need), ("kept", found.kept), ("held", found.held)):
            for device, elements in counts.items():
                ledger.sums[name][device] += elements * size
        for piece in found.pieces:
            ledger.send(tensor.name, piece, piece.elements * size)
    traffic = {
        device: Traffic(**{f"{name}_bytes": counts[device] for name, counts in ledger.sums.items()})
        for device in sorted({*source.devices, *target.devices})
    }
    return Reshard(source, target, tuple(ledger.moves), traffic)


def received_bytes(
    tensors: Iterable[Tensor],
    source: Holding,
    target: Holding,
    *,
    element_bytes: int | Callable[[Tensor], int] = 2,
) -> dict[int, int]:
    """What each device of `target` receives, without saying from whom: the formula of this module, in milliseconds.

    Equal to the `received_bytes` of the traffic that `reshard` finds; for a search that compares many layouts.
    """
    lacking: dict[tuple[object, ...], list[int]] = {}
    found = dict.fromkeys(target.devices, 0)
    rank_of = {device: rank for rank, device in enumerate(source.devices)}
    for tensor in tensors:
        key = _likeness(tensor, source, target)
        if key not in lacking:
            lacking[key] = [
                _volume(
                    without(
                        target.boxes(tensor, rank), source.boxes(tensor, rank_of[device]) if device in rank_of else ()
                    )
                )
                for rank, device in enumerate(target.devices)
            ]
        size = element_bytes if isinstance(element_bytes, int) else element_bytes(tensor)
        for device, elements in zip(target.devices, lacking[key], strict=True):
            found[device] += elements * size
    return found


def traffic_of(
    tensors: Iterable[Tensor],
    source: Holding,
    target: Holding,
    *,
    element_bytes: int = 2,
    devices_per_node: int | None = None,
) -> dict[int, Traffic]:
    """The bytes of each device in a reshard, without its moves: for plans, on a hundred devices in a tenth of a second.

    Needed, kept, held and received bytes, and all those across nodes together, are those of `reshard`. Where several devices can
    send a box, or bring it into a node, each is taken to do its part of them, rounded up.
    """
    per_node = devices_per_node or 1 + max(*source.devices, *target.devices)
    alike: dict[tuple[object, ...], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault(_likeness(tensor, source, target), []).append(tensor)
    whole: dict[str, dict[int, int]] = {name: defaultdict(int) for name in ("need", "kept", "held", "received")}
    shared: dict[str, dict[int, float]] = {
        name: defaultdict(float) for name in ("sent", "sent_across", "received_across")
    }
    for group in alike.values():
        found, size = _geometry(group[0], source, target, per_node), element_bytes * len(group)
        for name, counts in (("need", found.need), ("kept", found.kept), ("held", found.held)):
            for device, elements in counts.items():
                whole[name][device] += elements * size
        for device, elements in found.need.items():
            whole["received"][device] += (elements - found.kept[device]) * size
        for (targets, holders), elements in found.flows().items():
            part = elements * size / len(holders)
            passed = elements * size * (len(targets) - 1) / len(targets)
            is_far = holders[0] // per_node != targets[0] // per_node
            for device in holders:
                shared["sent"][device] += part
                shared["sent_across"][device] += part * is_far
            for device in targets:
                shared["sent"][device] += passed
                shared["received_across"][device] += elements * size / len(targets) * is_far
    counts_of = {**whole, **{name: {d: math.ceil(n) for d, n in one.items()} for name, one in shared.items()}}
    return {
        device: Traffic(**{f"{name}_bytes": counts.get(device, 0) for name, counts in counts_of.items()})
        for device in sorted({*source.devices, *target.devices})
    }


def _likeness(tensor: Tensor, source: Holding, target: Holding) -> tuple[object, ...]:
    """Equal for tensors that lie alike on both sides, whatever their names."""
    layer = tensor.layer if max(source.layout.pp, target.layout.pp) > 1 else None
    return tensor.shape, tensor.kind, tensor.split_axis, tensor.parts, layer


class _Ledger:
    """Moves so far, and their bytes by device: who sends next depends on them."""

    def __init__(self, per_node: int) -> None:
        self.per_node = per_node
        self.moves: list[Move] = []
        names = ("need", "kept", "held", "received", "sent", "received_across", "sent_across")
        self.sums: dict[str, dict[int, int]] = {name: defaultdict(int) for name in names}

    def send(self, tensor: str, piece: _Piece, num_bytes: int) -> None:
        """Send a piece to one of its targets, and from there to the others."""
        sent, across = self.sums["sent"], self.sums["received_across"]
        sender = min(piece.holders, key=lambda device: (sent[device], device))
        first = min(piece.targets, key=lambda device: (across[device], device))
        self._move(Move(tensor, piece.box, sender, first, num_bytes))
        for other in piece.targets:
            if other != first:
                self._move(Move(tensor, piece.box, first, other, num_bytes, hop=1))

    def _move(self, move: Move) -> None:
        self.moves.append(move)
        self.sums["sent"][move.source] += move.num_bytes
        self.sums["received"][move.target] += move.num_bytes
        if move.source // self.per_node != move.target // self.per_node:
            self.sums["sent_across"][move.source] += move.num_bytes
            self.sums["received_across"][move.target] += move.num_bytes


def _geometry(tensor: Tensor, source: Holding, target: Holding, per_node: int) -> _Geometry:
    own: dict[int, Boxes] = {device: source.boxes(tensor, rank) for rank, device in enumerate(source.devices)}
    need: dict[int, Boxes] = {device: target.boxes(tensor, rank) for rank, device in enumerate(target.devices)}
    anywhere = _holders(own, own)
    on_node: dict[int, list[int]] = defaultdict(list)
    for device in need:
        on_node[device // per_node].append(device)
    pieces: list[_Piece] = []
    kept: dict[int, int] = {}
    for node, devices in on_node.items():
        near = _holders(own, (device for device in own if device // per_node == node))
        for device in devices:
            missing = without(need[device], own.get(device, ()))
            kept[device] = _volume(need[device]) - _volume(missing)
            pieces.extend(_cover(missing, near, (device,))[0])
        for box, wanting in _shared({device: need[device] for device in devices}):
            found, left = _cover(without((box,), tuple(near)), anywhere, wanting)
            if left:
                raise ConfigError(
                    f"no device of layout {source.layout} holds {left[0]} of {tensor.name}, which device {wanting[0]} needs; "
                    "both sides must list the same model"
                )
            pieces.extend(found)
    return _Geometry(
        tuple(pieces),
        need={device: _volume(boxes) for device, boxes in need.items()},
        kept=kept,
        held={device: _volume(boxes) for device, boxes in own.items()},
    )


def _shared(need: dict[int, Boxes]) -> list[tuple[Box, tuple[int, ...]]]:
    """Boxes that do not overlap, and which devices need each.

    Devices may share a part of what they need only: ranks with blocks of their own of q, and the same heads of k and v.
    """
    alike: dict[Box, tuple[int, ...]] = {}
    for device, boxes in need.items():
        for box in boxes:
            alike[box] = (*alike.get(box, ()), device)
    found: list[tuple[Box, tuple[int, ...]]] = []
    for box, devices in alike.items():
        left, others = [box], []
        for known, theirs in found:
            shared = [both for one in left if (both := intersect(one, known)) is not None]
            if not shared:
                others.append((known, theirs))
                continue
            left = without(left, (known,))
            others += [(both, (*theirs, *devices)) for both in shared]
            others += [(rest, theirs) for rest in without((known,), shared)]
        found = [*others, *((one, devices) for one in left)]
    return found


def _volume(boxes: Iterable[Box]) -> int:
    return sum(volume(box) for box in boxes)


def _holders(own: dict[int, Boxes], devices: Iterable[int]) -> dict[Box, tuple[int, ...]]:
    """The boxes that some devices hold, and which of them hold each."""
    found: dict[Box, list[int]] = defaultdict(list)
    for device in devices:
        for box in own[device]:
            found[box].append(device)
    return {box: tuple(holding) for box, holding in found.items()}


def _cover(
    wanted: list[Box], holders: dict[Box, tuple[int, ...]], targets: tuple[int, ...]
) -> tuple[list[_Piece], list[Box]]:
    """Pieces of what is wanted that somebody holds, none of it twice, and what nobody holds."""
    pieces: list[_Piece] = []
    for held, devices in holders.items():
        if not wanted:
            break
        left: list[Box] = []
        for box in wanted:
            shared = intersect(box, held)
            if shared is None:
                left.append(box)
            else:
                pieces.append(_Piece(targets, shared, devices, volume(shared)))
                left.extend(subtract(box, shared))
        wanted = left
    return pieces, wanted


def aligned(source: Holding, target: Holding) -> Holding:
    """The source with its ranks dealt to the target's devices so that shards lie inside the blocks they will be part of.

    Both cover the same devices. Rank r of the source goes to the device with the coordinate that rank r has when the target
    counts its tp axis slowest. The target is left as it is. See [Note: Which ranks stand together].
    """
    if set(source.devices) != set(target.devices):
        raise ConfigError("only layouts on the same devices can be aligned; on different ones every byte moves anyway")
    slowest = target.layout.ordered("div")
    order = [target.devices[target.layout.rank(slowest.coordinate(rank))] for rank in range(slowest.size)]
    return replace(source, devices=tuple(order))


def best_order(
    tensors: Sequence[Tensor],
    source: Holding,
    target: Holding,
    *,
    element_bytes: int | Callable[[Tensor], int] = 2,
    devices_per_node: int | None = None,
) -> Reshard:
    """The reshard with the target's order of ranks ("mod" or "div") under which the busiest device receives least.

    An order that takes a tp group across nodes is left out when the other one does not: every layer of every token would pay for
    it. Ties go to the order with fewer bytes across nodes, then fewer in all, then to "mod", the order engines use.
    """
    per_node = devices_per_node or 1 + max(*source.devices, *target.devices)
    candidates = [replace(target, layout=target.layout.ordered(order)) for order in ("mod", "div")]
    inside = [one for one in candidates if not _crosses(one, per_node)]
    found = [
        reshard(tensors, source, one, element_bytes=element_bytes, devices_per_node=per_node)
        for one in inside or candidates
    ]
    return min(found, key=lambda one: (one.received_bytes, one.across_bytes, one.total_bytes))


def _crosses(holding: Holding, per_node: int) -> bool:
    """Whether some tp group has devices of more than one node."""
    groups = holding.layout.tp_groups()
    return any(len({holding.devices[rank] // per_node for rank in group}) > 1 for group in groups)
