"""Full memory and disks, damaged folders, forks, threads, ends: a clear error, and nothing that was there is lost."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from flowrl.errors import ConfigError, FlowError, StoreError, WaitTimeout
from flowrl.schema.types import SAMPLE
from flowrl.store import folders, opening, spill
from flowrl.store.catalog import Catalog, Record
from flowrl.store.presence import Presence
from flowrl.store.table import ExperienceTable
from tests.cpu.store.checked_rows import (
    FORK,
    LONG_S,
    SPAWN,
    TYPES,
    batch_of,
    check_rows,
    memory_bytes,
    tables_in_memory,
    until,
)

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def append_until_full(table: ExperienceTable, rows: int, *, most: int = 100_000, longest: int = 24) -> StoreError:
    """The error of the append that did not fit."""
    while table.appended < most:
        at = table.appended
        try:
            table.append(batch_of(at, at + rows, longest=longest))
        except StoreError as error:
            return error
    raise AssertionError(f"{most} rows fit")


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    found = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    if found.returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


# ------------------------------------------------------------------------------------------------------- full memory


def test_memory_that_is_really_too_small(small_mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "SHARED_MEMORY", small_mount)
    with ExperienceTable(chunk_rows=64) as table:
        error = append_until_full(table, 64, longest=200)
        assert "MiB" in str(error) and "--shm-size" in str(error) and str(small_mount) in str(error)
        held = len(table)
        assert held >= 64
        check_rows(table.batch(), np.arange(held), longest=200)
        table.evict(np.arange(held // 2))
        table.append(batch_of(held, held + 64, longest=200))
        check_rows(table.batch(), np.arange(held // 2, held + 64), longest=200)
        again = append_until_full(table, 64, longest=200)
        assert "MiB" in str(again)
        check_rows(table.batch(), np.arange(held // 2, table.appended), longest=200)
    assert not list(folders.shm_folder().glob("*/arena-*"))


@pytest.mark.parametrize("nth", range(1, 9))
def test_any_allocation_may_fail(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """The n-th request for space in memory fails, whatever it is for; later there is space again."""
    monkeypatch.setattr("flowrl.store.backing.COMPACT_BYTES", 20_000)
    monkeypatch.setattr("flowrl.store.log._FIRST_BYTES", 4096)
    real = os.posix_fallocate
    counts = [0]

    def allocate(descriptor: int, offset: int, size: int) -> None:
        counts[0] += 1
        if counts[0] in (nth, nth + 1):  # a smaller request, tried when a large one fails, too
            raise FULL
        real(descriptor, offset, size)

    with ExperienceTable(chunk_rows=32) as table:
        table.append(batch_of(0, 8))
        with ExperienceTable.open(table.name) as other:
            monkeypatch.setattr(os, "posix_fallocate", allocate)
            failed = 0
            with warnings.catch_warnings(record=True):
                while table.appended < 3000:
                    at = table.appended
                    try:
                        table.append(batch_of(at, at + 40))
                    except StoreError as error:
                        assert "MiB" in str(error) or "No space" in str(error)
                        failed += 1
                        assert table.appended == at, "append raised, and its rows are there"
                        check_rows(table.batch(), np.arange(at))
                        check_rows(other.batch(), np.arange(at))
                        assert failed < 5
            assert counts[0] >= nth + 1, "so many requests are never made"
            check_rows(table.batch(), np.arange(table.appended))
            check_rows(other.batch(), np.arange(table.appended))
            assert table._backing.arenas is not None
            used, stored = table._backing.arenas.used_bytes, sum(table._now().bytes.values())
            assert used <= stored + table._backing.pinned_bytes, "blocks of failed appends are kept"


def test_a_table_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(folders.shm_folder().glob("*")) if folders.shm_folder().exists() else set()
    for nth in range(1, 4):
        counts = [0]
        real = os.posix_fallocate

        def allocate(
            descriptor: int, offset: int, size: int, counts: list[int] = counts, nth: int = nth, real: Any = real
        ) -> None:
            counts[0] += 1
            if counts[0] == nth:
                raise FULL
            real(descriptor, offset, size)

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", allocate)
            with pytest.raises(StoreError, match="No space left"):
                ExperienceTable()
    assert {p for p in folders.shm_folder().glob("*") if p not in before and p.is_dir()} == set()


# -------------------------------------------------------------------------------------------------------- full disks


@pytest.mark.parametrize(
    "problem", [FULL, OSError(errno.EACCES, os.strerror(errno.EACCES)), OSError(errno.EIO, "disk broken")]
)
def test_a_disk_that_fails_while_rows_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: OSError) -> None:
    def fail(*_: Any) -> None:
        raise problem

    with ExperienceTable(chunk_rows=32, path=tmp_path / "t", memory_bytes=10_000) as table:
        real = os.replace
        monkeypatch.setattr(spill.os, "replace", fail)
        table.append(batch_of(0, 320))
        until(lambda: table._mover.error is not None, "the error")
        check_rows(table.batch(), np.arange(320))
        with pytest.raises(StoreError) as caught:
            table.flush()
        assert str(tmp_path) in str(caught.value)
        monkeypatch.setattr(spill.os, "replace", real)
        table.append(batch_of(320, 352))  # the error comes once
        table.flush()
        now = table._now()
        assert now.bytes["disk"] > 0 and now.bytes["hot"] <= 10_000
        check_rows(table.batch(), np.arange(352))
        kept = {name for s in now.tiers["disk"].values() for name in s.place}
        assert {f"segments/{p.name}" for p in (tmp_path / "t" / "segments").iterdir()} == kept, "no half files"
    with ExperienceTable.open(tmp_path / "t") as again:
        check_rows(again.batch(), np.arange(352))


def test_an_append_that_tells_of_the_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise FULL

    with ExperienceTable(chunk_rows=32, path=tmp_path / "t", memory_bytes=10_000) as table:
        with monkeypatch.context() as patch:
            patch.setattr(spill.os, "replace", fail)
            table.append(batch_of(0, 320))
            until(lambda: table._mover.error is not None, "the error")
        with pytest.raises(StoreError):
            table.append(batch_of(320, 330))
        assert table.appended == 320, "append raised, and its rows are there"
        table.append(batch_of(320, 330))
        check_rows(table.batch(), np.arange(330))


def test_a_mover_that_failed_goes_on_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Appends that come while the move is failing do not stop the thread for good."""
    is_failing, may_fail = threading.Event(), threading.Event()

    def fail(*_: Any) -> None:
        is_failing.set()
        may_fail.wait(LONG_S)
        raise FULL

    with ExperienceTable(chunk_rows=32, path=tmp_path / "t", memory_bytes=10_000) as table:
        with monkeypatch.context() as patch:
            patch.setattr(spill.os, "replace", fail)
            table.append(batch_of(0, 320))
            assert is_failing.wait(LONG_S)
            table.append(batch_of(320, 640))
            may_fail.set()
            until(lambda: table._mover.error is not None, "the error")
        with pytest.raises(StoreError):
            table.flush()
        table.flush()
        assert table._now().bytes["hot"] <= 10_000
        check_rows(table.batch(), np.arange(640))


def test_a_disk_that_is_really_full(small_mount: Path) -> None:
    with ExperienceTable(chunk_rows=64, path=small_mount / "t", memory_bytes=100_000) as table:
        errors = []
        for at in range(0, 4096, 64):
            rows = batch_of(at, at + 64, longest=1000)
            try:
                table.append(rows)
            except StoreError as error:
                errors.append(error)
                if table.appended == at:
                    table.append(rows)
            if len(errors) == 3:
                break
        assert errors and "No space left" in str(errors[0]) and str(small_mount) in str(errors[0])
        check_rows(table.batch(), np.arange(table.appended), longest=1000)
        table.evict(np.arange(table.appended - 64))
        gc.collect()
        held = table.appended
        for _ in range(2):
            try:
                table.flush()
            except StoreError:
                continue
        table.append(batch_of(held, held + 64, longest=1000))
        table.flush()
        check_rows(table.batch(), table.numbers, longest=1000)
        assert len(table) == 128


# ---------------------------------------------------------------------------------------------------- damaged folders


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a closed table of 200 rows."""
    path = tmp_path / "saved"
    with ExperienceTable(chunk_rows=32, path=path) as table:
        table.append(batch_of(0, 100))
        table.append(batch_of(100, 200))
    return path


def test_another_format(saved: Path) -> None:
    head = bytearray((saved / "head").read_bytes())
    head[8] = 77
    (saved / "head").write_bytes(head)
    with pytest.raises(StoreError, match=r"written by table format 77, this version reads \d+"):
        ExperienceTable.open(saved)


def test_not_a_table(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(StoreError, match="there is no table at"):
        ExperienceTable.open(tmp_path / "nothing")
    (saved / "head").write_bytes(b"x" * 4096)
    with pytest.raises(StoreError, match="is not a table's"):
        ExperienceTable.open(saved)
    (saved / "head").unlink()
    with pytest.raises(StoreError, match="there is no table at"):
        ExperienceTable.open(saved)
    with pytest.raises(ConfigError, match="is not empty"):
        ExperienceTable(path=saved)


def test_a_log_with_a_flipped_byte(saved: Path) -> None:
    log = next(saved.glob("log.*"))
    whole = log.read_bytes()
    committed = int.from_bytes((saved / "head").read_bytes()[16:24], "little") & ((1 << 40) - 1)
    for at in (70, committed // 2, committed - 9):
        broken = bytearray(whole)
        broken[at] ^= 0x10
        log.write_bytes(broken)
        with pytest.raises(StoreError, match=r"log damaged: .* at byte \d+"):
            ExperienceTable.open(saved)
    log.write_bytes(whole[: committed - 100])
    with pytest.raises(StoreError, match=r"log damaged"):
        ExperienceTable.open(saved)
    broken = bytearray(whole)
    if committed < len(whole):  # beyond what is committed, bytes mean nothing
        broken[committed] ^= 0xFF
    log.write_bytes(broken)
    with ExperienceTable.open(saved) as table:
        check_rows(table.batch(), np.arange(200))


def test_a_missing_log(saved: Path) -> None:
    before = tables_in_memory()
    next(saved.glob("log.*")).unlink()
    for _ in range(2):
        with pytest.raises(StoreError, match=r"log\.\d+ is missing"):
            ExperienceTable.open(saved)
    assert tables_in_memory() <= before, "a table that cannot be opened leaves no memory behind"


def test_a_missing_or_torn_segment_file(saved: Path) -> None:
    files = sorted((saved / "segments").iterdir())
    with ExperienceTable.open(saved) as table:
        files[1].rename(saved / "aside")
        with pytest.raises(StoreError, match=files[1].name):
            table.batch()
        check_rows(table.take(np.arange(32)), np.arange(32))  # the others can be read
        (saved / "aside").rename(files[1])
        check_rows(table.batch(), np.arange(200))
    content = files[2].read_bytes()
    for cut in (len(content) // 2, 10, 0):
        files[2].write_bytes(content[:cut])
        with ExperienceTable.open(saved) as table, pytest.raises(StoreError, match=files[2].name):
            table.batch()
    files[2].unlink()
    with pytest.warns(UserWarning, match=r"rows of the table .* are lost"):
        table = ExperienceTable.open(saved)
    with table:
        assert 0 < len(table) < 200
        check_rows(table.batch(), table.numbers)
        table.append(batch_of(200, 210))


def test_a_table_whose_memory_went_away(tmp_path: Path) -> None:
    """As after the machine restarted: rows in files are there, those only in memory are counted as lost."""
    path = tmp_path / "t"
    code = (
        "import os, sys; from flowrl.store.table import ExperienceTable; from tests.cpu.store.checked_rows import batch_of\n"
        "table = ExperienceTable(chunk_rows=32, path=sys.argv[1])\n"
        "table.append(batch_of(0, 64)); table.spill(); table.append(batch_of(64, 100)); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=LONG_S)
    shutil.rmtree(Path((path / "memory").read_text()))
    with pytest.warns(UserWarning, match=r"36 rows of the table .* are lost"):
        table = ExperienceTable.open(path)
    with table:
        check_rows(table.batch(), np.arange(64))
        assert table.append(batch_of(100, 110)) == range(100, 110)
        check_rows(table.batch(), np.r_[0:64, 100:110])


def test_a_path_in_use(tmp_path: Path) -> None:
    with ExperienceTable(path=tmp_path / "t", chunk_rows=32) as table:
        table.append(batch_of(0, 40))
        with pytest.raises(ConfigError, match=r"there is a table in .* already; open it with"):
            ExperienceTable(path=tmp_path / "t")
        with ExperienceTable.open(tmp_path / "t") as other:
            other.append(batch_of(40, 50))
        check_rows(table.batch(), np.arange(50))


def hold(name: str, ready: Connection) -> None:
    table = ExperienceTable.open(name)
    with table._backing.transaction():
        ready.send(os.getpid())
        time.sleep(LONG_S)


def test_a_lock_that_another_process_holds() -> None:
    with ExperienceTable(timeout_s=0.3, chunk_rows=32) as table:
        table.append(batch_of(0, 40))
        here, there = FORK.Pipe()
        holder = FORK.Process(target=hold, args=(table.name, there), daemon=True)
        holder.start()
        try:
            assert here.poll(LONG_S)
            pid = here.recv()
            for act in (
                lambda: table.append(batch_of(40, 50)), table.batch, lambda: table.claim("a", 1), table.finish,
                lambda: table.evict([0]), lambda: table.add_column("c", None, SAMPLE.i64),
            ):  # fmt: skip
                began = time.monotonic()
                with pytest.raises(WaitTimeout, match=f"process {pid} holds it"):
                    act()
                assert time.monotonic() - began < 5
            assert len(table) == 40  # what needs no lock goes on
        finally:
            holder.kill()
            holder.join(LONG_S)
        table.append(batch_of(40, 50))  # a dead process holds nothing
        check_rows(table.batch(), np.arange(50))


# ------------------------------------------------------------------------------------------------ forks and processes


def in_child(table: ExperienceTable, here: Connection) -> None:
    try:
        check_rows(table.batch(), np.arange(64))
        assert table.append(batch_of(64, 100)) == range(64, 100)
        check_rows(table.batch(), np.arange(100))
        claim = table.claim("train", 10)
        assert claim is not None
        check_rows(claim.batch(), np.arange(10))
        claim.done()
        here.send("right")
        assert here.recv() == "go"
        for at in range(100, 400, 20):
            table.append(batch_of(at, at + 20))
        check_rows(table.batch(), np.arange(400))
        here.send("right")
    except BaseException as error:
        here.send(repr(error))
        raise


@pytest.mark.parametrize("is_fork", [True, False], ids=["fork", "spawn"])
@pytest.mark.parametrize("options", [{}, {"compression": "lz4", "hot_bytes": 4000}], ids=["plain", "compressed"])
def test_a_child_goes_on_with_its_parents_table(is_fork: bool, options: dict[str, Any]) -> None:
    with ExperienceTable(chunk_rows=32, **options) as table:
        table.append(batch_of(0, 64))
        kept = list(table.scan())
        context = FORK if is_fork else SPAWN
        here, there = context.Pipe()
        child = context.Process(target=in_child, args=(table, there), daemon=True)
        child.start()
        try:
            assert here.poll(LONG_S)
            assert here.recv() == "right"
            check_rows(table.batch(), np.arange(100))
            here.send("go")
            assert here.poll(LONG_S)
            assert here.recv() == "right"
            child.join(LONG_S)
            assert child.exitcode == 0
            check_rows(table.batch(), np.arange(400))  # rows of the child, which has ended
            table.append(batch_of(400, 420))
            check_rows(table.batch(), np.arange(420))
            claim = table.claim("train", 10)
            assert claim is not None
            check_rows(claim.batch(), np.arange(10, 20))
            check_rows(kept[0], np.arange(32))
        finally:
            child.kill()
            child.join(LONG_S)
        folder = table._backing.mapped._source
    assert isinstance(folder, Path) and not folder.exists()


def read_and_wait(table: ExperienceTable, here: Connection) -> None:
    mine = list(table.scan())
    here.send("read")
    assert here.recv() == "look again"
    try:
        check_rows(mine[0], np.arange(32))
        here.send("right")
    except AssertionError as error:
        here.send(str(error))


def test_what_a_child_reads_is_not_reused_by_its_parent() -> None:
    with ExperienceTable(chunk_rows=32) as table:
        table.append(batch_of(0, 64))
        kept = list(table.scan())  # the child finds this memory in use already
        here, there = FORK.Pipe()
        child = FORK.Process(target=read_and_wait, args=(table, there), daemon=True)
        child.start()
        try:
            assert here.poll(LONG_S) and here.recv() == "read"
            del kept
            table.evict(np.arange(64))
            table._backing.recycle()
            for at in range(64, 1000, 32):
                table.append(batch_of(at, at + 32))
            here.send("look again")
            assert here.poll(LONG_S)
            assert here.recv() == "right"
        finally:
            child.kill()
            child.join(LONG_S)


def append_once(table: ExperienceTable, here: Connection) -> None:
    table.append(batch_of(0, 4))
    here.send(len(table.batch()))


def test_a_fork_while_other_threads_are_at_the_table() -> None:
    with ExperienceTable(chunk_rows=32, max_rows=500) as table:
        table.append(batch_of(0, 100))
        is_over = threading.Event()

        def keep_busy() -> None:
            while not is_over.is_set():
                table.append(batch_of(0, 8))
                len(table.batch(["number"]))

        busy = [threading.Thread(target=keep_busy) for _ in range(2)]
        for thread in busy:
            thread.start()
        children = []
        try:
            for _ in range(15):
                here, there = FORK.Pipe()
                child = FORK.Process(target=append_once, args=(table, there), daemon=True)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
                    child.start()
                children.append((child, here))
            for _, here in children:
                assert here.poll(10), "a child waits for a lock that no thread of it holds"
                assert here.recv() > 0
        finally:
            is_over.set()
            for child, _ in children:
                child.kill()
                child.join(LONG_S)
            for thread in busy:
                thread.join(LONG_S)


def test_two_tables_attached_in_one_process() -> None:
    with ExperienceTable(chunk_rows=32) as one:
        two = ExperienceTable.open(one.name)
        three = pickle.loads(pickle.dumps(one))
        one.append(batch_of(0, 40))
        two.append(batch_of(40, 80))
        three.append(batch_of(80, 120))
        for table in (one, two, three):
            check_rows(table.batch(), np.arange(120))
        claims = [table.claim("train", 40) for table in (one, two, three)]
        for number, claim in enumerate(claims):
            assert claim is not None
            assert np.array_equal(claim.numbers, np.arange(40 * number, 40 * number + 40))
        two.close()  # with a claim open
        with pytest.raises(StoreError, match="closed"):
            two.batch()
        claim = one.claim("train", 40)
        assert claim is not None
        check_rows(claim.batch(), np.arange(40, 80))
        three.close()
        check_rows(one.batch(), np.arange(120))
        one.append(batch_of(120, 130))


def test_threads_append_and_claim() -> None:
    with ExperienceTable(chunk_rows=32) as table:
        ranges: list[range] = []
        used: list[int] = []
        errors: list[BaseException] = []
        lock = threading.Lock()

        def work(thread: int) -> None:
            try:
                for step in range(30):
                    start = (thread * 30 + step) * 8
                    numbers = table.append(batch_of(start, start + 8))
                    claim = table.claim("train", 8, wait_s=LONG_S)
                    assert claim is not None
                    found = check_rows(claim.batch())
                    claim.done()
                    with lock:
                        ranges.append(numbers)
                        used.extend(found.tolist())
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        assert not errors
        assert sorted(n for numbers in ranges for n in numbers) == list(range(1920))
        assert sorted(used) == list(range(1920)), "each row once"
        assert sorted(check_rows(table.batch()).tolist()) == list(range(1920))


# -------------------------------------------------------------------------------------------------- what readers keep


@pytest.mark.parametrize("options", [{}, {"memory": "private"}, {"compression": "lz4", "hot_bytes": 4000}])
def test_rows_outlive_the_table(options: dict[str, Any]) -> None:
    table = ExperienceTable(chunk_rows=32, **options)
    table.append(batch_of(0, 96))
    chunks = list(table.scan())
    arrow = table.to_arrow()
    column = table.take([5, 6])["response_ids"]
    padded = next(iter(table.loader(32, layout="padded", columns=["number", "response_ids"])))
    before = {name: values.copy() for name, values in padded.items()}
    table.close()
    table.close()
    for number, chunk in enumerate(chunks):
        check_rows(chunk, np.arange(32 * number, 32 * number + 32))
    del table
    gc.collect()
    new = ExperienceTable(chunk_rows=32)
    new.append(batch_of(5000, 6000))
    for number, chunk in enumerate(chunks):
        check_rows(chunk, np.arange(32 * number, 32 * number + 32))
    assert arrow["number"].to_pylist() == list(range(96))
    assert np.array_equal(column[0][:1], [5 * 31])
    assert all(np.array_equal(padded[name], values) for name, values in before.items())
    new.close()


def test_a_table_that_is_dropped_keeps_what_was_read() -> None:
    table = ExperienceTable(chunk_rows=32)
    folder = table._backing.mapped._source
    table.append(batch_of(0, 64))
    chunks = list(table.scan())
    del table
    gc.collect()
    assert isinstance(folder, Path) and not folder.exists()
    check_rows(chunks[0], np.arange(32))
    check_rows(chunks[1], np.arange(32, 64))


@pytest.mark.parametrize("closes", [True, False])
def test_rows_that_are_kept_while_another_process_goes_on(closes: bool) -> None:
    """Those the other process wrote itself, so that it is the one to use their memory again."""
    owner = ExperienceTable(chunk_rows=32, max_rows=128)
    here, there = FORK.Pipe()
    writer = FORK.Process(target=write_then_go_on, args=(owner.name, there), daemon=True)
    writer.start()
    try:
        assert here.poll(LONG_S) and here.recv() == "written"
        reader = ExperienceTable.open(owner.name)
        chunks = list(reader.scan())
        if closes:
            reader.close()
            del reader
            gc.collect()
        here.send("go on")
        assert here.poll(LONG_S)
        assert here.recv() > 0, "memory that is read is kept"
        for number, chunk in enumerate(chunks):
            check_rows(chunk, np.arange(32 * number, 32 * number + 32))
        del chunks, chunk
        gc.collect()
        here.send("let go")
        assert here.poll(LONG_S)
        assert here.recv() == 0, "memory that nobody reads is used again"
    finally:
        writer.kill()
        writer.join(LONG_S)
        owner.close()


@pytest.mark.parametrize("how", ["has left and holds rows", "only reads"])
def test_the_last_to_leave_saves_rows_though_others_hold_some(tmp_path: Path, how: str) -> None:
    with ExperienceTable(chunk_rows=32, path=tmp_path / "table") as table:
        table.append(batch_of(0, 64))
        memory = table._backing.memory
        other = ExperienceTable.open(table.name, readonly=how == "only reads")
        chunks = list(other.scan())
        if how != "only reads":
            other.close()
    assert memory is not None and not memory.exists()
    for number, chunk in enumerate(chunks):
        check_rows(chunk, np.arange(32 * number, 32 * number + 32))
    if how == "only reads":
        check_rows(other.batch(), np.arange(64))
        other.close()
    shutil.copytree(tmp_path / "table", tmp_path / "copy")  # as on another machine
    with ExperienceTable.open(tmp_path / "copy") as again:
        check_rows(again.batch(), np.arange(64))


def append_and_die(path: Path) -> None:
    table = ExperienceTable(chunk_rows=32, path=path)
    table.append(batch_of(0, 64))
    os._exit(0)


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table whose only process ended without leaving it, and memory that is searched for such tables anew."""
    monkeypatch.setattr(folders, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(opening, "_LOOKED", False)
    child = FORK.Process(target=append_and_die, args=(tmp_path / "table",), daemon=True)
    child.start()
    child.join(LONG_S)
    assert child.exitcode == 0
    return tmp_path / "table"


def test_a_new_table_does_not_wait_for_a_killed_one(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody is at it, who saves it. It is saved when nobody is."""
    memory = Path((killed / "memory").read_text())
    with open(killed / "lock", "r+") as held, warnings.catch_warnings():
        warnings.simplefilter("error")
        fcntl.flock(held, fcntl.LOCK_EX)
        start = time.monotonic()
        ExperienceTable(chunk_rows=32).close()
        assert time.monotonic() - start < 5
        assert memory.exists()
    monkeypatch.setattr(opening, "_LOOKED", False)
    ExperienceTable(chunk_rows=32).close()
    assert not memory.exists()
    with ExperienceTable.open(killed) as table:
        check_rows(table.batch(), np.arange(64))


def test_a_killed_table_that_cannot_be_saved_is_named_once(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Path((killed / "memory").read_text())
    log = next(killed.glob("log.*"))
    whole = log.read_bytes()
    log.write_bytes(whole[:80] + bytes([whole[80] ^ 1]) + whole[81:])

    def make_one() -> list[str]:
        monkeypatch.setattr(opening, "_LOOKED", False)  # as in a new process
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ExperienceTable(chunk_rows=32).close()
        return [str(one.message) for one in said]

    (said,) = make_one()
    assert f"the table {killed} that a killed process left could not be saved" in said
    assert "log damaged" in said and f"rm -r {memory}" in said
    assert make_one() == []
    assert memory.exists() and "log damaged" in (memory / "unsaved").read_text()
    log.write_bytes(whole)  # restored: it is tried again
    assert make_one() == []
    assert not memory.exists()
    with ExperienceTable.open(killed) as table:
        check_rows(table.batch(), np.arange(64))


def test_files_of_rows_that_are_gone_go_when_their_reader_does(tmp_path: Path) -> None:
    with ExperienceTable(chunk_rows=32, path=tmp_path / "table") as table:
        table.append(batch_of(0, 96))
        table.spill()
        files = set((tmp_path / "table" / "segments").iterdir())
        reader = iter(table.scan())
        check_rows(next(reader), np.arange(32))
        table.evict(np.arange(96))
        table.append(batch_of(96, 100))
        assert all(file.exists() for file in files), "some rows are still to be read"
        assert [len(batch) for batch in reader] == [32, 32]
        del reader
        gc.collect()
        table.append(batch_of(100, 104))
        assert not any(file.exists() for file in files)


def test_a_pin_that_is_let_go_while_another_thread_looks_is_taken_back() -> None:
    """By the thread that looks: nobody may come after it."""
    with ExperienceTable(chunk_rows=32) as table:
        table.append(batch_of(0, 32))
        backing = table._backing
        uid = next(iter(backing.catalog.segments))
        rows = table.batch()
        assert isinstance(backing.presence, Presence)
        assert backing.presence.pinned([uid]) == {uid}
        real = backing._drain
        left = [rows]
        del rows

        def drain() -> None:
            real()
            if left:
                other = threading.Thread(target=lambda: (left.clear(), gc.collect()))
                other.start()
                other.join(LONG_S)

        backing._drain = drain  # type: ignore[method-assign]
        backing._unpinned.append(0)
        backing._take_back_pins()
        assert not left and backing.presence.pinned([uid]) == set()


def write_then_go_on(name: str, here: Connection) -> None:
    table = ExperienceTable.open(name)
    table.append(batch_of(0, 64))
    here.send("written")
    here.recv()
    for at in range(64, 3000, 32):
        table.append(batch_of(at, at + 32))
        table._backing.recycle()
    here.send(table._backing.pinned_bytes)
    here.recv()
    until(lambda: table._backing.recycle() or table._backing.pinned_bytes == 0, "memory to be let go", 10)
    here.send(table._backing.pinned_bytes)


def test_writers_that_come_and_go_do_not_fill_memory() -> None:
    """Memory of writers that have ended is given back once their rows are gone."""
    with ExperienceTable(chunk_rows=32, max_rows=128) as table:
        sizes = []
        for number in range(12):
            child = FORK.Process(target=append_some, args=(table.name, number * 320), daemon=True)
            child.start()
            child.join(LONG_S)
            assert child.exitcode == 0
            sizes.append(memory_bytes(table.name))
        check_rows(table.batch(), table.numbers)
        assert max(sizes) < 6 << 20, f"memory after each writer: {sizes}"


def append_some(name: str, start: int) -> None:
    table = ExperienceTable.open(name)
    for at in range(start, start + 320, 32):
        table.append(batch_of(at, at + 32))
    os._exit(0)


def test_errors_are_of_this_package(tmp_path: Path) -> None:
    with pytest.raises(FlowError):
        ExperienceTable.open(tmp_path)
    with ExperienceTable(chunk_rows=32, memory="private") as table:
        table.append(batch_of(0, 4), TYPES)
        with pytest.raises(StoreError, match="private"):
            pickle.dumps(table)


# ------------------------------------------------------------------------------------------------------- interruptions


class Interruption(BaseException):
    """What a signal handler may raise anywhere: Ctrl-C, or the alarm of a reward checker."""


UNINTERRUPTED = ("__del__", "_collected", "_drain", "unpin")
"""Run by the collector: Python prints an exception there and goes on."""


def interrupted(act: Callable[[], Any], at: int) -> int | None:
    """Run `act`, with an exception raised at the line numbered `at` of those of the store that it runs.

    Returns: None when it was interrupted, else the number of lines.
    """
    lines = 0
    store = str(Path(folders.__file__).parent)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(store) or frame.f_code.co_name in UNINTERRUPTED:
            return None
        if event == "line":
            lines += 1
            if lines == at:
                raise Interruption
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    except Interruption:
        return None
    finally:
        sys.settrace(before)
    return lines


def claim_and_end(table: ExperienceTable) -> None:
    claim = table.claim("train", 10, list(TYPES))
    assert claim is not None
    claim.batch()
    claim.done()


ACTS: dict[str, Callable[[ExperienceTable], Any]] = {
    "append": lambda table: table.append(batch_of(table.appended, table.appended + 24)),
    "claim": claim_and_end,
    "evict": lambda table: table.evict(np.arange(20)),
    "fill": lambda table: table.fill("reward", np.arange(40, 50), np.arange(40, 50, dtype=np.float32)),
    "read": lambda table: table.take([3, 40], list(TYPES)),
}


def interrupt_everywhere(name: str, stride: int) -> None:
    act = ACTS[name]
    at, lines = 1, None
    while lines is None:
        with ExperienceTable(chunk_rows=32, max_rows=100, timeout_s=2) as table:
            table.append(batch_of(0, 40))
            table.append(batch_of(40, 50))
            table.add_column("reward", None, SAMPLE.f32)
            with ExperienceTable.open(table.name) as other:
                note = f"{name} interrupted at line {at}"
                lines = interrupted(lambda: act(table), at)
                appended = other.appended
                other.append(batch_of(appended, appended + 8))  # nobody holds the lock
                for one in (table, other):
                    assert one.appended == appended + 8, note
                    assert np.array_equal(one.numbers, other.numbers), note
                    check_rows(one.batch(list(TYPES)), one.numbers)
                for _ in range(8):  # memory is given out again, and not twice
                    for one in (table, other):
                        start = one.appended
                        one.append(batch_of(start, start + 20))
                        one._backing.recycle()
                        check_rows(table.batch(list(TYPES)), other.numbers)
                        check_rows(other.batch(list(TYPES)), table.numbers)
                claim = table.claim("judge", 100, list(TYPES))
                assert claim is not None and len(claim) == len(table), note
                claim.done()
        at += stride


@pytest.mark.parametrize("memory", ["shared", "private"])
def test_an_interruption_in_the_middle_of_a_record(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(self: Catalog, record: Record) -> None:
        monkeypatch.undo()
        self.alive.remove(0, 200)
        raise Interruption

    with ExperienceTable(chunk_rows=32, memory=memory) as table:
        for start in range(0, 200, 40):  # the log is a snapshot and more
            table.append(batch_of(start, start + 40))
            with table._backing.transaction() as catalog:
                table._backing.log.compact(catalog.snapshot())
        table.append(batch_of(200, 240))
        monkeypatch.setattr(Catalog, "_apply_append", half)
        with pytest.raises(Interruption):
            table.append(batch_of(240, 280))
        table.append(batch_of(280, 320))
        check_rows(table.batch(), np.arange(320))


def test_an_error_before_a_commit_does_not_make_the_next_read_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExperienceTable(chunk_rows=32) as table:
        table.append(batch_of(0, 40))
        with table._backing.transaction(), pytest.raises(TypeError):
            table._backing.commit({"kind": "finish", "what": object()})
        monkeypatch.setattr(table._backing, "_begin_again", lambda: pytest.fail("nothing was torn"))
        table.append(batch_of(40, 48))
        check_rows(table.batch(), np.arange(48))


def test_the_first_error_is_the_one_that_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of a log which is damaged, too."""
    with ExperienceTable(chunk_rows=32) as table:
        table.append(batch_of(0, 40))
        backing = table._backing

        def damaged(*records: Record, is_last: bool = False) -> bool:
            monkeypatch.setattr(backing.log, "read", damaged)
            raise StoreError("damaged" if not records else "first")

        monkeypatch.setattr(backing.log, "append_read", damaged)
        with pytest.raises(StoreError, match="first"):
            table.append(batch_of(40, 80))
        monkeypatch.undo()
        check_rows(table.batch(), np.arange(40))


@pytest.mark.parametrize("name", ACTS)
def test_an_interruption_at_some_lines(name: str) -> None:
    interrupt_everywhere(name, 71)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ACTS)
def test_an_interruption_at_every_third_line(name: str) -> None:
    interrupt_everywhere(name, 3)
