"""Places of a whole segment against those of its columns one by one."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from flowrl.store import layout
from flowrl.store.placing import places_of
from tests.null.store.strategies import batch_of, row_lists


@settings(max_examples=60, deadline=None)
@given(row_lists)
def test_places_are_those_of_each_column(rows: list[dict[str, Any]]) -> None:
    batch = batch_of([*rows, *rows[:2]])  # neighbours that are equal, so that prompts are stored once
    prepared = layout.prepare(batch.stored, batch.types, len(batch))
    root = np.zeros(prepared.nbytes, np.uint8)
    prepared.write(root)
    found = places_of(prepared.layouts, root, len(batch))
    for column in prepared.layouts:
        wanted = layout.places(column, root, len(batch))
        if wanted is None:
            assert column.name not in found
            continue
        mine = found[column.name]
        assert mine.address.tolist() == wanted.address.tolist()
        assert (mine.length is None) == (wanted.length is None)
        if mine.length is not None and wanted.length is not None:
            assert mine.length.tolist() == wanted.length.tolist()
        assert (mine.bits, mine.inner) == (wanted.bits, wanted.inner)


def test_compressed_columns_have_no_places() -> None:
    buffers = (layout.Buffer(0, 8, "lz4", 64), layout.Buffer(64, 16))
    column = layout.ColumnLayout("reward", pytest.importorskip("flowrl.schema").SAMPLE.f32, "plain", buffers[:1])
    assert places_of([column], np.zeros(128, np.uint8), 4) == {}
