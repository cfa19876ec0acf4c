"""Weights edges between GPUs of one machine by copy engines: every device reads straight out of the others' memory.

    sender        pack k -> event -> post "packed k"                    ... await "pulled k" -> wait for its event -> pack k + 2
    receiver      await "packed k" -> wait for its event -> copy -> event -> post "pulled k"

Memory of the other processes is mapped once, by CUDA IPC; the posts go over a page of shared memory, and only order what the two
processes enqueue: no process waits for a GPU before the end of a run. Nobody but a device itself writes to its parameters.

[Note: Mapped on the reader's device]
A handle is opened on the reader's own device, as all-reduce kernels do, so that no context is made on the other one and the copy
is one call inside the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowrl.engines.reshard.control import BoardControl
from flowrl.engines.reshard.transports import Traffic
from flowrl.errors import EngineError


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a process lets the others read."""

    handles: tuple[tuple[Any, ...], ...]
    """IPC handles of whole storages."""
    sends: dict[int, list[tuple[int, int, int, int]]] = field(default_factory=dict)
    """Bucket -> (receiver, number of the handle, first byte, bytes) of each message."""
    packed: dict[int, bytes] = field(default_factory=dict)
    """Bucket -> handle of the event behind its packing."""
    pulled: dict[int, bytes] = field(default_factory=dict)


class PeerCopyTransport:
    """One process's end.

    Args:
        control: of the same edge and device; the posts go over its board.
        device: the GPU that this process uses.
        group: a group of all processes of the edge, in the order of the devices, on which objects can be gathered, once.
    """

    name = "peer copy"

    def __init__(self, control: BoardControl, *, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._control, self._at, self._group = control, device, group
        self._traffic: Sequence[Traffic] = ()
        self._packed: dict[int, torch.cuda.Event] = {}
        self._pulled: dict[int, torch.cuda.Event] = {}
        self._their_packed: dict[tuple[int, int], torch.cuda.Event] = {}
        self._their_pulled: dict[tuple[int, int], torch.cuda.Event] = {}
        self._copies: list[list[tuple[Tensor, Tensor]]] = []
        self._mapped: dict[tuple[int, int], torch.UntypedStorage] = {}
        self._senders: list[tuple[int, ...]] = []
        self._receivers: list[tuple[int, ...]] = []

    def bind(self, traffic: Sequence[Traffic]) -> None:
        self._traffic = traffic
        self._senders = [tuple(sorted({one.peer for one in of.receives})) for of in traffic]
        self._receivers = [tuple(sorted({one.peer for one in of.sends})) for of in traffic]
        offers: list[Any] = [None] * len(self._control.devices)
        dist.all_gather_object(offers, self._offer(), group=self._group)
        by_device: dict[int, _Offer] = dict(zip(self._control.devices, offers, strict=True))
        self._copies = [self._pairs(bucket, of, by_device) for bucket, of in enumerate(traffic)]
        for bucket in range(len(traffic)):
            for peer in self._senders[bucket]:
                self._their_packed[bucket, peer] = self._open(by_device[peer].packed[bucket])
            for peer in self._receivers[bucket]:
                self._their_pulled[bucket, peer] = self._open(by_device[peer].pulled[bucket])

    def ready(self, bucket: int) -> None:
        if bucket in self._packed:
            self._packed[bucket].record()
        self._control.post(BoardControl.PACKED, bucket + 1)

    def start(self, bucket: int) -> None:
        stream = torch.cuda.current_stream(self._at)
        for peer in self._senders[bucket]:
            self._control.await_(peer, BoardControl.PACKED, bucket + 1, f"send its messages of bucket {bucket}")
            stream.wait_event(self._their_packed[bucket, peer])
        for target, source in self._copies[bucket]:
            target.copy_(source, non_blocking=True)
        if bucket in self._pulled:
            self._pulled[bucket].record()
        self._control.post(BoardControl.PULLED, bucket + 1)

    def finish(self, bucket: int) -> None:
        pass  # the copies are in the stream that `start` was called on

    def release(self, bucket: int) -> None:
        stream = torch.cuda.current_stream(self._at)
        for peer in self._receivers[bucket]:
            self._control.await_(peer, BoardControl.PULLED, bucket + 1, f"take its messages of bucket {bucket}")
            stream.wait_event(self._their_pulled[bucket, peer])

    def close(self) -> None:
        """Let go of the others' memory. All do this before any of them frees what it offered."""
        self._copies = []
        self._mapped = {}

    def _offer(self) -> _Offer:
        """Handles of all storages that messages lie in, and of the events."""
        numbers: dict[int, int] = {}
        handles: list[tuple[Any, ...]] = []
        offer = _Offer((), {}, {}, {})
        for bucket, of in enumerate(self._traffic):
            listed = []
            for one in of.sends:
                storage = one.data.untyped_storage()
                if storage.data_ptr() not in numbers:
                    numbers[storage.data_ptr()] = len(handles)
                    handles.append(_shared(storage))
                first = one.data.data_ptr() - storage.data_ptr()
                listed.append((one.peer, numbers[storage.data_ptr()], first, one.data.numel()))
            if listed:
                offer.sends[bucket] = listed
                self._packed[bucket] = torch.cuda.Event(interprocess=True)
                offer.packed[bucket] = self._packed[bucket].ipc_handle()
            if of.receives:
                self._pulled[bucket] = torch.cuda.Event(interprocess=True)
                offer.pulled[bucket] = self._pulled[bucket].ipc_handle()
        return _Offer(tuple(handles), offer.sends, offer.packed, offer.pulled)

    def _pairs(self, bucket: int, of: Traffic, offers: dict[int, _Offer]) -> list[tuple[Tensor, Tensor]]:
        """(where it goes, where it is read) of each message that this device receives in a bucket."""
        found = []
        for peer in self._senders[bucket]:
            mine = [one.data for one in of.receives if one.peer == peer]
            theirs = [one for one in offers[peer].sends.get(bucket, ()) if one[0] == self._control.device]
            if [len(one) for one in mine] != [num_bytes for *_, num_bytes in theirs]:
                raise EngineError(
                    f"device {peer} sends other messages in bucket {bucket} than device {self._control.device} awaits; all "
                    "devices must make their program from the same arguments"
                )
            for target, (_, number, first, num_bytes) in zip(mine, theirs, strict=True):
                found.append((target, self._map(peer, number, offers[peer]).narrow(0, first, num_bytes)))
        return found

    def _map(self, peer: int, number: int, offer: _Offer) -> Tensor:
        """[bytes] a storage of another process; see [Note: Mapped on the reader's device]."""
        if (peer, number) not in self._mapped:
            _, *rest = offer.handles[number]
            try:
                self._mapped[peer, number] = torch.UntypedStorage._new_shared_cuda(self._at.index, *rest)
            except RuntimeError as error:
                raise _unmappable(f"device {self._control.device} cannot map memory of device {peer}", error) from error
        return torch.empty(0, dtype=torch.uint8, device=self._at).set_(self._mapped[peer, number])

    def _open(self, handle: bytes) -> torch.cuda.Event:
        return torch.cuda.Event.from_ipc_handle(self._at, handle)


def _shared(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """The handle of a storage, and what else its mapping needs."""
    try:
        return tuple(storage._share_cuda_())
    except RuntimeError as error:
        raise _unmappable(f"memory of {storage.device} cannot be mapped by other processes", error) from error


def _unmappable(what: str, error: RuntimeError) -> EngineError:
    return EngineError(
        f"{what} ({str(error).splitlines()[0]}); it needs GPUs of one machine that reach each other, and on some systems "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False; DistTransport does without"
    )
