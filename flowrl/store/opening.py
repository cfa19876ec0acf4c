"""Making, finding and leaving a table's folders.

    /dev/shm/flowrl-<user>/<name>/    memory, and the log of a table without a path
    <path>/                           the log and the files of a table with one; <path>/memory names its memory

[Note: Who removes what] Memory belongs to the processes that have the table open. The last one to leave writes what is only
in memory to files, when there is a path, and removes the memory. When the last one was killed instead, the next table that
anyone makes finds memory that no living process holds and does the same.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError, FlowError, StoreError, WaitTimeout
from flowrl.store.arena import Arenas, Mapped
from flowrl.store.backing import Backing
from flowrl.store.catalog import DISK, HOT, PACKED
from flowrl.store.folders import living, new_folder, reclaim_orphans, remove_folder, settled, shm_folder
from flowrl.store.local_log import LocalLog
from flowrl.store.log import CommitLog
from flowrl.store.mover import Mover, Tiers
from flowrl.store.presence import LocalPresence, Presence

MEMORY = "memory"
"""File in a table's path that names the folder of its memory."""
PATH = "path"
"""File in the folder of its memory that names a table's path."""
UNSAVED = "unsaved"
"""File in the folder of its memory that says why the rows of a table that killed processes left could not be saved."""
ORPHAN_WAIT_S = 0.1
"""Longest wait for the lock of a table that killed processes left: whoever holds it is saving it."""


@dataclass(slots=True)
class Opened:
    """An open table's parts and where they are."""

    backing: Backing
    name: str
    memory: Path | None
    path: Path | None


def create(settings: Mapping[str, Any], path: Path | None, memory: str) -> Opened:
    """A new table. Errors: ConfigError when there is one at the path already; StoreError when it cannot be made."""
    record = {"kind": "table", "settings": dict(settings)}
    if memory == "private":
        arenas = Arenas(None, 1)
        backing = Backing(LocalLog(), LocalPresence(), arenas, Mapped(arenas))
        with backing.transaction():
            backing.commit(record)
        return Opened(backing, f"private-{id(backing):x}", None, None)
    if path is not None:
        path = path.absolute()
        _make_path(path)
    recover_orphans()
    folder = new_folder()
    try:
        presence = Presence(folder, counter=path)
        log = CommitLog.create(path or folder)
    except BaseException:
        settled(folder)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    backing = Backing(log, presence, Arenas(folder, lambda: presence.slot), Mapped(folder))
    backing.memory = folder
    try:
        with backing.transaction():
            if path is not None:
                _point(folder / PATH, str(path))
                _point(path / MEMORY, str(folder))
            backing.commit(record)
    except BaseException as error:
        backing.close(keep=False)
        remove_folder(folder)
        if path is not None:
            for name in ("head", "lock", "log.1", "slots", MEMORY):
                (path / name).unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, FlowError):
            raise StoreError(f"the table cannot be made in {path or folder}: {error}") from error
        raise
    return Opened(backing, str(path) if path is not None else folder.name, folder, path)


def _make_path(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"the table's folder {path} cannot be made: {error}. Choose a folder you may write") from error
    if (path / "head").exists():
        raise ConfigError(
            f"there is a table in {path} already; open it with ExperienceTable.open({str(path)!r}), or choose another path"
        )
    if any(path.iterdir()):
        raise ConfigError(f"the table's folder {path} is not empty; choose a folder of its own for each table")


def _point(file: Path, text: str) -> None:
    aside = file.with_name(f"{file.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(file)


def find(target: str | Path) -> tuple[Path, bool]:
    """The folder with a table's log, and whether it is a path of the table's own (and not memory).

    Errors: StoreError when there is no table.
    """
    path = Path(target)
    if (path / "head").exists():
        return path.absolute(), path.absolute().parent != shm_folder()
    if path.parent == Path() and (shm_folder() / path / "head").exists():
        return shm_folder() / path, False
    there = [p.name for p in shm_folder().glob("*") if (p / "head").exists()] if shm_folder().exists() else []
    raise StoreError(
        f"there is no table at {target}: a table is a folder that ExperienceTable(path=...) made, or the name of one in "
        f"shared memory ({', '.join(sorted(there)[:8]) or 'there are none'})"
    )


def attach(target: str | Path, *, readonly: bool, timeout_s: float = 30.0) -> Opened:
    """An existing table. Rows whose memory has gone are counted as lost.

    Errors: StoreError; WaitTimeout when its lock is not free in `timeout_s`.
    """
    folder, has_path = find(target)
    log = CommitLog.open(folder, readonly=readonly)
    try:
        if not has_path and readonly:
            return _joined(log, folder, None, readonly)
        if not has_path:
            with log.transaction(timeout_s):  # whoever leaves as the last removes the folder inside one
                return _joined(log, folder, None, readonly)
        if readonly:
            memory = _memory_of(folder)
            return _joined(log, memory, folder, readonly)
        with log.transaction(timeout_s):
            memory = _memory_of(folder)
            if memory is not None:
                opened = _joined(log, memory, folder, readonly)
                (memory / UNSAVED).unlink(missing_ok=True)
                return opened
            memory = new_folder()
            try:
                _point(memory / PATH, str(folder))
                _point(folder / MEMORY, str(memory))
                return _joined(log, memory, folder, readonly)
            except BaseException:
                (folder / MEMORY).unlink(missing_ok=True)
                settled(memory)
                shutil.rmtree(memory, ignore_errors=True)
                raise
    except BaseException:
        log.close()
        raise


def _joined(log: CommitLog, memory: Path | None, path: Path | None, readonly: bool) -> Opened:
    presence = None
    arenas = None
    if memory is not None:
        try:
            presence = Presence(memory, counter=path, only_reads=readonly)
        except (OSError, FlowError):
            if not readonly:
                raise
            # rows can still be read; nobody is told, so a writer may reuse what is being read only when it is gone anyway
        if presence is not None and not readonly:
            joined = presence
            arenas = Arenas(memory, lambda: joined.slot)
    backing = Backing(log, presence, arenas, Mapped(memory if memory is not None else Path("/nowhere")))
    backing.readonly, backing.memory = readonly, memory
    backing.replay()
    lost = [
        s.uid
        for s in backing.catalog.segments.values()
        if s.tier != DISK and (memory is None or not (memory / str(s.place[0])).exists())
    ]
    lost += [
        s.uid
        for s in backing.catalog.segments.values()
        if s.tier == DISK and path is not None and not all((path / name).exists() for name in s.place)
    ]
    if lost:
        record = {"kind": "lost", "uids": lost}
        before = backing.catalog.lost
        if readonly:
            with backing.mutex:
                backing.catalog.apply(record)
        else:
            with backing.transaction():
                backing.commit(record)
        if backing.catalog.lost > before:
            warnings.warn(
                f"{backing.catalog.lost - before} rows of the table {path or memory} were only in memory and are lost: the "
                "machine was restarted, or the memory was removed, before they were written to files",
                stacklevel=4,
            )
    if not readonly:
        with backing.transaction():
            backing.remove_unused()
        if path is not None:
            _remove_strays(backing, path)
    name = str(path) if path is not None else str(memory.name if memory is not None else "")
    return Opened(backing, name, memory, path)


def _memory_of(path: Path) -> Path | None:
    try:
        memory = Path((path / MEMORY).read_text())
    except FileNotFoundError:
        return None
    return memory if memory.is_dir() else None


def _remove_strays(backing: Backing, path: Path) -> None:
    """Files that no segment names, of processes that have ended."""
    with backing.transaction() as catalog:
        known = {name for s in catalog.segments.values() if s.tier == DISK for name in s.place}
        for file in (path / "segments").glob("*"):
            if f"segments/{file.name}" in known:
                continue
            slot = _slot_of(file.name)
            if slot is None or backing.presence is None or not backing.presence.is_alive(slot):
                file.unlink(missing_ok=True)


def _slot_of(name: str) -> int | None:
    """The process that wrote a file, from the uid in its name."""
    try:
        return int(name.split(".")[0].split("-")[1], 16) >> 40
    except (IndexError, ValueError):
        return None


def leave(backing: Backing, mover: Mover, opened: Opened, *, readonly: bool) -> None:
    """Close this process's part; as the last one, save what is only in memory and remove it."""
    memory, path = opened.memory, opened.path
    if memory is None or readonly or backing.presence is None or backing.arenas is None:
        backing.close(keep=memory is not None)
        return
    try:
        with backing.transaction() as catalog:
            if any(slot == backing.presence.slot for node in catalog.nodes.values() for slot, _ in node.open.values()):
                backing.commit({"kind": "gone", "slot": backing.presence.slot})
            if any(slot != backing.presence.slot for slot in living(memory)):
                backing.leave_presence()  # before the lock is free, so that the next to leave sees that it is the last
            else:
                if path is not None:
                    for tier in (HOT, PACKED):
                        for segment in list(catalog.tiers[tier].values()):
                            mover.spill(segment)
                    backing.recycle()
                    backing.log.compact(catalog.snapshot())
                    (path / MEMORY).unlink(missing_ok=True)
                # still under the lock: a process that comes now finds either the table or that it is gone
                if not remove_folder(memory, own_slot=backing.presence.slot) and path is not None:
                    _point(path / MEMORY, str(memory))
    except (FlowError, OSError) as error:
        # memory stays, so that nothing is lost; whoever opens the table next saves it
        warnings.warn(
            f"rows of the table {opened.name} could not be written to files: {error}; they are kept in {memory}",
            stacklevel=2,
        )
    backing.close(keep=True)


_LOOKED = False


def recover_orphans(*, again: bool = False) -> None:
    """Remove memory that no living process holds; rows of tables with a path are written to their files first.

    Once in a process, unless asked `again`. Tables that somebody is at are left to them.
    """
    global _LOOKED
    if _LOOKED and not again:
        return
    _LOOKED = True
    reclaim_orphans()
    for folder in list(shm_folder().glob("*")):
        file = folder / PATH
        if not file.exists() or any(living(folder)):
            continue
        try:
            path = Path(file.read_text())
            has_rows = any(folder.glob("arena-*"))
            if not has_rows or not (path / "head").exists() or _memory_of(path) != folder:
                remove_folder(folder)
                continue
            _save(path)
        except WaitTimeout:
            continue
        except Exception as error:  # whatever is wrong with what another process left, this table has no part in it
            _warn_once(folder, f"{type(error).__name__}: {error}")


def _warn_once(folder: Path, why: str) -> None:
    """Of all processes that find the table, one says so. Each tries again, as a full disk may have space by then."""
    try:
        path = (folder / PATH).read_text()
    except OSError:  # somebody else has removed it
        return
    try:
        with open(folder / UNSAVED, "x") as file:
            file.write(why)
    except FileExistsError:
        return
    except OSError:  # no space: then it is said more than once
        pass
    warnings.warn(
        f"the table {path} that a killed process left could not be saved: {why}. Its memory {folder} stays; remove that "
        f"folder to give the rows up (rm -r {folder})",
        stacklevel=4,
    )


def _save(path: Path) -> None:
    """Write the rows of a table whose processes were killed to its files."""
    opened = attach(path, readonly=False, timeout_s=ORPHAN_WAIT_S)
    backing, settings = opened.backing, opened.backing.catalog.settings
    backing.folder, backing.removes_files = path, True
    tiers = Tiers(settings["compression"], settings["hot_bytes"], settings["memory_bytes"], path)
    leave(backing, Mover(backing, tiers), opened, readonly=False)
