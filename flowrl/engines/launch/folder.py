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
import errno
import fcntl
import mmap
import os
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from flowrl.engines.launch.across import LOOPBACK
from flowrl.engines.launch.board import GONE, POLL_S, Failure, Missing, Range, RankFailed, places_of
from flowrl.errors import RunError, StoreError, WaitTimeout
from flowrl.store import folders, futex

SAID, FAILURE, BELL = "said", "failure", "bell"
FULL = (errno.ENOSPC, errno.EDQUOT)


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


def hold(folder: Path, rank: int) -> int:
    """Keep a job's folder, as one of its ranks, for as long as the descriptor that this gives is open.

    Errors: RunError when the folder has gone.
    """
    try:
        held = os.open(folder / f"process-{rank}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunError(f"rank {rank} cannot join the job in {folder}: {error}; whoever started it has ended") from error
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folders.settled(folder)  # of whoever made it for itself and others: its own lock keeps the folder now
    return held


def leave(folder: Path, rank: int, held: int) -> None:
    """Keep a folder no longer; the last one to leave removes it, if no launcher holds it."""
    if folder.exists():
        folders.remove_folder(folder, own_slot=rank)
    os.close(held)


class FolderBoard:
    """See `flowrl.engines.launch.board.Board`."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        """Errors: RunError when the folder has gone."""
        self.rank, self.world = rank, world
        self.num_runs = 0
        self.timeout_s = 0.0
        self.folder: Path | None = folder
        self.host_of = (0,) * world
        self.address = LOOPBACK
        self._here = folder
        self._count = 0
        self.place = ""
        self._lock = hold(folder, rank)
        with open(folder / BELL, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
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

    def bring(self, name: str, parts: Mapping[int, Sequence[Range]], size: int, *, timeout_s: float, what: str) -> int:
        raise RunError(f"{what}: all ranks of this job are on one host")

    def close(self) -> None:
        if self._lock < 0:
            return
        if self._here.exists():
            self.post(f"ended/{self.rank}", b"")
        leave(self._here, self.rank, self._lock)
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
            gone = Failure(rank, at, GONE)
            raise RankFailed(self.fail(gone), self.place)

    def _places(self) -> str:
        said = {rank: self._read(f"at/{rank}") for rank in range(self.world)}
        return places_of({rank: at.decode() for rank, at in said.items() if at is not None}, self.rank, self.world)


class FolderWord:
    """What a launcher on the host of all ranks hears and says of its job; see `flowrl.engines.launch.hub.Hub`, which does the
    same for several hosts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fail(self, failure: Failure) -> Failure:
        return fail(self._folder, failure)

    def failure(self) -> Failure | None:
        return failure_in(self._folder)

    def place_of(self, rank: int) -> str:
        return place_of(self._folder, rank)

    def close(self) -> None:
        pass


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
    except OSError:
        if folder.exists():  # full: nobody else will say it. Else it went with whoever started the job
            print(failure.told(), file=sys.stderr, flush=True)
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
    try:
        aside.write_bytes(data)
        aside.replace(path)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise StoreError(
            f"rank {rank} cannot tell the others what they need, as there is no room in {path.parents[1]}: {error.strerror}; "
            "make /dev/shm larger (docker run --shm-size=...)"
        ) from error
