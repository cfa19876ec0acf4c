"""Weights that correct for rows the trained policy did not sample itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators.losses._common import held

if TYPE_CHECKING:
    from flowrl_operators.losses._common import Output


@fr.loss(corrects=True, max_staleness=None)
def truncated_importance(
    old_logprobs: fr.TOKEN.f32.or_live("logprobs"),
    rollout_logprobs: fr.TOKEN.f32,
    segments: Any,
    *,
    cap: float = 2.0,
    level: str = "token",
    log_ratio_clip: float = 20.0,
) -> Output:
    """A weight to multiply another term with: min(exp(old - rollout), cap), without gradient.

    Corrects for rows sampled by other weights or by an engine with other arithmetic than the trainer's: truncated importance
    sampling (Espeholt et al., arXiv 1802.01561; between sampler and trainer: Yao et al., 2025). `old` is the column
    `old_logprobs` or, where it is not there, the live policy.

    Args:
        cap: greatest weight.
        level: `"token"`, or `"sequence"`: one weight per row, the ratio of the whole response.
        log_ratio_clip: log-ratios (of a row: their sum) are held within this on both sides.

    Metrics: `importance`, `importance_capped`.
    """
    if not cap > 0 or level not in ("token", "sequence"):
        raise ConfigError(
            f"truncated_importance needs cap > 0 and level 'token' or 'sequence'; found cap={cap!r}, level={level!r}"
        )
    difference = (old_logprobs - rollout_logprobs).detach()
    if level == "sequence":
        difference = segments.spread(segments.sum(difference))
    ratio = held(difference, log_ratio_clip).exp()
    return ratio.clamp(max=cap), {"importance": ratio, "importance_capped": (ratio > cap).to(ratio.dtype)}
