"""Policy gradients of tokens inside a trust region. Notation: p = exp(logprobs), p_old, r = p / p_old, A the advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import flowrl as fr
from flowrl_operators._options import above_0, at_least_0, checked, required
from flowrl_operators.losses._common import Bound, check_ratio, fraction, held

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl_operators.losses._common import Output


LOW = {"tv": 0.15, "binary_kl": 0.05}
"""Usual bounds of a token's divergence."""


def _check_dppo(
    *,
    divergence: str,
    low: float | None,
    high: float | None,
    drop: str,
    value: str,
    cap: float | None,
    log_ratio_clip: Bound,
) -> None:
    checked("divergence", divergence, ("tv", "binary_kl"), "dppo")
    checked("drop", drop, ("pushed", "all"), "dppo")
    checked("value", value, ("log", "ratio"), "dppo")
    required(
        "dppo needs low >= 0, high >= 0 and cap > 0",
        at_least_0(low, high) and above_0(cap),
        low=low,
        high=high,
        cap=cap,
    )
    check_ratio("dppo", log_ratio_clip=log_ratio_clip)


@fr.loss(check=_check_dppo)
def dppo(
    logprobs: fr.TOKEN.f32,
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    advantages: fr.TOKEN.f32.or_broadcast("advantage"),
    *,
    divergence: str = "tv",
    low: float | None = None,
    high: float | None = None,
    drop: str = "pushed",
    value: str = "log",
    cap: float | None = 20.0,
    log_ratio_clip: Bound = 20.0,
) -> Output:
    """DPPO: the policy gradient weighed by r, of the tokens whose probability has not moved too far.

    A bound on probabilities in place of PPO's on ratios, which is far too tight on rare tokens and too wide on frequent ones.
    From arXiv 2602.04879. p = exp(logprobs), p_old = exp(old_logprobs), r = p / p_old, A the advantage.

    Args:
        divergence: `"tv"`: |p - p_old|; `"binary_kl"`: KL(old || new) of the token against all others together.
        low: greatest divergence where A < 0; it applies to steps that lower p. None takes 0.15 for `"tv"` and 0.05 for
            `"binary_kl"`.
        high: greatest divergence where A > 0, to steps that raise p; None takes `low`.
        drop: which tokens past it are left out: `"pushed"`, those that A pushes farther (the paper, verl, SkyRL,
            prime-rl); `"all"`, whatever A says: `low` bounds falls of p and `high` rises (prime-rl's IPO trust region).
        value: what is reported, the gradient being the same but where log_ratio_clip acts, which ends that of a ratio: `"log"`:
            -sg(r) A log pi (verl); `"ratio"`: -r A (SkyRL, prime-rl).
        cap: greatest weight r; None for no bound. (verl: 20; SkyRL, prime-rl: None.)
        log_ratio_clip: as in `ppo_clip`.

    A quadratic pull to the old policy beside it is a `kl("k2")` whose reference are the old log-probabilities (prime-rl).
    Metrics: `clip_fraction` (tokens left out), `ratio`.
    """
    import torch

    lower = LOW[divergence] if low is None else low
    upper = lower if high is None else high
    new, old = logprobs.detach(), old_logprobs.detach()
    moved = new.exp() - old.exp()
    distance = moved.abs() if divergence == "tv" else _binary_kl(new, old)
    rises, falls = moved > 0, moved < 0
    if drop == "pushed":
        rises, falls = rises & (advantages > 0), falls & (advantages < 0)
    is_out = (rises & (distance > upper)) | (falls & (distance > lower))
    step = held(logprobs - old, log_ratio_clip)
    ratio = step.detach().exp()
    weight = torch.where(is_out, 0.0, ratio if cap is None else ratio.clamp(max=cap)) * advantages
    loss = -weight * (logprobs if value == "log" else 1 + step - step.detach())
    return loss, {"clip_fraction": fraction(is_out, ratio), "ratio": ratio}


def _binary_kl(new: Tensor, old: Tensor) -> Tensor:
    """KL(old || new) of one token against all others."""
    import torch

    p_old = old.exp()
    rest_new, rest_old = torch.log1p(-new.exp()), torch.log1p(-p_old)
    # 0 log 0 is 0: a token that had all the probability leaves nothing to the others
    others = torch.where(p_old < 1, (1 - p_old) * (rest_old - rest_new), 0.0)
    return torch.where(p_old > 0, p_old * (old - new), 0.0) + others
