"""KL to a reference, entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators._kl import check_kl_kind, kl_estimate
from flowrl_operators._options import above_0, required
from flowrl_operators.losses._common import held

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl_operators.losses._common import Output

LOGITS = fr.TOKEN.f32["V"]

# [Note: A regulariser is no policy gradient]
# KL and entropy terms are declared on_policy=False and any staleness: at each token that trains they pull the model towards
# the reference, or towards more entropy, whoever sampled the token. On rows of older weights they are that pull at the older
# policy's states, not an unbiased estimate at the newest; multiply with truncated_importance for the estimate.


def _check_kl(
    *,
    kind: str,
    gradient: str | None,
    importance: str | None,
    against: str | None,
    importance_cap: float | None,
    log_ratio_clip: float | None,
    value_clip: float | None,
) -> None:
    check_kl_kind(kind)
    if gradient is not None:
        check_kl_kind(gradient)
    required(
        "kl importance is 'value', 'gradient' or None", importance in (None, "value", "gradient"), importance=importance
    )
    required(
        "kl needs importance_cap > 0, log_ratio_clip > 0 and value_clip > 0, or None",
        above_0(importance_cap, log_ratio_clip, value_clip),
        importance_cap=importance_cap,
        log_ratio_clip=log_ratio_clip,
        value_clip=value_clip,
    )


@fr.loss(on_policy=False, max_staleness=None, check=_check_kl)
def kl(
    logprobs: fr.TOKEN.f32,
    ref_logprobs: fr.TOKEN.f32,
    behaviour_logprobs: fr.TOKEN.f32.named_by("against") = None,
    *,
    kind: str = "k3",
    gradient: str | None = None,
    importance: str | None = None,
    against: str | None = "old_logprobs",
    importance_cap: float | None = None,
    log_ratio_clip: float | None = 20.0,
    value_clip: float | None = None,
) -> Output:
    """Estimate of KL(policy || reference) at each token, with d = logprobs - ref_logprobs.

    k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d: Schulman, "Approximating KL divergence" (2020); GRPO uses k3.
    As a loss, only k2 has the gradient of the KL in expectation; that of k1 is zero in expectation, that of k3 belongs to the
    KL the other way round (Tang and Munos, arXiv 2506.09477). For the gradient of the KL itself: `kl("k3", gradient="k2")`
    on tokens the policy sampled, with `importance="gradient"` on tokens of an older one; or `kl("k3", importance="value")`,
    whose ratio carries the derivative of the sampling.

    Args:
        kind: the estimator whose value is reported and, by default, differentiated.
        gradient: differentiate this one instead (verl's `k1+`, `k3+` take k2).
        importance: weigh by w = exp(logprobs - behaviour). `"value"`: w times the estimate, differentiated through both: bias
            corrected for tokens of an older policy (DeepSeek-V3.2, arXiv 2512.02556; TRL, slime), and on the policy's own
            tokens (`against=None`, w is 1) the estimate plus its score function (NeMo-RL). `"gradient"`: the value stays, its
            gradient is multiplied by w, which has none itself (OpenRLHF). None: no weight.
        against: column of the behaviour's log-probabilities, read where `importance` asks for it; None: the live policy itself.
        importance_cap: greatest w; None for no bound (OpenRLHF has 10).
        log_ratio_clip: in k3 the exponent is held within this on both sides; None takes it as it is.
        value_clip: the estimate, weighed or not, is held within this on both sides, with no gradient where it acts; a
            gradient taken from another estimator is not held.

    Metrics: `kl`.
    """
    import torch

    if importance is not None and against is not None and behaviour_logprobs is None:
        raise ConfigError(
            f"kl(importance={importance!r}) needs the column '{against}', which the rows do not have; write it with "
            f"fr.logprobs(model, rows, out='{against}'), or say against=None if the live policy drew the tokens"
        )
    difference = logprobs - ref_logprobs
    value = kl_estimate(torch, difference, kind, log_ratio_clip)
    weight = None
    if importance is not None:
        weight = _behaviour_weight(logprobs, None if against is None else behaviour_logprobs, importance_cap)
    if weight is not None and importance == "value":
        if kind == "k3" and log_ratio_clip is not None:
            # where the estimate is a constant the weight has no derivative either
            weight = weight.where(difference.abs() <= log_ratio_clip, weight.detach())
        value = value * weight
    value = held(value, value_clip)
    reported = value.detach()
    if gradient is not None:
        slope = kl_estimate(torch, difference, gradient, log_ratio_clip)
        if weight is not None and importance == "value":
            slope = slope * weight
        value = reported + slope - slope.detach()
    if weight is not None and importance == "gradient":
        value = reported + weight.detach() * (value - value.detach())
    return value, {"kl": reported}


@fr.loss(on_policy=False, max_staleness=None)
def full_kl(logits: LOGITS, ref_logits: LOGITS, *, normalised: bool = False) -> Output:
    """KL(policy || reference) at each token, the exact sum over the vocabulary: sum_v p_v (log p_v - log p_ref_v).

    No estimate, hence no variance over the token drawn; it costs a stored [T, V] column of the reference. No node of a flow
    writes `ref_logits`: this is for rows that bring them along and for `fr.apply_loss`. In a flow the same number is

        rows = fr.top_logprobs(ref, rows, k=vocabulary, out="teacher")  # vocabulary: the number of the model's logits
        loss = ... + 0.01 * losses.reverse_kl()

    and a smaller k a lower bound of it. As a reward instead: `rewards.token_kl`.

    Args:
        normalised: both columns hold log-probabilities, which are taken as they are; False: they are made so (log-softmax).

    Shapes: both [T, V]. A token of probability 0 adds 0. Metrics: `kl`.
    """
    ours, theirs = (logits, ref_logits) if normalised else (logits.log_softmax(-1), ref_logits.log_softmax(-1))
    chance = ours.exp()
    possible = chance > 0
    gap = ours.where(possible, 0.0) - theirs.where(possible, 0.0)
    value = (chance * gap).sum(-1)
    return value, {"kl": value.detach()}


def _behaviour_weight(logprobs: Tensor, behaviour: Tensor | None, cap: float | None) -> Tensor:
    base = logprobs if behaviour is None else behaviour
    difference = logprobs - base.detach()
    is_known = difference.detach().exp().isfinite()
    # the exponential of an infinity has no gradient that 0 times it would take away, so it is never formed
    weight = difference.where(is_known, 0.0).exp().where(is_known, 0.0)
    if cap is None:
        return weight
    is_beyond = ~is_known & ~difference.isnan()  # what the float cannot hold is beyond any cap
    return weight.clamp(max=cap).where(~is_beyond, cap)


@fr.loss(on_policy=False, max_staleness=None)
def entropy_bonus(entropy: fr.TOKEN.f32) -> Output:
    """Minus the entropy (nats) of the policy at each token, so that `+ 0.01 * entropy_bonus()` keeps it from collapsing.

    From Williams and Peng (1991); in PPO, arXiv 1707.06347 eq. 9. Metrics: `entropy`.
    """
    return -entropy, {"entropy": entropy.detach()}
