"""Data sets: types that follow the names, faults named by row and column, epochs that give every row once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from flowrl.errors import ConfigError, DataError
from flowrl.runtime.data import Data
from flowrl.schema import PROMPT, SAMPLE, TOKEN
from flowrl.store.rows import RowBatch

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(5)]


class HuggingFace:
    """What a Hugging Face data set looks like from here."""

    column_names = ("prompt", "answer")

    def __getitem__(self, name: str) -> list[str]:
        return [row[name] for row in ROWS]


def given_in_many_forms(folder: Path) -> dict[str, Any]:
    lines = folder / "rows.jsonl"
    lines.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    return {
        "dicts": ROWS,
        "generator": (row for row in ROWS),
        "arrow": pa.Table.from_pylist(ROWS),
        "hugging face": HuggingFace(),
        "jsonl": lines,
        "jsonl as text": str(lines),
        "parquet": folder / "rows.parquet",
        "rows": RowBatch.from_rows(ROWS, {"prompt": PROMPT.str, "answer": PROMPT.str}),
        "data": Data(ROWS),
    }


def test_every_form_gives_the_same_rows(tmp_path: Path) -> None:
    for form, rows in given_in_many_forms(tmp_path).items():
        data = Data(rows)
        assert data.rows == Data(ROWS).rows, form
        assert [str(c.type) for c in data.schema] == ["PROMPT.str"] * 3, form
        assert data.rows["prompt_id"].tolist() == ["0", "1", "2", "3", "4"]
    assert Data.of(data) is data
    assert len(Data.of(ROWS, name="prompts")) == 5


def test_types_follow_the_names_and_else_the_values() -> None:
    rows = [
        {
            "prompt_ids": [1, 2], "response_ids": [3], "loss_mask": [True], "chosen": True, "pair_id": 7, "reward": 1,
            "level": 3, "score": 0.5, "is_hard": False, "topic": "x", "raw": b"x", "ids": [1, 2], "big": [2**40],
            "weights": [0.5, 1], "tags": ["a"], "none": [],
        },
        {
            "prompt_ids": [], "response_ids": [3, 4], "loss_mask": [True, False], "chosen": False, "pair_id": 7, "reward": 0.5,
            "level": 2**40, "score": 1, "is_hard": True, "topic": "", "raw": b"", "ids": [], "big": [1], "weights": [],
            "tags": [], "none": [],
        },
    ]  # fmt: skip
    expected = {
        "prompt_id": PROMPT.str, "prompt_ids": PROMPT.i32["*"], "response_ids": TOKEN.i32, "loss_mask": TOKEN.bool,
        "chosen": SAMPLE.bool, "pair_id": SAMPLE.str, "reward": SAMPLE.f32, "level": PROMPT.i64, "score": PROMPT.f64,
        "is_hard": PROMPT.bool, "topic": PROMPT.str, "raw": PROMPT.bytes, "ids": PROMPT.i32["*"], "big": PROMPT.i64["*"],
        "weights": PROMPT.f32["*"], "tags": PROMPT.str["*"], "none": PROMPT.i32["*"],
    }  # fmt: skip
    assert Data(rows).rows.types == expected
    assert Data(rows).rows["prompt_id"].tolist() == ["7", "7"]
    assert Data(rows, types={"level": SAMPLE.f32}).rows.types["level"] == SAMPLE.f32


def test_arrow_columns_keep_their_width() -> None:
    table = pa.table(
        {
            "prompt": pa.array(["a", "b"]).dictionary_encode(),
            "small": pa.array([1, 2], pa.int8()),
            "half": pa.array([0.5, 1.0], pa.float32()),
            "ids": pa.array([[1], []], pa.list_(pa.int64())),
            "prompt_id": pa.array([2**53, 2**53 + 1]),
        }
    )
    data = Data(table)
    assert data.rows.types["small"] == PROMPT.i32
    assert data.rows.types["half"] == PROMPT.f32
    assert data.rows.types["ids"] == PROMPT.i64["*"]
    assert data.rows["prompt_id"].tolist() == [str(2**53), str(2**53 + 1)]


def test_columns_may_be_chosen_and_renamed() -> None:
    rows = [{"question": "q", "solution": "s", "extra": {"a": 1}}]
    for given_rows in (rows, pa.Table.from_pylist(rows)):
        data = Data(given_rows, columns={"prompt": "question", "answer": "solution"})
        assert data.rows.to_pylist() == [{"prompt_id": "0", "prompt": "q", "answer": "s"}]
    assert Data(rows, columns=["question"]).rows.names == ("prompt_id", "question")
    assert Data(Data(ROWS), columns={"text": "prompt"}).rows.names == ("prompt_id", "text")
    with pytest.raises(DataError, match="no column 'qestion'; did you mean 'question'"):
        Data(rows, columns=["qestion"])
    with pytest.raises(ConfigError, match="list of names"):
        Data(rows, columns="question")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "no rows"),
        (pa.table({"prompt": pa.array([], pa.string())}), "no rows"),
        ([{"prompt": "a"}, {"prompt": None}], "column 'prompt' is None in row 1"),
        ([{"prompt": "a", "answer": "b"}, {"prompt": "a"}], "column 'answer' is missing in row 1"),
        (pa.table({"prompt": ["a", None]}), "'prompt' has no value in row 1"),
        (pa.table({"uid": pa.array([1, None])}), "'uid' has no value in row 1"),
        ([{"prompt": 5}], "'prompt' has type PROMPT.str; row 0 is 5 (int)"),
        ([{"prompt": "a", "n": 1}, {"prompt": "b", "n": "x"}], "'n' mixes i64 and str"),
        ([{"prompt": "a", "n": {"x": 1}}], "json.dumps"),
        ([{"prompt": [{"role": "user", "content": "hi"}]}], "adapters.datasets.data(dataset, messages='prompt')"),
        ([{"prompt": "a", "chat": [{"role": "user", "content": "hi"}]}], "adapters.datasets.data(dataset, messages='chat')"),
        ([{"prompt": "a", "chat": [{"a": "hi"}]}], "json.dumps"),
        ([{"prompt": "a", "n": [[1], [2]]}], "numbers, text, or a list of them"),
        ([{"prompt": "a", "n": [1, None]}], "None"),
        (["a", "b"], "row 0 of the data is str"),
        ({"prompt": ["a"]}, "found dict"),
        (5, "found int"),
        ([{"prompt_id": "x", "prompt": "a"}, {"prompt_id": "x", "prompt": "b"}], "rows 0 and 1 both have prompt_id 'x'"),
        ([{"sample_id": "x", "response": "a"}, {"sample_id": "x", "response": "b"}], "both have sample_id 'x'"),
        ([{"prompt_id": 0.5}], "row 0 is 0.5"),
        ([{"response_ids": [1, 2], "loss_mask": [True]}], "one value per response token"),
        ("nowhere.jsonl", "no file 'nowhere.jsonl'"),
    ],
)  # fmt: skip
def test_a_data_set_that_does_not_fit_says_where(rows: Any, says: str) -> None:
    with pytest.raises(DataError) as caught:
        Data(rows)
    assert says in str(caught.value)


def test_files_are_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for text, says in (
        ('{"prompt": "a"}\n{"prompt"\n', "rows.jsonl:2: not a JSON"),
        ("[1]\n", ":1: each line is a JSON object"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=says):
            Data(path)
    (tmp_path / "rows.csv").touch()
    with pytest.raises(DataError, match="not a .jsonl or .parquet"):
        Data(tmp_path / "rows.csv")


def test_splits_are_to_be_chosen() -> None:
    class Splits:
        def __init__(self) -> None:
            self.column_names = {"train": ["prompt"], "test": ["prompt"]}

    with pytest.raises(DataError, match=r"choose a split: data\['train'\]"):
        Data(Splits())


def test_prompts_of_responses_may_repeat() -> None:
    data = Data([{"prompt_id": "x", "response": "a"}, {"prompt_id": "x", "response": "b"}])
    assert data.rows["prompt_id"].tolist() == ["x", "x"]


# ------------------------------------------------------------------------------------------------------- the cursor


def ids(data: Data, *counts: int | None) -> list[str]:
    return [name for count in counts for name in data.next(count)["prompt_id"]]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(0, 3), st.booleans())
def test_every_row_comes_once_per_epoch_however_it_is_asked_for(
    size: int, counts: list[int], seed: int, is_shuffled: bool
) -> None:
    rows = [{"prompt": str(i)} for i in range(size)]
    data = Data(rows, shuffle=is_shuffled, seed=seed)
    got = [data.next(count) for count in counts]
    assert [len(rows) for rows in got] == counts
    flat = [name for batch in got for name in batch["prompt_id"]]
    for start in range(0, len(flat) - size + 1, size):
        assert sorted(flat[start : start + size]) == [str(i) for i in range(size)]
    assert flat == ids(Data(rows, shuffle=is_shuffled, seed=seed), sum(counts))
    assert data.epoch == sum(counts) // size
    if not is_shuffled:
        assert flat == [str(i % size) for i in range(len(flat))]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(1, 8), max_size=5), st.integers(1, 20), st.booleans())
def test_a_restored_cursor_goes_on_with_the_very_next_row(
    size: int, counts: list[int], more: int, is_paired: bool
) -> None:
    rows = [{"prompt": str(i), **({"pair_id": str(i // 2)} if is_paired else {})} for i in range(2 * size)]
    data = Data(rows, seed=5)
    for count in counts:
        data.next(count)
    saved = json.loads(json.dumps(data.state()))
    other = Data(rows, seed=99).opened(seed=1, name="x")
    other.next(3)  # wherever it is
    other.restore(saved)
    assert ids(other, more) == ids(data, more)
    assert other.state() == data.state()


def test_resuming_at_the_end_of_an_epoch_goes_on_with_the_next_ones_order() -> None:
    rows = [{"prompt": str(i)} for i in range(4)]
    straight = Data(rows, batch=2, seed=1)
    steps = [ids(straight, None) for _ in range(4)]
    saved_at_2 = Data(rows, batch=2, seed=1)
    ids(saved_at_2, None, None)
    resumed = Data(rows, batch=2)
    resumed.restore(saved_at_2.state())
    assert [ids(resumed, None), ids(resumed, None)] == steps[2:]
    assert sorted(steps[2] + steps[3]) == ["0", "1", "2", "3"]


def test_another_data_set_is_not_resumed_on() -> None:
    state = Data(ROWS).state()
    with pytest.raises(DataError, match="saved with 5 rows and shuffle=True; this one has 4"):
        Data(ROWS[:4]).restore(state)
    with pytest.raises(DataError, match="Resume with the same data"):
        Data(ROWS, shuffle=False).restore(state)


def test_order_follows_seed_name_and_epoch() -> None:
    rows = [{"prompt": str(i)} for i in range(40)]
    first = ids(Data(rows, seed=1, name="a"), 40)
    assert first == ids(Data(rows, seed=1, name="a"), 40)
    assert first != ids(Data(rows, seed=2, name="a"), 40)
    assert first != ids(Data(rows, seed=1, name="b"), 40)
    data = Data(rows, seed=1, name="a")
    assert ids(data, 40) != ids(data, 40)


def test_all_is_every_row_in_its_order_each_time() -> None:
    data = Data(ROWS, batch="all")
    for _ in range(3):
        assert ids(data, None) == ["0", "1", "2", "3", "4"]
    assert data.epoch == 3
    assert ids(data.with_default_batch(2), None) == ["0", "1", "2", "3", "4"]


def test_the_batch_size_is_the_data_sets_own_or_the_runs() -> None:
    assert len(Data(ROWS, batch=3).with_default_batch(2).next()) == 3
    assert len(Data(ROWS).with_default_batch(2).next()) == 2
    assert len(Data(ROWS).next()) == 5
    for wrong in (0, -1, "some", 2.5, True):
        with pytest.raises(ConfigError, match="at least 1, or 'all'"):
            Data(ROWS, batch=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1"):
        Data(ROWS).next(0)


def test_two_runs_share_no_cursor() -> None:
    data = Data(ROWS, seed=1)
    first, second = data.opened(seed=4, name="x"), data.opened(seed=4, name="x")
    assert ids(first, 3) == ids(second, 3)
    assert (data.epoch, data.name) == (0, "")
    assert first.rows is second.rows


def test_pairs_stay_together() -> None:
    rows = [{"prompt": "p", "response": str(i), "pair_id": str(i % 6), "chosen": i < 6} for i in range(12)]
    data = Data(rows, seed=0)
    seen: list[str] = []
    for count in (4, 5, 1, 2):
        batch = data.next(count)
        assert all(len(group) == 2 for group in batch.group_indices("pair_id"))
        assert len(batch) == max(2, count - count % 2)
        seen += batch["response"].tolist()
    assert sorted(seen, key=int) == [str(i) for i in range(12)]


def test_rows_given_out_are_read_only() -> None:
    data = Data([{"prompt": "a", "level": 1}], batch="all")
    with pytest.raises(ValueError, match="read-only"):
        data.next()["level"][0] = 5
    assert np.asarray(data.rows["level"]).tolist() == [1]
