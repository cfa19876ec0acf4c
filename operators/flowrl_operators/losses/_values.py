"""Losses of critics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import flowrl as fr
from flowrl_operators._options import above_0, required

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl_operators.losses._common import Output


def _check_value_clip(*, clip: float | None, huber: float | None) -> None:
    required("value_clip needs clip > 0 and huber > 0, or None", above_0(clip, huber), clip=clip, huber=huber)


@fr.loss(on_policy=False, max_staleness=None, check=_check_value_clip)
def value_clip(
    values: fr.TOKEN.f32,
    old_values: fr.TOKEN.f32.column("values"),
    returns: fr.TOKEN.f32,
    *,
    clip: float | None = 0.2,
    huber: float | None = None,
) -> Output:
    """Half the squared error of a critic, the worse of free and clipped: max((V - R)^2, (clip(V, V_old +- c) - R)^2) / 2.

    From PPO's reference implementation (Schulman et al., arXiv 1707.06347; OpenAI baselines).

    Args:
        clip: how far a value may move from the stored one; None gives the plain squared error.
        huber: beyond this error the loss grows linearly, huber (|V - R| - huber / 2), so that an outlier cannot rule the step
            (Huber, 1964; an option of AReaL); None squares every error.

    Metrics: `value_clip_fraction`, `value_error` (squared).
    """
    import torch

    free = values - returns
    loss = _error(free, huber)
    metrics = {"value_error": free.detach().square()}
    if clip is None:
        return loss, metrics
    near = old_values + (values - old_values).clamp(-clip, clip)
    bound = _error(near - returns, huber)
    metrics["value_clip_fraction"] = (bound > loss).to(loss.dtype)
    return torch.maximum(loss, bound), metrics


def _error(gap: Tensor, huber: float | None) -> Tensor:
    squared = gap.square() / 2
    if huber is None:
        return squared
    size = gap.abs()
    return squared.where(size <= huber, huber * (size - huber / 2))
