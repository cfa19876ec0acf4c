"""Advantages per token."""

from __future__ import annotations

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError, DataError
from flowrl_operators.advantages._arrays import (
    at_last_token,
    discounted,
    packed,
    unpacked,
    whitened,
)


def _token_rewards(reward: np.ndarray, token_rewards: fr.Ragged | None, mask: fr.Ragged) -> fr.Ragged:
    # token rewards, where there are some, are the whole reward; otherwise the response's reward is paid at its end
    return at_last_token(reward, mask) if token_rewards is None else token_rewards


def _without_unknown(rewards: fr.Ragged, mask: fr.Ragged) -> tuple[fr.Ragged, fr.Ragged]:
    # rows with a reward that is not finite take no part: their mask becomes empty
    inside = mask.values.astype(bool)
    unknown = np.zeros(len(mask), bool)
    np.logical_or.at(unknown, mask.row_index, inside & ~np.isfinite(rewards.values))
    kept = fr.Ragged.like(inside & ~mask.spread(unknown), mask)
    return fr.Ragged.like(np.where(kept.values, rewards.values, 0.0).astype(np.float64), mask), kept


def _whitened_locality(*, whiten: bool, **_: object) -> fr.Locality:
    return fr.Locality("batch" if whiten else "row")


@fr.operator(writes={"advantages": fr.TOKEN.f32, "returns": fr.TOKEN.f32}, locality=_whitened_locality)
def gae(
    reward: fr.SAMPLE.f32,
    values: fr.TOKEN.f32,
    loss_mask: fr.TOKEN.bool,
    token_rewards: fr.TOKEN.f32 = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = True,
    unbiased: bool = True,
    eps: float = 1e-8,
):
    """Generalised advantage estimation: delta_t = r_t + gamma V_next - V_t, A_t = delta_t + gamma lam A_next.

    From Schulman et al. (arXiv 1506.02438). `next` is the next token that trains, and nothing follows the last one: values
    at masked tokens (tool output) never bootstrap, the convention of verl, NeMo-RL and AReaL. `returns` = A + V before
    whitening. r is `token_rewards` where that column exists, otherwise `reward` at the last token that trains.

    Args:
        whiten: advantages become (A - mean) / sqrt(var + eps) over all tokens of the step, as PPO for language models does
            since Ziegler et al. (arXiv 1909.08593); False keeps the estimator itself.
        unbiased: var divides by n - 1.

    A row whose reward is NaN gets advantages 0 and returns equal to its values, so that neither policy nor critic moves.
    """
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= number <= 1.0:
            raise ConfigError(f"gae needs 0 <= {name} <= 1; found {number!r}")
    mask = fr.Ragged.like(loss_mask.values.astype(bool), loss_mask)
    rewards, known = _without_unknown(_token_rewards(reward, token_rewards, mask), mask)
    paid, where = packed(rewards, known)
    expected, _ = packed(values.astype(np.float64), known)
    following = np.concatenate([expected[:, 1:], np.zeros((len(expected), min(1, expected.shape[1])))], axis=1)
    deltas = unpacked(paid + gamma * following - expected, where, known)
    advantages = discounted(deltas, known, gamma * lam)
    returns = fr.Ragged.like(np.where(mask.values, advantages.values + values.values, 0.0), mask)
    if whiten:
        advantages = whitened(advantages, known, unbiased=unbiased, eps=eps)
    return {"advantages": advantages, "returns": returns}


@fr.operator(writes={"advantages": fr.TOKEN.f32, "returns": fr.TOKEN.f32}, locality="batch")
def reinforce_pp(
    reward: fr.SAMPLE.f32,
    loss_mask: fr.TOKEN.bool,
    token_rewards: fr.TOKEN.f32 = None,
    *,
    gamma: float = 1.0,
    unbiased: bool = False,
    eps: float = 1e-8,
):
    """REINFORCE++: returns G_t = r_t + gamma G_next, whitened over all tokens of the step: (G - mean) / sqrt(var + eps).

    From Hu (arXiv 2501.03262); r is `token_rewards` (KL-shaped by `rewards.kl_shaped`) where that column exists, otherwise
    `reward` at the last token that trains. Masked tokens neither pay nor discount. The authors' OpenRLHF divides the
    variance by n; verl, SkyRL and slime by n - 1 (`unbiased=True`). A row whose reward is NaN gets 0.
    """
    mask = fr.Ragged.like(loss_mask.values.astype(bool), loss_mask)
    rewards, known = _without_unknown(_token_rewards(reward, token_rewards, mask), mask)
    returns = discounted(rewards, known, gamma)
    return {
        "advantages": whitened(returns, known, unbiased=unbiased, eps=eps),
        "returns": returns,
    }


@fr.operator(writes={"advantages": fr.TOKEN.f32})
def from_step_values(
    reward: fr.SAMPLE.f32,
    step_value: fr.TURN.f32,
    step_starts: fr.TURN.i32,
    loss_mask: fr.TOKEN.bool,
):
    """VinePPO: a token's advantage is what its reasoning step changed, A_k = V(s_k+1) - V(s_k); the last: R - V(s_last).

    From Kazemnejad et al. (arXiv 2410.01679): values are means of rollouts that continue from the start of each step.

    Args (columns):
        step_value: value of the state before each step.
        step_starts: index of each step's first response token, rising, from 0.

    Tokens before the first start belong to no step and get 0. A row with a NaN reward or value gets 0. Errors: DataError
    when a row has not one value per step.
    """
    if not np.array_equal(step_value.lengths, step_starts.lengths):
        row = int(np.flatnonzero(step_value.lengths != step_starts.lengths)[0])
        raise DataError(
            f"from_step_values needs one step_value per step; row {row} has {step_value.lengths[row]} values and "
            f"{step_starts.lengths[row]} steps; join the values with collect=True, in the order of the steps"
        )
    result = []
    for final, values, starts, mask in zip(reward, step_value, step_starts, loss_mask, strict=True):
        gains = np.diff(np.asarray([*values, final], np.float64))
        # number of steps begun at each token; the token belongs to the latest of them
        begun = np.searchsorted(starts, np.arange(len(mask)), side="right")
        per_token = np.concatenate(([0.0], gains))[begun]
        is_known = bool(np.isfinite(gains).all())
        result.append(np.where(mask.astype(bool) & is_known, per_token, 0.0))
    return fr.Ragged.of(result, dtype=np.float64)
