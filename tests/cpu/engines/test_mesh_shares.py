"""How rows are shared over ranks: every row once, as many blocks on each rank, full ones alike."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from flowrl.engines.mesh.passes import has_pairs
from flowrl.engines.mesh.shares import nothing, shared_blocks, shares
from flowrl.engines.packing import split_by_tokens
from flowrl.schema.ragged import Ragged

LENGTHS = st.lists(st.integers(1, 40), max_size=30).map(lambda found: np.asarray(found, np.int64))


def test_the_largest_first_each_to_the_emptiest() -> None:
    found = shares(np.array([5, 1, 4, 2]), 2)
    assert [rows.tolist() for rows in found] == [[0, 1], [2, 3]]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_every_row_is_on_one_rank_and_groups_stay(
    lengths: np.ndarray, ranks: int, kinds: int, has_groups: bool
) -> None:
    groups = np.arange(len(lengths)) % kinds if has_groups else None
    found = shares(lengths, ranks, groups=groups)
    assert len(found) == ranks
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.arange(len(lengths)))
    if groups is not None:
        owners = [rank for group in np.unique(groups) for rank, rows in enumerate(found) if group in groups[rows]]
        assert len(owners) == len(np.unique(groups))
    # the emptiest rank was given its last unit when it held an even share at most
    units = lengths if groups is None else np.bincount(groups, weights=lengths)
    fullest = max(int(lengths[rows].sum()) for rows in found)
    assert fullest <= lengths.sum() / ranks + units.max(initial=0)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 6), st.integers(1, 100), st.integers(1, 5), st.booleans())
def test_all_ranks_have_as_many_blocks(
    lengths: np.ndarray, ranks: int, budget: int, kinds: int, has_groups: bool
) -> None:
    groups = np.arange(len(lengths)) % kinds if has_groups else None
    found = [shared_blocks(lengths, budget, ranks, rank, groups=groups) for rank in range(ranks)]
    assert len({len(blocks) for blocks in found}) == 1
    rows = [row for blocks in found for block in blocks for row in block.tolist()]
    assert sorted(rows) == list(range(len(lengths)))
    assert not found[0] or any(len(blocks[-1]) for blocks in found)  # no pass of which every rank does nothing
    for blocks in found:
        filled = [len(block) > 0 for block in blocks]
        assert filled == sorted(filled, reverse=True)  # what is empty comes last
        for block in blocks:
            alone = len(block) <= 1 or (groups is not None and len(set(groups[block])) == 1)
            assert alone or len(block) * lengths[block].max() <= budget


def test_one_rank_has_the_blocks_of_one_device() -> None:
    lengths = np.array([3, 9, 4, 4, 1])
    groups = np.array([0, 0, 1, 2, 1])
    for kinds in (None, groups):
        mine = shared_blocks(lengths, 10, 1, 0, groups=kinds)
        assert [block.tolist() for block in mine] == [b.tolist() for b in split_by_tokens(lengths, 10, groups=kinds)]


def test_nothing_is_one_token_of_which_nothing_is_read() -> None:
    batch = nothing()
    assert batch.ids.shape == (1, 1)
    assert len(batch.rows) == len(batch.row_T) == len(batch.flat_T) == len(batch.last_B) == 0


@pytest.mark.parametrize(
    ("prompts", "rows", "expected"),
    [
        ([[1, 2], [1], [1, 2]], None, True),
        ([[1, 2], [1], [1, 2]], [0, 1], False),
        ([[1], [2]], None, False),
        ([], None, False),
    ],
)
def test_pairs_are_rows_with_one_prompt(prompts: list[list[int]], rows: list[int] | None, expected: bool) -> None:
    assert has_pairs(Ragged.of(prompts, np.int32), None if rows is None else np.array(rows)) == expected
