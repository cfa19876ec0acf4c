"""Several processes at one table: nothing torn, each row to one consumer, memory within its bound, nothing left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.errors import StoreError, WaitTimeout
from flowrl.store import changes
from flowrl.store.folders import shm_folder
from flowrl.store.table import ExperienceTable
from tests.cpu.store.checked_rows import (
    FORK,
    LONG_S,
    TYPES,
    batch_of,
    check_padded,
    check_rows,
    dicts_of,
    memory_bytes,
    until,
)


@pytest.fixture
def start() -> Iterator[Any]:
    started: list[BaseProcess] = []

    def begin(act: Any, *args: Any) -> BaseProcess:
        process = FORK.Process(target=act, args=args, daemon=True)
        process.start()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.join(LONG_S)


# ------------------------------------------------------------------------------------------------- readers and a writer


def write_for(name: str, seconds: float, found: SimpleQueue[Any]) -> None:
    table = ExperienceTable.open(name)
    until_ = time.monotonic() + seconds
    random_ = random.Random(1)
    while time.monotonic() < until_:
        at = table.appended
        rows = random_.choice((8, 8, 64, 200))
        table.append(batch_of(at, at + rows))
    found.put(("written", table.appended))


def read_for(name: str, seconds: float, seed: int, readonly: bool, found: SimpleQueue[Any]) -> None:
    """Read in every way, and keep some of it for a while: its values must stay what they were."""
    try:
        table = ExperienceTable.open(name, readonly=readonly)
        random_ = random.Random(seed)
        kept: list[tuple[Any, np.ndarray]] = []
        until_ = time.monotonic() + seconds
        reads = 0
        while time.monotonic() < until_:
            way = random_.randrange(4)
            if way == 0:
                batch = table.batch()
                numbers = check_rows(batch)
                assert np.array_equal(numbers, np.arange(numbers[0], numbers[0] + len(numbers)))
                kept.append((batch, numbers))
            elif way == 1:
                held = len(table)
                rows = np.random.default_rng(reads).integers(0, held // 2, 16)  # the number held only changes a little
                kept.append((batch := table.take(rows), check_rows(batch)))
            elif way == 2:
                for one in table.loader(
                    16, layout="padded", columns=["number", "response_ids"], shuffle=True, seed=reads
                ):
                    check_padded(one)
            else:
                kept += [(chunk, check_rows(chunk)) for chunk in table.scan()]
            reads += 1
            if len(kept) > 30:
                random_.shuffle(kept)
                for batch, numbers in kept:
                    check_rows(batch, numbers)
                del kept[: random_.randrange(10, 30)]
        for batch, numbers in kept:
            check_rows(batch, numbers)
        found.put(("read", reads))
    except BaseException as error:
        found.put(("failed", repr(error)[:2000]))
        raise


@pytest.mark.parametrize(
    "seconds", [2.5, pytest.param(60.0, marks=[pytest.mark.slow, pytest.mark.timeout(400)])], ids=["short", "long"]
)
@pytest.mark.parametrize("options", [{}, {"compression": "lz4", "hot_bytes": 50_000}], ids=["plain", "compressed"])
def test_readers_see_nothing_torn(start: Any, seconds: float, options: dict[str, Any]) -> None:
    with ExperienceTable(max_rows=1500, chunk_rows=64, **options) as table:
        table.append(batch_of(0, 1500))
        found: SimpleQueue[Any] = FORK.SimpleQueue()
        start(write_for, table.name, seconds, found)
        for number, readonly in enumerate((False, True)):
            start(read_for, table.name, seconds, number, readonly, found)
        results = [found.get() for _ in range(3)]
        assert sorted(kind for kind, _ in results) == ["read", "read", "written"], results
        counts = dict(results)
        assert counts["written"] > 20 * seconds and counts["read"] > seconds
        assert table.evicted == table.appended - len(table) > 0
        check_rows(table.batch(), table.numbers)


def test_a_reader_that_may_not_write_sees_no_reused_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that leave between a reader's look at the table and its pin must not be shown with others' bytes."""
    with ExperienceTable(chunk_rows=16, timeout_s=0.1) as table:
        table.append(batch_of(0, 64))
        with ExperienceTable.open(table.name, readonly=True) as reader:
            backing = reader._backing
            plain = type(backing).root
            left = [True]

            def slow(self: Any, segment: Any) -> np.ndarray:
                if self is backing and left:
                    left.pop()
                    with contextlib.suppress(WaitTimeout):  # when the reader keeps it out meanwhile
                        table.evict(np.arange(64))
                        table._backing.recycle()
                        for at in range(64, 640, 64):
                            table.append(batch_of(at, at + 64))
                return plain(self, segment)

            monkeypatch.setattr(type(backing), "root", slow)
            check_rows(reader.batch())
            assert not left


# ---------------------------------------------------------------------------------------------------------- consumers


def consume(name: str, node: str, found: SimpleQueue[Any], dies_after: int | None) -> None:
    """Claim until the table is finished; with `dies_after`, kill itself with a claim open."""
    table = ExperienceTable.open(name)
    mine: list[int] = []
    claims = 0
    while (claim := table.claim(node, 8, wait_s=LONG_S)) is not None:
        numbers = check_rows(claim.batch())
        claims += 1
        if dies_after is not None and claims > dies_after:
            found.put((node, mine, claim.numbers.tolist()))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.001)
        claim.done()
        mine += numbers.tolist()
    found.put((node, mine, []))


def test_each_row_goes_to_one_consumer_of_a_node_although_one_dies(start: Any) -> None:
    with ExperienceTable(chunk_rows=32) as table:
        found: SimpleQueue[Any] = FORK.SimpleQueue()
        table.append(batch_of(0, 8))
        start(consume, table.name, "train", found, 5)
        start(consume, table.name, "train", found, None)
        start(consume, table.name, "judge", found, None)
        for at in range(8, 800, 8):
            table.append(batch_of(at, at + 8))
        table.finish()
        train: list[int] = []
        lost: list[int] = []
        for _ in range(3):
            node, mine, open_ = found.get()
            if node == "judge":
                assert sorted(mine) == list(range(800))
            else:
                train += mine
                lost += open_
        assert len(lost) == 8, "one was killed with a claim open"
        assert sorted(train) == list(range(800)), "rows of the dead consumer went to the other, and none twice"
        assert set(lost) <= set(train)


def consume_slowly(name: str, longest: int, found: SimpleQueue[Any]) -> None:
    table = ExperienceTable.open(name)
    seen: list[int] = []
    while (claim := table.claim("train", 16, wait_s=LONG_S)) is not None:
        numbers = check_rows(claim.batch(), longest=longest).tolist()
        time.sleep(0.004)
        claim.done()
        seen += numbers
    found.put(seen)


def test_a_writer_waits_so_that_memory_stays_bounded(start: Any) -> None:
    longest, bound = 2000, 2_000_000
    with ExperienceTable(max_bytes=bound, on_full="wait", chunk_rows=16, timeout_s=LONG_S) as table:
        found: SimpleQueue[Any] = FORK.SimpleQueue()
        most = most_memory = 0
        table.append(batch_of(0, 16, longest=longest))
        start(consume_slowly, table.name, longest, found)
        until(lambda: "train" in table._now().nodes, "the consumer")
        for at in range(16, 1600, 16):
            table.append(batch_of(at, at + 16, longest=longest))
            most = max(most, sum(table._now().bytes.values()) + table._backing.pinned_bytes)
            most_memory = max(most_memory, memory_bytes(table.name))
        table.finish()
        assert found.get() == list(range(1600))
        assert table.evicted > 0
        assert most <= bound
        arenas = sorted(table._backing.arenas._maps.values(), key=len)  # type: ignore[union-attr]
        assert most_memory <= bound + len(arenas[-1]) + (1 << 20), (
            f"{most_memory} bytes of memory for a bound of {bound}"
        )


def write_numbers(name: str, start: int, stop: int, found: SimpleQueue[Any]) -> None:
    table = ExperienceTable.open(name)
    random_ = random.Random(start)
    at = start
    try:
        while at < stop:
            rows = min(random_.choice((8, 8, 40)), stop - at)
            table.append(batch_of(at, at + rows))
            at += rows
        found.put("")
    except BaseException as error:
        found.put(repr(error)[:1000])
        raise


@pytest.mark.parametrize(
    "bounds", [{"max_rows": 200}, {"max_bytes": 60_000}, {"max_rows": 100, "max_bytes": 100_000}], ids=str
)
def test_no_row_goes_unused_with_several_writers(start: Any, bounds: dict[str, Any]) -> None:
    """Three writers wait for two consumers: each row is used once, although thirty times the bound comes by."""
    with ExperienceTable(on_full="wait", chunk_rows=32, timeout_s=LONG_S, **bounds) as table:
        used: SimpleQueue[Any] = FORK.SimpleQueue()
        written: SimpleQueue[Any] = FORK.SimpleQueue()
        for _ in range(2):
            start(consume, table.name, "train", used, None)
        table.append(batch_of(0, 8))
        for writer in range(3):
            start(write_numbers, table.name, 10_000 * (writer + 1), 10_000 * (writer + 1) + 1000, written)
        assert [written.get() for _ in range(3)] == ["", "", ""]
        table.finish()
        found = [number for _ in range(2) for number in used.get()[1]]
        assert len(found) == 3008
        assert set(found) == {*range(8), *(n + 10_000 * writer for writer in (1, 2, 3) for n in range(1000))}
        if "max_rows" in bounds:
            assert len(table) <= bounds["max_rows"]


def come_and_go(name: str, seed: int, found: SimpleQueue[Any]) -> None:
    random_ = random.Random(seed)
    appended, refused, others = 0, 0, []
    for _ in range(30):
        try:
            with ExperienceTable.open(name) as table:
                table.append(batch_of(0, 4))
                check_rows(table.batch())
                time.sleep(random_.random() * 0.003)
            appended += 4
        except StoreError as error:
            refused += 1
            others += [] if "there is no table" in str(error) or "removed" in str(error) else [repr(error)]
        except BaseException as error:
            others.append(repr(error)[:1000])
    found.put((appended, refused, others))


@pytest.mark.parametrize("has_path", [False, True])
def test_processes_that_come_while_the_last_one_leaves(start: Any, tmp_path: Path, has_path: bool) -> None:
    options: dict[str, Any] = {"path": tmp_path / "t", "memory_bytes": 5000} if has_path else {}
    table = ExperienceTable(chunk_rows=16, **options)
    table.append(batch_of(0, 4))
    name = table.name
    found: SimpleQueue[Any] = FORK.SimpleQueue()
    if has_path:
        table.close()
    for seed in range(4):
        start(come_and_go, name, seed, found)
    if not has_path:
        time.sleep(0.02)
        table.close()
    appended = 4
    for _ in range(4):
        mine, refused, others = found.get()
        assert others == []
        assert not (has_path and refused)
        appended += mine
    if has_path:
        with ExperienceTable.open(name) as table:
            assert len(table) == appended
            check_rows(table.batch())
            files = {f"segments/{p.name}" for p in (tmp_path / "t" / "segments").iterdir()}
            assert files == {n for s in table._now().tiers["disk"].values() for n in s.place}
    else:
        until(lambda: not (shm_folder() / name).exists(), "the last one to remove the memory")


def test_a_writer_that_waits_in_vain_says_for_what() -> None:
    with ExperienceTable(max_rows=10, on_full="wait", timeout_s=0.3) as table:
        table.append(dicts_of(0, 8), TYPES)
        claim = table.claim("train", 8)
        assert claim is not None
        began = time.monotonic()
        with pytest.raises(WaitTimeout, match=r"4 rows beside 8 of max_rows=10\. 8 rows are claimed") as caught:
            table.append(dicts_of(8, 12))
        assert 0.25 < time.monotonic() - began < 3
        assert "'train' is done with 0" in str(caught.value)
        assert np.array_equal(table.numbers, np.arange(8)), "nothing is changed"
        claim.done()
        table.append(dicts_of(8, 12))
        check_rows(table.batch(), np.arange(2, 12))


@pytest.mark.parametrize("on_full", ["wait", "raise"])
def test_two_writers_with_room_for_one(monkeypatch: pytest.MonkeyPatch, on_full: str) -> None:
    """The room that one found was taken by the other: it waits again (or raises), and no row goes that nobody used."""
    with (
        ExperienceTable(max_rows=10, on_full=on_full, timeout_s=0.3) as table,
        ExperienceTable.open(table.name) as other,
    ):
        table.append(batch_of(0, 6))
        claim = table.claim("train", 1)
        assert claim is not None
        claim.done()
        plain = changes.write
        left = [True]

        def write(backing: Any, prepared: Any, first: int) -> Any:
            if backing is table._backing and left:
                left.pop()
                other.append(batch_of(6, 10))
            return plain(backing, prepared, first)

        monkeypatch.setattr(changes, "write", write)
        with contextlib.suppress(WaitTimeout, OSError):
            table.append(batch_of(10, 14))
        assert not left
        assert len(table) <= 10
        assert set(range(1, 10)) <= set(table["number"].tolist()), "rows that no consumer is done with are gone"


def test_threads_see_no_half_state_while_the_log_is_compacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.store.backing.COMPACT_BYTES", 4000)
    with ExperienceTable(max_rows=200, chunk_rows=16) as table:
        table.append(batch_of(0, 200))
        wrong: list[Any] = []
        is_over = threading.Event()

        def look() -> None:
            last = 0
            while not is_over.is_set():
                held, appended, columns = len(table), table.appended, table.columns
                if held < 192 or appended < last or len(columns) != len(TYPES):
                    wrong.append((held, appended, last, columns))
                    return
                last = appended

        lookers = [threading.Thread(target=look) for _ in range(2)]
        for looker in lookers:
            looker.start()
        at = 200
        ends = time.monotonic() + 1
        while time.monotonic() < ends and not wrong:
            table.append(batch_of(at, at + 8))
            at += 8
        is_over.set()
        for looker in lookers:
            looker.join(LONG_S)
        assert not wrong


# ------------------------------------------------------------------------------------------------ how a process may end

PROGRAM = """
import os, signal, sys, threading, time
from flowrl.store.table import ExperienceTable
from tests.cpu.store.checked_rows import batch_of
table = ExperienceTable(chunk_rows=16)
table.append(batch_of(0, 100))
views = list(table.scan())
print(table._backing.mapped._source, flush=True)
WAY
"""

ENDS = {
    "end": ("pass", None, 0, True),
    "sys.exit": ("sys.exit(3)", None, 3, True),
    "exception": ("raise RuntimeError('on purpose')", None, 1, True),
    "exit in a thread": ("threading.Thread(target=sys.exit).start()", None, 0, True),
    "SIGINT": ("time.sleep(60)", signal.SIGINT, -signal.SIGINT, True),
    "SIGTERM": ("time.sleep(60)", signal.SIGTERM, -signal.SIGTERM, False),
    "SIGKILL": ("time.sleep(60)", signal.SIGKILL, -signal.SIGKILL, False),
    "os._exit": ("os._exit(4)", None, 4, False),
    "SIGTERM handled": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); os.kill(os.getpid(), signal.SIGTERM)", None, 5, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", ENDS)
def test_what_a_process_leaves_in_memory(way: str) -> None:
    code, signal_, status, is_clean = ENDS[way]
    program = PROGRAM.replace("WAY", code)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert folder.parent == shm_folder()
        if signal_ is not None:
            time.sleep(0.05)
            process.send_signal(signal_)
        _, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == status, errors
    assert "Exception ignored" not in errors and "leaked" not in errors
    if is_clean:
        assert not folder.exists(), "memory is left after a normal end"
    else:
        assert folder.exists()
        code = "from flowrl.store.table import ExperienceTable; ExperienceTable().close()"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=LONG_S)
        assert not folder.exists(), "the next process that makes a table removes what is left"
