"""What ranks of a job tell each other: small messages by key, where each of them is, and who failed first.

    rank 1   board.post("0/rollout/0/1", ...)          a message stays until it is dropped
    rank 0   board.get(["0/rollout/0/1"], ...)         waits, with a timeout that names step, ranks and edge
    rank 2   board.fail(Failure(2, ...))               every wait of every rank ends with this failure

Rows and weights never pass here: messages say where they lie.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from flowrl.engines.launch.across import LOOPBACK
from flowrl.errors import FlowError, RunError

POLL_S = 0.1
"""Between two looks at whether another rank has failed or is gone, while nothing is heard."""

GONE = "its process is gone without a word: it was killed, or crashed"
"""Of a rank that neither ended nor failed in its own words."""

INTERRUPT = KeyboardInterrupt.__name__
"""Begins the error of a job that was interrupted, which is no failure of anybody."""

Range = tuple[int, int]
"""First byte and end, in a file."""

Missing = Callable[[list[str]], str]
"""What a wait is for, in words, by the keys that are missing."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first error of a job."""

    rank: int
    at: str
    """What that rank was doing: `step 3, at 'rewards'`."""
    error: str
    """Type and first line."""
    text: str = ""
    """All that is known: the whole error, a traceback where it is none of FlowRL's, or how a process ended."""

    def __str__(self) -> str:
        return f"rank {self.rank} failed first, in {self.at or 'nothing named'}: {self.error}"

    @property
    def is_interrupt(self) -> bool:
        return self.error.startswith(INTERRUPT)

    @classmethod
    def of(cls, rank: int, at: str, error: BaseException) -> Failure:
        lines = str(error).strip().splitlines()
        first = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
        text = str(error) if isinstance(error, FlowError) else "".join(traceback.format_exception(error))
        return cls(rank, at, first, text)

    def told(self, where: str = "") -> str:
        """The failure and, below it, what is known beyond its first line, which `where` ends."""
        first = f"{self}{where}"
        return first if self.text in self.error else f"{first}\n{self.text}".rstrip()

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Failure:
        return cls(**json.loads(data.decode()))


class RankFailed(RunError):
    """Another rank of the job failed; `failure` says which and how."""

    def __init__(self, failure: Failure, at: str = "") -> None:
        self.failure = failure
        self.at = at
        super().__init__(f"{failure}{f' (this rank was in {at})' if at else ''}")

    def __reduce__(self) -> tuple[object, ...]:
        return (RankFailed, (self.failure, self.at))


class Board(Protocol):
    """One rank's end of what the job tells itself."""

    rank: int
    world: int
    place: str
    """Where this rank said that it is."""
    timeout_s: float
    """Longest wait for another rank in the run at hand."""
    num_runs: int
    """Begun in this job so far; each has keys of its own."""
    folder: Path | None
    """In shared memory, for rows and weights between the ranks of this host; None where there is one rank."""
    host_of: tuple[int, ...]
    """Number of the host that each rank is on: ranks of one share the folder."""
    address: str
    """Of this host, for the other ones of the job."""

    def post(self, key: str, value: bytes) -> None:
        """Let all ranks read `value` under a key, which nobody has used before."""
        ...

    def get(self, keys: Sequence[str], *, timeout_s: float, what: Missing) -> list[bytes]:
        """The messages of all keys, as soon as they are there.

        Errors: RankFailed when a rank has failed, or is gone; KeyboardInterrupt when one was interrupted; WaitTimeout after
        `timeout_s`, with `what` of the missing keys and where the other ranks are.
        """
        ...

    def drop(self, keys: Iterable[str]) -> None:
        """Forget messages that everybody has read."""
        ...

    def at(self, text: str) -> None:
        """Say where this rank is."""
        ...

    def fail(self, failure: Failure) -> Failure:
        """Tell of a failure; the first one of the job, which may be another's."""
        ...

    def bring(self, name: str, parts: Mapping[int, Sequence[Range]], size: int, *, timeout_s: float, what: str) -> int:
        """Bring parts of a file in the folder from ranks of other hosts to the same places of the file here; bytes brought.

        Args:
            parts: rank that wrote -> first byte and end of each piece that it wrote.
            size: of the whole file, in bytes.
            what: in errors: what is waited for.

        Errors: as of `get`.
        """
        ...

    def close(self) -> None:
        """Leave the job: no rank waits for this one any more."""
        ...


def mates(board: Board) -> list[int]:
    """The ranks of this rank's host, itself too."""
    here = board.host_of[board.rank]
    return [rank for rank, host in enumerate(board.host_of) if host == here]


def places_of(said: Mapping[int, str], rank: int, world: int) -> str:
    """Where the other ranks are, in words, by what they said."""
    others = [other for other in range(world) if other != rank]
    found = [f"rank {one} was last in {said[one]}" if one in said else f"rank {one} has not begun" for one in others]
    return ", ".join(found) or "there is no other rank"


class Alone:
    """The board of a job of one rank."""

    rank, world = 0, 1
    folder: Path | None = None
    host_of: tuple[int, ...] = (0,)
    address = LOOPBACK

    def __init__(self) -> None:
        self.place = ""
        self.num_runs = 0
        self.timeout_s = 0.0
        self._said: dict[str, bytes] = {}

    def post(self, key: str, value: bytes) -> None:
        self._said[key] = value

    def get(self, keys: Sequence[str], *, timeout_s: float, what: Missing) -> list[bytes]:
        missing = [key for key in keys if key not in self._said]
        if missing:
            raise RunError(f"{what(missing)}, and there is no other rank that could post it")
        return [self._said[key] for key in keys]

    def drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._said.pop(key, None)

    def at(self, text: str) -> None:
        self.place = text

    def fail(self, failure: Failure) -> Failure:
        return failure

    def bring(self, name: str, parts: Mapping[int, Sequence[Range]], size: int, *, timeout_s: float, what: str) -> int:
        raise RunError(f"{what}: there is no other host in this job")

    def close(self) -> None:
        self._said.clear()
