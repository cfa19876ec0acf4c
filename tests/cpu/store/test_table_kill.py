"""Writers killed with SIGKILL at any instant: what they had appended is there and right, nothing else, and others go on."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.schema.types import SAMPLE
from flowrl.store import backing
from flowrl.store.folders import shm_folder
from flowrl.store.rows import RowBatch
from flowrl.store.table import ExperienceTable
from tests.cpu.store.checked_rows import FORK, LONG_S, batch_of, check_rows, dicts_of, tables_in_memory, until

PLAIN: dict[str, Any] = {"chunk_rows": 32}
TIERS: dict[str, Any] = {"chunk_rows": 32, "compression": "lz4", "hot_bytes": 20_000, "memory_bytes": 60_000}


def rows_for(table: ExperienceTable, start: int, stop: int) -> RowBatch:
    """Rows with every column the table has by now; those of the name extra_... are twice the number."""
    extra = [name for name in table.columns if name.startswith("extra_")]
    twice = np.arange(start, stop) * 2
    return batch_of(start, stop).with_columns(dict.fromkeys(extra, twice), dict.fromkeys(extra, SAMPLE.i64))


def write(name: str, returned: Synchronized[int], variant: str, seed: int) -> None:
    """Append groups until killed; `returned` counts rows whose append has come back."""
    random_ = random.Random(seed)
    table = ExperienceTable.open(name)
    while True:
        at = table.appended
        rows = random_.choice((1, 3, 8, 40))
        as_batch = variant == "columns" or random_.random() < 0.5
        numbers = table.append(rows_for(table, at, at + rows) if as_batch else dicts_of(at, at + rows))
        assert numbers == range(at, at + rows)
        returned.value = at + rows
        if variant == "columns":
            table.fill("reward", list(numbers), np.arange(at, at + rows, dtype=np.float32))
            if random_.random() < 0.1 and len(table.columns) < 12:
                table.add_column(f"extra_{at}", np.arange(len(table)) * 2, SAMPLE.i64)


def check(table: ExperienceTable, returned: int, before: int) -> None:
    """Everything that was appended is there; of the append that was under way, all rows or none."""
    appended = table.appended
    assert returned <= appended <= max(returned, before) + 40
    assert np.array_equal(table.numbers, np.arange(appended))
    names = [name for name in table.columns if name != "reward"]
    start = 0
    for chunk in table.scan(names):
        check_whole(chunk, np.arange(start, start + len(chunk)))
        start += len(chunk)
    assert start == appended
    if appended:
        rows = np.random.default_rng(appended).integers(0, appended, 20)
        check_whole(table.take(rows, names), rows)


def check_whole(batch: RowBatch, numbers: np.ndarray) -> None:
    check_rows(batch, numbers)
    for name in batch.names:
        assert not name.startswith("extra_") or np.array_equal(batch[name], numbers * 2)


def kill_many(table: ExperienceTable, variant: str, kills: int, seed: int = 0) -> None:
    random_ = random.Random(seed)
    written = 0
    for number in range(kills):
        before = table.appended
        returned: Synchronized[int] = FORK.Value("q", before, lock=False)  # type: ignore[assignment]
        writer = FORK.Process(target=write, args=(table.name, returned, variant, seed + number), daemon=True)
        writer.start()
        if random_.random() < 0.9:
            until(lambda: returned.value > before or not writer.is_alive(), "the writer's first append")  # noqa: B023
        time.sleep(random_.random() ** 2 * 0.05)
        assert writer.is_alive(), "the writer ended by itself"
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join(LONG_S)
        check(table, returned.value, before)
        written += table.appended - before
        at = table.appended
        table.append(rows_for(table, at, at + 5))  # others go on
        if variant == "columns":
            check_filled(table)
        if table.appended > 4000:
            begin_again(table)
    assert written > kills


def begin_again(table: ExperienceTable) -> None:
    """The table as it began, so that checking everything stays quick."""
    has_reward = "reward" in table.columns
    table.restore({"rows": None, "groups": [], "appended": 0, "evicted": 0, "version": table.version})
    table.append(batch_of(0, 4))
    if has_reward:
        table.add_column("reward", None, SAMPLE.f32)


def check_filled(table: ExperienceTable) -> None:
    """Values of the column that is filled row by row, where they are."""
    claim = table.claim("check", 1 << 30, ["number", "reward"])
    if claim is not None:
        batch = claim.batch()
        assert np.array_equal(batch["reward"], batch["number"].astype(np.float32))
        claim.done()


@pytest.fixture(params=["plain", "tiers", "columns"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[ExperienceTable, str]]:
    options = {**TIERS, "path": tmp_path / "table"} if request.param == "tiers" else PLAIN
    table = ExperienceTable(**options)
    table.append(batch_of(0, 4))
    if request.param == "columns":
        table.add_column("reward", None, SAMPLE.f32)
    yield table, request.param
    folder = table._backing.mapped._source
    table.close()
    assert isinstance(folder, Path)
    assert not folder.exists(), "memory of a closed table is left"
    if request.param == "tiers":
        with ExperienceTable.open(tmp_path / "table") as again:
            check_rows(again.batch(list(batch_of(0, 1).names)), again.numbers)
        assert not folder.exists()


def test_kills(case: tuple[ExperienceTable, str]) -> None:
    kill_many(*case, kills=17)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_many_kills(case: tuple[ExperienceTable, str]) -> None:
    kill_many(*case, kills=334, seed=1000)


ALONE = """
import sys
from flowrl.store.table import ExperienceTable
from tests.cpu.store.checked_rows import batch_of
path = sys.argv[1] if len(sys.argv) > 1 else None
table = ExperienceTable(chunk_rows=32, path=path)
at = 0
print(table._backing.mapped._source, flush=True)
while True:
    table.append(batch_of(at, at + 8))
    at += 8
    print(at, flush=True)
"""

AGAIN = """
import sys
from flowrl.store.table import ExperienceTable
with ExperienceTable():
    pass
"""


@pytest.mark.parametrize("has_path", [False, True])
def test_memory_of_killed_processes_is_taken_back(tmp_path: Path, has_path: bool) -> None:
    path = tmp_path / "table"
    arguments = [str(path)] if has_path else []
    with subprocess.Popen([sys.executable, "-c", ALONE, *arguments], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        folder = Path(writer.stdout.readline().strip())
        returned = [int(writer.stdout.readline()) for _ in range(20)][-1]
        writer.kill()
        returned = max([returned, *(int(line) for line in writer.stdout.read().split("\n")[:-1])])
    assert folder.exists() and folder.name in tables_in_memory()
    subprocess.run([sys.executable, "-c", AGAIN], check=True, timeout=LONG_S)
    assert not folder.exists(), "the next process that makes a table removes what killed ones left"
    assert not [p for p in shm_folder().glob(".gone-*") if folder.name in p.name]
    if has_path:
        with ExperienceTable.open(path) as table:
            assert returned <= table.appended <= returned + 8
            check_rows(table.batch(), np.arange(table.appended))


# ------------------------------------------------------------------------------------------- killed at a chosen instant

CALLS = (
    "open",
    "pwrite",
    "posix_fallocate",
    "replace",
    "rename",
    "unlink",
    "remove",
    "rmdir",
    "fsync",
    "fdatasync",
    "mkdir",
)
"""Calls that change what lies on disk or in memory; a process is killed just before or just after one of them."""


def live_a_life(path: Path, returned: Synchronized[int], evicted: Synchronized[int], dies_at: int) -> None:
    """Everything a table does, from opening to closing; killed at the call `dies_at`, and at none when it is 0."""
    calls = 0

    def watched(plain: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            found = plain(*args, **options)
            calls += 1
            if calls == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return call

    for name in CALLS:
        setattr(os, name, watched(getattr(os, name)))
    backing.COMPACT_BYTES = 6000
    table = ExperienceTable.open(path)
    at = table.appended
    for rows in (8, 40, 3, 16, 40, 8):
        numbers = table.append(rows_for(table, at, at + rows))
        at += rows
        returned.value = at
        table.fill("reward", list(numbers), np.arange(numbers.start, numbers.stop, dtype=np.float32))
    claim = table.claim("train", 20, ["number"])
    assert claim is not None
    claim.done()
    table.compress()
    table.spill()
    evicted.value = int(table.numbers[29]) + 1
    table.evict(np.arange(evicted.value))
    table.append(rows_for(table, at, at + 40))
    returned.value = at + 40
    table.close()
    returned.value = -calls
    os._exit(0)


def run_a_life(path: Path, dies_at: int) -> tuple[int, int, int]:
    """Rows whose append came back, the first row that must be there, and calls made when it lived to its end."""
    returned: Synchronized[int] = FORK.Value("q", 0, lock=False)  # type: ignore[assignment]
    evicted: Synchronized[int] = FORK.Value("q", 0, lock=False)  # type: ignore[assignment]
    child = FORK.Process(target=live_a_life, args=(path, returned, evicted, dies_at), daemon=True)
    child.start()
    child.join(LONG_S)
    assert child.exitcode == (-signal.SIGKILL if dies_at and returned.value >= 0 else 0)
    return returned.value, evicted.value, -returned.value


def die_everywhere(tmp_path: Path, stride: int) -> None:
    start = tmp_path / "start"
    with ExperienceTable(chunk_rows=32, path=start, compression="lz4", hot_bytes=1 << 20) as table:
        table.append(batch_of(0, 70))
        table.add_column("reward", None, SAMPLE.f32)
    shutil.copytree(start, tmp_path / "whole")
    _, _, calls = run_a_life(tmp_path / "whole", 0)
    assert calls > 200
    for dies_at in range(1, calls + 1, stride):
        path = tmp_path / f"killed-{dies_at}"
        shutil.copytree(start, path)
        returned, evicted, _ = run_a_life(path, dies_at)
        note = f"killed at call {dies_at} of {calls}"
        with ExperienceTable.open(path) as table:
            assert max(returned, 70) <= table.appended <= max(returned, 70) + 40, note
            numbers = table.numbers
            first = int(numbers[0]) if len(numbers) else table.appended
            assert first in (0, evicted), note
            assert np.array_equal(numbers, np.arange(first, table.appended)), note
            check_whole(table.batch([n for n in table.columns if n != "reward"]), numbers)
            check_filled(table)
            at = table.appended
            table.append(rows_for(table, at, at + 40))
            folder = table._backing.mapped._source
        assert isinstance(folder, Path) and not folder.exists(), note
        with ExperienceTable.open(path) as table:
            check_whole(table.batch([n for n in table.columns if n != "reward"]), np.arange(first, at + 40))
            known = {name for s in table._now().tiers["disk"].values() for name in s.place}
            assert {f"segments/{p.name}" for p in (path / "segments").iterdir()} == known, note
        shutil.rmtree(path)


def test_killed_at_any_call(tmp_path: Path) -> None:
    die_everywhere(tmp_path, 13)


@pytest.mark.slow
def test_killed_at_every_call(tmp_path: Path) -> None:
    die_everywhere(tmp_path, 1)
