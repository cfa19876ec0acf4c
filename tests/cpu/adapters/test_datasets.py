"""Hugging Face data sets, both ways."""

import numpy as np
import pyarrow as pa
import pytest

import flowrl as fr
from flowrl.errors import ConfigError, DataError
from flowrl_operators import adapters

datasets = pytest.importorskip("datasets")

ROWS = [{"question": f"{n}+1?", "answer": str(n + 1), "level": n, "tags": [n, n]} for n in range(5)]


class Template:
    """A tokenizer that counts characters, with a chat template."""

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]"

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}


def test_columns_are_mapped_and_stay_in_arrow(monkeypatch) -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    monkeypatch.setattr(datasets.arrow_dataset.Dataset, "__iter__", lambda self: pytest.fail("read row by row"))
    data = adapters.datasets.data(
        dataset, columns={"prompt": "question", "answer": "answer", "level": "level"}, batch=2, shuffle=False
    )
    rows = data.next()
    assert rows["prompt"].tolist() == ["0+1?", "1+1?"]
    assert rows["level"].tolist() == [0, 1]
    assert str(data.schema["level"].type) == "PROMPT.i64"


def test_rows_that_were_selected_and_shuffled_are_those_that_come() -> None:
    dataset = datasets.Dataset.from_list(ROWS).shuffle(seed=3).select([4, 0]).rename_column("question", "prompt")
    data = adapters.datasets.data(dataset, shuffle=False)
    assert data.rows["prompt"].tolist() == dataset["prompt"][:]
    assert data.rows["tags"].to_list() == dataset["tags"][:]
    assert len(adapters.datasets.data(dataset, take=1)) == 1


def test_streams_are_read_as_far_as_told() -> None:
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    assert len(adapters.datasets.data(stream, take=3)) == 3
    with pytest.raises(ConfigError, match="take="):
        adapters.datasets.data(stream)
    with pytest.raises(DataError, match="no rows"):
        adapters.datasets.data(stream, take=0)


def test_splits_and_unknown_columns_are_told() -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    with pytest.raises(DataError, match=r"several data sets in one \(train\)"):
        adapters.datasets.data(datasets.DatasetDict(train=dataset))
    with pytest.raises(DataError, match="no column 'prompt'; it has question, answer, level, tags"):
        adapters.datasets.data(dataset, columns=["prompt"])
    with pytest.raises(DataError, match="no column 'chat'"):
        adapters.datasets.data(dataset, messages="chat")


CHATS = [
    {"chat": [{"role": "user", "content": "hi"}], "info": {"a": 1, "b": [1, 2]}},
    {"chat": [{"role": "user", "content": "ho"}], "info": {"a": 2, "b": []}},
]


def test_one_message_becomes_its_text_and_dicts_json() -> None:
    data = adapters.datasets.data(datasets.Dataset.from_list(CHATS), messages="chat", as_json=["info"])
    assert data.rows["prompt"].tolist() == ["hi", "ho"]
    assert data.rows["info"].tolist() == ['{"a": 1, "b": [1, 2]}', '{"a": 2, "b": []}']
    assert "chat" not in data.schema.names


@pytest.mark.parametrize("name", ["prompt", "chat"])
@pytest.mark.parametrize("kind", ["set", "table", "list"])
def test_data_that_is_given_as_it_is_names_what_takes_messages(name: str, kind: str) -> None:
    rows = [{name: row["chat"], "answer": "2"} for row in CHATS]
    given = rows if kind == "list" else datasets.Dataset.from_list(rows)
    given = given.data.table if kind == "table" else given  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=rf"adapters\.datasets\.data\(dataset, messages='{name}'\)"):
        fr.Data(given)
    assert adapters.datasets.data(given, messages=name).rows["prompt"].tolist() == ["hi", "ho"]


def test_longer_chats_need_the_template() -> None:
    rows = [{"chat": [{"role": "system", "content": "s"}, *row["chat"]]} for row in CHATS]  # type: ignore[misc]
    dataset = datasets.Dataset.from_list(rows)
    with pytest.raises(DataError, match="row 0 is no single user message but system, user"):
        adapters.datasets.data(dataset, messages="chat")
    data = adapters.datasets.data(dataset, messages="chat", tokenizer=Template())
    assert data.rows["prompt"][1] == "[system]s[user]ho[assistant]"
    assert data.rows["prompt_ids"][1].tolist() == [ord(c) for c in "[system]s[user]ho[assistant]"]
    assert str(data.schema["prompt_ids"].type) == "PROMPT.i32['*']"


def test_rows_go_there_and_back() -> None:
    table = fr.ExperienceTable()
    table.append(
        [
            {"prompt_id": "a", "response_ids": [1, 2], "loss_mask": [True, False], "reward": 0.5},
            {"prompt_id": "b", "response_ids": [], "loss_mask": [], "reward": float("nan")},
        ]
    )
    table.add_column("embedding", np.ones((2, 3), np.float32), fr.SAMPLE.f32[3])
    dataset = adapters.datasets.dataset(table)
    assert dataset.column_names == ["prompt_id", "response_ids", "loss_mask", "reward", "embedding"]
    assert dataset[0]["response_ids"] == [1, 2]
    again = fr.ExperienceTable()
    again.append(dataset.data.table)
    assert again.schema == table.schema
    assert again["response_ids"] == table["response_ids"]
    np.testing.assert_array_equal(again["reward"], table["reward"])
    assert adapters.datasets.dataset(table, columns=["reward"]).column_names == ["reward"]


def test_numbers_are_not_copied() -> None:
    table = fr.ExperienceTable()
    table.append([{"prompt_id": str(n), "reward": float(n)} for n in range(3)])
    arrow = adapters.datasets.dataset(table).data.table["reward"].chunk(0)
    assert arrow.buffers()[1].address == table.batch()["reward"].ctypes.data


def test_data_of_a_flow_and_saved_sets(tmp_path) -> None:
    made = adapters.datasets.dataset(fr.Data([{"prompt": "a"}, {"prompt": "b"}]))
    made.save_to_disk(str(tmp_path / "saved"))
    loaded = datasets.load_from_disk(str(tmp_path / "saved"))
    assert adapters.datasets.data(loaded).rows["prompt"].tolist() == ["a", "b"]


def test_plain_arrow_tables_pass() -> None:
    assert len(adapters.datasets.data(pa.table({"prompt": ["a", "b"]}), take=1)) == 1
