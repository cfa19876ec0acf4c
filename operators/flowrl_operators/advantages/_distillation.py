"""Advantages from a teacher."""

from __future__ import annotations

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError


@fr.operator(writes={"advantages": fr.TOKEN.f32})
def distillation(
    teacher_logprob: fr.TOKEN.f32.named_by("teacher"),
    student_logprob: fr.TOKEN.f32.named_by("student"),
    loss_mask: fr.TOKEN.bool,
    *,
    teacher: str = "teacher_logprobs",
    student: str = "rollout_logprobs",
    clip: float | None = None,
):
    """On-policy distillation by policy gradient: the advantage of a token is log teacher - log student.

    Its mean under the student is minus KL(student || teacher) of the next token, so that a policy loss on it distils from one
    number per token: MiniLLM (arXiv 2306.08543), Lu et al., "On-policy distillation" (2025); so in NeMo-RL.

    Args:
        teacher: the column of the teacher's log-probabilities of the sampled tokens, from
            `fr.logprobs(teacher, rows, out="teacher_logprobs")`.
        student: the column of the student's own, before the update.
        clip: advantages are held within this on both sides.

    0 outside `loss_mask` and where either number is not finite.
    """
    if clip is not None and not clip > 0:
        raise ConfigError(f"distillation needs clip > 0 or None; found {clip!r}")
    with np.errstate(invalid="ignore"):  # minus infinity on both sides
        pull = teacher_logprob.values.astype(np.float64) - student_logprob.values
    pull = np.where(loss_mask.values.astype(bool) & np.isfinite(pull), pull, 0.0)
    return fr.Ragged.like(pull if clip is None else pull.clip(-clip, clip), loss_mask)
