"""The experience table against a plain list of dicts: growth, eviction, columns added later, reading while it changes."""

from collections import deque
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from flowrl.errors import ConfigError, DataError, SchemaError
from flowrl.schema import PROMPT, SAMPLE, TOKEN, Column, TableSchema
from flowrl.store.rows import RowBatch
from flowrl.store.table import ExperienceTable
from tests.null.store.strategies import TYPES, row

SIMPLE = {"prompt_id": PROMPT.str, "reward": SAMPLE.f32}


def simple(ids: str, start: int = 0) -> RowBatch:
    return RowBatch({"prompt_id": list(ids), "reward": [float(start + i) for i in range(len(ids))]}, SIMPLE)


class TableMachine(RuleBasedStateMachine):
    """Any order of changes leaves the table equal to a bounded list."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ExperienceTable(max_rows=9, chunk_rows=4)
        self.model: deque[dict[str, Any]] = deque(maxlen=9)
        self.types = dict(TYPES)
        self.appended = 0

    @rule(rows=st.lists(row(), max_size=14), how=st.sampled_from(["batch", "arrow", "dicts"]))
    def append(self, rows: list[dict[str, Any]], how: str) -> None:
        extra = {name: float(number) for number, name in enumerate(n for n in self.types if n not in TYPES)}
        rows = [{**r, **extra} for r in rows]
        batch = RowBatch.from_rows(rows, self.types)
        given_rows = {"batch": batch, "arrow": batch.to_arrow(), "dicts": rows}[how]
        numbers = self.table.append(given_rows, self.types) if how == "dicts" and rows else self.table.append(batch)
        assert numbers == range(self.appended, self.appended + len(rows))
        self.model.extend(rows)
        self.appended += len(rows)

    @rule(value=st.floats(-8, 8, width=16))
    def add_column(self, value: float) -> None:
        name = f"extra_{len(self.types)}"
        if not self.table.columns:
            return
        values = [value + i for i in range(len(self.model))]
        self.table.add_column(name, values, SAMPLE.f64)
        self.types[name] = SAMPLE.f64
        for r, v in zip(self.model, values, strict=True):
            r[name] = v

    @rule()
    def save_and_restore(self) -> None:
        other = ExperienceTable(max_rows=9, chunk_rows=4)
        other.restore(self.table.state())
        self.table = other

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        rows = list(self.model)
        if not rows:
            return
        places = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=12))
        assert self.table.take(places).to_pylist() == [rows[p] for p in places]
        mask = np.array([r["is_right"] for r in rows])
        assert self.table.filter(mask).to_pylist() == [r for r in rows if r["is_right"]]
        assert self.table.filter(lambda chunk: chunk["is_right"], ["reward"]).to_pylist() == [
            {"reward": r["reward"]} for r in rows if r["is_right"]
        ]

    @invariant()
    def holds_the_newest_rows(self) -> None:
        rows = list(self.model)
        assert len(self.table) == len(rows)
        assert self.table.appended == self.appended
        assert self.table.evicted == self.appended - len(rows)
        assert self.table.batch().to_pylist() == rows
        assert [r for chunk in self.table.scan() for r in chunk.rows()] == rows
        assert all(len(chunk) <= 4 for chunk in self.table.scan())
        if self.table.columns:
            assert RowBatch.from_arrow(self.table.to_arrow()).to_pylist() == rows


TableMachine.TestCase.settings = settings(max_examples=12, stateful_step_count=8, deadline=None)
TestTable = TableMachine.TestCase


def test_a_column_added_later_touches_no_other_column() -> None:
    table = ExperienceTable(chunk_rows=2)
    table.append(simple("aabbc"))
    before = [(chunk["prompt_id"], chunk["reward"]) for chunk in table.scan()]
    table.add_column("advantage", np.arange(5), SAMPLE.f32)
    after = [(chunk["prompt_id"], chunk["reward"]) for chunk in table.scan()]
    assert all(a is b for old, new in zip(before, after, strict=True) for a, b in zip(old, new, strict=True))
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
    with pytest.raises(TypeError):
        ExperienceTable(compression="lz4")  # type: ignore[call-arg]


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
    assert table.num_chunks == -(-len(whole) // chunk_rows)
