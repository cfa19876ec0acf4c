"""What the losses share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowrl.errors import ConfigError
from flowrl_operators._options import above_0, at_least_0, checked, required

if TYPE_CHECKING:
    from torch import Tensor

    Output = Tensor | tuple[Tensor, dict[str, Tensor]]

Bound = float | tuple[float | None, float | None] | None
"""A bound on both sides, a lower and an upper one (None: open), or none at all."""

LEVELS = ("token", "sequence", "geometric", "geometric_token")


def check_ratio(where: str, *, level: str = "token", log_ratio_clip: Bound = None, count_eps: float = 0.0) -> None:
    """Refuse options of a policy loss's ratio that make no sense; see `log_ratio`."""
    checked("level", level, LEVELS, where)
    if isinstance(log_ratio_clip, tuple):
        low, high = log_ratio_clip if len(log_ratio_clip) == 2 else (1, 0)
        is_bound = low is None or high is None or low < high
    else:
        is_bound = above_0(log_ratio_clip)
    required(
        f"{where} needs log_ratio_clip > 0, or (low, high) with low < high, either of them None",
        is_bound,
        log_ratio_clip=log_ratio_clip,
    )
    required(f"{where} needs count_eps >= 0", at_least_0(count_eps), count_eps=count_eps)


def held(values: Tensor, bound: Bound) -> Tensor:
    """Values within +-bound, or between a lower and an upper bound; as they are without one."""
    if bound is None or bound == (None, None):
        return values
    low, high = bound if isinstance(bound, tuple) else (-bound, bound)
    return values.clamp(low, high)


def log_ratio(
    logprobs: Tensor, old_logprobs: Tensor, segments: Any, level: str, bound: Bound, *, count_eps: float = 0.0
) -> Tensor:
    """[T] log of the ratio between the policy and the one it is compared with, d = logprobs - old_logprobs, held in `bound`.

    Levels: `token`: d of each token; `sequence`: their sum over the row, the ratio of whole responses; `geometric`: their
    mean over the row; `geometric_token`: the same value, differentiated through the own token only.
    """
    difference = logprobs - old_logprobs
    if level == "token":
        return held(difference, bound)
    if segments is None:
        raise ConfigError(
            f"level={level!r} needs the rows of the tokens: pass segments (flowrl.engines.segments.Segments)"
        )
    if level == "sequence":
        return held(segments.spread(segments.sum(difference)), bound)
    mean = segments.spread(row_mean(difference, segments, count_eps))
    if level == "geometric":
        return held(mean, bound)
    return held(logprobs - logprobs.detach() + mean.detach(), bound)


def row_mean(values: Tensor, segments: Any, count_eps: float = 0.0) -> Tensor:
    """[T] to [N]: the mean over each row's n tokens, or their sum / (n + count_eps); 0 for rows without tokens."""
    if not count_eps:
        found: Tensor = segments.mean(values)
        return found
    padded: Tensor = segments.sum(values) / (segments.lengths.to(values.dtype) + count_eps)
    return padded


def fraction(chosen: Tensor, like: Tensor) -> Tensor:
    """1 where chosen, 0 elsewhere: a metric whose mean is a share."""
    return chosen.to(like.dtype)
