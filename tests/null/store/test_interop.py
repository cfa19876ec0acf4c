"""Rows for other tools: what is written is read back as it was, whole or not at all; queries see every value."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from flowrl.errors import ConfigError, DataError, MissingExtra, SchemaError, StoreError
from flowrl.schema import PROMPT, SAMPLE, TOKEN, Column, TableSchema
from flowrl.store import interop
from flowrl.store.rows import RowBatch
from flowrl.store.table import ExperienceTable
from tests.null.store.strategies import TYPES, row_lists

LAST = 2**53 + 1
"""An id that a float64 cannot hold."""


class Chunks:
    """The least a table is here: a schema and chunks; it counts what it was asked for."""

    def __init__(self, *chunks: RowBatch) -> None:
        self.chunks, self.schema = chunks, chunks[0].schema
        self.asked: list[tuple[str, ...]] = []
        self.given = 0

    def scan(self, columns: Sequence[str] | None = None) -> Iterator[RowBatch]:
        names = self.schema.names if columns is None else columns
        self.asked.append(tuple(names))
        for chunk in self.chunks:
            self.given += 1
            yield chunk.select(names)


def small() -> Chunks:
    kinds = {
        "prompt_id": PROMPT.str, "count": SAMPLE.i64, "reward": SAMPLE.f32, "response_ids": TOKEN.i32,
        "teacher_logprobs": TOKEN.f16[2],
    }  # fmt: skip
    first = RowBatch(
        {
            "prompt_id": ["a", "b"], "count": [LAST, -1], "reward": [0.5, np.nan], "response_ids": [[1, 2], []],
            "teacher_logprobs": [[[0.5, 1], [2, 3]], np.zeros((0, 2))],
        },
        kinds,
    )  # fmt: skip
    second = RowBatch(
        {
            "prompt_id": ["a"], "count": [0], "reward": [1.5], "response_ids": [[7]], "teacher_logprobs": [[[4, 5]]],
        },
        kinds,
    )  # fmt: skip
    return Chunks(first, second)


def joined(table: Chunks) -> RowBatch:
    return RowBatch.concat(table.chunks)


# ------------------------------------------------------------------------------------------------------------- Parquet


@settings(max_examples=25)
@given(parts=st.lists(row_lists, min_size=1, max_size=3), group=st.none() | st.integers(1, 7))
def test_parquet_keeps_every_type_and_value(tmp_path_factory: Any, parts: list[Any], group: int | None) -> None:
    table = Chunks(*(RowBatch.from_rows(part, TYPES) for part in parts))
    path = tmp_path_factory.mktemp("parquet") / "rows.parquet"
    assert interop.to_parquet(table, path, row_group_rows=group) == path
    found = list(interop.from_parquet(path))
    if group is not None:
        assert all(len(batch) == group for batch in found[:-1])
    expected = joined(table)
    assert RowBatch.concat(found).equals(expected) if found else len(expected) == 0
    assert TableSchema.from_arrow(pq.read_schema(path)) == table.schema


@pytest.mark.parametrize("compression", ["zstd", "lz4", "snappy", "gzip", "none"])
def test_parquet_with_every_compression(tmp_path: Path, compression: str) -> None:
    table = small()
    interop.to_parquet(table, tmp_path / "rows.parquet", compression=compression)
    assert RowBatch.concat(list(interop.from_parquet(tmp_path / "rows.parquet"))).equals(joined(table))


def test_narrow_chunks_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of a million rows has thousands of chunks in a row group."""
    asked: list[str] = []

    class Narrow:
        @property
        def nbytes(self) -> int:
            asked.append("nbytes")
            return 4

        def __len__(self) -> int:
            asked.append("rows")
            return 1

    monkeypatch.setattr(interop, "pa", SimpleNamespace(Table=SimpleNamespace(from_batches=len)))
    monkeypatch.setattr(interop, "GROUP_BYTES", 400)
    assert list(interop._grouped(iter([Narrow() for _ in range(250)]), None)) == [100, 100, 50]
    assert asked.count("nbytes") == asked.count("rows") == 250


def test_parquet_of_chosen_columns(tmp_path: Path) -> None:
    table = small()
    interop.to_parquet(table, tmp_path / "rows.parquet", columns=["count", "prompt_id"])
    assert table.asked == [("count", "prompt_id")]
    found = next(interop.from_parquet(tmp_path / "rows.parquet", ["prompt_id"]))
    assert found.names == ("prompt_id",)
    with pytest.raises(SchemaError, match="no column 'cuont'; did you mean 'count'"):
        next(interop.from_parquet(tmp_path / "rows.parquet", ["cuont"]))
    with pytest.raises(SchemaError, match="no column 'cuont'; did you mean 'count'"):
        interop.to_parquet(table, tmp_path / "other.parquet", columns=["cuont"])


def test_ids_stay_integers_and_text(tmp_path: Path) -> None:
    interop.to_parquet(small(), tmp_path / "rows.parquet")
    schema = pq.read_schema(tmp_path / "rows.parquet")
    assert not any(field.nullable for field in schema)
    assert schema.field("count").type == pa.int64()
    assert pq.read_table(tmp_path / "rows.parquet")["count"].to_pylist() == [LAST, -1, 0]


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    interop.to_parquet(small(), path)
    before = path.read_bytes()

    class Breaks(Chunks):
        def scan(self, columns: Sequence[str] | None = None) -> Iterator[RowBatch]:
            yield self.chunks[0].select(columns or ())
            assert [p.name for p in tmp_path.iterdir()] != ["rows.parquet"], "written aside"
            raise DataError("half way")

    with pytest.raises(DataError, match="half way"):
        interop.to_parquet(Breaks(small().chunks[0]), path, row_group_rows=1)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["rows.parquet"]


def test_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="make the folder .*nowhere' first"):
        interop.to_parquet(small(), tmp_path / "nowhere" / "rows.parquet")
    with pytest.raises(ConfigError, match="compression is one of .*found 'brotly'"):
        interop.to_parquet(small(), tmp_path / "rows.parquet", compression="brotly")
    with pytest.raises(ConfigError, match="row_group_rows is at least 1; found 0"):
        interop.to_parquet(small(), tmp_path / "rows.parquet", row_group_rows=0)
    with pytest.raises(SchemaError, match="needs columns"):
        interop.to_parquet(ExperienceTable(), tmp_path / "rows.parquet")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="rows.parquet' cannot be written: .*No space left"):
        interop.to_parquet(small(), tmp_path / "rows.parquet")
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_no_unicode_is_refused_by_row(tmp_path: Path) -> None:
    rows = RowBatch({"prompt_id": ["a", "b\ud800"]}, {"prompt_id": PROMPT.str})
    with pytest.raises(DataError, match="column 'prompt_id' holds half a surrogate pair in row 1"):
        interop.to_parquet(Chunks(rows), tmp_path / "rows.parquet")
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_parquet_file_needs_types(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt_id": ["a", "b"], "reward": [1.0, 2.0]}), tmp_path / "rows.parquet")
    expected = [{"prompt_id": "a", "reward": 1.0}, {"prompt_id": "b", "reward": 2.0}]
    found = next(interop.from_parquet(tmp_path / "rows.parquet"))
    assert found.to_pylist() == expected
    assert found.types == {"prompt_id": PROMPT.str, "reward": SAMPLE.f32}, "those of standard columns"
    found = next(interop.from_parquet(tmp_path / "rows.parquet", types={"reward": SAMPLE.f64}))
    assert (found.to_pylist(), found.types["reward"]) == (expected, SAMPLE.f64)
    pq.write_table(pa.table({"prompt_id": ["a"], "level": [3]}), tmp_path / "odd.parquet")
    with pytest.raises(
        SchemaError, match=r"column 'level' of .*odd.parquet' \(int64\) is no standard column.*types={'level'"
    ):
        next(interop.from_parquet(tmp_path / "odd.parquet"))
    assert next(interop.from_parquet(tmp_path / "odd.parquet", "prompt_id")).to_pylist() == [{"prompt_id": "a"}]
    typed = next(interop.from_parquet(tmp_path / "odd.parquet", types={"level": SAMPLE.i64}))
    assert typed.to_pylist() == [{"prompt_id": "a", "level": 3}]
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(StoreError, match="rows.parquet' cannot be read as a Parquet file"):
        next(interop.from_parquet(tmp_path / "rows.parquet"))
    with pytest.raises(StoreError, match="missing.parquet"):
        next(interop.from_parquet(tmp_path / "missing.parquet"))


# --------------------------------------------------------------------------------------------------------------- Arrow


def test_a_reader_takes_chunks_as_they_are_asked_for() -> None:
    table = small()
    reader = interop.reader(table)
    assert table.given == 0
    first = reader.read_next_batch()
    assert (table.given, first.num_rows) == (1, 2)
    assert reader.read_next_batch().column("response_ids").to_pylist() == [[7]]


def test_a_reader_shares_numbers_with_the_table() -> None:
    table = small()
    counts = interop.reader(table, ["count"]).read_next_batch().column("count").to_numpy()
    assert np.shares_memory(counts, table.chunks[0]["count"])


def test_a_dataset_is_filtered_and_scanned_twice() -> None:
    import pyarrow.dataset as datasets

    rows = interop.dataset(small())
    assert isinstance(rows, datasets.Dataset)
    for _ in range(2):
        kept = rows.to_table(columns=["count"], filter=datasets.field("prompt_id") == "a")
        assert kept["count"].to_pylist() == [LAST, 0]


def test_a_named_inner_length_is_that_of_the_rows(tmp_path: Path) -> None:
    table = ExperienceTable(TableSchema((Column("teacher_ids", TOKEN.i32["k"], ""),)), chunk_rows=1)
    table.append([{"teacher_ids": np.zeros((0, 3), np.int32)}, {"teacher_ids": np.ones((2, 3), np.int32)}])
    interop.to_parquet(table, tmp_path / "rows.parquet")
    found = list(interop.from_parquet(tmp_path / "rows.parquet"))
    assert found[0].types["teacher_ids"] == TOKEN.i32[3]
    assert found[0]["teacher_ids"].to_list() == [[], [[1, 1, 1], [1, 1, 1]]]


# ----------------------------------------------------------------------------------------------------------------- SQL


@pytest.fixture
def duckdb() -> Any:
    return pytest.importorskip("duckdb")


def test_sql_sees_text_lists_and_halves(duckdb: Any) -> None:
    query = """
        select prompt_id, max("count") as top, sum(len(response_ids)) as tokens, max(teacher_logprobs[1][2]) as half
        from rows group by prompt_id order by prompt_id
    """
    table = small()
    found = interop.sql(table, query).to_pylist()
    assert [(row["prompt_id"], row["top"], int(row["tokens"])) for row in found] == [("a", LAST, 3), ("b", -1, 0)]
    assert found[0]["half"] == 5.0
    assert set(table.asked) == {("prompt_id", "count", "response_ids", "teacher_logprobs")}


def test_sql_may_name_the_table_more_than_once(duckdb: Any) -> None:
    query = 'select a."count" from rows a join rows b on a.prompt_id = b.prompt_id where b."count" = 0 order by 1'
    assert interop.sql(small(), query)["count"].to_pylist() == [0, LAST]
    assert interop.sql(small(), "select * from rows union all select * from rows").num_rows == 6


@pytest.mark.parametrize(
    ("query", "columns"),
    [
        ("select count(*) from rows", {"prompt_id"}),
        ("select Reward from rows", {"reward"}),
        ("select \"reward\" from rows where prompt_id = 'a'", {"reward", "prompt_id"}),
        ("with good as (select count from rows) select max(count) from good", {"count"}),
        ("select a.reward from rows a join rows b using (prompt_id)", {"reward", "prompt_id"}),
        ("select * from rows", None),
        ("from rows", None),
        ("select rows from rows", None),
        ("select r from rows as r", None),
        ("select r.* from rows r", None),
        ("select columns('c.*') from rows", None),
        ("select #2 from rows", None),
        ("select a.reward from rows a natural join rows b", None),
        ("select x from rows as r(x)", None),
        ("select count from query('select * from rows')", None),
    ],
)
def test_sql_reads_what_a_query_may_touch(duckdb: Any, query: str, columns: set[str] | None) -> None:
    table = small()
    interop.sql(table, query)
    everything = set(table.schema.names)
    asked = {name for names in table.asked for name in names}
    assert asked == (everything if columns is None else columns)


def test_sql_that_is_refused(duckdb: Any) -> None:
    with pytest.raises(ConfigError, match="(?s)refused: .*rewrd.*\nthe table `rows` has prompt_id, count"):
        interop.sql(small(), "select rewrd from rows")
    with pytest.raises(ConfigError, match="refused: .*syntax"):
        interop.sql(small(), "selct 1")
    with pytest.raises(SchemaError, match="no columns yet"):
        interop.sql(ExperienceTable(), "select 1")


def test_an_error_of_the_rows_arrives(duckdb: Any) -> None:
    rows = RowBatch({"prompt_id": ["b\ud800"]}, {"prompt_id": PROMPT.str})
    with pytest.raises(DataError, match="half a surrogate pair in row 0"):
        interop.sql(Chunks(rows), "select prompt_id from rows")


def test_sql_without_duckdb_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(MissingExtra, match=r"pip install 'flowrl\[sql\]'"):
        interop.sql(small(), "select 1")


# -------------------------------------------------------------------------------------------------------------- Polars


def test_polars_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(MissingExtra, match="pip install polars"):
        interop.to_polars(small())
