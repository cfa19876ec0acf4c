"""What may go on at the same time: a stream for each lane and events between them on a GPU, one after the other on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, Protocol

import torch

from flowrl.engines.reshard.control import Late

Lane = Literal["local", "pack", "wire", "unpack"]
SPIN_S = 0.05
"""The end of a run is looked for again at once for this long: most runs are shorter, and a nap would be a part of them."""
LANES: tuple[Lane, ...] = ("local", "pack", "wire", "unpack")


class Lanes(Protocol):
    def begin(self) -> None:
        """All lanes start behind what is enqueued already."""
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

    def close(self, lane: Lane) -> None:
        """Nothing more comes in this lane."""
        ...

    def end(self, timeout_s: float, what: str) -> dict[str, float]:
        """Until all lanes are empty; seconds from the beginning to the end of each, where they are known.

        Errors: WaitTimeout that names the lanes that are not empty.
        """
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

    def close(self, lane: Lane) -> None:
        pass

    def end(self, timeout_s: float, what: str) -> dict[str, float]:
        return {}


class CudaLanes:
    """One stream for each lane. Events are made once and used in every run."""

    def __init__(self, device: torch.device) -> None:
        # kernels of the local lane fill the whole device; those that others wait for go before them
        self._streams = {lane: torch.cuda.Stream(device, priority=0 if lane == "local" else -1) for lane in LANES}
        self._closed: set[Lane] = set()
        self._events: dict[tuple[Lane, int], torch.cuda.Event] = {}
        self._set: set[tuple[Lane, int]] = set()
        self._ends = {lane: torch.cuda.Event(enable_timing=True) for lane in LANES}
        self._began = torch.cuda.Event(enable_timing=True)
        self._device = device

    def begin(self) -> None:
        self._set.clear()
        self._closed.clear()
        current = torch.cuda.current_stream(self._device)
        self._began.record(current)
        for stream in self._streams.values():
            stream.wait_stream(current)

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        with torch.cuda.stream(self._streams[lane]):
            yield

    def mark(self, lane: Lane, number: int) -> None:
        key = (lane, number)
        if key not in self._events:
            self._events[key] = torch.cuda.Event()
        self._events[key].record(self._streams[lane])
        self._set.add(key)

    def after(self, lane: Lane, other: Lane, number: int) -> None:
        if (other, number) in self._set:
            self._streams[lane].wait_event(self._events[other, number])

    def close(self, lane: Lane) -> None:
        self._ends[lane].record(self._streams[lane])
        self._closed.add(lane)

    def end(self, timeout_s: float, what: str) -> dict[str, float]:
        for lane in LANES:
            if lane not in self._closed:
                self.close(lane)
        waiting = dict(self._ends)

        def is_done() -> bool:
            for lane in [lane for lane, event in waiting.items() if event.query()]:
                del waiting[lane]
            return not waiting

        Late(timeout_s).wait(is_done, lambda: f"the lanes {', '.join(waiting)} of {what} did not end", spin_s=SPIN_S)
        current = torch.cuda.current_stream(self._device)
        for event in self._ends.values():
            current.wait_event(event)
        return {lane: self._began.elapsed_time(event) / 1e3 for lane, event in self._ends.items()}


def lanes_for(device: torch.device) -> Lanes:
    return CudaLanes(device) if device.type == "cuda" else CpuLanes()
