"""Work that the ranks of a mesh do in parts, and that other ranks read: who posts what, and when it is forgotten.

workers of a step     share(key, ...)   each posts its part; all have the whole
other ranks           share(key, ...)   wait for the parts, and have the whole too
parts of other hosts  the first rank of a host that comes brings them there, for all of its ranks
an iteration later    everything of the step is removed, when all ranks have ended it
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from flowrl.engines.launch.board import Board
from flowrl.errors import RunError
from flowrl.runtime.ranks import packed, segment
from flowrl.runtime.ranks.segment import Arrays, Placing
from flowrl.store.rows import RowBatch


@dataclass(frozen=True, slots=True)
class Whole:
    """What the parts make."""

    arrays: Arrays
    said: tuple[Any, ...]
    """What each part says of itself."""


@dataclass
class Exchange:
    """One rank's end. Every rank that takes part in a key calls with equal workers."""

    board: Board
    timeout_s: float
    run: str = "run"
    """Before all keys: a job may run several flows, one after the other."""
    step: int = -1
    waited_s: float = 0.0
    """For other ranks, since `begin`."""
    num_bytes: int = 0
    """Of parts that this rank has written or brought from other hosts, since `begin`."""
    _files: dict[int, list[str]] = field(default_factory=dict)
    """Step -> keys whose file this rank removes."""
    _posted: dict[int, list[str]] = field(default_factory=dict)
    _ended: int | None = None
    """The last step that this rank has ended."""

    @property
    def rank(self) -> int:
        return self.board.rank

    def begin(self) -> None:
        """Start counting anew."""
        self.waited_s, self.num_bytes = 0.0, 0

    def share(self, key: str, workers: Sequence[int], mine: tuple[Arrays, Any] | None, edge: str) -> Whole:
        """The parts of all workers, in their order.

        Args:
            key: names the exchange; unlike any other of the run.
            workers: ranks that have a part.
            mine: arrays of this rank's part and what it says of it; None on a rank that only reads.
            edge: in errors: what is waited for.
        """
        if list(workers) == [self.rank] and self.board.world == 1:
            assert mine is not None
            return Whole(mine[0], (mine[1],))
        if self.board.folder is None:
            raise RunError(f"{edge}: rows of several ranks need shared memory between them, and this job has none")
        if mine is not None:
            self._post(f"{key}/size/{self.rank}", (segment.sizes_of(mine[0]), mine[1]))
        said = [pickle.loads(data) for data in self._get(f"{key}/size", workers, edge)]
        placing = segment.placing_of([sizes for sizes, _ in said])
        path = self.board.folder / f"{quote(f'{self.run}/{key}', safe='')}.rows"
        if mine is not None:
            part = list(workers).index(self.rank)
            segment.write(path, placing, part, mine[0])
            self.num_bytes += sum(array.nbytes for array in mine[0].values())
            self._files.setdefault(self.step, []).append(path.name)
            self._post(f"{key}/there/{self.rank}", None)
        self._get(f"{key}/there", workers, edge)
        self._bring(key, workers, placing, path, edge)
        return Whole(segment.read(path, placing), tuple(one for _, one in said))

    def _bring(self, key: str, workers: Sequence[int], placing: Placing, path: Path, edge: str) -> None:
        """Have the parts of other hosts in this host's memory."""
        host_of = self.board.host_of
        here = host_of[self.rank]
        parts = {
            rank: places
            for part, rank in enumerate(workers)
            if host_of[rank] != here and (places := segment.pieces(placing, part))
        }
        if not parts:
            return
        if not _is_first(path.with_suffix(".brought")):
            self._get(f"{key}/brought", [here], edge, of="host")
            return
        self._files.setdefault(self.step, []).extend((path.name, path.with_suffix(".brought").name))
        start = time.perf_counter()
        what = f"in step {self.step} for {edge} from {named(sorted(parts))}"
        self.num_bytes += self.board.bring(path.name, parts, placing.num_bytes, timeout_s=self.timeout_s, what=what)
        self.waited_s += time.perf_counter() - start
        self._post(f"{key}/brought/{here}", None)

    def rows(
        self, key: str, workers: Sequence[int], mine: RowBatch | None, edge: str, note: Any = None
    ) -> tuple[RowBatch, tuple[Any, ...]]:
        """`share` of rows: those of all parts, and the notes of the parts."""
        part = None if mine is None else (packed.pack(mine), (packed.shape_of(mine), note))
        if mine is not None and self.board.world == 1:
            return mine, (note,)
        whole = self.share(key, workers, part, edge)
        shapes, notes = zip(*whole.said, strict=True)
        return packed.unpack(whole.arrays, shapes), notes

    def tell(self, key: str, teller: int, value: Any, edge: str) -> Any:
        """A small value of one rank, for all: pickled."""
        if self.board.world == 1:
            return value
        if teller == self.rank:
            self._post(f"{key}/said/{teller}", value)
            return value
        return pickle.loads(self._get(f"{key}/said", [teller], edge)[0])

    def end_step(self, said: Any = None) -> list[Any]:
        """This rank has ended its step; what the step before needed is removed, once all ranks have ended that.

        Returns what each rank said of the step before; [] in the first one.
        """
        before, self._ended = self._ended, self.step
        if self.board.world == 1:
            return []
        self._post(f"{self.step}/done/{self.rank}", said)
        if before is None:
            return []
        found = self._of_all(before)
        self._forget(before)
        return found

    def end(self) -> list[Any]:
        """After the last step: when all ranks have come here, everything is removed but the word that they did.

        Returns what each rank said of the last step.
        """
        if self.board.world == 1:
            return []
        found = [] if self._ended is None else self._of_all(self._ended)
        posted = [key for keys in self._posted.values() for key in keys]
        self._post(f"-1/end/{self.rank}", None)
        self._get("-1/end", range(self.board.world), "the end of the run")
        for step in list(self._files):
            self._remove(step)
        self.board.drop(posted)
        self._posted.clear()
        return found

    def _of_all(self, step: int) -> list[Any]:
        everybody = range(self.board.world)
        return [pickle.loads(data) for data in self._get(f"{step}/done", everybody, f"the end of step {step}")]

    def _remove(self, step: int) -> None:
        folder = self.board.folder
        for name in self._files.pop(step, ()):
            if folder is not None:
                (folder / name).unlink(missing_ok=True)

    def _forget(self, step: int) -> None:
        self._remove(step)
        # whoever has ended this step has been through the end of the one before, which read `done` of the one before that
        self.board.drop(self._posted.pop(step - 2, ()))

    def _post(self, key: str, value: Any) -> None:
        key = f"{self.run}/{key}"
        self._posted.setdefault(self.step, []).append(key)
        self.board.post(key, pickle.dumps(value))

    def _get(self, key: str, ranks: Sequence[int], edge: str, of: str = "rank") -> list[bytes]:
        start = time.perf_counter()
        try:
            return self.board.get(
                [f"{self.run}/{key}/{rank}" for rank in ranks], timeout_s=self.timeout_s,
                what=_waiting(self.step, edge, of),
            )  # fmt: skip
        finally:
            self.waited_s += time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class AllRanks:
    """The ranks of a run as those that write one checkpoint; see `flowrl.runtime.checkpoints.Together`."""

    exchange: Exchange

    @property
    def rank(self) -> int:
        return self.exchange.rank

    def tell(self, what: str, value: str) -> str:
        told: str = self.exchange.tell(self._key(what), 0, value, f"the {what} of a checkpoint")
        return told

    def meet(self, what: str) -> None:
        for rank in range(self.exchange.board.world):
            self.exchange.tell(f"{self._key(what)}/{rank}", rank, None, f"the {what} of a checkpoint")

    def _key(self, what: str) -> str:
        return f"{self.exchange.step}/checkpoint/{what}"


def _is_first(claim: Path) -> bool:
    """Whether this process makes a file that none has made before."""
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        return True
    except FileExistsError:
        return False


def _waiting(step: int, edge: str, of: str) -> Callable[[list[str]], str]:
    def text(missing: list[str]) -> str:
        numbers = sorted({int(key.rpartition("/")[2]) for key in missing})
        who = named(numbers) if of == "rank" else f"the rank of host {numbers[0]} that brings them from other hosts"
        return f"in step {step} for {edge} from {who}"

    return text


def named(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def lengths_of(rows: RowBatch, name: str) -> np.ndarray:
    """[N] values of a list column in each row; ones where there is no such column."""
    return rows[name].lengths if name in rows else np.ones(len(rows), np.int64)
