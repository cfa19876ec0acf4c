"""KL to a reference, entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators.losses._common import held

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl_operators.losses._common import Output

KL_KINDS = ("k1", "k2", "k3", "abs")

# [Note: A regulariser is no policy gradient]
# KL and entropy terms are declared on_policy=False and any staleness: at each token that trains they pull the model towards
# the reference, or towards more entropy, whoever sampled the token. On rows of older weights they are that pull at the older
# policy's states, not an unbiased estimate at the newest; multiply with truncated_importance for the estimate.


@fr.loss(on_policy=False, max_staleness=None)
def kl(
    logprobs: fr.TOKEN.f32,
    ref_logprobs: fr.TOKEN.f32,
    *,
    kind: str = "k3",
    gradient: str | None = None,
    log_ratio_clip: float | None = 20.0,
    value_clip: float | None = None,
) -> Output:
    """Estimate of KL(policy || reference) at each token, with d = logprobs - ref_logprobs.

    k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d: Schulman, "Approximating KL divergence" (2020); GRPO uses k3.
    As a loss, only k2 has the gradient of the KL in expectation; that of k1 is zero in expectation, that of k3 belongs to the
    KL the other way round.

    Args:
        kind: the estimator whose value is reported and, by default, differentiated.
        gradient: differentiate this one instead, e.g. `kl("k3", gradient="k2")`.
        log_ratio_clip: in k3 the exponent is held within this on both sides; None takes it as it is.
        value_clip: the estimate is held within this on both sides.

    Metrics: `kl`.
    """
    difference = logprobs - ref_logprobs
    value = held(_kl_estimate(difference, kind, log_ratio_clip), value_clip)
    reported = value.detach()
    if gradient is not None:
        slope = _kl_estimate(difference, gradient, log_ratio_clip)
        value = reported + slope - slope.detach()
    return value, {"kl": reported}


def _kl_estimate(difference: Tensor, kind: str, log_ratio_clip: float | None) -> Tensor:
    match kind:
        case "k1":
            return difference
        case "abs":
            return difference.abs()
        case "k2":
            return difference.square() / 2
        case "k3":
            # the linear part is held too, so that the estimate stays >= 0 (as verl does)
            negative = held(-difference, log_ratio_clip)
            return negative.exp() - 1 - negative
    raise ConfigError(f"kl knows the estimators {', '.join(KL_KINDS)}; found {kind!r}")


@fr.loss(on_policy=False, max_staleness=None)
def entropy_bonus(entropy: fr.TOKEN.f32) -> Output:
    """Minus the entropy (nats) of the policy at each token, so that `+ 0.01 * entropy_bonus()` keeps it from collapsing.

    From Williams and Peng (1991); in PPO, arXiv 1707.06347 eq. 9. Metrics: `entropy`.
    """
    return -entropy, {"entropy": entropy.detach()}
