"""KL penalties as reward, and the controllers that move their weight."""

from __future__ import annotations

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators.advantages import at_last_token

KL_KINDS = ("k1", "k2", "k3", "abs")


@fr.operator(writes={"token_rewards": fr.TOKEN.f32})
def kl_shaped(
    reward: fr.SAMPLE.f32,
    policy_logprobs: fr.TOKEN.f32.named_by("logprobs"),
    ref_logprobs: fr.TOKEN.f32,
    loss_mask: fr.TOKEN.bool,
    *,
    coefficient: float,
    kind: str = "k1",
    logprobs: str = "old_logprobs",
):
    """Pay for distance from the reference at every token: r_t = -coefficient * kl_t, plus `reward` at the last token.

    From Ziegler et al. (arXiv 1909.08593) and InstructGPT (arXiv 2203.02155), which use k1. Only tokens that train pay.

    Args:
        coefficient: weight of the penalty.
        kind: estimator, with d = policy - reference: k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.
        logprobs: the column of the policy's log-probabilities: `old_logprobs` (recomputed by the trainer), or
            `rollout_logprobs` to do without that pass.
    """
    difference = policy_logprobs.values.astype(np.float64) - ref_logprobs.values.astype(np.float64)
    inside = loss_mask.values.astype(bool)
    penalty = kl_estimate(np.where(inside, difference, 0.0), kind)  # every estimate of 0 is 0
    paid = at_last_token(np.asarray(reward, np.float64), loss_mask).values - coefficient * penalty
    return fr.Ragged.like(paid, loss_mask)


def kl_estimate(difference: np.ndarray, kind: str) -> np.ndarray:
    """Estimators of KL(policy || reference) from the policy's samples; `difference` = log policy - log reference.

    Source: Schulman, "Approximating KL divergence" (2020). k3's exponent is held within +-20.
    """
    match kind:
        case "k1":
            return difference
        case "abs":
            return np.abs(difference)
        case "k2":
            return difference**2 / 2
        case "k3":
            return np.exp(np.clip(-difference, -20.0, 20.0)) - 1.0 + difference
    raise ConfigError(f"kind of KL estimate is one of {', '.join(KL_KINDS)}; found {kind!r}")
