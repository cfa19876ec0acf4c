"""Losses of critics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import flowrl as fr

if TYPE_CHECKING:
    from flowrl_operators.losses._common import Output


@fr.loss(on_policy=False, max_staleness=None)
def value_clip(
    values: fr.TOKEN.f32,
    old_values: fr.TOKEN.f32.column("values"),
    returns: fr.TOKEN.f32,
    *,
    clip: float | None = 0.2,
) -> Output:
    """Half the squared error of a critic, the worse of free and clipped: max((V - R)^2, (clip(V, V_old +- c) - R)^2) / 2.

    From PPO's reference implementation (Schulman et al., arXiv 1707.06347; OpenAI baselines).

    Args:
        clip: how far a value may move from the stored one; None gives the plain squared error.

    Metrics: `value_clip_fraction`, `value_error` (squared).
    """
    import torch

    error = (values - returns).square()
    if clip is None:
        return error / 2, {"value_error": error.detach()}
    near = old_values + (values - old_values).clamp(-clip, clip)
    bound = (near - returns).square()
    metrics = {"value_error": error.detach(), "value_clip_fraction": (bound > error).to(error.dtype)}
    return torch.maximum(error, bound) / 2, metrics
