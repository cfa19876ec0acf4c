"""A board in shared memory, for the ranks of one host: a file for each message, and a bell that wakes whoever waits.

    /dev/shm/flowrl-<user>/<name>/
        slots, process-<rank>      as in a table's memory: locked by a rank while it lives, so that the folder of a job whose
                                   processes are all gone is removed by the next table that anybody makes
        bell                       a word that every message changes
        said/<key>                 messages
        failure                    the first failure of the job
        *.rows                     rows and weights (`flowrl.runtime.ranks.segment`)

[Note: A rank that is gone] Each rank holds the lock of its file while its process lives, however it ends. Who waits looks at
these locks now and then: a rank that came and has neither said that it ended nor holds its lock was killed.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from flowrl.engines.launch.board import POLL_S, Failure, Missing, RankFailed
from flowrl.errors import RunError, WaitTimeout
from flowrl.store import folders, futex

SAID, FAILURE, BELL = "said", "failure", "bell"


def make_folder() -> Path:
    """A folder for a job, in shared memory; it stays until `remove_folder`, or until this process and all ranks are gone."""
    folders.reclaim_orphans()
    folder = folders.new_folder()
    (folder / SAID).mkdir()
    (folder / BELL).write_bytes(bytes(mmap.PAGESIZE))
    (folder / "slots").touch()
    return folder


def remove_folder(folder: Path) -> None:
    """Give back the memory of a job that has ended; ranks that are still there lose it."""
    folders.settled(folder)
    shutil.rmtree(folder, ignore_errors=True)


class FolderBoard:
    """See `flowrl.engines.launch.board.Board`."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        """Errors: RunError when the folder has gone."""
        self.rank, self.world = rank, world
        self.num_runs = 0
        self.timeout_s = 0.0
        self.folder: Path | None = folder
        self._here = folder
        self._count = 0
        self.place = ""
        try:
            self._lock = os.open(folder / f"process-{rank}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with open(folder / BELL, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        except OSError as error:
            raise RunError(
                f"rank {rank} cannot join the job in {folder}: {error}; whoever started it has ended"
            ) from error
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folders.settled(folder)  # of whoever made it for itself and others: its own lock keeps the folder now
        self._bell = ctypes.c_uint32.from_buffer(self._memory)
        self.post(f"came/{rank}", b"")

    # ------------------------------------------------------------------------------------------------------- messages

    def post(self, key: str, value: bytes) -> None:
        _write(self._file(key), value, self.rank)
        self._ring()

    def get(self, keys: Sequence[str], *, timeout_s: float, what: Missing) -> list[bytes]:
        found: dict[str, bytes] = {}
        until = time.monotonic() + timeout_s
        look_at = time.monotonic() + POLL_S
        while True:
            bell = int(self._bell.value)
            for key in keys:
                if key not in found and (data := self._read(key)) is not None:
                    found[key] = data
            if len(found) == len(set(keys)):
                return [found[key] for key in keys]
            self._raise_failure()
            now = time.monotonic()
            missing = [key for key in keys if key not in found]
            if now >= look_at:
                self._raise_gone()
                look_at = now + POLL_S
            if now >= until:
                raise WaitTimeout(f"rank {self.rank} waited {timeout_s:g} s {what(missing)}; {self._places()}")
            futex.sleep(ctypes.addressof(self._bell), bell, min(POLL_S, until - now))

    def drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._file(key).unlink(missing_ok=True)

    def at(self, text: str) -> None:
        self.place = text
        _write(self._file(f"at/{self.rank}"), text.encode(), self.rank)

    def fail(self, failure: Failure) -> Failure:
        first = fail(self._here, failure)
        self._ring()
        return first

    def close(self) -> None:
        if self._lock < 0:
            return
        if self._here.exists():
            self.post(f"ended/{self.rank}", b"")
            folders.remove_folder(
                self._here, own_slot=self.rank
            )  # the last to leave does it, and no launcher that holds it
        os.close(self._lock)
        self._lock = -1

    # --------------------------------------------------------------------------------------------------------- inside

    def _file(self, key: str) -> Path:
        return self._here / SAID / quote(key, safe="")

    def _read(self, key: str) -> bytes | None:
        try:
            return self._file(key).read_bytes()
        except FileNotFoundError:
            return None

    def _ring(self) -> None:
        """Change the word to one that it never had, so that nobody who looked before sleeps on."""
        self._count += 1
        self._bell.value = (self.rank + 1) << 20 | self._count % (1 << 20)
        futex.wake(ctypes.addressof(self._bell))

    def _raise_failure(self) -> None:
        failure = failure_in(self._here)
        if failure is not None and failure.is_interrupt:
            raise KeyboardInterrupt(str(failure))
        if failure is not None:
            raise RankFailed(failure, self.place)
        if not self._here.exists():
            raise RunError(f"the job's folder {self._here} has gone: whoever started the ranks has ended")

    def _raise_gone(self) -> None:
        for rank in range(self.world):
            if (
                rank == self.rank
                or self._read(f"came/{rank}") is None
                or folders.is_held(self._here / f"process-{rank}")
            ):
                continue
            if self._read(f"ended/{rank}") is not None:
                continue
            self._raise_failure()  # it may have said why in the meantime
            at = (self._read(f"at/{rank}") or b"").decode()
            gone = Failure(rank, at, "its process is gone without a word: it was killed, or crashed")
            raise RankFailed(self.fail(gone), self.place)

    def _places(self) -> str:
        found = []
        for rank in range(self.world):
            if rank != self.rank:
                at = self._read(f"at/{rank}")
                found.append(
                    f"rank {rank} was last in {at.decode()}" if at is not None else f"rank {rank} has not begun"
                )
        return ", ".join(found) or "there is no other rank"


def fail(folder: Path, failure: Failure) -> Failure:
    """Tell a job of a failure; the first one that it was told of."""
    aside = folder / f".{FAILURE}-{failure.rank}-{os.getpid()}"
    try:
        aside.write_bytes(failure.to_bytes())
        try:
            os.link(aside, folder / FAILURE)  # of two at the same time one is first
        except FileExistsError:
            pass
        finally:
            aside.unlink(missing_ok=True)
    except OSError:  # the folder went with whoever started the job
        return failure
    return failure_in(folder) or failure


def failure_in(folder: Path) -> Failure | None:
    """The first failure of a job; None while all is well."""
    try:
        return Failure.from_bytes((folder / FAILURE).read_bytes())
    except FileNotFoundError:
        return None


def place_of(folder: Path, rank: int) -> str:
    """Where a rank was last, in its own words; "" when it has said nothing."""
    try:
        return (folder / SAID / quote(f"at/{rank}", safe="")).read_text(encoding="utf-8")
    except OSError:
        return ""


def _write(path: Path, data: bytes, rank: int) -> None:
    aside = path.with_name(f".{rank}-{path.name}")
    aside.write_bytes(data)
    aside.replace(path)
