"""Policy gradients that look at all tokens of a step to choose some.

[Note: Statistics of a step need the step]
These are declared locality="batch": all rows of an optimizer step form one micro-batch, so that what they answer does not
depend on how the step is cut. The price is memory: activations of the whole step are held at once, whatever
`micro_batch_tokens` says.

Notation: d = logprobs - old_logprobs, r = exp(d), A the advantage, cov = (A - mean A)(logprobs - mean logprobs) with means over
the trained tokens of the step. From "The Entropy Mechanism of Reinforcement Learning" (arXiv 2505.22617): the entropy falls with
the covariance of log-probability and advantage, and few tokens make most of it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

import flowrl as fr
from flowrl_operators._options import above_0, checked, required
from flowrl_operators.losses._common import Bound, check_ratio, fraction, held

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl_operators.losses._common import Output


def _check_clip_cov(
    *,
    clip: float,
    high: float | None,
    low_cov: float,
    high_cov: float,
    share: float,
    seed: int,
    log_ratio_clip: Bound,
) -> None:
    required(
        "clip_cov needs clip > 0, high > 0, low_cov < high_cov and share between 0 and 1",
        above_0(clip, high) and low_cov < high_cov and 0 <= share <= 1,
        clip=clip,
        high=high,
        low_cov=low_cov,
        high_cov=high_cov,
        share=share,
    )
    check_ratio("clip_cov", log_ratio_clip=log_ratio_clip)


@fr.loss(locality="batch", check=_check_clip_cov)
def clip_cov(
    logprobs: fr.TOKEN.f32,
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    advantages: fr.TOKEN.f32.or_broadcast("advantage"),
    *,
    clip: float = 0.2,
    high: float | None = None,
    low_cov: float = 1.0,
    high_cov: float = 5.0,
    share: float = 2e-4,
    seed: int = 0,
    log_ratio_clip: Bound = 20.0,
) -> Output:
    """Clip-Cov: PPO's clipped surrogate without some of the tokens of great covariance.

    cov = (A - mean A)(logprobs - mean logprobs), A the advantage, with means over the trained tokens of the step, which is
    therefore one micro-batch, whatever `micro_batch_tokens` says.
    A token with low_cov < cov < high_cov that PPO does not clip is a candidate; `share` of the step's tokens (at least one),
    drawn from the candidates, add 0.

    Args:
        clip, high: as in `ppo_clip`.
        share: tokens left out, as a share of all trained tokens of the step; 1.0 takes every candidate.
        seed: of the draw.
        log_ratio_clip: as in `ppo_clip`. (verl: None.)

    Metrics: `clip_fraction` (by the ratio), `cov_fraction` (tokens left out for their covariance).
    """
    import torch

    ratio = held(logprobs - old_logprobs, log_ratio_clip).exp()
    free = -ratio * advantages
    bound = -ratio.clamp(1 - clip, 1 + (clip if high is None else high)) * advantages
    is_clipped = bound > free
    cov = _covariance(logprobs, advantages)
    candidates = ((cov > low_cov) & (cov < high_cov) & ~is_clipped).nonzero()[:, 0]
    wanted = max(int(share * len(cov)), 1) if share else 0
    if wanted < len(candidates):
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))[:wanted]
        candidates = candidates[order.to(candidates.device)]
    is_left_out = torch.zeros_like(is_clipped)
    is_left_out[candidates] = True
    loss = torch.where(is_left_out, 0.0, torch.maximum(free, bound))
    return loss, {"clip_fraction": fraction(is_clipped, loss), "cov_fraction": fraction(is_left_out, loss)}


def _check_kl_cov(*, share: float, coef: float, log_ratio_clip: Bound) -> None:
    required("kl_cov needs 0 < share <= 1 and coef >= 0", 0 < share <= 1 and coef >= 0, share=share, coef=coef)
    check_ratio("kl_cov", log_ratio_clip=log_ratio_clip)


@fr.loss(locality="batch", check=_check_kl_cov)
def kl_cov(
    logprobs: fr.TOKEN.f32,
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    advantages: fr.TOKEN.f32.or_broadcast("advantage"),
    *,
    share: float = 2e-3,
    coef: float = 1.0,
    log_ratio_clip: Bound = 20.0,
) -> Output:
    """KL-Cov: -r A, and coef |d| on top at the tokens of greatest covariance.

    d = logprobs - old_logprobs, r = exp(d), A the advantage; covariance (A - mean A)(logprobs - mean logprobs), means over the
    trained tokens of the step, which is therefore one micro-batch, whatever `micro_batch_tokens` says.

    Args:
        share: tokens that are held back, as a share of all trained tokens of the step (at least one).
        coef: weight of |d|.
        log_ratio_clip: as in `ppo_clip`. (verl: None.)

    Metrics: `ratio`, `cov_fraction` (tokens held back).
    """
    import torch

    difference = held(logprobs - old_logprobs, log_ratio_clip)
    ratio = difference.exp()
    cov = _covariance(logprobs, advantages)
    is_held = torch.zeros_like(cov, dtype=torch.bool)
    if len(cov):
        is_held[cov.topk(max(1, int(share * len(cov)))).indices] = True
    loss = -ratio * advantages + torch.where(is_held, coef * difference.abs(), 0.0)
    return loss, {"ratio": ratio.detach(), "cov_fraction": fraction(is_held, ratio)}


def _check_top_entropy(*, share: float, threshold: str) -> None:
    required("top_entropy needs 0 < share <= 1", 0 < share <= 1, share=share)
    checked("threshold", threshold, ("exact", "float32"), "top_entropy")


@fr.loss(locality="batch", on_policy=False, weight=True, check=_check_top_entropy)
def top_entropy(entropy: fr.TOKEN.f32, *, share: float = 0.2, threshold: str = "exact") -> Output:
    """A weight to multiply another term with: 1 at the share of tokens of greatest entropy, 0 elsewhere, without gradient.

    Only the tokens at which the response forks learn: "Beyond the 80/20 rule" (arXiv 2506.01939). The threshold is the
    (1 - share) quantile of the entropies of the step's trained tokens, linear between two of them; tokens left out stay in the
    count that an average divides by (TRL).

    Args:
        share: of the tokens that learn.
        threshold: `"exact"`, or computed in `"float32"` (TRL), where a token of greater precision that is the threshold itself
            may fall below it.

    Metrics: `entropy`, `learning_fraction`.
    """
    seen = entropy.detach()
    values = seen.float() if threshold == "float32" else seen
    chosen = fraction(seen >= _quantile(values, 1 - share), seen) if len(seen) else seen
    return chosen, {"entropy": seen, "learning_fraction": chosen}


def _covariance(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """[T] of each token, without gradient."""
    seen = logprobs.detach()
    return (advantages - advantages.mean()) * (seen - seen.mean())


def _quantile(values: Tensor, q: float) -> Tensor:
    """Linear between the two nearest of [T]; torch.quantile refuses more than 16 M values."""
    import torch

    ordered = values.sort().values
    # of single precision for single values, as torch.quantile has it
    kind = np.float32 if values.dtype == torch.float32 else np.float64
    place = float(kind(q) * kind(len(ordered) - 1))
    below = math.floor(place)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    return torch.lerp(low, high, place - below)
