"""Policy gradients per token. Notation: d = logprobs - old_logprobs, r = exp(d), A the advantage, sg no gradient.

[Note: Compared with the sampler]
r compares with the column `old_logprobs`: the policy when the update began. For the ratio to the sampler's own numbers give
its column that name: `rows.with_columns(old_logprobs=fr.col("rollout_logprobs"))`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators._kl import kl_estimate
from flowrl_operators._options import above_0, at_least_0, required
from flowrl_operators.losses._common import Bound, check_ratio, fraction, held, log_ratio

if TYPE_CHECKING:
    from flowrl_operators.losses._common import Output


def _check_ppo_clip(*, clip: float, high: float | None, dual: float | None, row_advantage: bool, **ratio: Any) -> None:
    required(
        "ppo_clip needs clip > 0, high > 0 and dual > 1",
        clip > 0 and above_0(high) and (dual is None or dual > 1),
        clip=clip,
        high=high,
        dual=dual,
    )
    check_ratio("ppo_clip", **ratio)


@fr.loss(check=_check_ppo_clip)
def ppo_clip(
    logprobs: fr.TOKEN.f32,
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    advantages: fr.TOKEN.f32.or_broadcast("advantage"),
    segments: Any = None,
    *,
    clip: float = 0.2,
    high: float | None = None,
    dual: float | None = None,
    level: str = "token",
    row_advantage: bool = False,
    count_eps: float = 0.0,
    log_ratio_clip: Bound = 20.0,
) -> Output:
    """PPO's clipped surrogate: max(-r A, -clip(r, 1 - clip, 1 + high) A).

    From Schulman et al. (arXiv 1707.06347). Without a column `old_logprobs` r is 1, with the policy gradient as its
    derivative: right for the first step after a rollout.

    GRPO, Dr. GRPO, DAPO and TRL's BNPO are this loss with another average, which belongs to `fr.update`: `"sequence_mean"` is
    GRPO's, `"constant"` Dr. GRPO's, `"token_mean"` that of DAPO and, where the step is one micro-batch, of BNPO.

    Args:
        clip: how far below 1 the ratio counts.
        high: how far above; None takes `clip`. DAPO's clip-higher (arXiv 2503.14476) is `ppo_clip(0.2, high=0.28)`.
        dual: for A < 0 the term is at most -dual * A (dual-clip, arXiv 1912.09729; usual value 3, ROLL has 1 + 2 clip). None
            leaves it out. Two-sided clipping with a bound delta > 1 + high (INTELLECT-2, arXiv 2505.07291; TRL) is the same.
        level: whose ratio r is. `"token"`; `"geometric"`: one per row, exp(mean of d): GSPO (arXiv 2507.18071; usual bounds
            3e-4 and 4e-4; TRL, OpenRLHF, NeMo-RL, slime, ROLL); `"geometric_token"`: the same value, differentiated through
            the own token only: GSPO-token (verl, SkyRL), the same gradient where A is the row's; `"sequence"`: one per row,
            exp(sum of d), the ratio of whole responses (TRL's RLOO). With a level above the token average by
            `sequence_mean`, as GSPO does.
        row_advantage: take the mean of A over the row at each of its tokens (AReaL's GSPO).
        count_eps: added to the number of tokens in the mean of d (NeMo-RL: 1e-8).
        log_ratio_clip: log r is held within this on both sides so that exp cannot overflow, or within (low, high), either of
            them None; None takes it as it is. No gradient where it acts. (verl, OpenRLHF, SkyRL: 20 per token; verl's GSPO:
            (None, 10); TRL, NeMo-RL, AReaL, slime, ROLL: None.)

    Metrics: `clip_fraction`, of it `clip_low_fraction` (A < 0) and `clip_high_fraction` (A > 0), `dual_clip_fraction`,
    `ratio`, `approx_kl` (r - 1 - log r, an estimate of KL(old || new)).
    """
    import torch

    difference = log_ratio(logprobs, old_logprobs, segments, level, log_ratio_clip, count_eps=count_eps)
    if row_advantage:
        if segments is None:
            raise ConfigError("row_advantage=True needs the rows of the tokens: pass segments")
        advantages = segments.spread(segments.mean(advantages))
    ratio = difference.exp()
    free = -ratio * advantages
    bound = -ratio.clamp(1 - clip, 1 + (clip if high is None else high)) * advantages
    loss = torch.maximum(free, bound)
    is_clipped = bound > free
    metrics = {
        "clip_fraction": fraction(is_clipped, loss),
        "clip_low_fraction": fraction(is_clipped & (advantages < 0), loss),
        "clip_high_fraction": fraction(is_clipped & (advantages > 0), loss),
        "ratio": ratio.detach(),
        "approx_kl": kl_estimate(torch, -difference.detach(), "k3"),
    }
    if dual is not None:
        ceiling = -dual * advantages
        metrics["dual_clip_fraction"] = fraction((advantages < 0) & (loss > ceiling), loss)
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return loss, metrics


@fr.loss
def reinforce(logprobs: fr.TOKEN.f32, advantages: fr.TOKEN.f32.or_broadcast("advantage")) -> Output:
    """REINFORCE: -A log pi. From Williams (1992). GPG (arXiv 2504.02546) is this on its own advantage, `advantages.gpg`."""
    return -advantages * logprobs


def _check_cispo(*, high: float, low: float | None, drop: bool, **ratio: Any) -> None:
    required("cispo needs high >= 0, and low > 0 or None", high >= 0 and above_0(low), high=high, low=low)
    check_ratio("cispo", **ratio)


@fr.loss(check=_check_cispo)
def cispo(
    logprobs: fr.TOKEN.f32,
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    advantages: fr.TOKEN.f32.or_broadcast("advantage"),
    segments: Any = None,
    *,
    high: float = 4.0,
    low: float | None = None,
    drop: bool = False,
    level: str = "token",
    log_ratio_clip: Bound = 20.0,
) -> Output:
    """CISPO: -sg(clip(r, 1 - low, 1 + high)) A log pi; the weight is clipped, and no token loses its gradient.

    From MiniMax-M1 (arXiv 2506.13585).

    Args:
        high: the weight is at most 1 + high. The default, weight 5, is ScaleRL's (arXiv 2510.13786). TRL's `epsilon_high` is
            the bound itself, high = epsilon_high - 1.
        low: the weight is at least 1 - low; None has no lower bound (the paper, TRL). (verl, SkyRL, NeMo-RL, slime, ROLL: 0.2.)
            `cispo(0.0, low=1.0)`, a weight in [0, 1], is ROLL's truncated importance sampling.
        drop: leave out tokens whose ratio is already past a bound in the direction that A pushes it (the paper's unified mask).
        level, log_ratio_clip: as in `ppo_clip`.

    Metrics: `clip_fraction` (tokens past a bound), `pushed_fraction` (of them those that A pushes on), `ratio`.
    """
    import torch

    ratio = log_ratio(logprobs.detach(), old_logprobs, segments, level, log_ratio_clip).exp()
    floor = -torch.inf if low is None else 1 - low
    weight = ratio.clamp(None if low is None else floor, 1 + high)
    is_high, is_low = ratio > 1 + high, ratio < floor
    is_pushed = (is_high & (advantages > 0)) | (is_low & (advantages < 0))
    if drop:
        weight = torch.where(is_pushed, 0.0, weight)
    metrics = {
        "clip_fraction": fraction(is_high | is_low, ratio),
        "pushed_fraction": fraction(is_pushed, ratio),
        "ratio": ratio,
    }
    return -weight * advantages * logprobs, metrics


def _check_topr(*, low: float, high: float, positive: float, negative: float, log_ratio_clip: Bound) -> None:
    required("topr needs low <= high", low <= high, low=low, high=high)
    required(
        "topr needs positive >= 0 and negative >= 0",
        at_least_0(positive, negative),
        positive=positive,
        negative=negative,
    )
    check_ratio("topr", log_ratio_clip=log_ratio_clip)


@fr.loss(check=_check_topr)
def topr(
    logprobs: fr.TOKEN.f32,
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    advantages: fr.TOKEN.f32.or_broadcast("advantage"),
    rewards: fr.TOKEN.f32.or_broadcast("reward"),
    *,
    low: float = 0.0,
    high: float = 1.0,
    positive: float = 1.0,
    negative: float = 1.0,
    log_ratio_clip: Bound = 20.0,
) -> Output:
    """Tapered off-policy REINFORCE: -positive A log pi where the reward is > 0, else -negative sg(clip(r, low, high)) A log pi.

    Good responses teach whoever sampled them, bad ones only as far as the policy still gives them. From arXiv 2503.14286.

    Args:
        low, high: bounds of the weight of the others.
        positive, negative: weights of the two kinds.
        log_ratio_clip: as in `ppo_clip`.

    Metrics: `ratio`.
    """
    import torch

    ratio = held((logprobs - old_logprobs).detach(), log_ratio_clip).exp()
    weight = torch.where(rewards > 0, positive, negative * ratio.clamp(low, high))
    return -weight * advantages * logprobs, {"ratio": ratio}


def _check_sapo(*, tau: float, negative_tau: float, **ratio: Any) -> None:
    required("sapo needs tau > 0 and negative_tau > 0", above_0(tau, negative_tau), tau=tau, negative_tau=negative_tau)
    check_ratio("sapo", **ratio)


@fr.loss(check=_check_sapo)
def sapo(
    logprobs: fr.TOKEN.f32,
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    advantages: fr.TOKEN.f32.or_broadcast("advantage"),
    segments: Any = None,
    *,
    tau: float = 1.0,
    negative_tau: float = 1.05,
    level: str = "token",
    log_ratio_clip: Bound = 20.0,
) -> Output:
    """SAPO: -(4 / tau) sigmoid(tau (r - 1)) A, a soft gate in place of the clip; its slope at r = 1 is the policy gradient's.

    From arXiv 2511.20347.

    Args:
        tau: sharpness of the gate where A > 0.
        negative_tau: sharpness elsewhere; a little greater, since those gradients raise many other tokens.
        level, log_ratio_clip: as in `ppo_clip`. (verl, SkyRL: 20; TRL, AReaL: None.)

    Metrics: `ratio`.
    """
    import torch

    ratio = log_ratio(logprobs, old_logprobs, segments, level, log_ratio_clip).exp()
    sharpness = torch.where(advantages > 0, ratio.new_tensor(tau), ratio.new_tensor(negative_tau))
    gate = 4 / sharpness * torch.sigmoid(sharpness * (ratio - 1))
    return -gate * advantages, {"ratio": ratio.detach()}


def _check_dro(*, beta: float) -> None:
    required("dro needs beta >= 0", beta >= 0, beta=beta)


@fr.loss(check=_check_dro)
def dro(
    logprobs: fr.TOKEN.f32,
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    advantages: fr.TOKEN.f32.or_broadcast("advantage"),
    *,
    beta: float = 0.1,
) -> Output:
    """Direct reward optimisation: -(A log pi - (beta / 2) d^2), REINFORCE with a quadratic pull to the old policy.

    From Richemond et al. (arXiv 2405.19107); Kimi k1.5 (arXiv 2501.12599) has the same with tau for beta.

    Metrics: `squared_log_ratio`.
    """
    squared = (logprobs - old_logprobs).square()
    return -advantages * logprobs + beta / 2 * squared, {"squared_log_ratio": squared.detach()}
