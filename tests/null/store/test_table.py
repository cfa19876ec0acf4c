"""The experience table against a plain list of dicts: growth, eviction, columns added later, reading while it changes."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from flowrl.errors import ConfigError, DataError, SchemaError
from flowrl.schema import PROMPT, SAMPLE, TOKEN, Column, TableSchema
from flowrl.store.rows import RowBatch
from flowrl.store.table import ExperienceTable

SIMPLE = {"prompt_id": PROMPT.str, "reward": SAMPLE.f32}


def simple(ids: str, start: int = 0) -> RowBatch:
    return RowBatch({"prompt_id": list(ids), "reward": [float(start + i) for i in range(len(ids))]}, SIMPLE)


def test_a_column_added_later_touches_no_other_column() -> None:
    table = ExperienceTable(chunk_rows=2)
    table.append(simple("aabbc"))
    before = [chunk["reward"] for chunk in table.scan()]
    stored = table.stats()
    table.add_column("advantage", np.arange(5), SAMPLE.f32)
    after = [chunk["reward"] for chunk in table.scan()]
    assert all(old.ctypes.data == new.ctypes.data for old, new in zip(before, after, strict=True)), "where they were"
    assert table.stats().columns["reward"] == stored.columns["reward"]
    assert table.stats().segments == stored.segments + 3
    assert table["advantage"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(SchemaError, match="has a column 'advantage' already"):
        table.add_column("advantage", np.arange(5), SAMPLE.f32)
    with pytest.raises(SchemaError, match=r"one value per row \(5\); found 3"):
        table.add_column("other", np.arange(3), SAMPLE.f32)
    with pytest.raises(SchemaError, match="column 'advantage' that the rows to append lack"):
        table.append(simple("d"))


def test_readers_keep_what_they_were_given() -> None:
    table = ExperienceTable(max_rows=4, chunk_rows=2)
    table.append(simple("aabb"))
    scan, loader, arrow = table.scan(), table.loader(2), table.to_arrow()
    table.append(simple("cccc"))
    assert [chunk["prompt_id"].tolist() for chunk in scan] == [["a", "a"], ["b", "b"]]
    assert [rows["prompt_id"].tolist() for rows in loader] == [["a", "a"], ["b", "b"]]
    assert arrow["prompt_id"].to_pylist() == list("aabb")
    assert table["prompt_id"].tolist() == list("cccc")


def test_groups_are_evicted_whole() -> None:
    table = ExperienceTable(max_rows=5, chunk_rows=3, keep_together="prompt_id")
    table.append(simple("abab"))  # neighbours or not, a group is one
    table.append(simple("ccd"))
    assert table["prompt_id"].tolist() == ["b", "b", "c", "c", "d"]
    table.append(simple("e"))
    assert table["prompt_id"].tolist() == ["c", "c", "d", "e"]
    assert (table.evicted, table.appended, len(table)) == (4, 8, 4)
    with pytest.raises(DataError, match="group of equal 'prompt_id' has 6 rows and the table keeps 5"):
        table.append(simple("ffffff"))
    assert len(table) == 4


def test_without_groups_rows_go_one_by_one() -> None:
    table = ExperienceTable(max_rows=3, chunk_rows=2)
    table.append(simple("abcdefg"))
    assert table["prompt_id"].tolist() == ["e", "f", "g"]
    assert table.evicted == 4


def test_an_evicted_chunk_gives_its_memory_back() -> None:
    table = ExperienceTable(max_rows=10, chunk_rows=5)
    step = RowBatch({"count": np.arange(1000)}, {"count": SAMPLE.i64})
    table.append(step)
    for chunk in table.scan():
        assert not np.shares_memory(chunk["count"], step["count"])


def test_a_failed_append_changes_nothing() -> None:
    table = ExperienceTable()
    table.append(simple("ab"))
    before = (table.version, len(table), table.batch())
    for wrong, says in (
        (simple("c").drop("reward"), "column 'reward' that the rows to append lack"),
        (simple("c").with_column("extra", [1], SAMPLE.i32), "column 'extra' that the table lacks"),
        (simple("c").with_column("reward", [["x"]], TOKEN.str), "'reward' of the table is SAMPLE.f32; found TOKEN.str"),
        ([{"prompt_id": "c"}], "no value for column 'reward'"),
        ([{"prompt_id": "c", "reward": None}], "row 0 has no value for column 'reward'"),
        ([{"prompt_id": "c", "reward": 1, "mine": 2}], "append(rows, types={'mine'"),
        ({"prompt_id": ["c"]}, "found dict"),
    ):
        with pytest.raises((SchemaError, DataError)) as caught:
            table.append(wrong)  # type: ignore[arg-type]
        assert says in str(caught.value)
    assert (table.version, len(table), table.batch()) == before


def test_the_schema_may_be_given_first() -> None:
    schema = TableSchema((Column("reward", SAMPLE.f32), Column("teacher_ids", TOKEN.i32["k"])))
    table = ExperienceTable(schema)
    assert table.columns == ("reward", "teacher_ids")
    assert len(table.batch()) == len(table.take([])) == table.to_arrow().num_rows == 0
    table.append(RowBatch({"teacher_ids": [[]], "reward": [1]}, {"teacher_ids": TOKEN.i32["k"], "reward": SAMPLE.i32}))
    table.append(
        RowBatch({"teacher_ids": [[[7, 8]]], "reward": [2]}, {"teacher_ids": TOKEN.i32["k"], "reward": SAMPLE.f32})
    )
    assert table.schema["teacher_ids"].type == TOKEN.i32[2]
    assert table["teacher_ids"].to_list() == [[], [[7, 8]]]
    assert table["reward"].dtype == np.float32
    assert table.to_arrow()["teacher_ids"].to_pylist() == [[], [[7, 8]]]


def test_arrow_tables_and_dicts_take_standard_types() -> None:
    table = ExperienceTable()
    table.append([{"prompt_id": "a", "response_ids": [1, 2], "reward": 1}])
    table.append(pa.table({"prompt_id": ["b"], "response_ids": [[3]], "reward": [0.5]}))
    assert table.schema["response_ids"].type == TOKEN.i32
    assert table["response_ids"].to_list() == [[1, 2], [3]]
    assert "reward" in table and "nothing" not in table
    assert "2 rows: prompt_id, response_ids, reward" in repr(table)


def test_every_change_is_a_new_version() -> None:
    table = ExperienceTable(max_rows=2)
    seen = [table.version]
    for change in (
        lambda: table.append(simple("ab")),
        lambda: table.append(simple("c")),
        lambda: table.add_column("x", [1, 2], SAMPLE.i32),
    ):
        change()
        seen.append(table.version)
    assert seen == sorted(set(seen))


@pytest.mark.parametrize("options", [{"max_rows": 0}, {"chunk_rows": 0}, {"max_rows": 2.5}, {"chunk_rows": True}])
def test_senseless_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        ExperienceTable(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"compression": "lzo"}, "compression is one of None, 'lz4', 'zstd', 'auto'; found 'lzo'"),
        ({"memory": "gpu"}, "memory is one of 'shared', 'private'"),
        ({"eviction": "random"}, "eviction is one of"),
        ({"on_full": "block"}, "on_full is one of"),
        ({"timeout_s": 0}, "an end to every wait"),
        ({"timeout_s": float("inf")}, "an end to every wait"),
        ({"memory_bytes": 1}, "needs path="),
        ({"hot_bytes": 1}, "needs compression="),
        ({"chunk_rows": None}, "chunk_rows of at least 1"),
        ({"memory": "private", "path": "somewhere"}, "its memory is 'shared'"),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ExperienceTable(**options)
    assert says in str(caught.value)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=6), st.integers(1, 7))
def test_how_rows_were_appended_does_not_matter(sizes: list[int], chunk_rows: int) -> None:
    whole = simple("x" * sum(sizes))
    table = ExperienceTable(TableSchema(whole.schema.columns), chunk_rows=chunk_rows)
    start = 0
    for size in sizes:
        table.append(whole.slice(start, start + size))
        start += size
    assert table.batch() == whole
    assert table.num_chunks >= -(-len(whole) // chunk_rows)
    assert all(len(chunk) <= chunk_rows for chunk in table.scan())
    # a chunk may end early for the sake of a large append, and is at least half of what would have fitted then
    assert table.num_chunks <= 1 + 2 * len(whole) // chunk_rows
