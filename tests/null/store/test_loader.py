"""Batches from a table: every row once, groups whole, bounds kept, layouts that hold the same values."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from flowrl.errors import ConfigError, DataError
from flowrl.schema import PROMPT, SAMPLE, TOKEN
from flowrl.store.loader import Loader, packed, padded
from flowrl.store.rows import RowBatch
from flowrl.store.table import ExperienceTable
from tests.null.store.strategies import batch_of, row_lists


def tokens(lengths: list[int], groups: str = "") -> RowBatch:
    count = len(lengths)
    return RowBatch(
        {
            "prompt_id": list(groups) or [str(i) for i in range(count)],
            "prompt_ids": [[7]] * count,
            "response_ids": [[10 + i] * n for i, n in enumerate(lengths)],
            "reward": np.arange(count),
        },
        {"prompt_id": PROMPT.str, "prompt_ids": PROMPT.i32["*"], "response_ids": TOKEN.i32, "reward": SAMPLE.f32},
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from("abcd")), max_size=20),
    st.sampled_from([{"batch_rows": 20}, {"max_tokens": 400}, {"batch_rows": 25, "max_tokens": 400}, {}]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["rows", "packed", "padded"]),
)
def test_every_row_comes_once_and_no_bound_is_crossed(
    rows: list[tuple[int, str]], bounds: dict[str, int], is_shuffled: bool, is_grouped: bool, layout: str
) -> None:
    batch = tokens([n for n, _ in rows], "".join(g for _, g in rows))
    loader = Loader(
        batch, **bounds, shuffle=is_shuffled, seed=3, group_by="prompt_id" if is_grouped else None, layout=layout
    )
    seen: list[float] = []
    homes: dict[str, set[int]] = {}
    for number, part in enumerate(loader):
        found = part["reward"].tolist()
        assert 0 < len(found) <= bounds.get("batch_rows", 32 if not bounds else 10**9)
        if layout == "packed" and "max_tokens" in bounds:
            assert len(part["response_ids"]) + len(part["prompt_ids"]) <= bounds["max_tokens"]
        if layout == "padded" and "max_tokens" in bounds:
            assert part["response_ids"].size + part["prompt_ids"].size <= bounds["max_tokens"]
        seen += found
        for prompt in part["prompt_id"]:
            homes.setdefault(prompt, set()).add(number)
    assert sorted(seen) == list(range(len(rows)))
    if not is_shuffled and not is_grouped:
        assert seen == sorted(seen)
    if is_grouped:
        assert all(len(numbers) == 1 for numbers in homes.values())


def test_batches_are_as_full_as_their_bounds_let_them() -> None:
    assert [len(part) for part in Loader(tokens([1] * 70))] == [32, 32, 6]
    assert [len(part) for part in Loader(tokens([1] * 7), batch_rows=3)] == [3, 3, 1]
    assert [len(part) for part in Loader(tokens([1] * 7), max_tokens=6)] == [3, 3, 1]  # a prompt has one token too
    assert [len(part) for part in Loader(tokens([1] * 7, "aabbccc"), batch_rows=4, group_by="prompt_id")] == [4, 3]


def test_shuffling_depends_on_seed_and_epoch_alone() -> None:
    batch = tokens([1] * 50)

    def order(loader: Loader) -> list[float]:
        return [value for part in loader for value in part["reward"].tolist()]

    loader = Loader(batch, batch_rows=7, shuffle=True, seed=1)
    first, second = order(loader), order(loader)
    assert first != second
    again = Loader(batch, batch_rows=50, shuffle=True, seed=1)  # the batch size does not change the order
    assert order(again) == first
    again.epoch = 1
    assert order(again) == second
    assert order(Loader(batch, shuffle=True, seed=2)) != first


@settings(max_examples=40, deadline=None)
@given(row_lists)
def test_layouts_hold_the_values_of_the_rows(rows: list[dict[str, Any]]) -> None:
    batch = batch_of(rows)
    flat, full = packed(batch), padded(batch)
    for name in ("response_ids", "teacher_ids", "prompt_ids", "step_text"):
        bounds = flat["cu_seqlens" if name in ("response_ids", "teacher_ids") else f"{name}.cu_seqlens"]
        mask = full["mask" if name in ("response_ids", "teacher_ids") else f"{name}.mask"]
        assert bounds.dtype == np.int32 and mask.dtype == np.bool_
        for i, r in enumerate(rows):
            assert flat[name][bounds[i] : bounds[i + 1]].tolist() == r[name]
            assert full[name][i][mask[i]].tolist() == r[name]
            assert mask[i].tolist() == sorted(mask[i].tolist(), reverse=True)  # padding is on the right
    assert flat["reward"] is batch["reward"]


def test_padding_is_zero_and_rounded_up() -> None:
    made = padded(tokens([1, 3, 0]), multiple=4)
    assert made["response_ids"].tolist() == [[10, 0, 0, 0], [11, 11, 11, 0], [0, 0, 0, 0]]
    assert made["mask"].sum(1).tolist() == [1, 3, 0]
    assert made["prompt_ids"].shape == (3, 4)
    assert padded(tokens([]))["response_ids"].shape == (0, 0)


def test_bounds_of_packed_rows_are_those_of_the_rows() -> None:
    made = packed(tokens([2, 0, 3]))
    assert made["cu_seqlens"].tolist() == [0, 2, 2, 5]
    assert made["prompt_ids.cu_seqlens"].tolist() == [0, 1, 2, 3]


def test_what_fits_in_no_batch_is_refused_before_the_first() -> None:
    with pytest.raises(DataError, match="row 1 has 10 tokens and a batch takes 8; raise max_tokens"):
        Loader(tokens([2, 9, 1]), max_tokens=8)
    with pytest.raises(DataError, match="group of 3 rows has 9 tokens"):
        Loader(tokens([2, 2, 2], "aaa"), max_tokens=8, group_by="prompt_id")
    with pytest.raises(DataError, match="group of equal 'prompt_id' has 3 rows and a batch takes 2"):
        Loader(tokens([2, 2, 2], "aaa"), batch_rows=2, group_by="prompt_id")


def test_tokens_count_even_when_their_columns_are_not_asked_for() -> None:
    loader = Loader(tokens([3, 3, 3]), max_tokens=8, columns=["reward"])
    assert [part["reward"].tolist() for part in loader] == [[0.0, 1.0], [2.0]]
    assert all(part.names == ("reward",) for part in Loader(tokens([1]), columns=["reward"]))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_rows": 0}, "batch_rows of at least 1"),
        ({"max_tokens": -1}, "max_tokens of at least 1"),
        ({"layout": "packd"}, "did you mean 'packed'"),
        ({"max_tokens": 5, "columns": None}, "use batch_rows"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any], says: str) -> None:
    rows = tokens([1, 2]).select(["reward"])
    with pytest.raises(ConfigError, match=says):
        Loader(rows, **options)
    table = ExperienceTable()
    table.append(rows)
    for name in ("device", "pin", "prefetch", "num_workers"):
        with pytest.raises(TypeError, match=name):  # what is not there yet is not accepted silently
            table.loader(**{name: 1})
