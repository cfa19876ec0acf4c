"""Loss terms. They add, scale and multiply: `ppo_clip(0.2) * truncated_importance(2.0) + 1e-3 * kl("k3")`.

A term sees the packed tokens that train and nothing else, [T] over all rows of the micro-batch, and returns what is to be
minimised per token, or per row where declared. Averaging is `fr.update(average=...)`'s business.

torch is imported when a term runs, never before, so that flows can be written and checked without it.

Notation: d = logprobs - old_logprobs, r = exp(d), A the advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import flowrl as fr
from flowrl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor

    Output = Tensor | tuple[Tensor, dict[str, Tensor]]

KL_KINDS = ("k1", "k2", "k3", "abs")
LOGITS, TOP_IDS, TOP_LOGPROBS = fr.TOKEN.f32["V"], fr.TOKEN.i32["k"], fr.TOKEN.f32["k"]

# --- policy -------------------------------------------------------------------------------------------------------------


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
    difference = _held(logprobs - old_logprobs, log_ratio_clip)
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
    ratio = _held(difference, log_ratio_clip).exp()
    return ratio.clamp(max=cap), {"importance": ratio, "importance_capped": (ratio > cap).to(ratio.dtype)}


# --- regularisers -------------------------------------------------------------------------------------------------------

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
    value = _held(_kl_estimate(difference, kind, log_ratio_clip), value_clip)
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
            held = _held(-difference, log_ratio_clip)
            return held.exp() - 1 - held
    raise ConfigError(f"kl knows the estimators {', '.join(KL_KINDS)}; found {kind!r}")


@fr.loss(on_policy=False, max_staleness=None)
def entropy_bonus(entropy: fr.TOKEN.f32) -> Output:
    """Minus the entropy (nats) of the policy at each token, so that `+ 0.01 * entropy_bonus()` keeps it from collapsing.

    From Williams and Peng (1991); in PPO, arXiv 1707.06347 eq. 9. Metrics: `entropy`.
    """
    return -entropy, {"entropy": entropy.detach()}


# --- values -------------------------------------------------------------------------------------------------------------


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


# --- imitation ----------------------------------------------------------------------------------------------------------


@fr.loss(on_policy=False, max_staleness=None)
def sft(logprobs: fr.TOKEN.f32) -> Output:
    """Supervised fine-tuning: minus the log-probability of each token."""
    return -logprobs


@fr.loss(on_policy=False, max_staleness=None)
def reverse_kl(
    logits: LOGITS,
    teacher_ids: TOP_IDS,
    teacher_logprobs: TOP_LOGPROBS,
    *,
    outside: str = "bucket",
) -> Output:
    """KL(student || teacher) at each token over the teacher's k likeliest tokens: on-policy distillation.

    From Agarwal et al. (arXiv 2306.13649) and MiniLLM (arXiv 2306.08543), whose sum over the vocabulary V is cut to k.

    Args:
        outside: what becomes of the other V - k tokens. `"bucket"`: one more token that holds their whole probability, a
            lower bound of the full KL that is 0 only where both agree; `"renormalise"`: both distributions are scaled to the
            k tokens (NeMo-RL); `"ignore"`: left out (the sum may be negative, and falls when the student leaves the k).

    Shapes: logits [T, V], the teacher's [T, k]. Metrics: `reverse_kl`, `inside_mass` (the student's probability of the k).
    """
    ours = logits.log_softmax(-1).gather(-1, teacher_ids.long())
    theirs = teacher_logprobs
    mass = ours.exp().sum(-1)
    if outside == "renormalise":
        ours, theirs = ours.log_softmax(-1), theirs.log_softmax(-1)
    value = (ours.exp() * (ours - theirs)).sum(-1)
    if outside == "bucket":
        least = 1e-7  # float32 cannot tell less from 1 - (sum of the rest)
        rest, their_rest = (1 - mass).clamp_min(least), (1 - theirs.exp().sum(-1)).clamp_min(least)
        value = value + rest * (rest.log() - their_rest.log())
    elif outside not in ("renormalise", "ignore"):
        raise ConfigError(f"reverse_kl outside is 'bucket', 'renormalise' or 'ignore'; found {outside!r}")
    return value, {"reverse_kl": value.detach(), "inside_mass": mass.detach()}


# --- preferences --------------------------------------------------------------------------------------------------------

# [Note: A pair's loss lies on both its rows]
# A preference loss has one number per pair and returns one per row. Both rows of a pair get the pair's number, so that the
# mean over rows is the mean over pairs whatever else is in the batch.


@fr.loss(locality=fr.group("pair_id"), per="sample", on_policy=False, max_staleness=None)
def dpo(
    logprobs: fr.TOKEN.f32,
    ref_logprobs: fr.TOKEN.f32,
    chosen: fr.SAMPLE.bool,
    pair_id: fr.SAMPLE.str,
    segments: Any,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Output:
    """Direct preference optimisation: -log sigmoid(beta (h_w - h_l)), h the sum over tokens of logprobs - ref_logprobs.

    From Rafailov et al. (arXiv 2305.18290).

    Args:
        beta: strength of the pull towards the reference.
        label_smoothing: chance e that a pair is the wrong way round: (1 - e) of the loss plus e of the swapped pair's (cDPO,
            Mitchell 2023).

    Metrics per row: `preference_accuracy`, `preference_margin` (beta (h_w - h_l)).
    """
    scores = beta * segments.sum(logprobs - ref_logprobs)
    winners, losers = _pairs(pair_id, chosen)
    margin = scores[winners] - scores[losers]
    return _on_both_rows(_preference(margin, label_smoothing), margin, winners, losers)


@fr.loss(locality=fr.group("pair_id"), per="sample", on_policy=False, max_staleness=None)
def bradley_terry(
    scores: fr.SAMPLE.f32,
    chosen: fr.SAMPLE.bool,
    pair_id: fr.SAMPLE.str,
    *,
    margin: float = 0.0,
    center: float = 0.0,
) -> Output:
    """Reward model: -log sigmoid(s_w - s_l - margin), s the score of each response.

    From Bradley and Terry (1952), as used by InstructGPT (arXiv 2203.02155).

    Args:
        margin: by how much the chosen response must lead.
        center: weight of (s_w + s_l)^2, which keeps scores near 0 (arXiv 2312.09244).

    Metrics per row: `preference_accuracy`, `preference_margin`.
    """
    winners, losers = _pairs(pair_id, chosen)
    lead = scores[winners] - scores[losers] - margin
    loss = _preference(lead, 0.0)
    if center:
        loss = loss + center * (scores[winners] + scores[losers]).square()
    return _on_both_rows(loss, lead + margin, winners, losers)


def _preference(margin: Tensor, label_smoothing: float) -> Tensor:
    from torch.nn.functional import logsigmoid

    loss = -logsigmoid(margin)
    return loss if not label_smoothing else (1 - label_smoothing) * loss - label_smoothing * logsigmoid(-margin)


def _pairs(pair_id: Sequence[str], chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Row indices of the chosen and of the rejected responses, pair by pair."""
    import torch

    winners: dict[str, int] = {}
    losers: dict[str, int] = {}
    for row, (pair, is_chosen) in enumerate(zip(pair_id, chosen.tolist(), strict=True)):
        side = winners if is_chosen else losers
        if pair in side:
            raise DataError(
                f"a preference loss needs one chosen and one rejected row per pair_id; pair {pair!r} has two "
                f"{'chosen' if is_chosen else 'rejected'} ones"
            )
        side[pair] = row
    torn = sorted(winners.keys() ^ losers.keys(), key=str)
    if torn:
        raise DataError(
            f"a preference loss needs one chosen and one rejected row per pair_id; {len(torn)} of "
            f"{len(winners.keys() | losers.keys())} pairs have one row, the first is {torn[0]!r}"
        )
    rows = [[winners[pair], losers[pair]] for pair in winners]
    both = torch.tensor(rows, dtype=torch.int64, device=chosen.device).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def _on_both_rows(loss: Tensor, margin: Tensor, winners: Tensor, losers: Tensor) -> Output:
    import torch

    order = torch.cat([winners, losers]).argsort()
    both = margin.detach().repeat(2)[order]
    return loss.repeat(2)[order], {"preference_accuracy": (both > 0).to(both.dtype), "preference_margin": both}


def _held(values: Tensor, bound: float | None) -> Tensor:
    return values if bound is None else values.clamp(-bound, bound)
