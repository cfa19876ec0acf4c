"""How rows become batches: nothing lost, nothing doubled, whatever the sizes."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from flowrl.engines.packing import Sequences, joined_units, make_batch, minibatches, needed_lengths, split_by_tokens
from flowrl.engines.protocol import TokenRows
from flowrl.errors import DataError
from flowrl.schema.ragged import Ragged

sizes = st.lists(st.integers(0, 30), min_size=1, max_size=25)


@given(sizes, st.integers(1, 80))
def test_blocks_hold_every_row_once_within_the_budget(lengths, budget):
    lengths = np.array(lengths)
    blocks = list(split_by_tokens(lengths, budget))
    assert sorted(np.concatenate(blocks).tolist()) == list(range(len(lengths)))
    for block in blocks:
        assert len(block) == 1 or len(block) * lengths[block].max() <= budget


@given(sizes, st.integers(1, 80), st.randoms(use_true_random=False))
def test_groups_stay_in_one_block(lengths, budget, random):
    lengths = np.array(lengths)
    groups = np.array([random.randrange(len(lengths)) for _ in lengths])
    blocks = list(split_by_tokens(lengths, budget, groups=groups))
    assert sorted(np.concatenate(blocks).tolist()) == list(range(len(lengths)))
    held = [set(groups[block]) for block in blocks]
    assert sum(map(len, held)) == len(set(groups))
    for block, inside in zip(blocks, held, strict=True):
        assert len(inside) == 1 or len(block) * lengths[block].max() <= budget


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(1, 6), st.booleans(), st.integers(0, 5))
def test_minibatches_are_even_and_keep_units(keys, count, shuffle, epoch):
    units = joined_units(len(keys), np.array(keys))
    if count > len(set(keys)):
        with pytest.raises(DataError, match=f"{count} mini-batches.*found {len(set(keys))}"):
            minibatches(units, count, shuffle=shuffle, seed=3, epoch=epoch)
        return
    parts = minibatches(units, count, shuffle=shuffle, seed=3, epoch=epoch)
    assert len(parts) == count
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(keys)))
    per_part = [len(set(units[part])) for part in parts]
    assert sum(per_part) == len(set(keys)) and max(per_part) - min(per_part) <= 1


def test_order_follows_seed_and_epoch():
    units = np.arange(12)

    def order(seed, epoch, shuffle=True):
        return np.concatenate(minibatches(units, 3, shuffle=shuffle, seed=seed, epoch=epoch)).tolist()

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1) != order(2, 1)
    assert order(1, 5, shuffle=False) == list(range(12))


def test_units_join_what_any_key_joins():
    pairs = np.array(["x", "x", "y", "z", "z", "w"], dtype=object)
    prompts = np.array([1, 2, 2, 3, 4, 5])
    assert joined_units(6).tolist() == [0, 1, 2, 3, 4, 5]
    assert joined_units(6, None, prompts).tolist() == [0, 1, 1, 2, 3, 4]
    assert joined_units(6, pairs, prompts).tolist() == [0, 0, 0, 1, 1, 2]
    # a chain that needs several passes
    left, right = np.array([0, 1, 1, 2, 2, 3]), np.array([9, 9, 8, 8, 7, 7])
    assert joined_units(6, left, right).tolist() == [0] * 6


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=8), st.randoms(use_true_random=False)
)
def test_a_batch_points_at_the_right_tokens(shape, random):
    prompts = [[random.randrange(1, 50) for _ in range(p)] for p, _ in shape]
    responses = [[random.randrange(1, 50) for _ in range(r)] for _, r in shape]
    rows = TokenRows(Ragged.of(prompts, np.int32), Ragged.of(responses, np.int32), np.ones(len(shape), np.float32))
    mask = np.array([random.random() < 0.6 for _ in range(len(rows.response_ids.values))], bool)
    sequences = Sequences.of(rows, num_ids=50)
    chosen = np.array(random.sample(range(len(shape)), random.randint(1, len(shape))))
    batch = make_batch(sequences, rows.response_ids, chosen, mask=mask, fill=0)
    assert batch.ids.shape[1] == needed_lengths(sequences, rows.response_ids, mask)[chosen].max(initial=0)
    expected = []
    for place, row in enumerate(chosen):
        full = prompts[row] + responses[row]
        start = rows.response_ids.offsets[row]
        for j, token in enumerate(responses[row]):
            if mask[start + j]:
                before = len(prompts[row]) + j - 1
                assert batch.ids[place, : before + 1].tolist() == full[: before + 1]
                expected.append((place, before, start + j, token))
    found = zip(batch.row_T, batch.position_T, batch.flat_T, batch.target_T, strict=True)
    assert [tuple(map(int, f)) for f in found] == expected


def test_bad_rows_are_named():
    def join(prompts, responses, **options):
        rows = TokenRows(
            Ragged.of(prompts, np.int32), Ragged.of(responses, np.int32), np.ones(len(prompts), np.float32)
        )
        return Sequences.of(rows, num_ids=10, **options)

    with pytest.raises(DataError, match="row 1 has an empty prompt"):
        join([[1], [], [2]], [[1], [2], []])
    with pytest.raises(DataError, match="row 2 holds token id 10.*0 to 9"):
        join([[1], [2], [3]], [[1], [], [4, 10]])
    with pytest.raises(DataError, match="row 1 has 2 prompt and 3 response tokens.*holds 4"):
        join([[1], [2, 3]], [[1], [1, 2, 3]], max_length=4)
    with pytest.raises(DataError, match="2 rows and response_ids 1"):
        join([[1], [2]], [[1]])
