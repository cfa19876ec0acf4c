"""Learning from given tokens and from a teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING

import flowrl as fr
from flowrl.errors import ConfigError

if TYPE_CHECKING:
    from flowrl_operators.losses._common import Output

LOGITS, TOP_IDS, TOP_LOGPROBS = fr.TOKEN.f32["V"], fr.TOKEN.i32["k"], fr.TOKEN.f32["k"]


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
