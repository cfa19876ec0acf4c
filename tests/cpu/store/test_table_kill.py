"""Writers killed with SIGKILL at any instant: what they had appended is there and right, nothing else, and others go on."""

from __future__ import annotations

import os
import random
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
    kill_many(*case, kills=25)


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
