"""Several processes at one table's log, memory and folders, some of them killed."""

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import StoreError, WaitTimeout
from flowrl.store import folders, futex, log as log_module
from flowrl.store.arena import Arenas, Mapped, new_folder, reclaim_orphans
from flowrl.store.log import CommitLog
from flowrl.store.presence import Presence

FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")
LONG_S = 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in shared memory, where these tables live."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="flowrl-test-") as name:
        yield Path(name)


@pytest.fixture
def run() -> Iterator[Callable[..., BaseProcess]]:
    started: list[BaseProcess] = []

    def start(act: Callable[..., Any], *args: Any, spawn: bool = False) -> BaseProcess:
        process = (SPAWN if spawn else FORK).Process(target=act, args=args, daemon=True)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.join(LONG_S)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {LONG_S} s for {what}"
        time.sleep(0.001)


def write_many(folder: Path, name: str, count: int) -> None:
    log = CommitLog.open(folder)
    for n in range(count):
        with log.transaction(LONG_S):
            log.append({"who": name, "n": n}, {"who": name, "n": n, "again": True})


@pytest.mark.parametrize("spawn", [False, True])
def test_two_writers_lose_nothing(folder: Path, run: Callable[..., BaseProcess], spawn: bool) -> None:
    reader = CommitLog.create(folder)
    writers = [run(write_many, folder, name, 400, spawn=spawn) for name in ("a", "b")]
    seen: list[dict[str, Any]] = []
    deadline = time.monotonic() + LONG_S
    while len(seen) < 1600 and time.monotonic() < deadline:
        before = reader.sequence
        seen += reader.read()
        assert len(seen) % 2 == 0, "a commit is seen whole"
        if len(seen) < 1600:
            reader.wait(before, 1)
    for writer in writers:
        writer.join(LONG_S)
        assert writer.exitcode == 0
    for name in ("a", "b"):
        own = [record for record in seen if record["who"] == name]
        assert [record["n"] for record in own] == [n // 2 for n in range(800)]
    assert CommitLog.open(folder).read() == seen


def test_threads_with_attachments_of_their_own_count_right(folder: Path) -> None:
    """Read, change, write: each attachment excludes the others, also in one process."""
    CommitLog.create(folder).close()
    shared = CommitLog.open(folder)
    failed: list[BaseException] = []
    totals: dict[int, int] = {}

    def count(log: CommitLog) -> None:
        try:
            for _ in range(60):
                with log.transaction(LONG_S):
                    for record in log.read():
                        totals[id(log)] = record["total"]
                    log.append({"total": totals.get(id(log), 0) + 1})
        except BaseException as error:
            failed.append(error)

    logs = [CommitLog.open(folder), CommitLog.open(folder), shared, shared]
    threads = [threading.Thread(target=count, args=(log,)) for log in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert not failed
    assert CommitLog.open(folder).read()[-1] == {"total": 240}


def write_forever(folder: Path, started: Any) -> None:
    log = CommitLog.open(folder)
    state: list[int] = []
    rng = random.Random(os.getpid())

    def replay() -> None:
        for record in log.read():
            if record.get("kind") == "snapshot":
                state[:] = record["state"]["all"]
            else:
                state.append(record["n"])

    while True:
        with log.transaction(LONG_S):
            replay()
            if len(state) > 300 or rng.random() < 0.05:
                # the length stays in the snapshot, so that what follows goes on counting
                state[:] = state[-1:]
                log.compact({"all": state})
            n = (state[-1] if state else -1) + 1
            log.append(*({"n": n + i, "long": "x" * rng.randrange(2000)} for i in range(3)))
        started.set()


def test_a_reader_sees_a_whole_prefix_whenever_the_writer_is_killed(
    folder: Path, run: Callable[..., BaseProcess]
) -> None:
    reader = CommitLog.create(folder)
    rng = random.Random(0)
    last = -1
    for _ in range(50):
        started = FORK.Event()
        writer = run(write_forever, folder, started)
        assert started.wait(LONG_S)
        stop = time.monotonic() + rng.random() * 0.02
        while time.monotonic() < stop or writer.is_alive():
            for record in reader.read():
                if record.get("kind") == "snapshot":
                    assert all(n >= last for n in record["state"]["all"]) or last == -1
                    last = record["state"]["all"][-1] if record["state"]["all"] else last
                else:
                    assert record["n"] == last + 1, "nothing is lost, doubled or out of order"
                    last = record["n"]
            assert last % 3 == 2 or last == -1, "a commit is seen whole"
            if time.monotonic() >= stop and writer.pid is not None and writer.exitcode is None:
                os.kill(writer.pid, signal.SIGKILL)
                writer.join(LONG_S)
        again = CommitLog.open(folder)
        again.read()
        with again.transaction(1):  # the lock ended with its holder
            pass
        again.close()
    assert last > 100
    assert len(list(folder.glob("log.*"))) <= 2


def hold(folder: Path, held: Any) -> None:
    with CommitLog.open(folder).transaction():
        held.set()
        time.sleep(LONG_S)


def test_the_lock_of_a_killed_holder_is_free(folder: Path, run: Callable[..., BaseProcess]) -> None:
    log = CommitLog.create(folder)
    held = FORK.Event()
    holder = run(hold, folder, held)
    assert held.wait(LONG_S)
    start = time.monotonic()
    with pytest.raises(WaitTimeout, match=rf"waited 0\.2 s .*process {holder.pid} holds it"), log.transaction(0.2):
        pass
    assert 0.2 <= time.monotonic() - start < 5
    got = threading.Event()

    def wait() -> None:
        with log.transaction(LONG_S):
            got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not got.wait(0.05)
    holder.kill()
    assert got.wait(5)
    thread.join(LONG_S)


def answer(folder: Path, sent: Any) -> None:
    log = CommitLog.open(folder)
    for n in range(sent):
        seen = log.sequence
        while not any("ask" in record and record["ask"] == n for record in log.read()):
            assert log.wait(seen, LONG_S)
            seen = log.sequence
        with log.transaction(LONG_S):
            log.append({"answer": n})


def test_commits_wake_the_other_process(folder: Path, run: Callable[..., BaseProcess], monkeypatch: Any) -> None:
    monkeypatch.setattr(log_module, "LONGEST_SLEEP_S", LONG_S)  # looking again by itself does not count
    log = CommitLog.create(folder)
    run(answer, folder, 300)
    start = time.monotonic()
    for n in range(300):
        with log.transaction(LONG_S):
            log.append({"ask": n})
        while True:
            seen = log.sequence
            if any(record.get("answer") == n for record in log.read()):
                break
            assert log.wait(seen, 20), f"a wake-up was lost at {n}"
    assert time.monotonic() - start < 20


def test_a_wait_ends_in_time(folder: Path) -> None:
    log = CommitLog.create(folder)
    start = time.monotonic()
    assert not log.wait(log.sequence, 0.25)
    assert 0.25 <= time.monotonic() - start < 5


def test_waiting_works_where_the_system_has_no_such_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, "_call", None)
    monkeypatch.setattr(futex, "_call_to_wake", None)
    log = CommitLog.create(folder)
    assert not log.wait(log.sequence, 0.01)
    seen = log.sequence

    def commit() -> None:
        with log.transaction():
            log.append({"n": 1})

    thread = threading.Timer(0.05, commit)
    thread.start()
    assert log.wait(seen, LONG_S)
    thread.join(LONG_S)


def use_inherited(log: CommitLog, presence: Presence, arenas: Arenas, answers: Any) -> None:
    with log.transaction(LONG_S):
        known = log.read()
        block = arenas.allocate(100)
        arenas.write(block)[:] = 9
        presence.pin(5)
        log.append({"from": presence.slot, "place": [block.arena, block.offset, block.nbytes]})
    answers.send((os.getpid(), presence.slot, known))
    answers.recv()  # lives until it is asked to end
    arenas.close(keep=True)


def test_the_child_of_a_fork_goes_on_as_a_process_of_its_own(folder: Path, run: Callable[..., BaseProcess]) -> None:
    presence = Presence(folder)
    log, arenas, mapped = CommitLog.create(folder), Arenas(folder, lambda: presence.slot), Mapped(folder)
    own = arenas.allocate(100)
    arenas.write(own)[:] = 3
    ours, theirs = FORK.Pipe()
    with log.transaction():
        log.append({"n": 1})
        child = run(use_inherited, log, presence, arenas, theirs)
        assert not ours.poll(0.05), "the child waits for its parent's transaction"
        log.append({"n": 2})
    assert ours.poll(LONG_S)
    _, slot, known = ours.recv()
    assert slot == 2
    assert known == [{"n": 1}, {"n": 2}]
    records = log.read()
    assert records[:2] == known
    arena, offset, nbytes = records[2]["place"]
    assert arena == "arena-2-1"
    assert (mapped.root(type(own)(arena, offset, nbytes)) == 9).all()
    assert (mapped.root(own) == 3).all()
    assert presence.pinned([5]) == {5}
    child.kill()
    child.join(LONG_S)
    assert presence.pinned([5]) == set()
    assert not presence.is_alive(2)
    assert folders.is_held(folder / "process-1")


def table(above: str, made: Any) -> None:
    folders.SHARED_MEMORY = Path(above)
    folder = new_folder()
    presence = Presence(folder)
    arenas = Arenas(folder, presence.slot)
    arenas.allocate(1 << 16)
    made.send(str(folder))
    time.sleep(LONG_S)


def test_only_orphans_are_reclaimed(
    folder: Path, run: Callable[..., BaseProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "SHARED_MEMORY", folder)
    ours, theirs = FORK.Pipe()
    processes = []
    made = []
    for _ in range(3):
        processes.append(run(table, str(folder), theirs))
        assert ours.poll(LONG_S)
        made.append(Path(ours.recv()))
    assert reclaim_orphans() == []
    processes[1].kill()
    processes[1].join(LONG_S)
    assert reclaim_orphans() == [made[1]]
    assert made[0].exists()
    assert made[2].exists()


def make_and_leave(above: str, count: int, problems: Any) -> None:
    folders.SHARED_MEMORY = Path(above)
    for n in range(count):
        try:
            mine = new_folder()
            presence = Presence(mine)
            log = CommitLog.create(mine)
            with log.transaction(LONG_S):
                log.append({"n": n})
            assert log.read() == [{"n": n}]
            assert (mine / "head").exists()
            log.close()
            presence.close()
        except BaseException as error:
            problems.send(f"{type(error).__name__}: {error}")
            return
    problems.send("")


def test_a_folder_being_made_is_never_reclaimed(
    folder: Path, run: Callable[..., BaseProcess], monkeypatch: Any
) -> None:
    monkeypatch.setattr(folders, "SHARED_MEMORY", folder)
    ours, theirs = FORK.Pipe()
    makers = [run(make_and_leave, str(folder), 150, theirs) for _ in range(2)]
    reclaimed = 0
    while any(maker.is_alive() for maker in makers):
        reclaimed += len(reclaim_orphans())
    for _ in makers:
        assert ours.poll(LONG_S)
        assert ours.recv() == ""
    reclaimed += len(reclaim_orphans())
    assert reclaimed == 300


def come(folder: str, slots: Any, count: int) -> None:
    for _ in range(count):
        presence = Presence(Path(folder))
        assert presence.is_alive(presence.slot)
        assert Presence.alive_in(Path(folder), presence.slot)
        slots.send(presence.slot)
        presence.close()


def test_numbers_are_given_once_to_many_that_come_at_once(folder: Path, run: Callable[..., BaseProcess]) -> None:
    pipes = [FORK.Pipe() for _ in range(3)]
    comers = [run(come, str(folder), theirs, 60) for _, theirs in pipes]
    watcher = Presence(folder)
    got: list[int] = []
    until(lambda: any(ours.poll() for ours, _ in pipes), "the first to come")
    while any(comer.is_alive() for comer in comers):
        watcher.pinned([1])  # removes files of the dead, and none of the living
    for comer, (ours, _) in zip(comers, pipes, strict=True):
        comer.join(LONG_S)
        assert comer.exitcode == 0
        while ours.poll():
            got.append(ours.recv())
    assert len(set(got) | {watcher.slot}) == len(got) + 1 == 181


def test_memory_that_is_really_full_is_an_error(tmp_path: Path) -> None:
    mount = shutil.which("mount")
    small = tmp_path / "small"
    small.mkdir()
    done = None
    if mount is not None:
        done = subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "none", str(small)], capture_output=True)
    if done is None or done.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        log = CommitLog.create(small)
        presence = Presence(small)
        arenas = Arenas(small, presence.slot, first_bytes=1 << 18)
        blocks = []
        with pytest.raises(StoreError, match=r"of 1\.00 MiB"):
            while True:
                blocks.append(arenas.allocate(1 << 16))
                arenas.write(blocks[-1])[:] = 1
        with log.transaction(), pytest.raises(StoreError, match="must grow"):
            while True:
                log.append({"long": "x" * 4000})
        records = log.read()
        assert records == [{"long": "x" * 4000}] * len(records) != []
        with contextlib.suppress(StoreError):
            Presence(small).close()
        arenas.free(blocks.pop())
        arenas.write(arenas.allocate(1 << 16))[:] = 2
        arenas.close()
        with log.transaction():
            log.append({"n": 1})
        assert log.read() == [{"n": 1}]
        presence.close()
        log.close()
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
