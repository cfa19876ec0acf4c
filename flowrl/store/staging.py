"""Memory that batches are made in, used again and again; and one thread that makes batches ahead.

    pool.take(nbytes) -> block -> arrays in it -> batch -> (nobody holds an array of it any more) -> taken again

[Note: A kept batch is never overwritten] Every array of a batch, every slice of it and every tensor made from it holds a
reference to the array that owns the block. The pool gives a block out again only when its own reference is the last one.
What is kept therefore stays as it was, and what is dropped is used again at once; there is nothing to give back by hand.
"""

from __future__ import annotations

import mmap
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import numpy as np

from flowrl.errors import StoreError, WaitTimeout

T = TypeVar("T")

TIMEOUT_S = 600.0
"""Longest wait for one batch."""
_POLL_S = 0.5
"""How often a wait looks whether the other side is still there."""
_ROOM = 1 << 16
"""Blocks are a multiple of this, so that batches of nearly one size use the same block; those above half a huge page, of that."""


class Staged(dict[str, Any]):
    """A batch: a dict that can say when it is gone."""

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))  # what is pickled is a plain dict

    def end(self) -> None:
        """Let go of its arrays. Whoever reads it from now on gets a StoreError; arrays taken out before stay as they are."""
        self.clear()
        self.__class__ = _ended(type(self))


def _refuse(batch: Staged, *_: Any, **__: Any) -> Any:
    raise StoreError(
        "this batch ended when the next one was asked for, because its loader was made with reuse=True. Keep its arrays "
        "(batch['response_ids'], or dict(batch)) before that, or make the loader without reuse"
    )


_READING = (
    "__contains__", "__eq__", "__getitem__", "__iter__", "__len__", "__ne__", "__or__", "__reduce__", "__reversed__",
    "__ror__", "copy", "get", "items", "keys", "pop", "popitem", "values",
)  # fmt: skip


@lru_cache
def _ended(kind: type[Staged]) -> type[Staged]:
    """What batches of this type are when they have ended."""
    return type("EndedBatch", (kind,), {"__slots__": (), "__hash__": None, **dict.fromkeys(_READING, _refuse)})


_HUGE = 2 << 20
"""Bytes of a huge page."""


def pages(nbytes: int) -> np.ndarray:
    """Fresh zero pages, uint8 [nbytes]; unlike the allocator's they go back to the system at once.

    Multiples of 2 MiB are asked for as huge pages: to fill such a block takes fewer looks into the page table.
    """
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes % _HUGE == 0:
        with suppress(OSError):  # a system without them
            memory.madvise(getattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NORMAL))
    return np.frombuffer(memory, np.uint8)


_blocks = [pages(1)]
_UNUSED = sys.getrefcount(_blocks[0])
"""References to a block that only a list holds, as `sys.getrefcount` counts them."""


class StagingPool:
    """Blocks of memory, each used again once nobody holds an array in it.

    Not for several threads at once. Example:
        block = pool.take(1000)                                  # uint8, at least 1000 bytes, from a page boundary on
        array = np.ndarray((3, 4), np.int32, buffer=block)       # keeps the block from being taken again
    """

    def __init__(self, allocate: Callable[[int], np.ndarray] = pages, most: int = 4) -> None:
        """Args:
        allocate: makes a block of so many bytes; the array must own itself (its base is no array).
        most: blocks to know at a time. Of more, the oldest are left to whoever holds them.
        """
        self._allocate, self._most = allocate, max(most, 1)
        self._is_plain = allocate is pages
        self._blocks: list[np.ndarray] = []
        self.made = 0
        """Blocks that came to it, new or left by another pool."""
        if self._is_plain:
            weakref.finalize(self, _keep, self._blocks).atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks known now."""
        return sum(block.nbytes for block in self._blocks)

    def take(self, nbytes: int) -> np.ndarray:
        """A block of at least `nbytes` bytes that nobody uses. Its contents are undefined.

        It counts as used as long as the caller, or any array in it, holds it.
        """
        blocks = self._blocks
        unused = -1
        for place in range(len(blocks)):
            if sys.getrefcount(blocks[place]) == _UNUSED:
                if blocks[place].nbytes >= nbytes:
                    return blocks[place]
                unused = place
        if unused >= 0:
            del blocks[unused]  # too small: a larger one takes its place
        elif len(blocks) >= self._most:
            del blocks[0]
        largest = max((block.nbytes for block in blocks), default=0)
        block = _spare_block(nbytes) if self._is_plain else None
        if block is None:
            size = max(nbytes + nbytes // 8, largest, 1)
            room = _HUGE if size > _HUGE // 2 and self._is_plain else _ROOM
            block = self._allocate(-(-size // room) * room)
        self.made += 1
        blocks.append(block)
        return block


_spare: list[np.ndarray] = []
"""Blocks of pools that are gone, for the next ones: pages that were touched before are several times as fast as fresh ones."""
_SPARE = 4
_SPARE_BYTES = 8 << 20


def _keep(blocks: list[np.ndarray]) -> None:
    _spare.extend([block for block in blocks if block.nbytes <= _SPARE_BYTES][: max(_SPARE - len(_spare), 0)])


def _spare_block(nbytes: int) -> np.ndarray | None:
    """A block of at least `nbytes` bytes that nobody uses; None when there is none. Others are forgotten."""
    while True:
        try:
            found = [_spare.pop()]  # one thread alone gets it
        except IndexError:
            return None
        if sys.getrefcount(found[0]) == _UNUSED and found[0].nbytes >= nbytes:
            return found[0]


class Carrier(Protocol):
    """Takes batches from where they are gathered to where they are used."""

    pool: StagingPool

    def ship(self, arrays: Mapping[str, np.ndarray], block: np.ndarray | None, nbytes: int) -> Staged:
        """The batch of these arrays, which are views of the first `nbytes` of `block`. In the thread that makes batches.

        Without `block` the arrays lie anywhere.
        """
        ...

    def receive(self, batch: Staged) -> Staged:
        """In the thread that uses the batch, before it does."""
        ...

    def used(self) -> Callable[[], None]:
        """In the thread that uses batches, before it gets the next one: a function that waits until everything it asked for
        so far is done with the batches it had. Called in the thread that makes batches, before memory is used again."""
        ...


def _nothing() -> None:
    pass


class ArrayCarrier:
    """Batches of NumPy arrays, used where they were gathered."""

    def __init__(self, ahead: int) -> None:
        self.pool = StagingPool(most=ahead + 2)

    def ship(self, arrays: Mapping[str, np.ndarray], block: np.ndarray | None, nbytes: int) -> Staged:
        return Staged(arrays)

    def receive(self, batch: Staged) -> Staged:
        return batch

    def used(self) -> Callable[[], None]:
        return _nothing


class _Permit:
    """Leave to make one more item; goes back once, whoever gives it first."""

    __slots__ = ("_back", "_left", "watch")

    def __init__(self, back: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        self._back, self._left = back, [True]
        self.watch: Any = None

    def give_back(self, wait: Callable[[], None]) -> None:
        try:
            self._left.pop()  # atomic: a collector may call this in the middle of anything
        except IndexError:
            return
        self.watch = None
        self._back.put(wait)


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


_END = object()


class _Shared:
    """What the two threads share. It refers to neither the iterator nor who uses it, so that both can be dropped."""

    def __init__(self, alive: int) -> None:
        self.made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.permits: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # its put may be re-entered
        self.is_closed = False
        for _ in range(alive):
            self.permits.put(_nothing)

    def permit(self) -> bool:
        """Wait for leave to make an item; False when nobody wants one any more."""
        while not self.is_closed:
            try:
                wait = self.permits.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if wait is not None and not self.is_closed:
                wait()
                return True
        return False


def _work(shared: _Shared, items: Iterator[Any]) -> None:
    try:
        while shared.permit():
            item = next(items, _END)
            shared.made.put(item)
            if item is _END:
                return
            del item  # what the user drops is gone
    except BaseException as error:
        shared.made.put(_Failed(error))


def _stop(shared: _Shared, thread: threading.Thread) -> None:
    shared.is_closed = True
    shared.permits.put(None)
    if thread is not threading.current_thread() and thread.is_alive():
        thread.join(timeout=10.0)


class Ahead(Iterator[T]):
    """The items of an iterator, made by one thread ahead of whoever uses them.

    At most `ahead` + 1 items are alive at a time: those made ahead, and the one in use. The next one is begun when the one
    in use is dropped; when it is kept, with the second call after it. An error in the thread is raised here, in the place
    of the item and with its own traceback. The thread ends with the last item, at `close()`, or when this is dropped.

    In a process forked while this was in use the thread is not there: asking for more than was made raises StoreError.
    """

    def __init__(
        self, items: Iterator[T], ahead: int, *, carrier: Carrier | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._carrier, self._timeout_s = carrier, timeout_s
        self._shared = _Shared(ahead + 1)
        self._last: _Permit | None = None
        self._older: _Permit | None = None
        self._is_over = False
        self._thread = threading.Thread(target=_work, args=(self._shared, items), name="flowrl-loader", daemon=True)
        self._thread.start()
        self.close = weakref.finalize(self, _stop, self._shared, self._thread)
        """Ends the thread; also called when this is dropped, and at exit."""

    def __iter__(self) -> Ahead[T]:
        return self

    def __next__(self) -> T:
        if self._is_over:
            raise StopIteration
        used = _used_nothing if self._carrier is None else self._carrier.used
        if self._older is not None:
            self._older.give_back(used())
        if self._last is not None and self._last.watch is None:
            self._last.give_back(used())  # nobody can tell whether it is still held
        self._older, self._last = self._last, None
        item: Any = self._get()
        if item is _END:
            self._end()
            raise StopIteration
        if isinstance(item, _Failed):
            self._end()
            try:
                raise item.error
            finally:
                del item  # the traceback holds this frame
        if self._carrier is not None:
            item = self._carrier.receive(item)
        permit = self._last = _Permit(self._shared.permits)
        if isinstance(item, Staged):
            permit.watch = weakref.ref(item, lambda _: permit.give_back(used()))
        made: T = item
        return made

    def _end(self) -> None:
        self._is_over = True
        self.close()

    def _get(self) -> Any:
        waited = 0.0
        while True:
            try:
                return self._shared.made.get(timeout=min(_POLL_S, self._timeout_s))
            except queue.Empty:
                waited += min(_POLL_S, self._timeout_s)
            if not self._thread.is_alive() and self._shared.made.empty():
                self._is_over = True
                raise StoreError(
                    "the thread that makes batches ahead is gone: this process was forked, or the loader was closed, in the "
                    "middle of an epoch. Iterate over the loader anew"
                )
            if waited >= self._timeout_s:
                raise WaitTimeout(
                    f"no batch was made in {waited:.0f} s; the loader's thread waits for its rows (a slow disk, a lock). "
                    "Raise timeout_s, or read with prefetch=0 to see where"
                )


def _used_nothing() -> Callable[[], None]:
    return _nothing
