"""Numbers of Python are written at once only where that gives what the careful way gives."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from flowrl.errors import FlowError
from flowrl.schema import SAMPLE, ColumnType
from flowrl.store.columns import NUMPY_DTYPES, to_stored
from flowrl.store.pyvalues import numbers_of

KINDS = (SAMPLE.i32, SAMPLE.i64, SAMPLE.u8, SAMPLE.f16, SAMPLE.f32, SAMPLE.f64)
EDGES = [0, 1, -1, 255, 256, 2**31 - 1, 2**31, -(2**31) - 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**30]
FLOATS = [0.0, -0.0, 1e-46, 65504.0, 65505.0, 3.4028234663852886e38, 3.5e38, 1.7e308, float("inf"), float("nan")]
numbers = st.one_of(
    st.lists(st.sampled_from(EDGES) | st.integers(), min_size=1, max_size=4),
    st.lists(st.sampled_from(FLOATS) | st.floats(), min_size=1, max_size=4),
    st.lists(st.sampled_from([True, 1, 1.5]), min_size=1, max_size=4),
)


@given(st.sampled_from(KINDS), numbers)
def test_what_is_written_at_once_is_what_the_careful_way_gives(kind: ColumnType, values: list[Any]) -> None:
    found = numbers_of(values, set(map(type, values)), NUMPY_DTYPES[kind.dtype])
    if found is None:
        return
    stored, _ = to_stored("x", values, kind, len(values))
    assert isinstance(stored, np.ndarray)
    assert stored.dtype == found.dtype
    assert stored.tobytes() == found.tobytes()


@pytest.mark.parametrize("kind, values", [(SAMPLE.i32, [3, -4]), (SAMPLE.u8, [0, 255]), (SAMPLE.f32, [0.5, -2.0])])
def test_usual_numbers_are_written_at_once(kind: ColumnType, values: list[Any]) -> None:
    found = numbers_of(values, set(map(type, values)), NUMPY_DTYPES[kind.dtype])
    assert found is not None
    assert found.tolist() == values


@pytest.mark.parametrize(
    "kind, values", [(SAMPLE.i32, [2**31]), (SAMPLE.u8, [-1]), (SAMPLE.i64, [2**63]), (SAMPLE.i32, [1.5])]
)
def test_numbers_that_do_not_fit_are_left_to_who_says_it(kind: ColumnType, values: list[Any]) -> None:
    assert numbers_of(values, set(map(type, values)), NUMPY_DTYPES[kind.dtype]) is None
    with pytest.raises(FlowError):
        to_stored("x", values, kind, len(values))
