"""Rows in memory against plain Python lists, and against the faults people met."""

import importlib
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from flowrl.errors import DataError, OperatorError, SchemaError
from flowrl.schema import PROMPT, SAMPLE, TOKEN, TURN, ColumnType, Ragged
from flowrl.store.columns import readonly
from flowrl.store.rows import RowBatch, refusing_writes
from tests.null.store.strategies import TYPES, batch_of, row_lists

few = settings(max_examples=40, deadline=None)


def groups_of(ids: list[str], rewards: list[float]) -> RowBatch:
    return RowBatch({"prompt_id": ids, "reward": rewards}, {"prompt_id": PROMPT.str, "reward": SAMPLE.f32})


# --------------------------------------------------------------------------------------------- against plain Python


@few
@given(row_lists)
def test_rows_come_back_as_they_went_in(rows: list[dict[str, Any]]) -> None:
    batch = batch_of(rows)
    assert batch.to_pylist() == rows
    assert len(batch) == len(rows)
    assert batch.types == TYPES


@few
@given(row_lists)
def test_arrow_and_pickle_give_the_same_rows(rows: list[dict[str, Any]]) -> None:
    batch = batch_of(rows)
    assert RowBatch.from_arrow(batch.to_arrow()) == batch
    assert pickle.loads(pickle.dumps(batch)) == batch


@few
@given(row_lists, st.data())
def test_take_filter_slice_and_concat_agree_with_lists(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    batch = batch_of(rows)
    places = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=8)) if rows else []
    assert batch.take(places).to_pylist() == [rows[place] for place in places]
    mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    assert batch.filter(np.asarray(mask, bool)).to_pylist() == [r for r, keep in zip(rows, mask, strict=True) if keep]
    start, stop = data.draw(st.tuples(st.integers(-7, 7), st.integers(-7, 7)))
    assert batch.slice(start, stop).to_pylist() == rows[start:stop]
    cut = data.draw(st.integers(0, len(rows)))
    assert RowBatch.concat([batch.slice(0, cut), batch.slice(cut)]) == batch
    assert RowBatch.concat([batch, batch.slice(0, cut).copy()]).to_pylist() == rows + rows[:cut]


@few
@given(row_lists, st.data())
def test_a_slice_of_a_slice_travels_like_any_batch(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(rows)))
    part = batch_of(rows).slice(start).slice(0, 2)
    assert RowBatch.from_arrow(part.to_arrow()).to_pylist() == rows[start:][:2]
    assert RowBatch.from_ipc(part.to_ipc()).to_pylist() == rows[start:][:2]
    assert part.take(list(range(len(part)))) == part


@few
@given(row_lists, st.randoms())
def test_groups_are_made_by_value_whatever_the_order(rows: list[dict[str, Any]], random: Any) -> None:
    random.shuffle(rows)
    groups = batch_of(rows).group_indices("prompt_id")
    first_seen = list(dict.fromkeys(r["prompt_id"] for r in rows))
    assert [g.tolist() for g in groups] == [[i for i, r in enumerate(rows) if r["prompt_id"] == v] for v in first_seen]


# ------------------------------------------------------------------------------------------------------------ faults


def test_a_pickled_slice_holds_its_rows_and_not_the_table_it_was_cut_from() -> None:
    ids = Ragged(np.arange(20_000 * 512, dtype=np.int32), np.arange(20_001) * 512)
    batch = RowBatch({"response_ids": ids}, {"response_ids": TOKEN.i32})
    for part in (batch.slice(7, 8), batch.take([7])):
        sent = pickle.dumps(part)
        assert len(sent) < 64_000
        assert pickle.loads(sent)["response_ids"][0].tolist() == list(range(7 * 512, 8 * 512))


def test_numbers_reach_arrow_and_come_back_without_a_copy() -> None:
    batch = RowBatch(
        {"count": np.arange(1000), "response_ids": Ragged(np.arange(3000, dtype=np.int32), np.arange(1001) * 3)},
        {"count": SAMPLE.i64, "response_ids": TOKEN.i32},
    )
    table = batch.to_arrow()
    assert table["count"].num_chunks == 1
    back = RowBatch.from_arrow(table)
    assert np.shares_memory(back["count"], batch["count"])
    assert np.shares_memory(back["response_ids"].values, batch["response_ids"].values)
    assert table.schema.field("response_ids").type == pa.large_list(pa.int32())  # 64-bit offsets have no limit to guard


@pytest.mark.parametrize("rows", [1, 2])
def test_one_row_has_the_types_of_two(rows: int) -> None:
    batch = RowBatch.from_rows(
        [{"answer": "x", "response_ids": [5, 5], "reward": 1.0, "step_text": ["y"]}] * rows,
        {"answer": PROMPT.str, "response_ids": TOKEN.i32, "reward": SAMPLE.f32, "step_text": TURN.str},
    )
    assert batch["answer"].shape == (rows,)
    assert batch["response_ids"].lengths.tolist() == [2] * rows
    back = RowBatch.from_arrow(RowBatch.concat([batch.slice(0, 1), batch.slice(1)]).to_arrow())
    assert back == batch
    assert [value.tolist() for value in back["step_text"]] == [["y"]] * rows


def test_columns_are_never_changed_in_place() -> None:
    batch = groups_of(["a", "a"], [1.0, 3.0])
    before = batch.to_ipc()
    for values in (batch["reward"], readonly(batch["reward"]), batch.take([0, 1])["reward"], batch.slice(0)["reward"]):
        with pytest.raises(ValueError, match="read-only"):
            values -= values.mean()
    with pytest.raises(ValueError, match="read-only"):
        RowBatch({"x": [[1], [2]]}, {"x": TOKEN.i32})["x"].values[0] = 3
    assert batch.to_ipc() == before


def test_a_batch_is_safe_from_whoever_made_its_arrays() -> None:
    own = np.ones(3, np.float32)
    view = np.ones(6, np.float32)[::2]
    batch = RowBatch({"own": own, "view": view}, {"own": SAMPLE.f32, "view": SAMPLE.f32})
    with pytest.raises(ValueError, match="read-only"):
        own[0] = 5  # loud, instead of changing the batch
    view[0] = 5
    assert batch["view"].tolist() == [1, 1, 1]


def test_writing_into_an_operators_input_says_what_to_write_instead() -> None:
    with pytest.raises(OperatorError, match="'centre' wrote into a column.*reward = reward"):
        with refusing_writes("centre"):
            column = readonly(np.ones(2))
            column -= 1
    with pytest.raises(ValueError, match="something else"):
        with refusing_writes("centre"):
            raise ValueError("something else")


def test_a_dropped_sibling_moves_no_row_into_another_group() -> None:
    batch = groups_of(["A", "A", "B", "B", "B"], [1, 0, 1, 1, 0])
    for order in ([0, 1, 2, 3, 4], [4, 0, 3, 1, 2]):
        rows = batch.take(order)
        means = {rows["prompt_id"][g[0]]: rows["reward"][g].mean() for g in rows.group_indices("prompt_id")}
        assert means == pytest.approx({"A": 0.5, "B": 2 / 3})


def test_groups_follow_the_id_and_not_the_text() -> None:
    batch = RowBatch(
        {"prompt_id": ["1", "2"], "prompt": ["same", "same"]}, {"prompt_id": PROMPT.str, "prompt": PROMPT.str}
    )
    assert len(batch.group_indices("prompt_id")) == 2
    assert len(batch.group_indices(["prompt", "prompt_id"])) == 2
    assert len(batch.group_indices("prompt")) == 1


def test_an_integer_id_with_a_null_is_refused_and_big_ones_stay_apart() -> None:
    big = [2**53, 2**53 + 1]
    batch = RowBatch.from_arrow(pa.table({"uid": big}), {"uid": PROMPT.i64})
    assert len(batch.group_indices("uid")) == 2
    with pytest.raises(DataError, match="'uid' has no value in row 1"):
        RowBatch.from_arrow(pa.table({"uid": pa.array([big[0], None, big[1]], pa.int64())}), {"uid": PROMPT.i64})
    with pytest.raises(SchemaError, match="group key"):
        groups_of(["a"], [1.0]).group_indices("reward")


# --------------------------------------------------------------------------------------------------------- refusals

THREE = RowBatch(
    {"response_ids": [[1, 2], [], [3]], "reward": [1.0, 2.0, 3.0]}, {"response_ids": TOKEN.i32, "reward": SAMPLE.f32}
)


@pytest.mark.parametrize(
    ("values", "kind", "says"),
    [
        (0.5, SAMPLE.f32, "one value per row; found the single value 0.5.*np.full"),
        (np.float32(2), SAMPLE.f32, "single value"),
        ("abc", SAMPLE.str, "single value 'abc'"),
        (None, SAMPLE.str, "single value None"),
        ([1.0], SAMPLE.f32, "one value per row (3); found 1"),
        ([1.0, None, 2.0], SAMPLE.f32, "no value in row 1"),
        (["a", None, "b"], SAMPLE.str, "no value in row 1"),
        (["a", 1, "b"], SAMPLE.str, "row 1 is 1 (int)"),
        ([b"a", "b", b""], SAMPLE.bytes, "row 1 is 'b' (str)"),
        ([1.5, 2.0, 3.0], SAMPLE.i32, "found dtype float64. Round it yourself"),
        ([0, 1, 1], SAMPLE.bool, "Compare (values != 0)"),
        ([0, 1, 2**31], SAMPLE.i32, "found values from 0 to 2147483648"),
        ([-1, 0, 1], SAMPLE.u8, "0 to 255"),
        ([1e39, 0.0, 0.0], SAMPLE.f32, "cannot hold 1e+39"),
        (["1", "2", "3"], SAMPLE.f32, "Convert it first"),
        ([[1, 2], [3], [4]], SAMPLE.f32, "one shape in all rows"),
        (THREE["response_ids"], SAMPLE.f32, "Reduce it"),
        ([[1], [2], [3]], TOKEN.f32, "in row 0 'x' has 1 and 'response_ids' has 2"),
        ([1, 2, 3], TOKEN.f32, "a list per row; row 0 is 1"),
        (["ab", "", "c"], TURN.str, "a list per row; row 0 is 'ab'"),
        ([[1.0], None, []], TURN.f32, "no value in row 1"),
        ([[1.0], [2.0, None], []], TURN.f32, "no value in row 1, place 1"),
        ([["a"], [None], []], TURN.str, "no value in"),
        ([[1, 2], [3, 4], [5, 6]], SAMPLE.i32[3], "needs shape (3); found (2)"),
        ([[[1]], [], [[2]]], TURN.i32["*"], "lists of lists"),
        ({1, 2, 3}, SAMPLE.i32, "found set"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_was_found(values: Any, kind: ColumnType, says: str) -> None:
    with pytest.raises((SchemaError, DataError), match=re.escape(says).replace(r"\.\*", ".*")) as caught:
        THREE.with_column("x", values, kind)
    assert "'x'" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "kind", "stored"),
    [
        ([1, 2, 3], SAMPLE.f32, [1.0, 2.0, 3.0]),
        ([True, False, True], SAMPLE.i32, [1, 0, 1]),
        (np.array([1, 2, 3], np.int64), SAMPLE.i32, [1, 2, 3]),
        (np.array([0.1, 0.2, float("inf")]), SAMPLE.f32, [np.float32(0.1), np.float32(0.2), np.inf]),
        ((x for x in (1, 2, 3)), SAMPLE.i64, [1, 2, 3]),
        (np.array(["a", "b", "c"]), SAMPLE.str, ["a", "b", "c"]),
        (pa.array([1, 2, 3], pa.int8()), SAMPLE.f64, [1.0, 2.0, 3.0]),
        (pa.chunked_array([["a"], ["b", "c"]]), SAMPLE.str, ["a", "b", "c"]),
        (pa.array(["a", "b", "a"]).dictionary_encode(), SAMPLE.str, ["a", "b", "a"]),
    ],
)
def test_what_fits_is_widened(values: Any, kind: ColumnType, stored: list[Any]) -> None:
    made = THREE.with_column("x", values, kind)["x"]
    assert made.tolist() == stored
    assert type(made[0]) is (str if kind.dtype == "str" else made.dtype.type)


def test_ragged_columns_come_from_many_forms() -> None:
    for values in ([[1, 2], [], [3]], [np.array([1, 2]), np.array([]), (3,)], Ragged.of([[1, 2], [], [3]])):
        made = THREE.with_column("x", values, TOKEN.f32)["x"]
        assert made.to_list() == [[1.0, 2.0], [], [3.0]]
        assert made.dtype == np.float32
        assert made.offsets is THREE["response_ids"].offsets  # TOKEN columns share their boundaries
    lists = pa.array([[9], [1, 2], [], [3]], pa.list_(pa.int64()))[1:]
    assert THREE.with_column("x", lists, TOKEN.i32)["x"].to_list() == [[1, 2], [], [3]]


def test_a_named_inner_length_is_filled_in_from_the_values() -> None:
    made = THREE.with_column(
        "teacher_ids", [np.ones((2, 4), int), np.zeros((0, 4), int), np.ones((1, 4), int)], TOKEN.i32["k"]
    )
    assert made.types["teacher_ids"] == TOKEN.i32[4]
    assert made.to_arrow().schema.field("teacher_ids").type == pa.large_list(pa.list_(pa.int32(), 4))
    empty = RowBatch({"t": [[], []]}, {"t": TOKEN.i32["k"]})
    assert RowBatch.from_arrow(empty.to_arrow()) == empty
    full = RowBatch({"t": [[[1, 2]]]}, {"t": TOKEN.i32["k"]})
    assert RowBatch.concat([empty, full])["t"].to_list() == [[], [], [[1, 2]]]
    wider = RowBatch({"t": [[[1, 2, 3]]]}, {"t": TOKEN.i32["k"]})
    for parts in ([full, wider], [empty, full, wider]):
        with pytest.raises(SchemaError, match="column 't'"):
            RowBatch.concat(parts)


# ------------------------------------------------------------------------------------------------- names and columns


def test_adding_columns_shares_the_others() -> None:
    made = THREE.with_column("advantage", np.zeros(3), SAMPLE.f32)
    assert made["reward"] is THREE["reward"]
    assert "advantage" not in THREE
    assert made.names == ("response_ids", "reward", "advantage")
    again = made.with_column("reward", [0, 0, 0], SAMPLE.f32)
    assert again.names == made.names
    assert again["reward"].tolist() == [0, 0, 0]


def test_token_columns_replaced_together_may_change_length() -> None:
    both = THREE.with_column("loss_mask", [[True, True], [], [True]], TOKEN.bool)
    cut = both.with_columns(
        {"response_ids": [[1], [], [3]], "loss_mask": [[True], [], [False]]},
        {"response_ids": TOKEN.i32, "loss_mask": TOKEN.bool},
    )
    assert cut["loss_mask"].to_list() == [[True], [], [False]]
    with pytest.raises(SchemaError, match="one value per response token"):
        both.with_column("response_ids", [[1], [], [3]], TOKEN.i32)


def test_select_drop_rename_refuse_what_is_not_there() -> None:
    assert THREE.select(["reward"]).names == ("reward",)
    assert THREE.drop("reward").names == ("response_ids",)
    assert THREE.rename({"reward": "score"}).names == ("response_ids", "score")
    for wrong in (
        lambda: THREE["rewrd"],
        lambda: THREE.select(["rewrd"]),
        lambda: THREE.drop(["rewrd"]),
        lambda: THREE.rename({"rewrd": "x"}),
    ):
        with pytest.raises(SchemaError, match="did you mean 'reward'"):
            wrong()
    with pytest.raises(SchemaError, match="two columns the name 'reward'"):
        THREE.rename({"response_ids": "reward"})
    with pytest.raises(SchemaError, match="identifier"):
        THREE.rename({"reward": "no name"})
    with pytest.raises(SchemaError, match="take"):
        THREE[0]  # type: ignore[index]


def test_take_and_filter_refuse_each_others_arguments() -> None:
    with pytest.raises(SchemaError, match="use filter"):
        THREE.take(np.array([True, False, True]))
    with pytest.raises(SchemaError, match="one boolean per row"):
        THREE.filter([0, 1, 1])
    with pytest.raises(SchemaError, match="one boolean per row"):
        THREE.filter(np.array([True]))
    with pytest.raises(DataError, match="row 3 of 3"):
        THREE.take([0, 3])
    assert len(THREE.take([])) == 0
    assert len(THREE.take([]).take([])) == 0


def test_concat_keeps_common_columns_and_checks_their_types() -> None:
    more = THREE.with_column("advantage", [0.0, 0.0, 0.0], SAMPLE.f32)
    assert RowBatch.concat([THREE, more]).names == THREE.names
    wide = THREE.with_column("reward", np.array([1, 2, 3]), SAMPLE.i64)
    both = RowBatch.concat([THREE, wide])
    assert both.types["reward"] == SAMPLE.f32 and both["reward"].dtype == np.float32
    with pytest.raises(SchemaError, match="'reward' is SAMPLE.i64 in one batch and SAMPLE.f32 in another"):
        RowBatch.concat([wide, THREE])
    with pytest.raises(SchemaError, match="at least one"):
        RowBatch.concat([])


def test_rows_without_columns_keep_their_number() -> None:
    batch = THREE.select([])
    assert len(batch) == len(RowBatch.from_ipc(batch.to_ipc())) == 3
    assert batch.to_pylist() == [{}, {}, {}]


def test_from_rows_names_the_row_and_column_that_is_wrong() -> None:
    types = {"prompt_id": PROMPT.str, "reward": SAMPLE.f32}
    with pytest.raises(DataError, match="row 1 has no value for column 'reward'"):
        RowBatch.from_rows([{"prompt_id": "a", "reward": 1}, {"prompt_id": "b"}], types)
    with pytest.raises(DataError, match="row 0 has a column 'rewardd' without type; did you mean 'reward'"):
        RowBatch.from_rows([{"prompt_id": "a", "reward": 1, "rewardd": 1}], types)
    with pytest.raises(SchemaError, match="'x' has no type"):
        RowBatch({"x": [1]}, {})


def test_it_prints_and_weighs_itself() -> None:
    batch = RowBatch(
        {"prompt": ["é", "b"], "loss_mask": [[True], []], "ids": [[1], []]},
        {"prompt": PROMPT.str, "loss_mask": TOKEN.bool, "ids": TOKEN.i32},
    )
    assert batch.nbytes == 3 + (1 + 4) + 3 * 8  # offsets are shared
    text = repr(batch)
    assert "2 rows, 3 columns, 32 B" in text
    assert "TOKEN.bool" in text and "'é', 'b'" in text
    assert batch and not len(batch.take([]))


def test_nan_equals_nan_and_one_value_apart_is_not_equal() -> None:
    nan = groups_of(["a", "b"], [float("nan"), 1.0])
    assert nan == groups_of(["a", "b"], [float("nan"), 1.0])
    assert nan != groups_of(["a", "b"], [float("nan"), 2.0])
    assert nan != nan.rename({"reward": "score"})
    assert nan != nan.with_column("reward", nan["reward"], SAMPLE.f64)


def test_foreign_arrow_fields_need_a_type() -> None:
    with pytest.raises(SchemaError, match="granularity is unknown"):
        RowBatch.from_arrow(pa.table({"x": [1]}))
    with pytest.raises(SchemaError, match="a list per row; found the Arrow type int64"):
        RowBatch.from_arrow(pa.table({"x": [1]}), {"x": TOKEN.i32})
    with pytest.raises(DataError, match="'x' has no value in row"):
        RowBatch.from_arrow(pa.table({"x": [[1], [None]]}), {"x": TOKEN.i32})


def test_the_store_imports_nothing_above_it() -> None:
    for name in ("columns", "rows", "table", "loader"):
        path = importlib.import_module(f"flowrl.store.{name}").__file__
        assert path is not None
        assert not re.search(r"flowrl\.(runtime|engines|graph|viz|model)", Path(path).read_text())
