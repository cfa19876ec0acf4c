"""Each named advantage on numbers that can be reckoned by hand, and what its options change."""

from typing import Any

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch
from flowrl_operators import advantages as a, rewards

NAN = float("nan")


def floats(*values: float) -> np.ndarray:
    return np.asarray(values, np.float64)


def keys(text: str) -> np.ndarray:
    return np.asarray(list(text), object)


def masks(*counts: int) -> fr.Ragged:
    """Rows of four tokens, the first `count` of which train."""
    return fr.Ragged.of([[k < count for k in range(4)] for count in counts], dtype=bool)


def tokens(*rows: list[float]) -> fr.Ragged:
    return fr.Ragged.of(list(rows), dtype=np.float64)


# --- conventions of group statistics --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [1, -1, -1, 1]),
        ({"unbiased": True}, [0.75**0.5, -(0.75**0.5), -(0.75**0.5), 0.75**0.5]),
        ({"baseline": "others", "scale": "none"}, [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        # the others of a 1 are 0, 0, 1 with deviation sqrt(2)/3
        ({"baseline": "others", "scale": "others"}, [2**0.5, -(2**0.5), -(2**0.5), 2**0.5]),
        ({"baseline": "none", "scale": "none"}, [1, 0, 0, 1]),
        ({"baseline": "none"}, [2, 0, 0, 2]),
        ({"baseline": "none", "around": "baseline"}, [2**0.5, 0, 0, 2**0.5]),
    ],
)
def test_one_group_in_every_convention(options: dict[str, Any], wanted: list[float]) -> None:
    found = a.group_norm(floats(1, 0, 0, 1), keys("aaaa"), None, eps=0.0, **options)
    assert found == pytest.approx(wanted)


def test_a_batch_baseline_moves_groups_whose_rewards_are_equal() -> None:
    reward, group = floats(1, 1, 0, 1), keys("aabb")
    assert a.group_norm(reward, group, None, baseline="batch", scale="none") == pytest.approx([0.25, 0.25, -0.75, 0.25])
    assert a.group_norm(reward, group, None)[:2].tolist() == [0.0, 0.0]
    kept = a.group_norm(reward, group, None, baseline="batch", eps=0.5)
    assert kept[:2] == pytest.approx([0.25, 0.25])  # a std of 0 divides nothing,
    assert a.group_norm(reward, group, None, baseline="batch", eps=0.5, flat="eps")[:2] == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    ("single", "wanted"), [("zero", 0.0), ("reward", 2.0), ("scaled", 2.0 / float(np.float32(1 + 1e-6)))]
)
def test_what_a_group_of_one_gets(single: str, wanted: float) -> None:
    assert a.group_norm(floats(2.0), keys("a"), None, single=single).tolist() == [wanted]


def test_one_known_reward_of_several_is_a_group_of_one() -> None:
    assert a.rloo(floats(2, NAN, NAN), keys("aaa"), None).tolist() == [0, 0, 0]
    assert a.rloo(floats(2, NAN, NAN), keys("aaa"), None, single="reward").tolist() == [2, 0, 0]


def test_siblings_that_do_not_train_count_when_asked() -> None:
    reward, group, mask = floats(100, 1), keys("aa"), masks(0, 2)
    assert a.group_norm(reward, group, mask, scale="none").tolist() == [0, 0]
    assert a.group_norm(reward, group, mask, scale="none", counts="scored").tolist() == [49.5, -49.5]


def test_others_that_are_all_equal_have_no_deviation() -> None:
    found = a.group_norm(floats(1, 0.95, 0.95, 0.95), keys("aaaa"), None, baseline="others", scale="others")
    assert found[0] == pytest.approx(0.05)  # not divided by the rounding of 0.95
    assert found[1] < -0.5


def test_a_ratio_of_counts_in_float32() -> None:
    reward, group = floats(1, 0, 0, 1), keys("aaaa")
    exact = a.group_norm(reward, group, None, unbiased=True)
    rounded = a.group_norm(reward, group, None, unbiased=True, count_ratio="float32")
    assert 0 < abs(rounded[0] - exact[0]) < 1e-7


@pytest.mark.parametrize("option", ["baseline", "scale", "single", "counts", "around", "flat", "count_ratio"])
def test_an_unknown_word_is_refused_with_the_known_ones(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is one of .*; found 'median'"):
        a.group_norm(floats(1, 0), keys("aa"), None, **{option: "median"})


def test_how_far_each_must_see() -> None:
    def locality(call: Any) -> str:
        return str(call.locality)

    assert locality(a.group_norm.bind(baseline="batch")) == "batch"
    assert locality(a.group_norm.bind(baseline="others")) == "group(prompt_id)"
    assert locality(a.gpg.bind()) == "batch"
    assert locality(a.multi_reward.bind(parts=("x",))) == "group(prompt_id)"
    assert locality(a.multi_reward.bind(parts=("x",), scale="batch")) == "batch"
    assert locality(a.gdpo.bind(parts=("x",))) == "batch"
    assert locality(a.gae.bind(whiten=False)) == "row"
    assert locality(a.reinforce.bind()) == "row"
    assert a.group_norm.bind().min_group == 2
    assert a.group_norm.bind(single="reward").min_group == 1


# --- named algorithms -----------------------------------------------------------------------------------------------------


def test_opo_weighs_the_mean_by_length() -> None:
    # (4 * 1 + 1 * 0) / 5
    assert a.opo(floats(1, 0), keys("aa"), masks(4, 1)) == pytest.approx([0.2, -0.8])
    assert a.opo(floats(3), keys("a"), masks(1), single="reward").tolist() == [3.0]
    # a sibling without tokens weighs nothing; whether the group is one of two is `counts`
    one = floats(3, 1), keys("aa"), masks(2, 0)
    assert a.opo(*one, single="reward")[0] == 3
    assert a.opo(*one, single="reward", counts="scored")[0] == 0


def test_gpg_makes_up_for_groups_without_signal() -> None:
    reward, group = floats(1, 0, 1, 1), keys("aabb")
    assert a.gpg(reward, group, None) == pytest.approx([1, -1, 0, 0])  # alpha = 4 / 2
    assert a.gpg(reward, group, None, valid="nonzero") == pytest.approx([2 / 3, -2 / 3, 0, 0])  # 4 / 3
    assert a.gpg(reward, group, None, divisor=2.0) == pytest.approx([0.5, -0.5, 0, 0])
    assert a.gpg(floats(1, 1), keys("aa"), None).tolist() == [0, 0]


def test_maxrl_divides_by_the_mean() -> None:
    assert a.maxrl(floats(1, 0, 0, 0), keys("aaaa"), None) == pytest.approx([3, -1, -1, -1])
    negative = floats(-1, -3)
    assert a.maxrl(negative, keys("aa"), None).tolist() == [0, 0]
    assert a.maxrl(negative, keys("aa"), None, negative="divide") == pytest.approx([-0.5, 0.5])
    assert a.maxrl(floats(1, -1), keys("aa"), None, negative="divide").tolist() == [0, 0]  # a mean of 0 divides nothing
    assert a.maxrl(floats(-2), keys("a"), None, single="reward").tolist() == [-2]


def test_pass_at_k_by_all_sets() -> None:
    reward, group = floats(3, 1, 0), keys("aaa")
    assert a.pass_at_k(reward, group, None) == pytest.approx([2, 0, 0])
    assert a.pass_at_k(reward, group, None, k=2) == pytest.approx([2.5, 0.5, 0])
    assert a.pass_at_k(reward, group, None, k=9) == pytest.approx([2, 0, 0])
    with pytest.raises(ConfigError, match="k >= 2"):
        a.pass_at_k(reward, group, None, k=1)


@pytest.mark.parametrize("k", [2, 3, 4, 6])
def test_pass_at_k_equals_the_mean_over_sets(k: int) -> None:
    from itertools import combinations

    reward = np.random.default_rng(k).choice([0.0, 0.5, 1.0, 2.0, -1.0], 6)
    found = a.pass_at_k(reward, keys("aaaaaa"), None, k=k)
    for i in range(6):
        others = [j for j in range(6) if j != i]
        gains = [max(reward[i] - max(reward[list(s)]), 0.0) for s in combinations(others, k - 1)]
        assert found[i] == pytest.approx(np.mean(gains))


def test_reinforce_pp_baseline_counts_a_row_once_per_token() -> None:
    found = a.reinforce_pp_baseline(floats(1, 0), keys("aa"), masks(3, 1), eps=0.0, guard="variance")
    # centred 0.5 three times and -0.5 once: mean 0.25, variance 3/16
    assert found == pytest.approx([0.25 / (3 / 16) ** 0.5, -0.75 / (3 / 16) ** 0.5])


def test_remax_per_token() -> None:
    found = a.remax(floats(9.0), floats(0.5), masks(3), tokens([1, 0, 2, 7]), per="token")
    assert found["returns"][0].tolist() == [3, 2, 2, 0]
    assert found["advantages"][0].tolist() == [2.5, 1.5, 1.5, 0]
    with pytest.raises(ConfigError, match="token_rewards"):
        a.remax(floats(1), floats(0), per="token")


def test_a_loud_part_does_not_drown_another_when_parts_are_normalised() -> None:
    group, right, loud = keys("aaaa"), floats(1, 0, 1, 0), floats(100, 100, -100, -100)
    options: dict[str, Any] = {"parts": ("right", "loud"), "eps": 0.0}
    summed = a.multi_reward.function(group, None, right, loud, **options)
    assert summed == pytest.approx([1, 1, -1, -1], abs=0.02)
    apart = a.multi_reward.function(group, None, right, loud, order="normalize_then_sum", **options)
    assert apart == pytest.approx([2, 0, 0, -2])
    weighed = a.multi_reward.function(
        group, None, right, loud, order="normalize_then_sum", weights=(1.0, 0.5), **options
    )
    assert weighed == pytest.approx([1.5, -0.5, 0.5, -1.5])
    gdpo = a.gdpo.function(group, None, right, loud, over_eps=0.0, **options)
    assert gdpo == pytest.approx(floats(2, 0, 0, -2) / 2**0.5)


def test_a_missing_part_is_a_missing_reward_unless_asked() -> None:
    group, first, second = keys("aaa"), floats(1, 0, NAN), floats(0, 0, 1)
    options: dict[str, Any] = {"parts": ("first", "second"), "scale": "none"}
    assert a.multi_reward.function(group, None, first, second, **options) == pytest.approx([0.5, -0.5, 0])
    partly = a.multi_reward.function(group, None, first, second, missing="part", **options)
    assert partly == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    nothing = a.multi_reward.function(group, None, first, floats(0, 0, NAN), missing="part", **options)
    assert nothing == pytest.approx([0.5, -0.5, 0])


def test_parts_of_a_table_and_wrong_weights() -> None:
    columns = {
        "prompt_id": keys("aa"),
        "right": floats(1, 0).astype(np.float32),
        "tidy": floats(0, 0).astype(np.float32),
    }
    rows = RowBatch(columns, {"prompt_id": fr.PROMPT.str, "right": fr.SAMPLE.f32, "tidy": fr.SAMPLE.f32})
    found = run_operator(a.gdpo.bind(parts=("right", "tidy")), rows).rows["advantage"]
    assert found == pytest.approx([1, -1], abs=1e-4)
    with pytest.raises(ConfigError, match="one weight for each of its 2 parts"):
        a.gdpo.function(keys("a"), None, floats(1), floats(1), parts=("x", "y"), weights=(1.0,))


def test_the_optimal_baseline_weighs_returns_by_the_gradient() -> None:
    # certain tokens (pi = 1, sum pi^2 = 1) have no gradient, so the other row's return alone is the baseline
    logprobs, squares = tokens([0.0, 0.0], [np.log(0.5), np.log(0.5)]), tokens([1.0, 1.0], [0.5, 0.5])
    mask = fr.Ragged.of([[1, 1], [1, 1]], dtype=bool)
    found = a.optimal_token_baseline(floats(0, 1), keys("aa"), logprobs, squares, mask, eps=0.0)
    assert found["advantages"].to_list() == [[-1, -1], [0, 0]]
    rho = tokens([1.0, 1.0], [1.0, 1.0])
    again = a.optimal_token_baseline(floats(0, 1), keys("aa"), logprobs, squares, mask, None, rho, eps=0.0)
    assert again["advantages"] == found["advantages"]


def test_what_eps_leaves_of_equal_returns_and_who_makes_a_group() -> None:
    logprobs, squares = tokens(*[[np.log(0.5)]] * 2), tokens([0.5], [0.5])
    given = keys("aa"), logprobs, squares
    both, one = fr.Ragged.of([[1], [1]], dtype=bool), fr.Ragged.of([[1], [0]], dtype=bool)
    for flat, wanted in (("zero", [[0], [0]]), ("eps", [[0.5], [0.5]])):  # W is 0.5 for each: 1 - 1 / (1 + 1)
        found = a.optimal_token_baseline(floats(1, 1), *given, both, flat=flat, eps=1.0)
        assert found["advantages"].to_list() == wanted
    for counts, wanted in (("trained", [[2], [0]]), ("scored", [[0], [0]])):
        found = a.optimal_token_baseline(floats(2, 1), *given, one, single="reward", counts=counts)
        assert found["advantages"].to_list() == wanted


def test_the_tail_and_the_turns_of_the_optimal_baseline() -> None:
    some = tokens([np.log(0.5)] * 3, [np.log(0.5)] * 3)
    squares = tokens([0.5] * 3, [0.5] * 3)
    mask = fr.Ragged.of([[1, 0, 1], [1, 0, 0]], dtype=bool)
    options: dict[str, Any] = {"eps": 0.0}
    found = a.optimal_token_baseline(floats(1, 0), keys("aa"), some, squares, mask, **options)["advantages"]
    assert found.to_list() == [[0.5, 0, 0], [-0.5, 0, 0]]
    tail = a.optimal_token_baseline(floats(1, 0), keys("aa"), some, squares, mask, tail="zero", **options)
    assert tail["advantages"].to_list() == [[0.5, 0, 1], [-0.5, 0, 0]]
    late = fr.Ragged.of([[0, 1, 1], [1, 1, 0]], dtype=bool)
    by_place = a.optimal_token_baseline(floats(1, 0), keys("aa"), some, squares, late, **options)["advantages"]
    by_turn = a.optimal_token_baseline(floats(1, 0), keys("aa"), some, squares, late, align="trained", **options)
    assert by_turn["advantages"].to_list() == [[0, 0.5, 0.5], [-0.5, -0.5, 0]]
    assert by_place[0].tolist() != by_turn["advantages"][0].tolist()


# --- GAE and sums of rewards ----------------------------------------------------------------------------------------------


def gae(mask: list[int], values: list[float], paid: list[float], **options: Any) -> dict[str, list[float]]:
    found = a.gae(
        floats(0), tokens(values), fr.Ragged.of([mask], dtype=bool), tokens(paid), whiten=False, gamma=1.0, **options
    )
    return {name: column[0].tolist() for name, column in found.items()}


@pytest.mark.parametrize(
    ("masked", "first"),
    [("skip", 0.5), ("decay", 0.25), ("values", 8 + 0.5 * (0 - 8) + 0.25), ("all", 8 + 0.5 * (3 - 8) + 0.25)],
)
def test_what_masked_tokens_do_in_gae(masked: str, first: float) -> None:
    # one token, a tool's token with value 8 and reward 3, one token that pays 1
    found = gae([1, 0, 1], [0, 8, 0], [0, 3, 1], lam=0.5, masked=masked)
    assert found["advantages"] == pytest.approx([first, 0, 1])


def test_a_response_that_was_cut_off_bootstraps() -> None:
    mask, values = fr.Ragged.of([[1, 1]], dtype=bool), tokens([0.0, 0.0])
    found = a.gae(floats(1.0), values, mask, None, floats(4.0), gamma=0.5, lam=1.0, whiten=False)
    assert found["returns"][0].tolist() == [1.5, 3.0]


def test_vapo_has_a_lambda_for_each_length_and_one_for_the_critic() -> None:
    values, mask = tokens([0.0, 0.0], [0.0] * 4), fr.Ragged.of([[1, 1], [1] * 4], dtype=bool)
    found = a.gae(floats(1, 1), values, mask, None, None, adaptive=0.5, lam_returns=1.0, whiten=False)
    assert found["advantages"].to_list() == [[0, 1], [0.125, 0.25, 0.5, 1]]
    assert found["returns"].to_list() == [[1, 1], [1] * 4]
    with pytest.raises(ConfigError, match="adaptive > 0"):
        a.gae(floats(1, 1), values, mask, None, None, adaptive=0.0)


def test_a_value_that_is_not_finite_silences_its_row_alone() -> None:
    values, mask = tokens([NAN, 0.5], [0.25, 0.5]), fr.Ragged.of([[1, 1], [1, 1]], dtype=bool)
    found = a.gae(floats(1, 1), values, mask, None, None, whiten=False, lam=1.0)
    assert found["advantages"].to_list() == [[0, 0], [0.75, 0.5]]
    assert found["returns"].to_list() == [[0, 0.5], [1, 1]]


@pytest.mark.parametrize(("masked", "first"), [("skip", 0.5), ("decay", 0.25), ("reset", 0.0)])
def test_what_masked_tokens_do_in_a_sum_of_rewards(masked: str, first: float) -> None:
    mask = fr.Ragged.of([[1, 0, 1]], dtype=bool)
    found = a.reinforce(floats(1), mask, None, gamma=0.5, masked=masked)["returns"]
    assert found[0].tolist() == [first, 0, 1]


def test_clip_and_gamma_of_reinforce() -> None:
    mask, paid = fr.Ragged.of([[1, 1]], dtype=bool), tokens([3.0, -1.0])
    assert a.reinforce(floats(0), mask, paid, gamma=0.0)["advantages"][0].tolist() == [3, -1]
    assert a.reinforce(floats(0), mask, paid, gamma=0.0, clip=0.5)["advantages"][0].tolist() == [0.5, -0.5]
    with pytest.raises(ConfigError, match="0 <= gamma <= 1"):
        a.reinforce(floats(0), mask, paid, gamma=2.0)


# --- sums, means and whitening over a mask --------------------------------------------------------------------------------


def test_sums_and_means_over_a_mask() -> None:
    values, mask = tokens([1, 2, NAN], [NAN, NAN], [], [5]), fr.Ragged.of([[1, 1, 0], [0, 0], [], [1]], dtype=bool)
    assert a.masked_sum(values, mask) == 8
    assert a.masked_sum(values, mask, per="row").tolist() == [3, 0, 0, 5]
    assert a.masked_mean(values, mask) == pytest.approx(8 / 3)
    assert a.masked_mean(values, mask, per="row", empty=-1.0).tolist() == [1.5, -1, -1, 5]
    assert a.masked_var(values, mask, per="row").tolist() == [0.25, 0, 0, 0]
    assert a.masked_var(values, mask, per="row", unbiased=True).tolist() == [0.5, 0, 0, 0]
    assert a.masked_var(values, mask, unbiased=True) == pytest.approx(np.var([1, 2, 5], ddof=1))


@pytest.mark.parametrize(("guard", "std"), [("variance", 2**0.5), ("floor", 1.0), ("std", 2.0)])
def test_where_eps_stands(guard: str, std: float) -> None:
    values, mask = tokens([3.0, 5.0]), fr.Ragged.of([[1, 1]], dtype=bool)
    for per in ("batch", "row"):
        found = a.whitened(values, mask, unbiased=False, eps=1.0, guard=guard, per=per)
        assert found[0] == pytest.approx([-1 / std, 1 / std])


@pytest.mark.parametrize("per", ["batch", "row"])
def test_whitening_that_keeps_the_mean_or_the_scale(per: str) -> None:
    values, mask = tokens([3.0, 7.0, NAN]), fr.Ragged.of([[1, 1, 0]], dtype=bool)
    assert a.whitened(values, mask, unbiased=False, scale=False, per=per)[0].tolist() == [-2, 2, 0]
    kept = a.whitened(values, mask, unbiased=False, eps=0.0, centre=False, per=per)
    assert kept[0].tolist() == [4, 6, 0]
    one = fr.Ragged.of([[1, 0, 0]], dtype=bool)
    assert a.whitened(values, one, unbiased=True, per=per)[0].tolist() == [0, 0, 0]
    assert a.whitened(values, one, unbiased=True, centre=False, per=per)[0].tolist() == [3, 0, 0]
    with pytest.raises(ConfigError, match="guard is one of variance, floor, std"):
        a.whitened(values, mask, unbiased=True, guard="none", per=per)


# --- KL in the reward -----------------------------------------------------------------------------------------------------

MASK = fr.Ragged.of([[1, 1, 0]], dtype=bool)
POLICY, REFERENCE = tokens([-1.0, -2.0, NAN]), tokens([-2.0, -1.0, 0.0])


def test_a_penalty_joins_the_reward() -> None:
    def shaped(**options: Any) -> list[float]:
        found: fr.Ragged = rewards.kl_shaped(floats(5), POLICY, REFERENCE, MASK, coefficient=0.5, **options)
        return found[0].tolist()

    assert shaped() == [-0.5, 5.5, 0]
    assert shaped(kind="abs", paid="every") == [4.5, 4.5, 0]
    assert shaped(kind="abs", reward_clip=(-1.0, 1.0)) == [-0.5, 0.5, 0]
    assert shaped(kind="k2", value_clip=0.25) == [-0.125, 5 - 0.125, 0]
    with pytest.raises(ConfigError, match="paid is one of last, every"):
        shaped(paid="first")
    over = rewards.kl_shaped(floats(5), POLICY, REFERENCE, MASK, tokens([1, 1, 1]), coefficient=0.5)
    assert over[0].tolist() == [0.5, 1.5, 1]


def test_a_penalty_of_the_whole_response() -> None:
    assert rewards.kl_penalised(floats(5), POLICY, REFERENCE, MASK, coefficient=0.5, kind="abs").tolist() == [4.0]
    held = rewards.kl_penalised(
        floats(5), POLICY, REFERENCE, MASK, coefficient=0.5, kind="abs", reward_clip=(-2.0, 2.0)
    )
    assert held.tolist() == [1.0]


def test_the_coefficient_follows_the_kl_and_is_kept() -> None:
    rows = RowBatch(
        {"reward": np.zeros(1, np.float32), "old_logprobs": POLICY, "ref_logprobs": REFERENCE, "loss_mask": MASK},
        {"reward": fr.SAMPLE.f32, "loss_mask": fr.TOKEN.bool}
        | dict.fromkeys(("old_logprobs", "ref_logprobs"), fr.TOKEN.f32),
    )
    call = rewards.adaptive_kl_shaped.bind(coefficient=0.5, target=0.5, horizon=10, kind="abs")
    state = fr.State()
    first = run_operator(call, rows, state=state).rows
    assert first["kl_coefficient"].tolist() == [0.5]
    assert first["token_rewards"][0].tolist() == [-0.5, -0.5, 0]
    assert state == {"coefficient": 0.5 * (1 + 0.2 / 10), "kl": 1.0}  # twice the target; held at 0.2
    second = run_operator(call, rows, state=fr.State(state)).rows
    assert second["kl_coefficient"] == pytest.approx([0.51])


def test_a_kl_that_is_no_number_leaves_the_coefficient() -> None:
    assert rewards.next_kl_coefficient(0.1, NAN, 8, target=0.5, horizon=10) == 0.1
    assert rewards.next_kl_coefficient(0.1, 9.0, 8, target=None) == 0.1
    assert rewards.next_kl_coefficient(0.1, 0.4, 5, target=0.5, horizon=10) == pytest.approx(0.1 * 0.9)
    with pytest.raises(ConfigError, match="target > 0"):
        rewards.next_kl_coefficient(0.1, 0.4, 5, target=0.0, horizon=10)
