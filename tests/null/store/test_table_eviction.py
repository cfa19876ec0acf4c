"""Which rows leave: the oldest, the least recently read chunk, whole groups, never claimed ones; and bounds in bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from flowrl.errors import ConfigError, DataError, StoreError, WaitTimeout
from flowrl.schema import PROMPT, SAMPLE
from flowrl.store.claims import Claim
from flowrl.store.rows import RowBatch
from flowrl.store.table import ExperienceTable

TYPES = {"prompt_id": PROMPT.str, "number": SAMPLE.i64}


def table(**options: Any) -> ExperienceTable:
    return ExperienceTable(memory="private", **options)


def numbers(start: int, stop: int, group: int = 2) -> RowBatch:
    rows = np.arange(start, stop)
    return RowBatch({"prompt_id": [f"p{n // group}" for n in rows], "number": rows}, TYPES)


def held(rows: ExperienceTable) -> list[int]:
    return list(rows["number"].tolist())


def test_a_cache_keeps_the_chunks_that_are_read() -> None:
    cache = table(max_rows=12, chunk_rows=4, eviction="lru")
    cache.append(numbers(0, 12))
    cache.take([1])
    cache.append(numbers(12, 16))
    assert held(cache) == [0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15], "the second chunk was read longest ago"
    # held() read everything, oldest first
    cache.take([0])
    cache.append(numbers(16, 18))
    assert held(cache) == [0, 1, 2, 3, 10, 11, 12, 13, 14, 15, 16, 17]


def test_a_cache_is_asked_by_key() -> None:
    cache = table(max_rows=8, chunk_rows=2, eviction="lru")
    cache.append(numbers(0, 8, group=1))
    places = cache.find("prompt_id", ["p5", "nobody", "p0"])
    assert places.tolist() == [5, -1, 0]
    assert cache.take(places[places >= 0])["number"].tolist() == [5, 0]


def test_claimed_rows_stay_beyond_the_bound() -> None:
    rows = table(max_rows=4, chunk_rows=2)
    rows.append(numbers(0, 4))
    claim = rows.claim("update", 2)
    assert claim is not None
    rows.append(numbers(4, 8))
    assert held(rows) == [0, 1, 4, 5, 6, 7]
    claim.release()
    rows.append(numbers(8, 9))
    assert held(rows) == [5, 6, 7, 8]


def test_a_claim_that_is_dropped_is_given_back() -> None:
    rows = table()
    rows.append(numbers(0, 4))
    claim = rows.claim("update", 3)
    assert claim is not None
    assert rows.claim("update", 4).numbers.tolist() == [3]  # type: ignore[union-attr]
    del claim
    assert rows.claim("update", 4).numbers.tolist() == [0, 1, 2, 3]  # type: ignore[union-attr]


def test_a_claim_that_has_ended_gives_no_rows() -> None:
    rows = table()
    rows.append(numbers(0, 2))
    with rows.claim("update", 2) as claim:  # type: ignore[union-attr]
        batch = claim.batch()
    assert batch["number"].tolist() == [0, 1], "what was read stays"
    with pytest.raises(StoreError, match="read its rows before"):
        claim.batch()
    with pytest.raises(ZeroDivisionError), rows.claim("critic", 2):  # type: ignore[union-attr]
        raise ZeroDivisionError
    assert len(rows.claim("critic", 2)) == 2, "given back by the error"  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), max_size=12), st.integers(5, 11), st.integers(1, 6))
def test_groups_leave_and_are_claimed_as_a_whole(steps: list[tuple[int, int]], max_rows: int, chunk_rows: int) -> None:
    """Against lists of groups: an append evicts whole groups, oldest first, except claimed ones."""
    rows = table(max_rows=max_rows, chunk_rows=chunk_rows, keep_together="prompt_id")
    model: list[list[int]] = []
    taken: list[list[int]] = []
    claims: list[Claim] = []
    at = 0
    for size, want in steps:
        rows.append(numbers(at, at + size, group=1000))
        over = sum(map(len, model)) + size - max_rows
        busy = taken[-1:]  # only the last claim is still open
        for group in [g for g in model if g not in busy]:
            if over <= 0:
                break
            over -= len(group)
            model.remove(group)
        model.append(list(range(at, at + size)))
        at += size
        assert held(rows) == [n for g in model for n in g]
        if claims:
            claims.pop().done()
        fresh = [g for g in model if g not in taken]
        wanted: list[list[int]] = []
        for group in fresh:
            if sum(map(len, wanted)) + len(group) > want:
                break
            wanted.append(group)
        if fresh and len(fresh[0]) > want:
            with pytest.raises(DataError, match="claim more rows at a time"):
                rows.claim("update", want, whole_groups=True)
            taken.append([])
            continue
        claim = rows.claim("update", want, whole_groups=True)
        if not wanted:
            assert claim is None
            taken.append([])
            continue
        assert claim is not None
        assert claim.numbers.tolist() == [n for g in wanted for n in g]
        taken += wanted
        if len(wanted) > 1:  # the model looks at the last group only
            claim.done()
            taken.append([])
        else:
            claims.append(claim)


def test_whole_groups_need_a_table_that_knows_them() -> None:
    rows = table()
    rows.append(numbers(0, 4))
    with pytest.raises(ConfigError, match="keep_together='prompt_id'"):
        rows.claim("update", 2, whole_groups=True)


def test_bytes_are_a_bound_too() -> None:
    step = RowBatch({"number": np.arange(64)}, {"number": SAMPLE.i64})  # 512 bytes
    rows = table(max_bytes=2048, chunk_rows=64)
    for _ in range(10):
        rows.append(step)
        assert rows.stats().stored_bytes <= 2048
    assert len(rows) == 4 * 64
    with pytest.raises(StoreError, match="one append needs 4096 bytes and the table keeps max_bytes=2048"):
        rows.append(RowBatch({"number": np.arange(512)}, {"number": SAMPLE.i64}))
    assert len(rows) == 4 * 64, "an error changes nothing"


def test_a_full_table_may_raise_or_wait() -> None:
    full = table(max_rows=4, on_full="raise")
    full.append(numbers(0, 4))
    with pytest.raises(StoreError, match="the table is full: 4 rows"):
        full.append(numbers(4, 5))
    assert held(full) == [0, 1, 2, 3]

    waits = table(max_rows=4, on_full="wait", timeout_s=0.02)
    waits.append(numbers(0, 4))
    with pytest.raises(WaitTimeout, match="no consumer has claimed any row yet"):
        waits.append(numbers(4, 5))
    waits.claim("update", 2).done()  # type: ignore[union-attr]
    waits.append(numbers(4, 6))
    assert held(waits) == [2, 3, 4, 5]
    with pytest.raises(WaitTimeout, match="'update' is done with"):
        waits.append(numbers(6, 7))
    with pytest.raises(StoreError, match="does not fit into a table of max_rows=4"):
        waits.append(numbers(0, 5))
    assert waits.evicted == 2


def test_a_finished_table_takes_no_more() -> None:
    rows = table()
    rows.append(numbers(0, 3))
    rows.finish()
    rows.finish()
    with pytest.raises(StoreError, match="was finished"):
        rows.append(numbers(3, 4))
    assert [len(batch["number"]) for batch in rows.stream("update", 2, columns=["number"])] == [2, 1]
    assert rows.claim("update", 1, wait_s=5) is None


def test_a_stream_that_is_left_gives_its_last_batch_back() -> None:
    rows = table(chunk_rows=4)
    rows.append(numbers(0, 10))
    for count, batch in enumerate(rows.stream("update", 2, columns=["number"])):
        assert batch["number"].tolist() == [2 * count, 2 * count + 1]
        if count == 2:
            break
    left = rows.claim("update", 10)
    assert left is not None
    assert left.numbers.tolist() == [4, 5, 6, 7, 8, 9]


def test_a_stream_waits_for_a_column_and_says_for_what() -> None:
    rows = table()
    first = rows.append(numbers(0, 4))
    rows.add_column("reward", None, SAMPLE.f32)
    assert rows.fill("reward", [first[1], first[3]], [0.5, 1.0]) == 2
    stream = rows.stream("update", 2, columns=["number", "reward"], timeout_s=0.02)
    assert next(stream)["number"].tolist() == [1, 3]
    with pytest.raises(WaitTimeout, match=r"'reward' is there for 2\. Is the producer still running"):
        next(stream)
    with pytest.raises(
        DataError, match="column 'reward' is not there yet for 2 of 4 rows .the first is row number 0.; fill it"
    ):
        rows.batch()
