"""Folders of tables in shared memory: made, found, and removed when no living process has one open.

    /dev/shm/flowrl-<user>/lock       held for microseconds while a folder is made or removed
    /dev/shm/flowrl-<user>/<name>/    a table's memory
        setup                         locked by the process that makes the table, until it has a `process-<slot>` file
        slots                         counter of the processes ever attached; locked while one comes or the folder goes
        process-<slot>                locked by an attached process while it lives

[Note: No living folder is removed] A folder is removed under the lock of its `slots` file, after no lock of `setup` or
`process-*` was found held, by renaming it away first. A process that comes takes the same lock, then looks whether `slots`
is still the file it opened. So either it is seen, or it sees that the folder is gone. A folder that has no process yet is
made, with `setup` locked, under the lock of the folder above, which whoever removes folders holds too.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowrl.errors import StoreError, WaitTimeout

SHARED_MEMORY = Path("/dev/shm")
LONGEST_WAIT_S = 30.0
"""For a lock that is held for microseconds, or while the memory of a large table is removed."""
_EAGER_S = 100e-6
"""How long a lock is tried for again and again: most are free by then, and the shortest nap takes as long."""
_FIRST_NAP_S, _LONGEST_NAP_S = 50e-6, 1e-3
"""Between tries after that."""
ONLY_READS = 3
"""Index of the 8-byte word of a `process-<slot>` file that is 1 when the table may end without that process."""
REMEDY = "Make /dev/shm writable and larger (docker run --shm-size=...), or use memory='private'"
_GONE = ".gone-"

_setting_up: dict[Path, int] = {}
"""Folders this process made and has not attached to yet, with the descriptor that holds their `setup` lock."""


def shm_folder() -> Path:
    """The folder of this user's tables in shared memory. It need not exist yet."""
    return SHARED_MEMORY / f"flowrl-{os.getuid()}"


def new_folder() -> Path:
    """A new, empty folder for a table's memory. It is safe from `reclaim_orphans` until a process attaches or this one ends.

    Errors: StoreError when shared memory is missing, full or not ours to write; WaitTimeout.
    """
    above = _user_folder()
    try:
        with locked(above / "lock"):
            folder = above / secrets.token_hex(5)
            folder.mkdir(mode=0o700)
            held = os.open(folder / "setup", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _setting_up[folder] = held
            return folder
    except WaitTimeout:
        raise
    except OSError as error:
        raise StoreError(f"no folder for a table can be made in {above}: {error}. {REMEDY}") from error


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def settled(folder: Path) -> None:
    """The folder has a `process-<slot>` file now; the lock of its making is not needed any more."""
    held = _setting_up.pop(folder, None)
    if held is not None:
        (folder / "setup").unlink(missing_ok=True)
        os.close(held)


def remove_folder(folder: Path, *, own_slot: int | None = None) -> bool:
    """Remove a table's memory unless a living process other than `own_slot` has it open. Says whether it is removed."""
    settled(folder)
    try:
        with locked(folder / "slots"):
            if any(slot != own_slot for slot in living(folder)) or is_held(folder / "setup"):
                return False
            gone = folder.with_name(f"{_GONE}{folder.name}")
            folder.rename(gone)
    except FileNotFoundError:
        return not folder.exists()
    shutil.rmtree(gone, ignore_errors=True)
    return True


def reclaim_orphans() -> list[Path]:
    """Remove the memory of tables that no living process has open, and name it.

    A folder with a file `path` is left: its table has a folder on disk, and whoever opens that saves the rows first.
    Errors: StoreError when the folder of all tables is not ours.
    """
    if not shm_folder().exists():
        return []
    above = _user_folder()
    removed = []
    with locked(above / "lock"):
        found = [Path(entry.path) for entry in os.scandir(above) if entry.is_dir(follow_symlinks=False)]
        for folder in found:
            if folder.name.startswith(_GONE):  # whoever removed it was killed half-way
                shutil.rmtree(folder, ignore_errors=True)
            elif (folder / "path").exists() or is_held(folder / "setup") or any(living(folder)):
                continue
            elif remove_folder(folder):
                removed.append(folder)
    return removed


def living(folder: Path) -> Iterator[int]:
    """Slots of the living processes that have the folder's table open, and do not only read it."""
    for slot in slots(folder):
        if has_open(folder / f"process-{slot}"):
            yield slot


def has_open(file: Path) -> bool:
    """Whether the process of a `process-<slot>` file lives and has the table open, not only to read it."""
    if not is_held(file):
        return False
    try:
        with open(file, "rb", buffering=0) as opened:
            return not any(os.pread(opened.fileno(), 8, 8 * ONLY_READS))
    except FileNotFoundError:
        return False
    except PermissionError:  # as in is_held
        return True


def slots(folder: Path) -> list[int]:
    """Slots that have a file in the folder, of living and of dead processes."""
    names = (name.removeprefix("process-") for name in os.listdir(folder) if name.startswith("process-"))
    return [int(name) for name in names if name.isdecimal()]


def is_held(file: Path) -> bool:
    """Whether a living process holds the exclusive lock of a file. False when there is none."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError:  # of another user: nothing is known, so nothing of it is taken
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that two who look do not see each other
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


@contextmanager
def locked(file: Path) -> Iterator[int]:
    """Hold the lock of a file that every holder keeps for a very short time.

    Errors: FileNotFoundError when it goes away; WaitTimeout when its holder does not go on (it was stopped, say).
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not lock_until(descriptor, time.monotonic() + LONGEST_WAIT_S):
            raise WaitTimeout(
                f"waited {LONGEST_WAIT_S:g} s for the lock of {file}; the process that holds it was stopped or hangs: "
                "let it go on, or end it (fuser names it)"
            )
        if os.stat(file).st_ino != os.fstat(descriptor).st_ino:
            raise FileNotFoundError(f"{file} was replaced")
        yield descriptor
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked meanwhile has a copy of the descriptor
        os.close(descriptor)


def lock_until(descriptor: int, deadline: float) -> bool:
    """Take the exclusive lock of an open file. False when somebody else held it until `deadline` (`time.monotonic`)."""
    nap = _FIRST_NAP_S
    eager = None
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            now = time.monotonic()
            if now >= deadline:
                return False
            if eager is None:
                eager = now + _EAGER_S
            if now < eager:
                os.sched_yield()  # the holder may need this processor to go on
                continue
            time.sleep(min(nap, deadline - now))
            nap = min(2 * nap, _LONGEST_NAP_S)


def _user_folder() -> Path:
    above = shm_folder()
    try:
        above.mkdir(mode=0o700, exist_ok=True)
        found = os.lstat(above)
    except OSError as error:
        raise StoreError(f"{above} cannot be made: {error}. {REMEDY}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StoreError(f"{above} belongs to somebody else; remove it, or use memory='private'")
    return above


def _in_child() -> None:
    for descriptor in _setting_up.values():  # the lock stays with the parent
        os.close(descriptor)
    _setting_up.clear()


os.register_at_fork(after_in_child=_in_child)
