"""What carries the messages of a bucket from device to device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flowrl.engines.reshard.control import Loop, LoopControl


@dataclass(frozen=True, slots=True)
class Stretch:
    """One end of a message: the bytes, and the device at the other end."""

    peer: int
    data: Tensor
    """[bytes] uint8, contiguous; a view of a slot, a shard or a live parameter."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The messages of one device in one bucket."""

    sends: tuple[Stretch, ...] = ()
    receives: tuple[Stretch, ...] = ()

    def peers(self) -> str:
        """For errors: `sends to 1, 3; receives from 2`."""
        to, of = ({stretch.peer for stretch in side} for side in (self.sends, self.receives))
        parts = [f"sends to {', '.join(map(str, sorted(to)))}"] if to else []
        parts += [f"receives from {', '.join(map(str, sorted(of)))}"] if of else []
        return "; ".join(parts)


class Transport(Protocol):
    """Moves the messages of buckets, in order. On a GPU all four calls after `bind` only enqueue work on the current stream.

    Errors of all calls: WaitTimeout or EngineError that names bucket and devices.
    """

    name: str

    def bind(self, traffic: Sequence[Traffic]) -> None:
        """The messages of every bucket; the same tensors are used in every run. Called once, by all ranks together."""
        ...

    def ready(self, bucket: int) -> None:
        """What the bucket sends lies in place."""
        ...

    def start(self, bucket: int) -> None:
        """Begin to move it."""
        ...

    def finish(self, bucket: int) -> None:
        """What it receives has arrived, for whatever is enqueued after this."""
        ...

    def release(self, bucket: int) -> None:
        """What it sends may be overwritten, for whatever is enqueued after this."""
        ...


class LoopTransport:
    """Between threads of one process, on CPUs or on GPUs. The receiver copies; the sender waits until it has."""

    name = "loopback"

    def __init__(self, loop: Loop, control: LoopControl) -> None:
        self.loop, self.control = loop, control
        self._traffic: Sequence[Traffic] = ()

    def bind(self, traffic: Sequence[Traffic]) -> None:
        self._traffic = traffic

    def ready(self, bucket: int) -> None:
        pass

    def start(self, bucket: int) -> None:
        with self.loop.changed:
            for peer, data in _by_peer(self._traffic[bucket].sends).items():
                self.loop.mail[self._key(bucket, self.control.device, peer)] = [_mark(data[0]), *data]
            self.loop.changed.notify_all()

    def finish(self, bucket: int) -> None:
        for peer, data in _by_peer(self._traffic[bucket].receives).items():
            key = self._key(bucket, peer, self.control.device)
            self._wait(key, True, f"device {peer} did not send its messages of bucket {bucket}")
            with self.loop.changed:
                sent, *given = self.loop.mail[key]
            _wait_for(sent)
            for mine, theirs in zip(data, given, strict=True):
                mine.copy_(theirs, non_blocking=True)
            with self.loop.changed:
                del self.loop.mail[key]
                self.loop.taken[key] = _mark(data[0])
                self.loop.changed.notify_all()

    def release(self, bucket: int) -> None:
        for peer in _by_peer(self._traffic[bucket].sends):
            key = self._key(bucket, self.control.device, peer)
            self._wait(key, False, f"device {peer} did not take its messages of bucket {bucket}")
            with self.loop.changed:
                arrived = self.loop.taken.pop(key, None)
            _wait_for(arrived)

    def _wait(self, key: tuple[int, int, int, int], is_there: bool, message: str) -> None:
        """Until the mail is there, or gone."""
        with self.loop.changed:
            self.loop.wait(self.control.attempt, lambda: (key in self.loop.mail) == is_there, lambda: message)

    def _key(self, bucket: int, sender: int, receiver: int) -> tuple[int, int, int, int]:
        return self.control.attempt, bucket, sender, receiver


def _mark(tensor: Tensor) -> torch.cuda.Event | None:
    """How far the current stream is; None on a CPU, where what was called is done."""
    return torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None


def _wait_for(event: torch.cuda.Event | None) -> None:
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def _by_peer(stretches: Sequence[Stretch]) -> dict[int, list[Tensor]]:
    found: dict[int, list[Tensor]] = {}
    for stretch in stretches:
        found.setdefault(stretch.peer, []).append(stretch.data)
    return found
