"""Row sets against Python's own sets."""

from itertools import pairwise

import numpy as np
from hypothesis import given, strategies as st

from flowrl.store.intervals import RowSet, common, first_of, length

pair = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda p: (p[0], p[0] + p[1]))
changes = st.lists(st.tuples(st.sampled_from(["add", "remove"]), pair), max_size=25)


def apply(steps: list[tuple[str, tuple[int, int]]]) -> tuple[RowSet, set[int]]:
    rows, model = RowSet(), set[int]()
    for what, (start, stop) in steps:
        getattr(rows, what)(start, stop)
        model = model | set(range(start, stop)) if what == "add" else model - set(range(start, stop))
    return rows, model


@given(changes, pair)
def test_a_row_set_is_a_set_of_numbers(steps: list[tuple[str, tuple[int, int]]], asked: tuple[int, int]) -> None:
    rows, model = apply(steps)
    assert rows.numbers().tolist() == sorted(model)
    assert len(rows) == len(model)
    pairs = rows.pairs()
    assert all(a < b for a, b in pairs)
    assert all(b < c for (_, b), (c, _) in pairwise(pairs)), "neighbours are one interval"
    assert RowSet.of(np.array(sorted(model) * 2, np.int64)) == rows
    assert RowSet(pairs) == rows.copy() == rows
    within = set(range(*asked))
    assert rows.covers(*asked) == (within <= model)
    assert rows.meets(*asked) == bool(within & model)
    assert {n for a, b in rows.clip(*asked) for n in range(a, b)} == within & model
    assert all((n in rows) == (n in model) for n in range(60))
    if model:
        places = np.arange(len(model))
        assert rows.nth(places).tolist() == sorted(model)


@given(changes, changes, changes, st.integers(0, 30))
def test_what_sets_have_in_common(one: list, two: list, three: list, count: int) -> None:  # type: ignore[type-arg]
    (a, ma), (b, mb), (c, mc) = apply(one), apply(two), apply(three)
    wanted = sorted((ma & mb) - mc)
    assert [n for start, stop in common([a, b], [c]) for n in range(start, stop)] == wanted
    found = first_of(count, [a, b], [c])
    assert [n for start, stop in found for n in range(start, stop)] == wanted[:count]
    assert length(found) == min(count, len(wanted))
