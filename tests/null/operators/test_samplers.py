"""Parts of equal work, batches under a budget, and stale rows that count without training."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

import flowrl as fr
from flowrl.errors import ConfigError, DataError
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch
from flowrl.testing import operator_cases
from flowrl_operators import advantages, masks, samplers

lengths = st.lists(st.integers(0, 60), min_size=1, max_size=24)
SHARES = [samplers.balanced_parts, samplers.greedy_parts]


def rows_of(parts: list[np.ndarray]) -> list[int]:
    return sorted(int(row) for part in parts for row in part)


@given(lengths, st.integers(1, 6), st.booleans(), st.sampled_from(SHARES))
def test_each_row_is_in_one_part_and_none_is_empty(costs, parts, equal_size, share) -> None:  # type: ignore[no-untyped-def]
    if parts > len(costs):
        with pytest.raises(ConfigError, match="no part may be empty"):
            share(costs, parts, equal_size=equal_size)
        return
    found = share(costs, parts, equal_size=equal_size)
    assert rows_of(found) == list(range(len(costs)))
    sizes = [len(part) for part in found]
    assert len(found) == parts
    if equal_size:
        assert max(sizes) - min(sizes) <= 1
    elif share is samplers.balanced_parts or min(costs) > 0:
        assert min(sizes) > 0
    assert all((np.diff(part) > 0).all() for part in found)


@given(lengths, st.integers(1, 6))
@example([8, 7, 6, 5, 4], 2)
def test_how_equal_balanced_parts_are(costs: list[int], parts: int) -> None:
    parts = min(parts, len(costs))
    free, equal = (samplers.sums_of(costs, samplers.balanced_parts(costs, parts, equal_size=e)) for e in (False, True))
    assert np.ptp(free) <= max(costs)
    descending = sorted(costs, reverse=True)
    blocks = [descending[i : i + parts] for i in range(0, len(costs), parts)]
    blocks[-1] += [0] * (parts - len(blocks[-1]))
    assert np.ptp(equal) <= max(block[0] - block[-1] for block in blocks)
    dealt_out = [sum(descending[i::parts]) for i in range(parts)]
    assert equal.max() <= max(dealt_out)


def least_possible(costs: list[int], parts: int) -> int:
    places = itertools.product(range(parts), repeat=len(costs))
    return min(max(np.bincount(place, weights=costs, minlength=parts)) for place in places)  # type: ignore[no-any-return]


@given(st.lists(st.integers(1, 30), min_size=3, max_size=7))
def test_greedy_is_within_grahams_bound(costs: list[int]) -> None:
    found = samplers.sums_of(costs, samplers.greedy_parts(costs, 3)).max()
    assert found <= (4 / 3 - 1 / 9) * least_possible(costs, 3) + 1e-9


def test_differencing_beats_greed_where_it_is_known_to() -> None:
    costs = [8, 7, 6, 5, 4]
    assert sorted(samplers.sums_of(costs, samplers.balanced_parts(costs, 2))) == [14, 16]
    assert sorted(samplers.sums_of(costs, samplers.greedy_parts(costs, 2))) == [13, 17]
    assert sorted(samplers.sums_of(costs, samplers.greedy_parts(costs, 2, order="given"))) == [13, 17]


@given(lengths, st.integers(1, 80), st.sampled_from(samplers.FITS))
def test_no_batch_is_over_its_budget(costs: list[int], budget: int, fit: str) -> None:
    found = samplers.token_batches(costs, budget, fit=fit)
    assert rows_of(found) == list(range(len(costs)))
    for batch in found:
        assert len(batch)
        assert samplers.sums_of(costs, [batch])[0] <= budget or len(batch) == 1
    for row in np.flatnonzero(np.asarray(costs) > budget):
        assert [row] in [batch.tolist() for batch in found]
    if fit == "in_order":
        assert [int(row) for batch in found for row in batch] == list(range(len(costs)))


def naive_first_fit(costs: list[int], budget: int) -> int:
    batches: list[int] = []
    for cost in costs:
        fits = [i for i, total in enumerate(batches) if total + cost <= budget]
        if fits:
            batches[fits[0]] += cost
        else:
            batches.append(cost)
    return len(batches)


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 80))
def test_first_fit_counts_as_first_fit_does(costs: list[int], budget: int) -> None:
    assert samplers.num_token_batches(costs, budget) == naive_first_fit(costs, budget)
    decreasing = samplers.num_token_batches(costs, budget, fit="longest_first")
    assert decreasing == naive_first_fit(sorted(costs, reverse=True), budget)


@given(lengths, st.integers(1, 80), st.integers(1, 5))
def test_balanced_batches_keep_to_the_budget_too(costs: list[int], budget: int, least: int) -> None:
    found = samplers.balanced_batches(costs, budget, least=least)
    assert rows_of(found) == list(range(len(costs)))
    assert all(len(batch) == 1 or samplers.sums_of(costs, [batch])[0] <= budget for batch in found)
    assert all(len(batch) for batch in found)
    assert len(found) >= min(least, len(costs))
    assert len(found) <= max(least, samplers.num_token_batches(costs, budget, fit="longest_first")) or least > 1


def test_no_rows_make_no_batches() -> None:
    assert samplers.token_batches([], 10) == []
    assert samplers.balanced_batches([], 10) == []


def test_what_cannot_be_shared_out_is_refused() -> None:
    with pytest.raises(DataError, match="row 1 has 9 tokens and a batch holds 8"):
        samplers.token_batches([3, 9], 8, long_rows="refuse")
    with pytest.raises(DataError, match="row 0 has -1"):
        samplers.balanced_parts([-1], 1)
    with pytest.raises(ConfigError, match="fit is one of longest_first, first_fit, in_order; found 'best'"):
        samplers.token_batches([1], 1, fit="best")
    with pytest.raises(ConfigError, match="above 0"):
        samplers.token_batches([1], 0)


def table(lengths: list[int], prompts: list[int]) -> RowBatch:
    types = {"response_ids": fr.TOKEN.i32, "prompt_ids": fr.PROMPT.i32["*"]}
    return RowBatch({"response_ids": [[1] * n for n in lengths], "prompt_ids": [[2] * n for n in prompts]}, types)


def test_operators_number_parts_and_batches() -> None:
    rows = table([4, 1, 1, 4], [1, 4, 4, 1])
    part = run_operator(samplers.part_by_length.bind(parts=2), rows).rows["part"]
    assert sorted(np.bincount(part, weights=[5, 5, 5, 5])) == [10, 10]
    batch = run_operator(samplers.batch_by_tokens.bind(max_tokens=10), rows).rows["micro_batch"]
    assert batch.tolist() == [0, 0, 1, 1]
    alone = run_operator(samplers.batch_by_tokens.bind(max_tokens=4, fit="in_order"), rows).rows["micro_batch"]
    assert alone.tolist() == [0, 1, 2, 3]


def test_fewer_rows_than_parts_leave_parts_empty() -> None:
    ids = fr.Ragged.of([[1], [1, 2]], np.int32)
    assert sorted(samplers.part_by_length(ids, parts=4)) == [0, 1]
    assert len(samplers.part_by_length(fr.Ragged.of([], np.int32), parts=4)) == 0
    with pytest.raises(ConfigError, match="at least 1"):
        samplers.part_by_length(ids, parts=0)


def test_attention_may_weigh_more_than_tokens() -> None:
    ids = fr.Ragged.of([[1] * n for n in (6, 3, 3)], np.int32)
    assert sorted(np.bincount(samplers.part_by_length(ids, parts=2))) == [1, 2]
    ids = fr.Ragged.of([[1] * n for n in (6, 4, 4, 4, 2)], np.int32)
    plain = samplers.part_by_length(ids, parts=2)
    assert sorted(np.bincount(plain, weights=ids.lengths)) == [10, 10]
    squared = samplers.part_by_length(ids, parts=2, quadratic=100.0)
    assert sorted(np.bincount(squared, weights=ids.lengths**2)) == [40, 48]


def test_a_stale_sibling_counts_and_does_not_train() -> None:
    types = {
        "prompt_id": fr.PROMPT.str,
        "reward": fr.SAMPLE.f32,
        "min_policy_version": fr.SAMPLE.i32,
        "max_policy_version": fr.SAMPLE.i32,
        "response_ids": fr.TOKEN.i32,
        "loss_mask": fr.TOKEN.bool,
    }
    rows = RowBatch(
        {
            "prompt_id": np.asarray(["a"] * 4, object),
            "reward": [1.0, 0.0, 0.0, 0.0],
            "min_policy_version": [2, 5, 5, 5],
            "max_policy_version": [5, 5, 5, 5],
            "response_ids": [[1, 2], [1], [1], [1]],
            "loss_mask": [[True, True], [True], [True], [False]],
        },
        types,
    )
    group_norm, mask_stale = advantages.group_norm.bind(scale="none"), masks.stale.bind(most=1)
    scored = run_operator(group_norm, rows).rows
    done = run_operator(mask_stale, scored).rows
    # the mean is that of the three rows with a token that trains, the stale one among them
    np.testing.assert_allclose(done["advantage"][:3], [2 / 3, -1 / 3, -1 / 3], rtol=1e-6)
    assert done["loss_mask"].to_list() == [[False, False], [True], [True], [False]]
    # the other way round it says nothing
    late = run_operator(group_norm, run_operator(mask_stale, rows).rows).rows
    assert late["advantage"].tolist() == [0, 0, 0, 0]


def test_a_mask_under_another_name_leaves_the_loss_mask_alone() -> None:
    call = masks.stale.bind(most=0, out="fresh")
    assert [column.name for column in call.writes] == ["fresh"]
    with pytest.raises(ConfigError, match="most"):
        masks.stale(fr.Ragged.of([[True]]), np.asarray([1]), most=True)


PLACES = {"order": "rows of equal length are told apart by their place"}
CASES = [
    *operator_cases(samplers.part_by_length, config=[{"parts": 3}, {"parts": 2, "method": "greedy"}], skip=PLACES),
    *operator_cases(samplers.batch_by_tokens, config=[{"max_tokens": 4}], skip=PLACES),
    *operator_cases(masks.stale, config=[{}, {"most": 1, "out": "fresh"}]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance(case) -> None:  # type: ignore[no-untyped-def]
    case.check()
