"""What must not go wrong when something else does: a claim that is gone, a merge without memory, a restored table."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest

from flowrl.errors import ConfigError, DataError, SchemaError, StoreError, WaitTimeout
from flowrl.schema import PROMPT, SAMPLE
from flowrl.store import changes, claims
from flowrl.store.rows import RowBatch
from flowrl.store.table import ExperienceTable

TYPES = {"prompt_id": PROMPT.str, "number": SAMPLE.i64}


def numbers(start: int, stop: int, group: int = 4) -> RowBatch:
    rows = np.arange(start, stop)
    return RowBatch({"prompt_id": [f"p{n // group}" for n in rows], "number": rows}, TYPES)


def private(**options: Any) -> ExperienceTable:
    return ExperienceTable(memory="private", **options)


def test_a_stream_over_a_table_that_was_restored_ends_and_the_table_goes_on() -> None:
    with ExperienceTable() as rows:
        rows.append(numbers(0, 8))
        saved = rows.state()
        stream = rows.stream("update", 4, columns=["number"], ahead=1)
        next(stream)
        rows.restore(saved)
        with pytest.raises(StoreError, match="the claim of node 'update' is gone"):
            next(stream)
        with ExperienceTable.open(rows.name) as other:  # whatever is in the log can be read
            assert other["number"].tolist() == list(range(8))
            assert other.claim("update", 8).numbers.tolist() == list(range(8))  # type: ignore[union-attr]


def test_a_childs_copy_of_a_claim_gives_nothing_back() -> None:
    with ExperienceTable() as rows:
        rows.append(numbers(0, 8))
        claim = rows.claim("update", 4)
        assert claim is not None
        child = os.fork()
        if child == 0:
            try:
                del claim
                found = rows.claim("update", 8)
                os._exit(0 if found is not None and found.numbers.tolist() == [4, 5, 6, 7] else 1)
            except BaseException:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        claim.done()


def test_a_bound_in_bytes_drops_pieces_and_not_the_table() -> None:
    rows = private(max_bytes=10_000)
    for start in range(0, 4000, 100):
        rows.append(RowBatch({"number": np.arange(start, start + 100)}, {"number": SAMPLE.i64}))
        assert rows.stats().stored_bytes <= 10_000
        if start >= 2000:
            assert len(rows) >= 900, "an append takes the place of about as much as it brings"
    assert rows["number"].tolist()[-1] == 3999


def test_claimed_rows_stay_beyond_a_bound_in_bytes() -> None:
    rows = private(max_bytes=2048, chunk_rows=128)
    step = RowBatch({"number": np.arange(128)}, {"number": SAMPLE.i64})
    rows.append(step)
    claim = rows.claim("update", 128)
    rows.append(step)
    assert len(rows) == 256, "more than the bound, since nothing may leave"
    assert claim is not None and len(claim.batch()) == 128
    claim.done()
    rows.append(step)
    assert rows.numbers.tolist() == list(range(128, 384))


def test_groups_are_what_they_were_after_saving() -> None:
    rows = private(keep_together="prompt_id")
    rows.append(numbers(0, 12))
    rows.evict([4, 5, 6, 7])
    again = private(keep_together="prompt_id")
    again.restore(rows.state())
    assert again.claim("update", 8, whole_groups=True).numbers.tolist() == [0, 1, 2, 3, 8, 9, 10, 11]  # type: ignore[union-attr]
    assert again.evict([5]) == 0


def test_types_that_another_process_set_first_are_kept() -> None:
    with ExperienceTable() as rows, ExperienceTable.open(rows.name) as other:
        later = changes.make_room

        def meanwhile(*arguments: Any) -> None:
            patch.setattr(changes, "make_room", later)
            if not other.columns:
                other.append(RowBatch({"score": [0.5]}, {"score": SAMPLE.f64}))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(changes, "make_room", meanwhile)
            with pytest.raises(SchemaError, match=r"'score' of the table is SAMPLE\.f64; found SAMPLE\.i64"):
                rows.append(RowBatch({"score": [1]}, {"score": SAMPLE.i64}))
        assert rows["score"].tolist() == [0.5]


def test_the_error_of_a_block_is_the_one_that_is_seen() -> None:
    rows = private()
    rows.append(numbers(0, 4))
    saved = rows.state()
    with pytest.raises(ZeroDivisionError), rows.claim("update", 2):  # type: ignore[union-attr]
        rows.restore(saved)
        raise ZeroDivisionError


def test_rows_are_appended_though_there_is_no_memory_to_merge_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = private(chunk_rows=4)

    def full(*_: Any) -> None:
        raise StoreError("full")

    monkeypatch.setattr(changes.layouts, "merge", full)
    for start in range(0, 8, 2):
        rows.append(numbers(start, start + 2))
    assert rows["number"].tolist() == list(range(8))
    assert rows.stats().segments == 4
    monkeypatch.undo()
    rows.append(numbers(8, 10))
    rows.append(numbers(10, 12))
    assert rows.stats().segments == 3, "older pieces are merged when there is room again"


def test_many_groups_are_claimed_in_one_go() -> None:
    rows = private(keep_together="prompt_id", chunk_rows=4096)
    rows.append(numbers(0, 20_000))
    claim = rows.claim("update", 20_000, whole_groups=True)
    assert claim is not None and len(claim) == 20_000
    assert len(claim._pairs) == 1


def test_what_consumers_are_done_with_is_saved() -> None:
    rows = private()
    rows.append(numbers(0, 6))
    rows.claim("update", 2).done()  # type: ignore[union-attr]
    held = rows.claim("update", 2)
    rows.finish()
    again = private()
    again.restore(rows.state())
    assert held is not None
    claim = again.claim("update", 6)
    assert claim is not None and claim.numbers.tolist() == [2, 3, 4, 5], "what was not done is given back"
    with pytest.raises(StoreError, match="was finished"):
        again.append(numbers(6, 7))


def test_a_reward_is_filled_while_another_thread_waits_for_room() -> None:
    rows = private(max_rows=4, on_full="wait", timeout_s=10)
    first = rows.append(numbers(0, 4))
    rows.add_column("reward", None, SAMPLE.f32)
    sampler = threading.Thread(target=rows.append, args=[numbers(4, 6)], daemon=True)
    sampler.start()
    claim = rows.claim("update", 2, columns=["number"])
    assert claim is not None
    assert rows.fill("reward", first[:2], [1.0, 2.0]) == 2
    claim.done()
    sampler.join(10)
    assert not sampler.is_alive()
    assert rows.numbers.tolist() == [2, 3, 4, 5]


def test_types_that_contradict_the_table_are_refused_for_dicts_too() -> None:
    rows = private()
    rows.append([{"score": 1.0}], {"score": SAMPLE.f32})
    with pytest.raises(SchemaError, match=r"'score' of the table is SAMPLE\.f32"):
        rows.append([{"score": "x"}], {"score": SAMPLE.str})


def test_closing_a_copy_in_a_child_that_used_it_leaves_the_table() -> None:
    with ExperienceTable() as rows:
        rows.append(numbers(0, 8))
        child = os.fork()
        if child == 0:
            try:
                claim = rows.claim("update", 2)
                rows.close()
                os._exit(0 if claim is not None else 1)
            except BaseException:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        claim = rows.claim("update", 8)
        assert claim is not None and len(claim) == 8, "the child's claim was given back when it left"


def test_a_wrong_type_is_refused_before_it_is_in_the_log() -> None:
    with ExperienceTable() as rows:
        rows.append(numbers(0, 2))
        for wrong in ("f32", float, np.float32, SAMPLE, SAMPLE.f32[0]):
            with pytest.raises(SchemaError, match="column 'score'"):
                rows.add_column("score", None, wrong)  # type: ignore[arg-type]
            with pytest.raises(SchemaError, match="column 'score'"):
                rows.append([{"prompt_id": "a", "number": 1, "score": 1.0}], {"score": wrong})  # type: ignore[dict-item]
        for node in (("a",), None, 3, ""):
            with pytest.raises(ConfigError, match="a node is named by a text"):
                rows.claim(node, 1)  # type: ignore[arg-type]
        with ExperienceTable.open(rows.name) as other:
            assert len(other) == 2


def test_a_judge_that_dies_between_fill_and_done_stops_nobody() -> None:
    rows = private()
    rows.append(numbers(0, 4))
    rows.add_column("reward", None, SAMPLE.f32)
    claim = rows.claim("judge", 4, columns=["number"])
    assert claim is not None
    rows.fill("reward", claim.numbers[:2], [1.0, 2.0])
    claim.release()  # as when its process dies
    again = rows.claim("judge", 4, columns=["number"])
    assert again is not None
    with pytest.raises(SchemaError, match="row number 0 has a value of 'reward' already.*claim.fill"):
        rows.fill("reward", again.numbers, [5.0, 6.0, 7.0, 8.0])
    again.fill({"reward": [5.0, 6.0, 7.0, 8.0]})
    assert rows["reward"].tolist() == [1.0, 2.0, 7.0, 8.0]
    assert not again.is_open
    assert rows.claim("judge", 4, columns=["number"]) is None, "filled and done, in one"


def test_a_stream_keeps_its_claim_until_the_next_one_is_told() -> None:
    rows = private()
    rows.append(numbers(0, 4))
    stream = rows.stream("update", 2, columns=["number"], ahead=1)
    next(stream)

    def late(*_: Any, **__: Any) -> None:
        raise WaitTimeout("the lock")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "claim", late)
        with pytest.raises(WaitTimeout):
            next(stream)
    found = rows.claim("update", 4, columns=["number"])
    assert found is not None
    assert found.numbers.tolist() == [2, 3], "the first batch was used, and is not given out again"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"number": [1]}, "dicts by row"),
        ("abc", "a list of dicts; 'abc'"),
        ([numbers(0, 1), None], "row 0 is"),
        ([{"number": 1}, "x"], "row 1 is 'x'"),
        ([{}], "row 0 has no columns"),
        ([{"number": 1, "source": "web"}], "append(rows, types={'source': fr.SAMPLE.str})"),
        ([{"number": 1, "scores": [0.5, 1.0]}], 'fr.SAMPLE.f32["*"]'),
        ([{"number": None}], "row 0 has no value for column 'number': it is None"),
        ((row for row in ()), "Write list(...)"),
    ],
)
def test_what_is_no_list_of_rows_is_refused_with_what_to_write(given: Any, says: str) -> None:
    rows = private()
    rows.add_column("later", None, SAMPLE.f32)
    with pytest.raises((SchemaError, DataError)) as caught:
        rows.append(
            given, {"number": SAMPLE.i64} if isinstance(given, list) and given[0] and "number" in given[0] else None
        )
    assert says in str(caught.value)
    assert len(rows) == 0


def test_small_slips_are_told_apart() -> None:
    rows = private()
    rows.append(numbers(0, 4))
    with pytest.raises(SchemaError, match=r"For rows: take\(\[0\]\)"):
        rows[0]  # type: ignore[index]
    with pytest.raises(SchemaError, match="scan"):
        list(rows)
    with pytest.raises(SchemaError, match="find needs a list of values"):
        rows.find("prompt_id", "p0")
    with pytest.raises(SchemaError, match="evict needs a list of row numbers"):
        rows.evict([1.5])
    with pytest.raises(SchemaError, match="types= maps a column's name to its type; found list"):
        rows.append([{"prompt_id": "a", "number": 1}], [SAMPLE.i64])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="A folder: path="):
        ExperienceTable("replay")  # type: ignore[arg-type]
    for saved in ({}, {**rows.state(), "rows": b"x"}, {**rows.state(), "appended": 1}):
        with pytest.raises(DataError, match=r"restore needs what state\(\) returned"):
            rows.restore(saved)
    assert len(rows) == 4


def test_filled_rows_are_read_though_their_neighbours_are_not_filled() -> None:
    rows = private(chunk_rows=4)
    rows.append(numbers(0, 6))
    rows.add_column("reward", None, SAMPLE.f32)
    rows.fill("reward", [0, 2, 5], [0.5, 1.0, 2.0])
    assert rows.take([5, 0, 2], ["number", "reward"]).to_pylist() == [
        {"number": n, "reward": r} for n, r in ((5, 2.0), (0, 0.5), (2, 1.0))
    ]
    with pytest.raises(DataError, match="'reward' is not there yet for 1 of 2 rows"):
        rows.take([0, 1])


def test_who_asks_in_a_loop_is_told_of_everything_that_changed() -> None:
    rows = private()
    rows.append(numbers(0, 2))
    held = rows.claim("update", 2)
    assert held is not None
    assert rows.claim("update", 2) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "_try", lambda *_: pytest.fail("looked, though nothing was committed"))
        assert rows.claim("update", 2) is None
    del held
    again = rows.claim("update", 2)
    assert again is not None, "a claim that was dropped"
    assert rows.claim("update", 2) is None
    rows.append(numbers(2, 3))
    assert rows.claim("update", 2) is not None
    again.done()
