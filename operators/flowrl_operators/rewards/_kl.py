"""KL penalties as reward, and the controllers that move their weight.

[Note: Which rewards a penalty joins]
A penalty is paid per token. `kl_shaped` writes `token_rewards`: minus the penalty at each token, plus the reward where it is
paid. Where `token_rewards` are there already (a process reward), the penalty is added to them and `reward` is left out, since
they are the whole reward; this takes `replace=True`.
"""

from __future__ import annotations

import math

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError, DataError
from flowrl_operators import _kl
from flowrl_operators._options import above_0, checked, required
from flowrl_operators.advantages import at_last_token, masked_mean, masked_sum
from flowrl_operators.advantages._arrays import held_within, token_blocks

TOP_IDS, TOP_LOGPROBS = fr.TOKEN.i32["k"], fr.TOKEN.f32["k"]

PAID = ("last", "every")
KL_COUNTS = ("trained", "all")

LEAST_LEFT = 1e-6
"""Probability outside a list that is told from none: sums of float32 probabilities are no finer."""


@fr.operator(writes={"token_rewards": fr.TOKEN.f32})
def kl_shaped(
    reward: fr.SAMPLE.f32.named_by("of"),
    policy_logprobs: fr.TOKEN.f32.named_by("logprobs"),
    ref_logprobs: fr.TOKEN.f32,
    loss_mask: fr.TOKEN.bool,
    token_rewards: fr.TOKEN.f32 = None,
    token_kl: fr.TOKEN.f32 = None,
    *,
    coefficient: float,
    kind: str = "k1",
    paid: str = "last",
    log_ratio_clip: float | None = 20.0,
    value_clip: float | None = None,
    reward_clip: tuple[float, float] | None = None,
    logprobs: str = "old_logprobs",
    of: str = "reward",
):
    """Pay for distance from the reference at every token: r_t = -coefficient * kl_t, plus `reward` at the last token.

    From Ziegler et al. (arXiv 1909.08593) and InstructGPT (arXiv 2203.02155), which use k1. Only tokens that train pay. Where
    the rows have `token_rewards` already (a process reward), the penalty is taken off these and `reward` is left out, since
    they are the whole reward; this takes `replace=True`.

    Args:
        coefficient: weight of the penalty.
        kind: the estimate of the KL from the token drawn, d = log policy - log reference: `"k1"` d, `"abs"` |d|, `"k2"`
            d^2 / 2, `"k3"` exp(-d) - 1 + d; or `"full"`: the exact KL, read from the column `token_kl` that `token_kl` writes.
        log_ratio_clip: in k3, d is held within this on both sides; None takes it as it is.
        value_clip: the KL of a token is held within this on both sides.
        paid: `"last"`: the reward stands at the last token that trains; `"every"`: at each of them, for what does not sum
            rewards from each token on (NeMo-RL's and slime's REINFORCE++-baseline).
        reward_clip: (least, greatest) reward; beyond it is held there (OpenRLHF).
        logprobs: the column of the policy's log-probabilities: `old_logprobs` (recomputed by the trainer), or
            `rollout_logprobs` to do without that pass.
        of: the column of the reward per response, e.g. `"advantage"` for what a group operator made of it.

    Errors: ConfigError for `kind="full"` without `token_kl` (which is optional, so that only the run tells).
    """
    penalty = _penalty(policy_logprobs, ref_logprobs, loss_mask, token_kl, kind, log_ratio_clip, value_clip)
    return _with_reward(reward, penalty, loss_mask, token_rewards, coefficient, paid, reward_clip)


@fr.operator(writes={"token_rewards": fr.TOKEN.f32, "kl_coefficient": fr.SAMPLE.f32}, locality="stateful")
def adaptive_kl_shaped(
    reward: fr.SAMPLE.f32.named_by("of"),
    policy_logprobs: fr.TOKEN.f32.named_by("logprobs"),
    ref_logprobs: fr.TOKEN.f32,
    loss_mask: fr.TOKEN.bool,
    token_rewards: fr.TOKEN.f32 = None,
    token_kl: fr.TOKEN.f32 = None,
    *,
    coefficient: float,
    target: float,
    horizon: float,
    kind: str = "k1",
    paid: str = "last",
    log_ratio_clip: float | None = 20.0,
    value_clip: float | None = None,
    reward_clip: tuple[float, float] | None = None,
    counts: str = "trained",
    count_eps: float = 0.0,
    logprobs: str = "old_logprobs",
    of: str = "reward",
    state: fr.State,
):
    """`kl_shaped` with a coefficient that follows the KL: it grows while that is above `target`, and falls below.

    From Ziegler et al. (arXiv 1909.08593), section 2.2; see `next_kl_coefficient`. The KL of a step is the mean over its rows
    of the mean over a row's tokens. Writes the step's coefficient to every row's `kl_coefficient`; the next step's is
    saved with checkpoints, as `coefficient`, with the step's KL as `kl`.

    Args:
        coefficient: of the first step.
        target: KL per token that is wished for.
        horizon: rows over which the coefficient moves by the whole of a clipped error.
        counts: rows of the mean: `"trained"`: with a token that trains; `"all"`: the others too, with KL 0 (verl).
        count_eps: added to a row's number of tokens in its mean; verl has 1e-8.

    Other arguments as in `kl_shaped`. A step whose KL is not a number leaves the coefficient as it is.
    """
    checked("counts", counts, KL_COUNTS, "adaptive_kl_shaped")
    _check_controller(target, horizon)
    required("adaptive_kl_shaped needs count_eps >= 0", count_eps >= 0, count_eps=count_eps)
    now = float(state.setdefault("coefficient", coefficient))
    penalty = _penalty(policy_logprobs, ref_logprobs, loss_mask, token_kl, kind, log_ratio_clip, value_clip)
    shaped = _with_reward(reward, penalty, loss_mask, token_rewards, now, paid, reward_clip)
    of_rows = masked_mean(penalty, loss_mask, per="row", count_eps=count_eps)
    trains = masked_sum(fr.Ragged.like(np.ones(len(penalty.values)), penalty), loss_mask, per="row") > 0
    chosen = of_rows if counts == "all" else of_rows[trains]
    state["kl"] = float(np.mean(chosen)) if len(chosen) else 0.0
    if len(chosen):
        state["coefficient"] = next_kl_coefficient(now, state["kl"], len(chosen), target=target, horizon=horizon)
    return {"token_rewards": shaped, "kl_coefficient": np.full(len(of_rows), now)}


@fr.operator(writes={"reward": fr.SAMPLE.f32}, replaces=True)
def kl_penalised(
    reward: fr.SAMPLE.f32,
    policy_logprobs: fr.TOKEN.f32.named_by("logprobs"),
    ref_logprobs: fr.TOKEN.f32,
    loss_mask: fr.TOKEN.bool,
    token_kl: fr.TOKEN.f32 = None,
    *,
    coefficient: float,
    kind: str = "k1",
    log_ratio_clip: float | None = 20.0,
    value_clip: float | None = None,
    reward_clip: tuple[float, float] | None = None,
    logprobs: str = "old_logprobs",
):
    """Take the whole response's penalty off its reward: R - coefficient * sum of kl_t over the tokens that train.

    For advantages per response: RLOO (arXiv 2402.14740) has it so. Arguments as in `kl_shaped`.
    """
    penalty = _penalty(policy_logprobs, ref_logprobs, loss_mask, token_kl, kind, log_ratio_clip, value_clip)
    score = np.asarray(reward, np.float64)
    required("kl_penalised needs a finite coefficient", math.isfinite(coefficient), coefficient=coefficient)
    score = held_within(score, reward_clip, "reward_clip")
    return score - coefficient * masked_sum(penalty, loss_mask, per="row")


@fr.operator(writes={"token_kl": fr.TOKEN.f32})
def token_kl(
    own_ids: TOP_IDS.named_by("policy_ids"),
    own_logprobs: TOP_LOGPROBS.named_by("policy_logprobs"),
    other_ids: TOP_IDS.named_by("ref_ids"),
    other_logprobs: TOP_LOGPROBS.named_by("ref_logprobs"),
    *,
    policy_ids: str = "policy_top_ids",
    policy_logprobs: str = "policy_top_logprobs",
    ref_ids: str = "ref_top_ids",
    ref_logprobs: str = "ref_top_logprobs",
):
    """KL(policy || reference) at each token as a sum over the vocabulary, sum_v p_v (log p_v - log q_v): no estimate.

    For `kl_shaped`, `kl_penalised` and `adaptive_kl_shaped` with `kind="full"`. In a flow:

        rows = fr.top_logprobs(policy, rows, k=vocabulary, out="policy_top")
        rows = fr.top_logprobs(ref, rows, k=vocabulary, out="ref_top")
        rows = rewards.kl_shaped(rewards.token_kl(rows), coefficient=0.05, kind="full")

    Exact with k = the vocabulary's size. With fewer, the sum runs over the tokens that both lists hold, and one more token that
    holds the probability left on either side: a lower bound that is never below 0, and rises to the KL with k.

    Args:
        policy_ids, policy_logprobs: columns of the policy's k likeliest tokens and their log-probabilities.
        ref_ids, ref_logprobs: those of the reference.

    Shapes: [T, k] each, to [T]. What is left counts as 1e-6 at least, which float32 cannot tell from 0. Infinite where the
    reference excludes a token (minus infinity) that the policy does not.
    """
    shapes = [column.values.shape for column in (own_ids, own_logprobs, other_ids, other_logprobs)]
    if shapes[0] != shapes[1] or shapes[2] != shapes[3] or shapes[0][0] != shapes[2][0]:
        raise DataError(f"token_kl needs ids and log-probabilities [tokens, k] of both models; found {shapes}")
    value = np.zeros(len(own_ids.values))
    for at in token_blocks(own_ids.values):
        columns = (column.values[at] for column in (own_ids, own_logprobs, other_ids, other_logprobs))
        value[at] = _exact_kl(*columns)
    return fr.Ragged.like(value, own_ids)


def _exact_kl(ids: np.ndarray, logprobs: np.ndarray, other_ids: np.ndarray, other_logprobs: np.ndarray) -> np.ndarray:
    # [T]; the reference's list sorted by (token's place, id), in which the policy's ids are looked up
    order = np.argsort(other_ids, axis=-1)
    span = 1 + max(int(ids.max(initial=0)), int(other_ids.max(initial=0)))
    start = span * np.arange(len(ids))[:, None]
    known = (np.take_along_axis(other_ids, order, -1) + start).ravel()
    place = np.searchsorted(known, ids + start).clip(max=len(known) - 1)
    is_shared = known[place] == ids + start
    p = logprobs.astype(np.float64)
    q = np.take_along_axis(other_logprobs, order, -1).ravel()[place].astype(np.float64)
    counts = is_shared & (np.exp(p) > 0)  # a token of probability 0 adds nothing
    gap = np.where(counts, p, 0.0) - np.where(counts, q, 0.0)
    left, other_left = (
        np.maximum(1.0 - np.exp(np.where(is_shared, side, -np.inf)).sum(-1), LEAST_LEFT) for side in (p, q)
    )
    return (np.where(counts, np.exp(p), 0.0) * gap).sum(-1) + left * np.log(left / other_left)


def _check_controller(target: float | None, horizon: float) -> None:
    needs = "a KL controller needs target > 0 and horizon > 0"
    required(needs, above_0(target, horizon), target=target, horizon=horizon)


def next_kl_coefficient(
    coefficient: float, kl: float, rows: int, *, target: float | None, horizon: float = 10_000, clip: float = 0.2
) -> float:
    """The coefficient after a step of `rows` responses with this KL: times 1 + clip(kl / target - 1) * rows / horizon.

    From Ziegler et al. (arXiv 1909.08593), section 2.2. Without a target the coefficient is fixed.

    Args:
        clip: the relative error is held within this on both sides; 0.2 in the paper.
    """
    if target is None or not math.isfinite(kl):
        return coefficient
    _check_controller(target, horizon)
    error = min(max(kl / target - 1.0, -clip), clip)
    return coefficient * (1.0 + error * rows / horizon)


def kl_estimate(
    difference: np.ndarray, kind: str, *, log_ratio_clip: float | None = 20.0, value_clip: float | None = None
) -> np.ndarray:
    """Estimators of KL(policy || reference) from the policy's samples; `difference` d = log policy - log reference.

    k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d: Schulman, "Approximating KL divergence" (2020).

    Args:
        log_ratio_clip: in k3, d is held within this on both sides (20 in verl and NeMo-RL); None takes it as it is.
        value_clip: the estimate is held within this on both sides (10 for k3 in verl, SkyRL and ROLL, for all kinds in
            OpenRLHF, NeMo-RL and AReaL).
    """
    required(
        "a KL estimate needs log_ratio_clip > 0 and value_clip > 0, or None",
        above_0(log_ratio_clip, value_clip),
        log_ratio_clip=log_ratio_clip,
        value_clip=value_clip,
    )
    value = _kl.kl_estimate(np, np.asarray(difference), kind, log_ratio_clip)
    return value if value_clip is None else np.clip(value, -value_clip, value_clip)


def _penalty(
    policy: fr.Ragged,
    reference: fr.Ragged,
    mask: fr.Ragged,
    exact: fr.Ragged | None,
    kind: str,
    log_ratio_clip: float | None,
    clip: float | None,
) -> fr.Ragged:
    trains = mask.values.astype(bool)
    if kind == "full":
        if exact is None:
            raise ConfigError(
                "kind='full' needs the column 'token_kl', which the rows do not have; write it with rewards.token_kl(rows), "
                "which reads what fr.top_logprobs gives of both models"
            )
        required("a KL needs value_clip > 0 or None", above_0(clip), value_clip=clip)
        held = exact.values.astype(np.float64) if clip is None else exact.values.astype(np.float64).clip(-clip, clip)
        return fr.Ragged.like(np.where(trains, held, 0.0), mask)
    with np.errstate(invalid="ignore", over="ignore"):  # outside of the mask
        difference = policy.values.astype(np.float64) - reference.values.astype(np.float64)
    inside = np.where(trains, difference, 0.0)  # every estimate of 0 is 0
    return fr.Ragged.like(kl_estimate(inside, kind, log_ratio_clip=log_ratio_clip, value_clip=clip), mask)


def _with_reward(
    reward: np.ndarray,
    penalty: fr.Ragged,
    mask: fr.Ragged,
    token_rewards: fr.Ragged | None,
    coefficient: float,
    paid: str,
    reward_clip: tuple[float, float] | None,
) -> fr.Ragged:
    checked("paid", paid, PAID, "kl_shaped")
    required("kl_shaped needs a finite coefficient", math.isfinite(coefficient), coefficient=coefficient)
    if token_rewards is not None:
        return fr.Ragged.like(token_rewards.values.astype(np.float64) - coefficient * penalty.values, mask)
    score = held_within(np.asarray(reward, np.float64), reward_clip, "reward_clip")
    if paid == "last":
        given = at_last_token(score, mask).values
    else:
        given = np.where(mask.values.astype(bool), mask.spread(score), 0.0)
    return fr.Ragged.like(given - coefficient * penalty.values, mask)
