"""Many rows and large columns: time does not grow with the rows held, values stay right, offsets do not overflow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flowrl.errors import DataError, StoreError
from flowrl.schema.ragged import Ragged
from flowrl.schema.types import SAMPLE, TOKEN
from flowrl.store import backing as backing_module, kernels, laying
from flowrl.store.rows import RowBatch
from flowrl.store.table import ExperienceTable

TYPES = {"number": SAMPLE.i64, "response_ids": TOKEN.u8}
SIZES = [200_000, pytest.param(10_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1700)])]
TENTHS = 10
MOST_GROWTH = 2.0
"""Of the time per row, from the first tenth of the rows to the last."""


def short_rows(start: int, stop: int) -> RowBatch:
    """Rows of one or two tokens."""
    numbers = np.arange(start, stop)
    offsets = np.zeros(len(numbers) + 1, np.int64)
    np.cumsum(1 + numbers % 2, out=offsets[1:])
    ids = np.repeat(numbers % 251, 1 + numbers % 2).astype(np.uint8)
    return RowBatch({"number": numbers, "response_ids": Ragged(ids, offsets)}, TYPES, len(numbers))


def check_short(batch: Any, numbers: np.ndarray) -> None:
    wanted = np.repeat(numbers % 251, 1 + numbers % 2)
    assert np.array_equal(batch["number"], numbers)
    assert np.array_equal(batch["response_ids"].lengths, 1 + numbers % 2)
    assert np.array_equal(batch["response_ids"].values, wanted)


class Laps:
    """CPU seconds of each tenth of some steps. What other processes of the machine do does not count."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._times = np.zeros(steps)

    def time(self, step: int, act: Any, *args: Any) -> Any:
        began = time.process_time()
        found = act(*args)
        self._times[step] = time.process_time() - began
        return found

    def check(self, what: str) -> None:
        """The typical step of the last tenth takes at most MOST_GROWTH times that of the first (the very first warms up),
        and neither does the sum, apart from single long steps that double each time (snapshots of the log)."""
        per = max(1, self._steps // TENTHS)
        first, last = self._times[1 : per + 1], self._times[-per:]
        print(f"{what}: {1e6 * np.median(first):.0f} us a step at first, {1e6 * np.median(last):.0f} us at last")
        assert np.median(last) <= MOST_GROWTH * np.median(first) + 200e-6, (
            f"{what}: a step took {1e6 * np.median(first):.0f} us at first and {1e6 * np.median(last):.0f} us at last"
        )
        half = self._times[: self._steps // 2].sum(), self._times[self._steps // 2 :].sum()
        assert half[1] <= 3 * half[0] + 0.2, (
            f"{what}: {half[0]:.2f} s for the first half, {half[1]:.2f} s for the second"
        )


@pytest.mark.parametrize("rows", SIZES)
def test_appending_does_not_slow_down(rows: int) -> None:
    step = rows // 200
    with ExperienceTable(chunk_rows=256) as table:
        laps = Laps(200)
        for number in range(200):
            laps.time(number, table.append, short_rows(number * step, (number + 1) * step))
        assert len(table) == rows
        laps.check(f"append of {step} rows, {rows} in all")

        groups = Laps(200)
        at = rows
        for number in range(200):  # small groups at the end of a large table
            groups.time(number, table.append, short_rows(at, at + 8))
            at += 8
        groups.check("append of 8 rows to a large table")
        small = ExperienceTable(chunk_rows=256, memory="private")
        fresh = Laps(200)
        for number in range(200):
            fresh.time(number, small.append, short_rows(number * 8, number * 8 + 8))
        assert np.median(groups._times) < 4 * np.median(fresh._times) + 200e-6, (
            "a group costs what the table's size says"
        )

        picked = np.random.default_rng(0).integers(0, at, 1000)
        check_short(table.take(picked), picked)
        check_short(table.take([0, -1]), np.array([0, at - 1]))
        start = 0
        for chunk in table.scan():
            check_short(chunk, np.arange(start, start + len(chunk)))
            start += len(chunk)
        assert start == at
        start = 0
        for batch in table.loader(50_000, layout="packed", columns=["number", "response_ids"]):
            numbers = np.arange(start, start + len(batch["number"]))
            assert np.array_equal(batch["number"], numbers)
            assert np.array_equal(np.diff(batch["cu_seqlens"]), 1 + numbers % 2)
            start += len(numbers)
        assert start == at
        whole = table.to_arrow()
        assert whole.num_rows == at and pa.compute.sum(whole["number"]).as_py() == at * (at - 1) // 2


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("group", [None, "group"])
def test_evicting_does_not_slow_down(rows: int, group: str | None) -> None:
    """A table that evicts all along, with claims over it and a log that is compacted many times."""
    step, steps = rows // 2000, 2000
    with ExperienceTable(max_rows=40 * step, chunk_rows=256, keep_together=group) as table:
        kinds = {"group": SAMPLE.i64}
        compactions = 0
        generation = -1
        appends, claims = Laps(steps), Laps(steps)
        used = 0
        for number in range(steps):
            batch = short_rows(number * step, (number + 1) * step)
            if group is not None:
                batch = batch.with_columns({"group": batch["number"] // 4}, kinds)
            appends.time(number, table.append, batch)
            claim = claims.time(number, table.claim, "train", step)
            assert claim is not None
            if number % 50 == 0:
                check_short(claim.batch(), claim.numbers)
            used += len(claim)
            claim.done()
            now = table._backing.log.sequence >> 40
            compactions, generation = compactions + (now != generation), now
        assert used == rows and table.appended == rows and len(table) == 40 * step
        appends.check(f"append of {step} rows that evicts as many")
        claims.check(f"claim of {step} rows")
        check_short(table.batch(["number", "response_ids"]), np.arange(rows - 40 * step, rows))
        assert compactions >= (3 if rows > 1_000_000 else 1)


def test_the_log_is_compacted_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backing_module, "COMPACT_BYTES", 40_000)
    with ExperienceTable(max_rows=2000, chunk_rows=64) as table, ExperienceTable.open(table.name) as other:
        generations = set()
        laps = Laps(1500)
        for number in range(1500):
            laps.time(number, table.append, short_rows(number * 16, number * 16 + 16))
            generations.add(table._backing.log.sequence >> 40)
            if number % 100 == 0:
                check_short(other.batch(), other.numbers)
        laps.check("append of 16 rows with compactions")
        assert len(generations) > 10
        with ExperienceTable.open(table.name) as third:
            check_short(third.batch(), np.arange(24_000 - len(third), 24_000))
        files = [p.name for p in Path(table._backing.mapped._source).glob("log.*")]
        assert len(files) == 1


# ------------------------------------------------------------------------------------------------- beyond 2^31 values


LONG = 1 << 21


def long_row(number: int) -> np.ndarray:
    """2 Mi tokens that follow from the row's number."""
    values = np.resize(np.arange(251, dtype=np.uint8), LONG)
    values[:8] = np.frombuffer(np.int64(number).tobytes(), np.uint8)
    return values


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("spills", [False, True])
def test_a_column_of_more_than_2_31_values(tmp_path: Path, spills: bool) -> None:
    rows = 1056  # 2.2e9 values, 2.1 GiB
    options: dict[str, Any] = {"path": tmp_path / "t", "memory_bytes": 1 << 28} if spills else {}
    with ExperienceTable(chunk_rows=64, **options) as table:
        for at in range(0, rows, 16):
            table.append([{"number": n, "response_ids": long_row(n)} for n in range(at, at + 16)], types=TYPES)
        if spills:
            table.flush()
            assert table._now().bytes["disk"] > 1 << 30
        last = table.take([rows - 1, 0])
        assert np.array_equal(last["response_ids"][0], long_row(rows - 1))
        assert np.array_equal(last["response_ids"][1], long_row(0))
        total = seen = 0
        for chunk in table.scan():
            total += len(chunk["response_ids"].values)
            for row in range(len(chunk)):
                assert chunk["response_ids"][row][:8].tobytes() == np.int64(seen + row).tobytes()
            seen += len(chunk)
        assert seen == rows and total == rows * LONG > 1 << 31
        if spills:
            return
        whole = table.to_arrow()
        column = whole["response_ids"]
        assert pa.types.is_large_list(column.type) and sum(len(c.values) for c in column.chunks) == total
        values = table["response_ids"]  # one array of them all
        assert values.offsets.dtype == np.int64 and values.offsets[-1] == total
        assert np.array_equal(values[rows - 1], long_row(rows - 1))
        del values, whole, column
        with pytest.raises(DataError, match=r"int32 bounds end at 2\^31"):
            next(iter(table.loader(rows, layout="packed", columns=["response_ids"])))


def test_offsets_are_64_bit_everywhere(tmp_path: Path) -> None:
    with ExperienceTable(chunk_rows=64, path=tmp_path / "t", compression="lz4", hot_bytes=1 << 20) as table:
        texts = np.asarray([f"text {n}" for n in range(256)], dtype=object)
        table.append(short_rows(0, 256).with_column("response", texts, SAMPLE.str))
        for tier, move in (("hot", lambda: None), ("packed", table.compress), ("disk", table.spill)):
            move()
            assert table._now().bytes[tier] > 0
            arrow = table.to_arrow()
            assert pa.types.is_large_list(arrow["response_ids"].type)
            assert pa.types.is_large_string(arrow["response"].type)
            assert table["response_ids"].offsets.dtype == np.int64
            assert table["response"].tolist() == texts.tolist()


@pytest.mark.parametrize("spills", [False, True])
def test_a_packed_batch_beyond_int32_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spills: bool) -> None:
    """`cu_seqlens` is int32, as attention kernels take it; it must not wrap around. The limit is lowered to be reached."""
    with ExperienceTable(chunk_rows=64, path=tmp_path / "t") as table:
        table.append(short_rows(0, 256))
        if spills:
            table.spill()
        monkeypatch.setattr(kernels, "_MOST", 100)
        loader = table.loader(128, layout="packed", columns=["response_ids"])
        with pytest.raises(DataError, match=r"'response_ids' has 192 values in one batch; int32 bounds end at 2\^31"):
            next(iter(loader))
        for batch in table.loader(64, layout="packed", columns=["response_ids"]):  # 96 values
            assert batch["cu_seqlens"][-1] == 96
        assert next(iter(table.loader(128, layout="padded", columns=["response_ids"])))["mask"].sum() == 192


def test_a_packed_batch_of_rows_beyond_int32_is_refused() -> None:
    values = np.broadcast_to(np.uint8(1), ((1 << 31) + 5,))  # takes no memory
    column = Ragged(values, np.array([0, 1 << 31, (1 << 31) + 5]))
    with pytest.raises(DataError, match=r"int32 bounds end at 2\^31"):
        laying.packed(RowBatch.of_stored({"response_ids": column}, {"response_ids": TOKEN.u8}, 2))


def test_a_commit_too_large_for_the_log_is_refused() -> None:
    from flowrl.store.log import _framed

    class Long(bytes):
        def __len__(self) -> int:
            return 1 << 32

    with pytest.raises(StoreError, match="too large"):
        _framed(Long())
