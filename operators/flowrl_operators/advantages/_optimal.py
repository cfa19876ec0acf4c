"""The baseline per token under which a group's gradient varies least."""

from __future__ import annotations

import numpy as np

import flowrl as fr
from flowrl_operators._options import checked, required
from flowrl_operators.advantages._arrays import (
    accumulate,
    any_in_row,
    as_bool,
    at_last_token,
    packed,
    reward_to_go,
    token_blocks,
    unpacked,
)
from flowrl_operators.advantages._groups import COUNTS, SINGLES, Groups, numbered

TOP_LOGPROBS = fr.TOKEN.f32["k"]

ALIGN = ("position", "trained")
TAILS = ("kept", "zero")
FLAT = ("zero", "eps")


@fr.operator(writes={"sum_pi_squared": fr.TOKEN.f32})
def sum_pi_squared(top_logprobs: TOP_LOGPROBS.named_by("of"), *, of: str = "policy_top_logprobs"):
    """Sum over the vocabulary of the policy's squared probabilities at each token, for `optimal_token_baseline`.

    sum of exp(2 log pi) over the k likeliest tokens, which `fr.top_logprobs(policy, rows, k=k, out="policy_top")` gives. Exact
    with k = the vocabulary's size, else a lower bound, and a close one since squares fall fast: what is missing is at most the
    k-th probability times all the probability outside the k, hence below 0.001 where the k-th is 0.001.

    Args:
        of: the column of the log-probabilities, [k] at each token.

    Shapes: [T, k] to [T].
    """
    values = np.zeros(len(top_logprobs.values))
    for block in token_blocks(top_logprobs.values):
        values[block] = np.exp(2.0 * top_logprobs.values[block].astype(np.float64)).sum(-1)
    return fr.Ragged.like(values, top_logprobs)


@fr.operator(
    writes={"advantages": fr.TOKEN.f32, "returns": fr.TOKEN.f32},
    locality=lambda *, by, **_: fr.group(by),
    min_group=2,
    many_groups=True,
)
def optimal_token_baseline(
    reward: fr.SAMPLE.f32,
    group: fr.SAMPLE.str.named_by("by"),
    old_logprobs: fr.TOKEN.f32,
    sum_pi_squared: fr.TOKEN.f32,
    loss_mask: fr.TOKEN.bool,
    token_rewards: fr.TOKEN.f32 = None,
    rollout_is_weights: fr.TOKEN.f32 = None,
    *,
    align: str = "position",
    tail: str = "kept",
    single: str = "zero",
    counts: str = "trained",
    flat: str = "zero",
    eps: float = 1e-8,
    by: str = "prompt_id",
):
    """A_t = G_t - b_t with the baseline of least variance: at each place of the response, b = sum G W / sum W over the group.

    G_t is the sum of rewards from t on; W_t the sum, up to t, of 1 - 2 pi(token) + sum over the vocabulary of pi^2, the
    squared length of the gradient of the log-probability by the logits: a row weighs as much as its gradient. As in verl.

    In a flow:

        rows = fr.logprobs(policy, rows, out="old_logprobs")
        rows = fr.top_logprobs(policy, rows, k=64, out="policy_top")
        rows = advantages.optimal_token_baseline(advantages.sum_pi_squared(rows))

    Args (columns):
        sum_pi_squared: sum over the vocabulary of the squared probabilities at each token, from the operator of that name.
        rollout_is_weights: importance weights rho; if there, each term of W is multiplied by rho^2.

    Args:
        align: tokens of a group are compared at the same `"position"` of the response, or after the same number of `"trained"`
            tokens, which leaves tool output out (verl's form for many turns).
        tail: the baseline where the group's longest row has no other beside it is `"kept"`, so that its advantage is about 0
            there, or `"zero"` from the number of tokens of the second longest on (verl).
        single: what a group of one gets: `"zero"`, or its `"reward"`: the returns themselves (verl).
        counts: whether rows without a token that trains make a group more than one (`"scored"`, verl with `"position"`) or not
            (`"trained"`).
        flat: a group of equal returns gets exactly `"zero"`, apart from a tail of baseline zero, or what `"eps"` leaves of
            them: G eps / (sum W + eps) (verl).
        eps: added to the sum of W.

    A row with a number that is not finite gets 0
    and has no part in the baseline.
    """
    required("optimal_token_baseline needs eps >= 0", eps >= 0, eps=eps)
    checked("align", align, ALIGN, "optimal_token_baseline")
    checked("tail", tail, TAILS, "optimal_token_baseline")
    checked("single", single, SINGLES, "optimal_token_baseline")
    checked("counts", counts, COUNTS, "optimal_token_baseline")
    checked("flat", flat, FLAT, "optimal_token_baseline")
    trains = as_bool(loss_mask)
    paid = at_last_token(np.asarray(reward, np.float64), trains) if token_rewards is None else token_rewards
    for column in (paid, old_logprobs, sum_pi_squared, rollout_is_weights):
        if column is not None:
            bad = any_in_row(trains.values & ~np.isfinite(column.values), trains.offsets)
            trains = fr.Ragged.like(trains.values & ~trains.spread(bad), trains)
    returns = reward_to_go(paid, trains)
    gains, offsets = packed(returns.values, trains)
    row, lengths = trains.row_index[trains.values], np.diff(offsets)
    places = np.arange(len(gains)) - offsets[:-1][row]
    if align == "position":
        places = np.flatnonzero(trains.values) - trains.offsets[:-1][row]
    number = numbered(group, len(trains))
    weight = _path_weight(trains, old_logprobs, sum_pi_squared, rollout_is_weights, offsets)
    baseline = _baseline(gains, weight, number[row], places, eps)
    if len(gains) and flat == "zero":
        baseline = np.where(
            Groups.of(gains, number[row], np.ones(len(gains), bool)).has_signal[number[row]], baseline, gains
        )
    if tail == "zero":
        baseline[_stands_alone(lengths, number)[row] <= places] = 0.0
    in_group = np.bincount(number, weights=(lengths > 0) | (counts == "scored"))
    is_single = (in_group == 1)[number[row]]
    baseline = np.where(is_single, gains if single == "zero" else 0.0, baseline)
    return {"advantages": fr.Ragged.like(unpacked(gains - baseline, trains), trains), "returns": returns}


def _path_weight(
    trains: fr.Ragged, logprobs: fr.Ragged, squares: fr.Ragged, rho: fr.Ragged | None, offsets: np.ndarray
) -> np.ndarray:
    # sum of the squared lengths up to each token: from the other end, the sum of what is not after it
    # no probability is above 1; a greater number would make NaN of whatever is summed beside it
    size = 1.0 - 2.0 * np.exp(np.minimum(packed(logprobs.values, trains)[0], 0.0)) + packed(squares.values, trains)[0]
    if rho is not None:
        size *= packed(rho.values, trains)[0] ** 2
    return accumulate(size[::-1], offsets[-1] - offsets[::-1], 1.0)[::-1]


def _baseline(gains: np.ndarray, weight: np.ndarray, number: np.ndarray, places: np.ndarray, eps: float) -> np.ndarray:
    # [T] weighted mean of the gains at the same place of the same group
    width = int(places.max(initial=0)) + 1
    _, same = np.unique(number * width + places, return_inverse=True)
    total = np.bincount(same, weights=gains * weight) / (np.bincount(same, weights=weight) + eps)
    return total[same]


def _stands_alone(lengths: np.ndarray, number: np.ndarray) -> np.ndarray:
    # [N] place from which a row is the only one of its group that goes on; beyond any place for all but the longest
    order = np.lexsort((-lengths, number))
    of, sorted_lengths = number[order], lengths[order]
    is_first = np.concatenate(([True], of[1:] != of[:-1])) if len(of) else np.zeros(0, bool)
    second = np.where(np.append(is_first[1:], True), 0, np.append(sorted_lengths[1:], 0))
    result = np.full(len(lengths), np.iinfo(np.int64).max)
    is_alone = is_first & (sorted_lengths > second)
    result[order[is_alone]] = second[is_alone]
    return result
