"""The commit log: what is committed is read, whole and in order, whatever happens to whoever wrote it."""

import contextlib
import errno
import os
import pickle
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from flowrl.errors import StoreError, WaitTimeout
from flowrl.store import futex, log as log_module
from flowrl.store.local_log import LocalLog
from flowrl.store.log import CommitLog
from tests.null.store.forks import in_child


def commit(log: CommitLog | LocalLog, *records: dict[str, Any]) -> int:
    with log.transaction(0):
        return log.append(*records)


def numbers(*values: int) -> list[dict[str, Any]]:
    return [{"n": value} for value in values]


def no_space(descriptor: int, offset: int, nbytes: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


steps = st.lists(
    st.tuples(st.sampled_from(["append", "read", "compact"]), st.integers(0, 2), st.integers(1, 3)), max_size=30
)


@given(steps)
def test_every_attachment_reads_all_records_or_a_snapshot_of_them(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("log")
    logs = [CommitLog.create(folder, durable=False), *(CommitLog.open(folder, durable=False) for _ in range(2))]
    all_of_it: list[int] = []
    heard: list[list[int]] = [[], [], []]
    sequence = logs[0].sequence

    def replay(i: int) -> None:
        for record in logs[i].read():
            if record.get("kind") == "snapshot":
                heard[i] = record["state"]["all"]
            else:
                heard[i].append(record["n"])
        assert logs[i].read() == []

    for what, i, count in steps:
        if what == "append":
            new = list(range(len(all_of_it), len(all_of_it) + count))
            after = commit(logs[i], *numbers(*new))
            all_of_it += new
            assert after > sequence, "the sequence grows"
            sequence = after
            assert {log.sequence for log in logs} == {after}
        elif what == "read":
            replay(i)
            assert heard[i] == all_of_it
        else:
            with logs[i].transaction(0):
                logs[i].compact({"all": all_of_it})
            assert logs[i].sequence > sequence
            sequence = logs[i].sequence
            assert logs[i].bytes_since_snapshot == 0
            assert len(list(folder.glob("log.*"))) == 1, "older generations are removed"
    for i in range(3):
        replay(i)
        assert heard[i] == all_of_it
    late = CommitLog.open(folder, readonly=True)
    assert late.sequence == sequence
    for log in [*logs, late]:
        log.close()


def test_text_and_large_records_come_back_equal(tmp_path: Path) -> None:
    log = CommitLog.create(tmp_path)
    records: list[dict[str, Any]] = [{"text": "ä\ud800 \0", "big": "x" * 300_000}, {"n": [1, 2.5, None, True, 1 << 62]}]
    commit(log, *records)
    commit(log, {"more": "y" * 3_000_000})
    assert log.read() == [*records, {"more": "y" * 3_000_000}]
    assert CommitLog.open(tmp_path).read() == [*records, {"more": "y" * 3_000_000}]


@pytest.mark.parametrize("when", ["frame written", "half a frame written"])
def test_a_writer_that_died_before_the_end_wrote_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    log, other = CommitLog.create(tmp_path), CommitLog.open(tmp_path)
    commit(log, *numbers(1, 2))

    class Killed(BaseException):
        pass

    def killed(*args: object) -> int:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed), log.transaction(0):
        if when == "frame written":
            patch.setattr(log, "_publish", killed)
        else:
            write = os.pwrite
            patch.setattr(os, "pwrite", lambda fd, data, at: killed() if write(fd, data[: len(data) // 2], at) else 0)
        log.append({"n": 3, "long": "x" * 500})
    assert other.read() == numbers(1, 2)
    commit(other, {"n": 4})
    assert log.read() == numbers(1, 2, 4)
    assert CommitLog.open(tmp_path).read() == numbers(1, 2, 4)


def test_after_the_last_commit_of_a_transaction_others_need_not_wait_for_its_end(tmp_path: Path) -> None:
    log, other = CommitLog.create(tmp_path), CommitLog.open(tmp_path)
    with log.transaction(0):
        log.append_read({"n": 1}, is_last=True)
        commit(other, {"n": 2})  # would time out at once
        with pytest.raises(StoreError, match="none after its last"):
            log.append({"n": 3})
    with log.transaction(0), log.transaction(0):
        log.append_read({"n": 4}, is_last=True)  # the outer one may go on
        with pytest.raises(WaitTimeout):
            commit(other, {"n": 5})
        log.append({"n": 6})
    assert log.read() == numbers(2, 4, 6)
    assert other.read() == numbers(1, 2, 4, 6)


def test_a_compaction_that_died_leaves_the_old_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = CommitLog.create(tmp_path)
    commit(log, *numbers(1))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError), log.transaction(0):
        patch.setattr(log, "_publish", lambda place: (_ for _ in ()).throw(RuntimeError("killed")))
        log.compact({"all": [1] * 5000})
    assert (tmp_path / "log.2").exists()
    other = CommitLog.open(tmp_path)
    assert other.read() == numbers(1)
    with other.transaction(0):
        other.compact({"all": [1]})
    commit(other, {"n": 2})
    assert log.read() == [{"kind": "snapshot", "state": {"all": [1]}}, {"n": 2}]
    assert [path.name for path in tmp_path.glob("log.*")] == ["log.2"]


@pytest.mark.parametrize("part", ["length", "checksum", "text", "zeros"])
def test_damage_is_named_once_what_precedes_it_was_read(tmp_path: Path, part: str) -> None:
    log = CommitLog.create(tmp_path)
    commit(log, *numbers(1))
    commit(log, *numbers(2))
    at = 64 + log.bytes_since_snapshot
    commit(log, *numbers(3))
    commit(log, *numbers(4))
    assert log.read() == numbers(1, 2, 3, 4)
    with open(tmp_path / "log.1", "r+b") as file:
        file.seek(at + {"length": 0, "checksum": 4, "text": 9, "zeros": 0}[part])
        file.write(bytes(16) if part == "zeros" else b"\xff")
    damaged = CommitLog.open(tmp_path, readonly=True)
    assert damaged.read() == numbers(1, 2)
    for _ in range(2):
        with pytest.raises(StoreError, match=rf"log damaged: .*log\.1 at byte {at} "):
            damaged.read()


def test_what_is_not_a_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there is no table in .*head is missing"):
        CommitLog.open(tmp_path)
    with pytest.raises(StoreError, match="cannot be made"):
        CommitLog.create(tmp_path / "none")
    CommitLog.create(tmp_path).close()
    with pytest.raises(StoreError, match="there is a table in .* already"):
        CommitLog.create(tmp_path)
    head = (tmp_path / "head").read_bytes()
    (tmp_path / "head").write_bytes(head[:8] + struct.pack("=I", 7) + head[12:])
    with pytest.raises(StoreError, match="written by table format 7, this version reads 2"):
        CommitLog.open(tmp_path)
    (tmp_path / "head").write_bytes(b"FLOWRLT9" + head[8:])
    with pytest.raises(StoreError, match="written by table format 9, this version reads 2"):
        CommitLog.open(tmp_path)
    for other in (b"PAR1" + head[4:], b"", head[:100]):
        (tmp_path / "head").write_bytes(other)
        with pytest.raises(StoreError, match="is not a table's"):
            CommitLog.open(tmp_path)
    (tmp_path / "head").write_bytes(head)
    (tmp_path / "log.1").unlink()
    with pytest.raises(StoreError, match=r"log\.1 is missing"):
        CommitLog.open(tmp_path).read()


def test_permission_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit(CommitLog.create(tmp_path), *numbers(1))
    tmp_path.chmod(0o555)
    for path in tmp_path.iterdir():
        path.chmod(0o444)
    try:
        if os.geteuid():
            with pytest.raises(StoreError, match="may not be written.*readonly=True"):
                CommitLog.open(tmp_path)
        with monkeypatch.context() as patch:  # nothing is opened to be written, and no lock is needed
            really = os.open
            asked = []
            patch.setattr(os, "open", lambda path, flags, *mode: asked.append(flags) or really(path, flags, *mode))
            log = CommitLog.open(tmp_path, readonly=True)
            assert log.read() == numbers(1)
            assert not any(flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT) for flags in asked)
        assert not log.wait(log.sequence, 0)
        with pytest.raises(StoreError, match="readonly=True"), log.transaction():
            log.append({"n": 1})
        log.close()
    finally:
        tmp_path.chmod(0o755)


def test_no_space_leaves_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, other = CommitLog.create(tmp_path), CommitLog.open(tmp_path)
    commit(log, *numbers(1))
    before = log.sequence
    with monkeypatch.context() as patch, log.transaction(0):
        patch.setattr(os, "posix_fallocate", no_space)
        log.append({"n": 2})  # there is space for this one
        before = log.sequence
        with pytest.raises(StoreError, match=r"must grow to 0\.25 MiB and cannot: .*No space left.* MiB are free"):
            log.append({"long": "x" * 200_000})
        with pytest.raises(StoreError, match="cannot be compacted"):
            log.compact({"long": "x" * 200_000})
        assert log.sequence == before
    assert not (tmp_path / "log.2").exists()
    assert other.read() == numbers(1, 2)
    commit(log, {"long": "x" * 200_000})
    assert [len(r["long"]) for r in other.read()] == [200_000]
    with monkeypatch.context() as patch, pytest.raises(StoreError, match="cannot be made"):
        patch.setattr(os, "posix_fallocate", no_space)
        CommitLog.create(tmp_path_of(tmp_path))


def tmp_path_of(above: Path) -> Path:
    folder = above / "other"
    folder.mkdir()
    return folder


def test_a_store_error_is_text_and_pickles() -> None:
    error = pickle.loads(pickle.dumps(StoreError("the disk is full")))
    assert type(error) is StoreError
    assert isinstance(error, OSError)
    assert str(error) == "the disk is full"


def test_two_attachments_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    log, other = CommitLog.create(tmp_path), CommitLog.open(tmp_path)
    with log.transaction(0), log.transaction(0):
        log.append({"n": 1})
        with pytest.raises(WaitTimeout, match=f"process {os.getpid()} holds it"), other.transaction(0):
            pass
        with pytest.raises(StoreError, match="inside a transaction"):
            other.append({"n": 2})
    with other.transaction(0):
        other.append({"n": 2})
    assert log.read() == numbers(1, 2)


def test_a_thread_is_not_in_the_transaction_of_another(tmp_path: Path) -> None:
    for log in (CommitLog.create(tmp_path), LocalLog()):
        heard: list[str] = []

        def other(log: CommitLog | LocalLog = log, found: list[str] = heard) -> None:
            with contextlib.suppress(StoreError):
                log.append({"n": 1})
                found.append("it could append")
            with contextlib.suppress(WaitTimeout), log.transaction(0):
                found.append("it could enter")
            found.append("done")

        with log.transaction(0):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(10)
        assert heard == ["done"]
        commit(log, *numbers(5))
        assert log.read() == numbers(5)


def test_a_failed_transaction_frees_the_lock_and_keeps_what_it_committed(tmp_path: Path) -> None:
    log, other = CommitLog.create(tmp_path), CommitLog.open(tmp_path)
    with pytest.raises(KeyError), log.transaction(0):
        log.append({"n": 1})
        raise KeyError
    with pytest.raises(TypeError), log.transaction(0):
        log.append({"n": 2}, {"n": object()})
    assert other.read() == numbers(1)
    commit(other, *numbers(3))


@pytest.mark.parametrize("local", [False, True])
def test_a_waiter_is_woken_by_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool) -> None:
    monkeypatch.setattr(log_module, "LONGEST_SLEEP_S", 60.0)  # looking again by itself does not count
    log: CommitLog | LocalLog = LocalLog() if local else CommitLog.create(tmp_path)
    waiting = log if local else CommitLog.open(tmp_path, readonly=True)
    seen = waiting.sequence
    assert not waiting.wait(seen, 0)
    woken: list[int] = []
    ready = threading.Event()

    def wait() -> None:
        for _ in range(50):
            before = waiting.sequence
            ready.set()
            assert waiting.wait(before, 30)
            waiting.read()
            woken.append(before)

    thread = threading.Thread(target=wait)
    thread.start()
    for sent in range(50):
        assert ready.wait(30)
        ready.clear()
        commit(log, {"n": sent})
    thread.join(30)
    assert len(woken) == 50
    assert not log.wait(log.sequence, 0.01)
    assert log.wait(seen, 0)


def test_closing_ends_a_wait_and_what_comes_after_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "LONGEST_SLEEP_S", 60.0)
    for log in (CommitLog.create(tmp_path), LocalLog()):
        answers: list[bool] = []
        started = threading.Event()

        def wait(log: CommitLog | LocalLog = log, answers: list[bool] = answers, started: Any = started) -> None:
            started.set()
            answers.append(log.wait(log.sequence, 60))

        thread = threading.Thread(target=wait)
        thread.start()
        assert started.wait(10)
        while thread.is_alive():  # closing may come before it sleeps, then it is for the wait to see
            log.close()
            futex.wake(log._bell) if isinstance(log, CommitLog) else None
            thread.join(0.01)
        assert answers == [False]
        with pytest.raises(StoreError, match="closed"), log.transaction(0):
            pass
    with pytest.raises(StoreError, match="closed"):
        CommitLog.open(tmp_path).close() or log_closed(tmp_path).read()


def log_closed(folder: Path) -> CommitLog:
    log = CommitLog.open(folder)
    log.close()
    return log


def test_a_removed_table_is_named_to_whoever_waited_for_its_lock(tmp_path: Path) -> None:
    log = CommitLog.create(tmp_path)
    commit(log, *numbers(1))
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(StoreError, match="was removed"), log.transaction(0):
        pass


def test_a_local_log_reads_what_it_was_told(tmp_path: Path) -> None:
    log = LocalLog()
    with log.transaction(0):
        first = log.append({"a": (1, 2)}, {1: "b"})  # type: ignore[dict-item]
        assert log.append({"c": 3}) > first
    assert log.read() == [{"a": [1, 2]}, {"1": "b"}, {"c": 3}]
    assert log.read() == []
    with log.transaction(0):
        log.append({"d": 4})
        log.compact({"x": 1})
    assert log.read() == [{"kind": "snapshot", "state": {"x": 1}}]


@pytest.mark.parametrize("local", [False, True])
def test_what_was_read_can_be_read_again(tmp_path: Path, local: bool) -> None:
    log = LocalLog() if local else CommitLog.create(tmp_path)
    commit(log, *numbers(1, 2))
    commit(log, *numbers(3))
    assert log.read() == numbers(1, 2, 3) and log.read() == []
    before = log.bytes_since_snapshot
    commit(log, *numbers(4))
    log.rewind()
    assert log.read() == numbers(1, 2, 3, 4)
    assert log.bytes_since_snapshot > before > 0 and log.snapshot_bytes == 0
    with log.transaction():
        log.compact({"sum": 10})
    assert log.bytes_since_snapshot == 0 and log.snapshot_bytes > 0
    commit(log, *numbers(5))
    for _ in range(2):
        assert log.read() == [{"kind": "snapshot", "state": {"sum": 10}}, *numbers(5)]
        log.rewind()


def test_a_child_is_not_in_its_parents_transaction(tmp_path: Path) -> None:
    log = CommitLog.create(tmp_path)
    commit(log, *numbers(1))

    def child() -> bytes:
        for act in (lambda: log.append({"n": 9}), lambda: log.transaction(0).__enter__()):
            try:
                act()
                return b"it could"
            except (StoreError, WaitTimeout):
                pass
        return str(log.read()).encode()

    with log.transaction(0):
        assert in_child(child) == b"[{'n': 1}]"
        with pytest.raises(WaitTimeout), CommitLog.open(tmp_path).transaction(0):
            pass  # the lock did not end with the child
        log.append({"n": 2})
    assert in_child(lambda: str(commit(log, *numbers(3)) == log.sequence).encode()) == b"True"
    assert log.read() == numbers(1, 2, 3)


def test_the_child_of_a_fork_inside_a_transaction_may_leave_it(tmp_path: Path) -> None:
    log = CommitLog.create(tmp_path)

    def leave() -> bytes:
        transaction.__exit__(None, None, None)
        return b"left"

    transaction = log.transaction(0)
    with transaction:
        assert in_child(leave) == b"left"
        with pytest.raises(WaitTimeout), CommitLog.open(tmp_path).transaction(0):
            pass
