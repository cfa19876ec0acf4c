"""Copies in, work and copies out at the same time: streams and events on a GPU, one after the other on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

import torch

Lane = Literal["in", "work", "out"]
"""Host to device, the stream that is current when a run begins, device to host."""


class Lanes(Protocol):
    def begin(self) -> None:
        """Both copying lanes start behind what the current stream has been given."""
        ...

    def on(self, lane: Lane) -> AbstractContextManager[None]:
        """What is enqueued inside belongs to a lane."""
        ...

    def mark(self, lane: Lane, number: int) -> None:
        """Remember how far a lane is now."""
        ...

    def after(self, lane: Lane, other: Lane, number: int) -> None:
        """What a lane gets from now on waits for a mark of another; a mark that was never set is no wait."""
        ...

    def wait(self, lane: Lane, number: int) -> None:
        """This thread waits for a mark; one that was never set is no wait."""
        ...

    def end(self) -> None:
        """The current stream goes on behind both copying lanes."""
        ...

    def settle(self) -> None:
        """`end`, and this thread waits too."""
        ...


class CpuLanes:
    """Everything is done when its call returns."""

    def begin(self) -> None:
        pass

    def on(self, lane: Lane) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self, lane: Lane, number: int) -> None:
        pass

    def after(self, lane: Lane, other: Lane, number: int) -> None:
        pass

    def wait(self, lane: Lane, number: int) -> None:
        pass

    def end(self) -> None:
        pass

    def settle(self) -> None:
        pass


class CudaLanes:
    """A stream for each direction. Events are made once and used in every run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in, self._out = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._work = torch.cuda.current_stream(device)
        self._events: dict[tuple[Lane, int], torch.cuda.Event] = {}
        self._set: set[tuple[Lane, int]] = set()

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return {"in": self._in, "work": self._work, "out": self._out}[lane]

    def begin(self) -> None:
        self._set.clear()
        self._work = torch.cuda.current_stream(self._device)
        self._in.wait_stream(self._work)
        self._out.wait_stream(self._work)

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        with torch.cuda.stream(self._stream(lane)):
            yield

    def mark(self, lane: Lane, number: int) -> None:
        key = (lane, number)
        if key not in self._events:
            self._events[key] = torch.cuda.Event()
        self._events[key].record(self._stream(lane))
        self._set.add(key)

    def after(self, lane: Lane, other: Lane, number: int) -> None:
        if (other, number) in self._set:
            self._stream(lane).wait_event(self._events[other, number])

    def wait(self, lane: Lane, number: int) -> None:
        if (lane, number) in self._set:
            self._events[lane, number].synchronize()

    def end(self) -> None:
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._in)
        current.wait_stream(self._out)

    def settle(self) -> None:
        self.end()
        torch.cuda.current_stream(self._device).synchronize()


def lanes_for(device: torch.device) -> Lanes:
    return CudaLanes(device) if device.type == "cuda" else CpuLanes()
