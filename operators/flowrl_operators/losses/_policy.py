"""Policy gradients. Notation: d = logprobs - old_logprobs, r = exp(d), A the advantage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators.losses._common import held

if TYPE_CHECKING:
    from flowrl_operators.losses._common import Output


@fr.loss
def ppo_clip(
    logprobs: fr.TOKEN.f32,
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    advantages: fr.TOKEN.f32.or_broadcast("advantage"),
    *,
    clip: float = 0.2,
    high: float | None = None,
    dual: float | None = None,
    log_ratio_clip: float | None = 20.0,
) -> Output:
    """PPO's clipped surrogate: max(-r A, -clip(r, 1 - clip, 1 + high) A).

    From Schulman et al. (arXiv 1707.06347). Without a column `old_logprobs` r is 1, with the policy gradient as its
    derivative: right for the first step after a rollout.

    Args:
        clip: how far below 1 the ratio counts.
        high: how far above; None takes `clip`. DAPO's clip-higher (arXiv 2503.14476) is `ppo_clip(0.2, high=0.28)`.
        dual: for A < 0 the term is at most -dual * A (dual-clip, arXiv 1912.09729; usual value 3). None leaves it out.
        log_ratio_clip: d is held within this on both sides so that exp cannot overflow; None takes d as it is.

    Metrics: `clip_fraction`, `ratio`, `approx_kl` (r - 1 - d, an estimate of KL(old || new)).
    """
    import torch

    if not clip > 0 or (dual is not None and not dual > 1):
        raise ConfigError(f"ppo_clip needs clip > 0 and dual > 1; found clip={clip!r}, dual={dual!r}")
    difference = held(logprobs - old_logprobs, log_ratio_clip)
    ratio = difference.exp()
    free = -ratio * advantages
    bound = -ratio.clamp(1 - clip, 1 + (clip if high is None else high)) * advantages
    loss = torch.maximum(free, bound)
    metrics = {
        "clip_fraction": (bound > free).to(loss.dtype),
        "ratio": ratio.detach(),
        "approx_kl": (ratio - 1 - difference).detach(),
    }
    if dual is not None:
        ceiling = -dual * advantages
        metrics["dual_clip_fraction"] = ((advantages < 0) & (loss > ceiling)).to(loss.dtype)
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return loss, metrics


@fr.loss
def reinforce(logprobs: fr.TOKEN.f32, advantages: fr.TOKEN.f32.or_broadcast("advantage")) -> Output:
    """REINFORCE: -A log pi. From Williams (1992)."""
    return -advantages * logprobs
