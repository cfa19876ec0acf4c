"""Advantages where others have gone wrong: missing rewards, masked siblings, equal rewards, rows in any order, holes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import flowrl as fr
from flowrl.errors import ConfigError, DataError
from flowrl.runtime.operators import run_operator
from flowrl.schema import Ragged
from flowrl.store.rows import RowBatch
from flowrl_operators import advantages

NAN = float("nan")
ESTIMATORS = {
    "grpo": lambda r, g, m=None: advantages.group_norm.function(r, g, m),
    "batch_scale": lambda r, g, m=None: advantages.group_norm.function(r, g, m, scale="batch"),
    "dr_grpo": lambda r, g, m=None: advantages.group_norm.function(r, g, m, scale="none"),
    "rloo": lambda r, g, m=None: advantages.rloo.function(r, g, m),
    "batch_norm": lambda r, g, m=None: advantages.batch_norm.function(r, None, m),
}


def floats(*values: float) -> np.ndarray:
    return np.asarray(values, np.float64)


def one_group(count: int) -> np.ndarray:
    return np.asarray(["p"] * count, dtype=object)


def masks(*counts: int) -> fr.Ragged:
    """Two tokens per row, the first `count` of which train."""
    return fr.Ragged.of([[k < count for k in range(2)] for count in counts], dtype=bool)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_sibling_without_trained_tokens_does_not_move_the_baseline(name: str) -> None:
    found = ESTIMATORS[name](floats(100.0, 1.0), one_group(2), masks(0, 2))
    assert found.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_missing_reward_does_not_poison_its_group(name: str) -> None:
    found = ESTIMATORS[name](floats(1.0, NAN, 3.0), one_group(3))
    assert found[1] == 0
    assert found[0] == -found[2] < 0


def test_missing_rewards_by_numbers() -> None:
    grpo = ESTIMATORS["grpo"]
    assert grpo(floats(1.0, NAN, 3.0), one_group(3)) == pytest.approx([-1.0, 0.0, 1.0], abs=2e-6)
    assert grpo(floats(1.0), one_group(1)).tolist() == [0.0]
    one_of_eight = floats(*[NAN] * 3, 1.0, *[NAN] * 4)
    assert grpo(one_of_eight, one_group(8)).tolist() == [0.0] * 8
    assert ESTIMATORS["rloo"](floats(1.0, NAN, 3.0), one_group(3)).tolist() == [-2.0, 0.0, 2.0]


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize(("reward", "count"), [(0.95, 8), (0.7, 16), (0.1, 3), (1e6 + 0.3, 5), (0.0, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_rewards_give_exactly_zero(name: str, reward: float, count: int, dtype: type) -> None:
    found = ESTIMATORS[name](np.full(count, reward, dtype), one_group(count))
    assert (found == 0).all()


def test_rounding_of_summed_rewards_is_no_signal() -> None:
    # 0.1 + 0.2 in another order of addition: equal to a person, one float32 step apart
    found = ESTIMATORS["grpo"](np.asarray([0.3, np.nextafter(np.float32(0.3), 1), 0.3], np.float32), one_group(3))
    assert (found == 0).all()


def test_groups_are_made_by_key_not_by_place() -> None:
    group = np.asarray(list("AABBB"), dtype=object)
    reward = floats(1, 0, 1, 1, 0)
    found = advantages.group_norm.function(reward, group, scale="none")
    assert found == pytest.approx([0.5, -0.5, 1 / 3, 1 / 3, -2 / 3])
    order = np.asarray([3, 0, 4, 1, 2])
    assert advantages.group_norm.function(reward[order], group[order], scale="none") == pytest.approx(found[order])


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.sampled_from([0.0, 1.0, 0.5, 0.95, NAN]), st.integers(0, 2)),
        min_size=1,
        max_size=12,
    ),
    st.randoms(use_true_random=False),
    st.sampled_from(sorted(ESTIMATORS)),
)
def test_any_order_of_rows_gives_the_same_and_only_finite_numbers(rows, random, name) -> None:  # type: ignore[no-untyped-def]
    order = list(range(len(rows)))
    random.shuffle(order)

    def compute(rows):  # type: ignore[no-untyped-def]
        groups = np.asarray([g for g, _, _ in rows], dtype=object)
        return ESTIMATORS[name](floats(*[r for _, r, _ in rows]), groups, masks(*[m for _, _, m in rows]))

    found = compute(rows)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(compute([rows[i] for i in order]), found[order], atol=1e-12)


def batch(rewards: list[float], groups: str) -> RowBatch:
    types = {"prompt_id": fr.PROMPT.str, "reward": fr.SAMPLE.f32, "loss_mask": fr.TOKEN.bool}
    columns = {
        "prompt_id": np.asarray(list(groups), dtype=object),
        "reward": np.asarray(rewards, np.float32),
        "loss_mask": masks(*[2] * len(rewards)),
    }
    return RowBatch(columns, types)


@pytest.mark.parametrize("scale", advantages.SCALES)
def test_run_over_a_table_equals_the_function(scale: str) -> None:
    rows = batch([1, 0, 0.25, 1, 0], "ababa")
    applied = run_operator(advantages.group_norm.bind(scale=scale), rows)
    wanted = advantages.group_norm.function(rows["reward"], rows["prompt_id"], scale=scale)
    np.testing.assert_allclose(applied.rows["advantage"], wanted, rtol=1e-6)


def test_scale_decides_how_far_it_must_see() -> None:
    assert str(advantages.group_norm.bind().locality) == "group(prompt_id)"
    assert str(advantages.group_norm.bind(scale="batch").locality) == "batch"
    assert str(advantages.group_norm.bind(by="source_id").locality) == "group(source_id)"
    with pytest.raises(ConfigError, match="scale is one of group, others, batch, none"):
        advantages.group_norm.bind(scale="groups")


def test_scale_batch_divides_by_the_deviation_of_all_rewards() -> None:
    reward, group = floats(0, 1, 10, 30), np.asarray(list("aabb"), dtype=object)
    found = advantages.group_norm.function(reward, group, scale="batch", eps=0.0)
    assert found == pytest.approx(floats(-0.5, 0.5, -10, 10) / reward.std())


def test_batch_norm_apart_by_role() -> None:
    role = np.asarray(["a", "b", "a", "b"], dtype=object)
    found = advantages.batch_norm.function(floats(0, 10, 1, 30), role, by="role", eps=0.0)
    assert found == pytest.approx([-1, -1, 1, 1])


def test_remax_without_a_baseline_learns_nothing() -> None:
    assert advantages.remax.function(floats(1, NAN, 1), floats(0.25, 0, NAN)).tolist() == [0.75, 0.0, 0.0]


# --- per token ----------------------------------------------------------------------------------------------------------


def gae(reward, values, mask, token_rewards=None, **options):  # type: ignore[no-untyped-def]
    mask = fr.Ragged.of([mask], dtype=bool)
    paid = None if token_rewards is None else fr.Ragged.of([token_rewards], dtype=np.float64)
    options = {"whiten": False, **options}
    return advantages.gae.function(floats(reward), fr.Ragged.of([values], dtype=np.float64), mask, paid, **options)


def test_a_masked_value_does_not_bootstrap() -> None:
    found = gae(0.0, [0, 0, 100], [1, 1, 0], [0, 1, 0], gamma=1.0, lam=0.95)
    assert found["advantages"][0] == pytest.approx([0.95, 1.0, 0.0])
    assert found["returns"][0] == pytest.approx([0.95, 1.0, 0.0])


def test_a_hole_is_as_if_it_were_not_there() -> None:
    whole = gae(1.0, [0.1, 0.2, 0.3], [1, 1, 1], gamma=0.9, lam=0.8)["advantages"][0]
    holes = gae(1.0, [7.0, 0.1, NAN, 0.2, 9.0, 0.3, NAN], [0, 1, 0, 1, 0, 1, 0], gamma=0.9, lam=0.8)["advantages"][0]
    assert holes[[1, 3, 5]] == pytest.approx(whole)
    assert (holes[[0, 2, 4, 6]] == 0).all()


def test_the_reward_is_paid_at_the_last_token_that_trains() -> None:
    found = gae(2.0, [0, 0, 0], [1, 1, 0], gamma=0.5, lam=1.0)
    assert found["returns"][0] == pytest.approx([1.0, 2.0, 0.0])


def test_gae_with_a_missing_reward_moves_neither_policy_nor_critic() -> None:
    found = gae(NAN, [0.5, 0.25], [1, 1])
    assert found["advantages"][0].tolist() == [0.0, 0.0]
    assert found["returns"][0].tolist() == [0.5, 0.25]


@pytest.mark.parametrize("whiten", [False, True])
def test_gae_of_rows_without_tokens_is_empty(whiten: bool) -> None:
    empty = fr.Ragged.of([[], []], dtype=np.float64)
    found = advantages.gae.function(floats(1, 2), empty, empty.astype(bool), None, whiten=whiten)
    assert found["advantages"].lengths.tolist() == [0, 0]


def test_one_token_in_the_batch_whitens_to_zero() -> None:
    assert gae(1.0, [0.5], [1], whiten=True)["advantages"][0].tolist() == [0.0]


def test_whitening_has_mean_zero_and_deviation_one() -> None:
    found = advantages.reinforce_pp.function(
        floats(0.0, 1.0, 3.0), fr.Ragged.of([[1, 1], [1], [1, 1, 1]], dtype=bool), None
    )["advantages"].values
    assert found.mean() == pytest.approx(0, abs=1e-12)
    assert found.std() == pytest.approx(1, abs=1e-6)


def test_gae_refuses_a_discount_above_one() -> None:
    with pytest.raises(ConfigError, match="0 <= gamma <= 1; found 1.5"):
        gae(1.0, [0.0], [1], gamma=1.5)


def test_a_step_gets_what_it_changed() -> None:
    found = advantages.from_step_values.function(
        floats(1.0),
        fr.Ragged.of([[0.25, 0.75, 0.5]], dtype=np.float64),
        fr.Ragged.of([[0, 2, 3]], dtype=np.int32),
        fr.Ragged.of([[1, 1, 1, 0, 1]], dtype=bool),
    )
    assert found[0].tolist() == [0.5, 0.5, -0.25, 0.0, 0.5]


def test_step_values_must_fit_the_steps() -> None:
    with pytest.raises(DataError, match="row 1 has 1 values and 2 steps"):
        advantages.from_step_values.function(
            floats(1.0, 1.0),
            fr.Ragged.of([[0.5], [0.5]], dtype=np.float64),
            fr.Ragged.of([[0], [0, 1]], dtype=np.int32),
            fr.Ragged.of([[1], [1, 1]], dtype=bool),
        )


def test_a_step_without_known_value_learns_nothing() -> None:
    found = advantages.from_step_values.function(
        floats(NAN),
        fr.Ragged.of([[0.5]], dtype=np.float64),
        fr.Ragged.of([[0]], dtype=np.int32),
        fr.Ragged.of([[1, 1]], dtype=bool),
    )
    assert found[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "call",
    [
        advantages.group_norm.bind(),
        advantages.group_norm.bind(unbiased=True, eps=1e-4),
        advantages.group_norm.bind(scale="none"),
        advantages.rloo.bind(),
    ],
    ids=["population", "sample", "none", "rloo"],
)
def test_all_groups_at_once_and_one_at_a_time_give_the_same(call: fr.graph.operators.OperatorCall) -> None:
    draw = np.random.default_rng(0)
    number = draw.integers(0, 40, 200)
    reward = draw.choice([0.0, 1.0, 0.7, np.nan], 200, p=[0.4, 0.4, 0.1, 0.1]).astype(np.float32)
    lengths = draw.integers(0, 4, 200)
    mask = [draw.random(n) < 0.7 for n in lengths]
    types = {"prompt_id": fr.PROMPT.str, "reward": fr.SAMPLE.f32, "loss_mask": fr.TOKEN.bool}
    keys = np.asarray([f"p{n}" for n in number], dtype=object)
    rows = RowBatch({"prompt_id": keys, "reward": reward, "loss_mask": Ragged.of(mask, bool)}, types)
    together = run_operator(call, rows).rows["advantage"]
    apart = run_operator(replace(call, many_groups=False), rows).rows["advantage"]
    assert np.isfinite(together).all() and np.any(together)
    np.testing.assert_allclose(together, apart, atol=1e-6)


def test_a_group_of_one_has_a_deviation_around_a_baseline_that_is_not_its_mean() -> None:
    reward, group = floats(3.0, 1.0), np.asarray(["p", "q"], dtype=object)

    def norm(**options: object) -> list[float]:
        return advantages.group_norm(reward, group, None, baseline="batch", eps=0.0, **options).tolist()

    assert norm(around="baseline") == [1.0, -1.0]  # its distance from the batch's mean, over itself
    assert norm(around="baseline", unbiased=True) == norm() == [1.0, -1.0]
    assert advantages.group_norm(
        2 * reward, group, None, baseline="batch", around="baseline"
    ).tolist() == pytest.approx([1.0, -1.0], abs=1e-6)
    assert advantages.group_norm(2 * reward, group, None, baseline="batch").tolist() == [2.0, -2.0]


def test_lambda_of_the_length_in_single_precision() -> None:
    mask = fr.Ragged.of([[True] * 7], dtype=bool)
    values = fr.Ragged.of([[0.0] * 7], dtype=np.float64)
    options = {"adaptive": 0.3, "whiten": False}
    exact = advantages.gae(floats(1.0), values, mask, None, None, **options)["advantages"].values
    single = advantages.gae(floats(1.0), values, mask, None, None, count_ratio="float32", **options)[
        "advantages"
    ].values
    assert exact[0] == pytest.approx((1 - 1 / 2.1) ** 6, rel=1e-12)
    assert single[0] == pytest.approx(exact[0], rel=1e-6) and single[0] != exact[0]
