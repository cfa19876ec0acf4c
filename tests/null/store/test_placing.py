"""Places of a whole segment against those of its columns one by one."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from flowrl.schema import PROMPT, SAMPLE, TOKEN
from flowrl.store import layout
from flowrl.store.kernels import Gather, choose, forced, locate
from flowrl.store.loader import packed, padded
from flowrl.store.placing import recipe, split
from flowrl.store.table import ExperienceTable
from flowrl.store.writing import _text
from tests.null.store.strategies import batch_of, row_lists

KERNELS = ["numpy", *(["numba"] if choose() == "numba" else [])]


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=60, deadline=None)
@given(row_lists, st.data())
def test_places_are_those_of_each_column(kernel: str, rows: list[dict[str, Any]], data: st.DataObject) -> None:
    batch = batch_of([*rows, *rows[:2]])  # neighbours that are equal, so that prompts are stored once
    prepared = layout.prepare(batch.stored, batch.types, len(batch))
    root = np.zeros(prepared.nbytes, np.uint8)
    prepared.write(root)
    wanted = {column.name: layout.places(column, root, len(batch)) for column in prepared.layouts}
    names = tuple([name for name, there in wanted.items() if there is not None])
    if not names:
        return
    same, buffers = split(_text(prepared.layouts))
    found = recipe(names, batch.types, [(names, same)])
    assert found is not None and found.lines[0] is not None
    low = data.draw(st.integers(0, len(batch)))
    high = data.draw(st.integers(low, len(batch)))
    matrix = np.full((found.form.lines, high - low + 2), -1, np.int64)
    with forced(kernel):
        assert locate(root, buffers, found.lines[0], low, high, matrix, 1)
    assert (matrix[:, [0, -1]] == -1).all()
    for number, name in enumerate(names):
        place = wanted[name]
        assert place is not None
        assert matrix[number, 1:-1].tolist() == place.address[low:high].tolist()
        assert (found.kinds[number][0] == 2) == place.bits and found.kinds[number][1] == place.inner
        if number in found.form.keys:
            assert place.length is not None
            axis = len(names) + found.form.keys.index(number)
            assert matrix[axis, 1:-1].tolist() == place.length[low:high].tolist()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "lacks", [[0, -1, 64, 16], [0, 64, 128, 16], [-8, 8, 64, 16], [0, 8, 64, 8], [0, 1 << 60, 64, 16]]
)
def test_buffers_that_are_compressed_or_not_in_the_block_are_not_read(kernel: str, lacks: list[int]) -> None:
    root = np.zeros(128, np.uint8)
    lines = np.array([[1, 4, 1, 0, 1, -1, 0, 1]])
    matrix = np.zeros((2, 1), np.int64)
    with forced(kernel):
        assert locate(root, np.array([0, 8, 64, 16]), lines, 0, 1, matrix, 0)
        assert not locate(root, np.array(lacks), lines, 0, 1, matrix, 0)


def test_compressed_buffers_are_known_as_such() -> None:
    assert split('[]\n[[[0,8,"lz4",64],[64,16]]]')[1].tolist() == [0, -1, 64, 16]
    assert split("[]\n[[[0,8],[64,16]],[[128,4]]]")[1].tolist() == [0, 8, 64, 16, 128, 4]


def test_text_has_no_recipe() -> None:
    same = '[["note","sample.str","text",[],0]]'
    assert recipe(("note",), {"note": SAMPLE.str}, [(("note",), same)]) is None
    assert recipe(("x",), {"x": TOKEN.i32}, [(("note",), same)]) is None


@pytest.mark.parametrize("kernel", KERNELS)
def test_parts_stored_in_different_ways_are_one_source(kernel: str) -> None:
    prompt = np.arange(40, dtype=np.int32)

    def rows(first: int, count: int, *, same: bool) -> list[dict[str, Any]]:
        return [
            {
                "prompt_ids": prompt if same else prompt[: 1 + (first + i) % 7],
                "response_ids": np.arange(1 + (first + i) % 5, dtype=np.int32),
                "loss_mask": np.arange(1 + (first + i) % 5) % 2 == 0,
                "reward": float(first + i),
            }
            for i in range(count)
        ]

    types = {"prompt_ids": PROMPT.i32["*"], "response_ids": TOKEN.i32, "loss_mask": TOKEN.bool, "reward": SAMPLE.f32}
    with ExperienceTable(memory="private", chunk_rows=4) as table, forced(kernel):
        table.append(rows(0, 3, same=True), types)
        table.append(rows(3, 6, same=False), types)
        table.append(rows(9, 4, same=True), types)
        table.add_column("advantage", np.arange(13, dtype=np.float32), SAMPLE.f32)
        view, _ = table._view(None)
        plan = view.places(list(view.types))
        assert plan is not None and len(view.parts) > 3
        assert {len(part.sources) for part in view.parts} == {2}
        gather, order = Gather(plan), [12, 3, 3, 0, 8, 9]
        batch = table.take(order)
        for found, wanted in (
            (gather.padded(np.array(order), multiple=4), padded(batch, multiple=4)),
            (gather.packed(np.array(order)), packed(batch)),
        ):
            assert list(found) == list(wanted)
            for name, array in wanted.items():
                assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
                assert found[name].tobytes() == array.tobytes(), name
