"""A data frame of rows; here and not in tests/null, because polars looks for torch when it is imported."""

import pytest

from flowrl.schema import SAMPLE, TOKEN
from flowrl.store.interop import to_polars
from flowrl.store.rows import RowBatch
from flowrl.store.table import ExperienceTable

LAST = 2**53 + 1
"""An id that a float64 cannot hold."""


def test_polars_has_every_value() -> None:
    pytest.importorskip("polars")
    kinds = {"count": SAMPLE.i64, "response_ids": TOKEN.i32, "teacher_logprobs": TOKEN.f16[2]}
    halves = [[[0.5, 1], [2, 3]], [], [[4, 5]]]
    columns = {"count": [LAST, -1, 0], "response_ids": [[1, 2], [], [7]], "teacher_logprobs": halves}
    table = ExperienceTable()
    table.append(RowBatch(columns, kinds))
    frame = to_polars(table)
    assert frame["count"].to_list() == [LAST, -1, 0]
    assert str(frame["count"].dtype) == "Int64"
    assert frame["response_ids"].to_list() == [[1, 2], [], [7]]
    assert frame["teacher_logprobs"].to_list()[0] == halves[0]
