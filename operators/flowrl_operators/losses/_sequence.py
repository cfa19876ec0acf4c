"""Policy gradients whose weight belongs to the whole response. Notation: d = logprobs - old_logprobs, A the advantage."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import flowrl as fr
from flowrl_operators._options import above_0, at_least_0, required
from flowrl_operators.losses._common import Bound, check_ratio, fraction, held, row_mean
from flowrl_operators.losses._policy import ppo_clip

if TYPE_CHECKING:
    from flowrl_operators.losses._common import Output


def _check_gspo(*, clip: float, high: float | None, token: bool) -> None:
    required("gspo needs clip > 0 and high > 0", above_0(clip, high), clip=clip, high=high)


@fr.loss(check=_check_gspo)
def gspo(
    logprobs: fr.TOKEN.f32,
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    advantages: fr.TOKEN.f32.or_broadcast("advantage"),
    segments: Any,
    *,
    clip: float = 3e-4,
    high: float | None = 4e-4,
    token: bool = False,
) -> Output:
    """GSPO: PPO's clipped surrogate with one ratio per response, s = exp(mean of d over its tokens).

    From Zheng et al. (arXiv 2507.18071), with its bounds; average by `sequence_mean`, as the paper does. LUSPO
    ("Length-Unbiased Sequence Policy Optimization", 2026) is the same averaged by `sequence_sum`, so that a long response has
    the weight of its length. It is `ppo_clip` with level `"geometric"`, which has further options.

    Args:
        clip, high: how far below and above 1 the ratio counts; high=None takes `clip`.
        token: GSPO-token: the same value, differentiated at each token through that token alone. The same gradient unless the
            advantage differs between the tokens of a response.

    Metrics: as in `ppo_clip`.
    """
    level = "geometric_token" if token else "geometric"
    return ppo_clip.function(logprobs, old_logprobs, advantages, segments, clip=clip, high=high, level=level)


def _check_gmpo(*, clip: float, high: float | None, **ratio: Any) -> None:
    required("gmpo needs clip > 0 and high > 0", above_0(clip, high), clip=clip, high=high)
    check_ratio("gmpo", **ratio)


@fr.loss(per="sample", check=_check_gmpo)
def gmpo(
    logprobs: fr.TOKEN.f32,
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    advantages: fr.TOKEN.f32.or_broadcast("advantage"),
    segments: Any,
    *,
    clip: float = 0.4,
    high: float | None = None,
    count_eps: float = 0.0,
    log_ratio_clip: Bound = 20.0,
) -> Output:
    """GMPO, one number per row: -A exp(mean of c), c = d held in [-clip, high] on the side that A pushes it to.

    The geometric mean of the clipped token ratios, which no single token can drive. From arXiv 2507.20673. A of the row is the
    mean over its tokens; 0 for a row without tokens.

    Args:
        clip: how far below 0 the log-ratio counts where A < 0 (a bound of d, not of exp(d)).
        high: how far above where A > 0; None takes `clip`.
        count_eps: added to the number of tokens in means over a row (verl: 1e-8).
        log_ratio_clip: d is held within this before; see `ppo_clip`.

    Metrics: `clip_fraction`, `clip_low_fraction`, `clip_high_fraction` (tokens), `ratio` (rows).
    """
    import torch

    upper = clip if high is None else high
    difference = held(logprobs - old_logprobs, log_ratio_clip)
    side = advantages.sign()
    kept = side * torch.minimum(side * difference, side * difference.clamp(-clip, upper))
    ratio = row_mean(kept, segments, count_eps).exp()
    low_clip, high_clip = (side < 0) & (difference < -clip), (side > 0) & (difference > upper)
    metrics = {
        "clip_fraction": fraction(low_clip | high_clip, ratio),
        "clip_low_fraction": fraction(low_clip, ratio),
        "clip_high_fraction": fraction(high_clip, ratio),
        "ratio": ratio.detach(),
    }
    return -row_mean(advantages, segments, count_eps) * ratio, metrics


def _check_vespo(*, power: tuple[float, ...], decay: tuple[float, ...], log_ratio_clip: Bound) -> None:
    required(
        "vespo needs two numbers >= 0 for power and for decay",
        len(power) == len(decay) == 2 and at_least_0(*power, *decay),
        power=power,
        decay=decay,
    )
    check_ratio("vespo", log_ratio_clip=log_ratio_clip)


@fr.loss(check=_check_vespo)
def vespo(
    logprobs: fr.TOKEN.f32,
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    advantages: fr.TOKEN.f32.or_broadcast("advantage"),
    segments: Any,
    *,
    power: tuple[float, float] = (2.0, 3.0),
    decay: tuple[float, float] = (3.0, 2.0),
    log_ratio_clip: Bound = 20.0,
) -> Output:
    """VESPO: -sg(phi) A log pi with phi = W^power exp(decay (1 - W)), W the ratio of the whole response.

    A smooth weight of the sequence ratio that is 1 at W = 1 and falls to 0 on both sides. From arXiv 2602.10693.

    Args:
        power, decay: for tokens with A >= 0, and for those with A < 0.
        log_ratio_clip: d of each token, and log W from above, are held within this; W is at least 1e-8.

    Metrics: `sequence_weight`.
    """
    import torch

    difference = held((logprobs - old_logprobs).detach(), log_ratio_clip)
    upper = log_ratio_clip[1] if isinstance(log_ratio_clip, tuple) else log_ratio_clip
    log_weight = segments.spread(segments.sum(difference)).clamp(math.log(1e-8), upper)
    is_good = advantages >= 0
    powers = torch.where(is_good, *log_weight.new_tensor(power))
    decays = torch.where(is_good, *log_weight.new_tensor(decay))
    weight = (powers * log_weight + decays * (1 - log_weight.exp())).exp()
    return -weight * advantages * logprobs, {"sequence_weight": weight}
