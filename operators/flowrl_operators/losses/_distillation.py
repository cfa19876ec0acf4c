"""Learning from a teacher: divergences between its distribution and the student's, and their policy gradient.

[Note: A cut vocabulary]
A teacher's k likeliest tokens leave V - k others out. What becomes of those decides what the minimum of the loss is:

- `"bucket"`: one more token holds their whole probability on either side. A lower bound of the full KL, 0 only where both agree
  on the k tokens.
- `"renormalise"`: both distributions are scaled to the k tokens. How much probability lies outside is not seen.
- `"ignore"` (forward and reverse KL): left out. The sum may be negative; the reverse KL falls when the student leaves the k
  tokens, and the forward KL rises with every token the student leaves (so in verl).
- `"floor"` (reverse KL only): the teacher's log-probability of each other token is a constant far below, so that the student is
  driven out of them (NeMo-RL's zero outside top-k, -100).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import flowrl as fr
from flowrl.errors import ConfigError, DataError
from flowrl_operators._options import above_0, checked, required
from flowrl_operators.losses._common import held

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl_operators.losses._common import Output

LOGITS, TOP_IDS, TOP_LOGPROBS = fr.TOKEN.f32["V"], fr.TOKEN.i32["k"], fr.TOKEN.f32["k"]


def _check_jsd(*, beta: float, temperature: float, outside: str) -> None:
    required(
        "jsd needs 0 <= beta <= 1 and temperature > 0",
        0 <= beta <= 1 and temperature > 0,
        beta=beta,
        temperature=temperature,
    )
    checked("outside", outside, ("bucket", "renormalise"), "jsd")


@fr.loss(on_policy=False, max_staleness=None, check=_check_jsd)
def jsd(
    logits: LOGITS,
    teacher_logits: LOGITS.column("teacher_logits") = None,
    teacher_ids: TOP_IDS.column("teacher_ids") = None,
    teacher_logprobs: TOP_LOGPROBS.column("teacher_logprobs") = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    outside: str = "bucket",
) -> Output:
    """Generalised Jensen-Shannon divergence of student S and teacher T at each token.

    beta KL(T || M) + (1 - beta) KL(S || M), M = (1 - beta) S + beta T, from Agarwal et al. (GKD, arXiv 2306.13649).

    Of the teacher it takes either the k likeliest tokens, as a flow has them:

        rows = fr.top_logprobs(teacher, rows, k=64, out="teacher")  # writes teacher_ids and teacher_logprobs
        student = fr.update(student, rows, loss=losses.jsd())

    (with k = the vocabulary's size, V, it is the divergence over the whole vocabulary), or the column `teacher_logits` if the
    rows bring it along; no node of a flow writes that, and it goes first. Each is optional, so that the check before a run does
    not see that both are missing; the first update says so.

    Args:
        beta: 0 is the forward KL(T || S) and 1 the reverse KL(S || T). They are what the divergence divided by beta, or by
            1 - beta, tends to; the divergence itself tends to 0 at both ends, so that a small beta is a small loss.
        temperature: both logits are divided by it. Gradients shrink with its square; multiply the term if they should not.
            With k < V, any other than 1 needs `outside="renormalise"`: the other tokens' probability at it is not known.
        outside: what becomes of the V - k other tokens. `"bucket"`: one more token holds their whole probability on either
            side, a lower bound of the divergence over the whole vocabulary; `"renormalise"`: both distributions are scaled to
            the k tokens, and how much probability lies outside is not seen.

    Shapes: logits and teacher_logits [T, V]; teacher_ids and teacher_logprobs [T, k].
    Metrics: `divergence`, `student_entropy` (nats, over the whole vocabulary).
    Errors: ConfigError when the rows have no teacher; DataError when its vocabulary is another.
    """
    student = _log_softmax(logits / temperature)
    if teacher_logits is not None:
        if logits.shape != teacher_logits.shape:
            raise DataError(
                f"jsd needs the student's and the teacher's logits over one vocabulary; found {list(logits.shape)} and "
                f"{list(teacher_logits.shape)} (tokens, vocabulary)"
            )
        ours, theirs = student, _log_softmax(teacher_logits / temperature)
    elif teacher_ids is not None and teacher_logprobs is not None:
        _check_ids("jsd", logits, teacher_ids, teacher_logprobs)
        ours, theirs = _cut(student, teacher_ids.long(), teacher_logprobs, temperature, outside)
    else:
        raise ConfigError(
            "jsd needs the teacher's 'teacher_ids' and 'teacher_logprobs', or its 'teacher_logits', and the rows have neither; "
            "write them with fr.top_logprobs(teacher, rows, k=64, out='teacher')"
        )
    if beta == 0:
        value = _kl(theirs, ours)
    elif beta == 1:
        value = _kl(ours, theirs)
    else:
        # a token that both exclude would make a NaN of the gradient; this is still nothing
        held_ours, held_theirs = (side.clamp(min=-1e30) for side in (ours, theirs))
        middle = (held_ours + math.log1p(-beta)).logaddexp(held_theirs + math.log(beta))
        value = beta * _kl(theirs, middle) + (1 - beta) * _kl(ours, middle)
    return value, {"divergence": value.detach(), "student_entropy": _entropy(student.detach())}


def _cut(student: Tensor, ids: Tensor, theirs: Tensor, temperature: float, outside: str) -> tuple[Tensor, Tensor]:
    """Log-probabilities of both sides at the teacher's k tokens, and of the bucket that holds the others."""
    import torch

    ours = student.gather(-1, ids)
    if ids.shape[-1] == student.shape[-1]:  # nothing is outside
        return ours, _log_softmax(theirs / temperature)
    if outside == "renormalise":
        return ours.log_softmax(-1), _log_softmax(theirs / temperature)
    if temperature != 1:
        raise ConfigError(
            f"jsd(temperature={temperature!r}) over the teacher's {ids.shape[-1]} likeliest of {student.shape[-1]} tokens does "
            "not know the others' probability at that temperature; say outside='renormalise', or take all tokens"
        )
    return tuple(torch.cat([side, _outside(side).log()[..., None]], -1) for side in (ours, theirs))  # type: ignore[return-value]


def _check_forward_kl(*, outside: str, min_logprob: float | None) -> None:
    checked("outside", outside, ("bucket", "renormalise", "ignore"), "forward_kl")
    required(
        "forward_kl needs min_logprob < 0 or None", min_logprob is None or min_logprob < 0, min_logprob=min_logprob
    )


@fr.loss(on_policy=False, max_staleness=None, check=_check_forward_kl)
def forward_kl(
    logits: LOGITS,
    teacher_ids: TOP_IDS,
    teacher_logprobs: TOP_LOGPROBS,
    *,
    outside: str = "bucket",
    min_logprob: float | None = None,
) -> Output:
    """KL(teacher || student) at each token over the teacher's k likeliest tokens: distillation that covers the teacher.

    From Hinton et al. (arXiv 1503.02531), whose sum over the vocabulary V is cut to k. A mixture with the other direction is a
    sum of terms: `0.5 * forward_kl() + 0.5 * reverse_kl()`.

    Args:
        outside: what becomes of the V - k other tokens. `"bucket"`: one more token holds their whole probability on either
            side; a lower bound of the full KL, 0 only where both agree on the k tokens. `"renormalise"`: both distributions
            are scaled to the k tokens; how much probability lies outside is not seen. `"ignore"` (verl, NeMo-RL): they are
            left out; the sum may be negative, and still rises with every token of the k that the student leaves.
            With k = V all are the full KL.
        min_logprob: log-probabilities of both sides are held above this, with no gradient below it.

    Shapes: logits [T, V], the teacher's [T, k]. Metrics: `forward_kl`, `inside_mass` (the student's probability of the k).
    """
    _check_ids("forward_kl", logits, teacher_ids, teacher_logprobs)
    ours, theirs = _log_softmax(logits).gather(-1, teacher_ids.long()), teacher_logprobs
    mass = ours.detach().exp().sum(-1)
    rest = _rest(theirs, ours) if outside == "bucket" else None
    if outside == "renormalise":
        ours, theirs = ours.log_softmax(-1), theirs.log_softmax(-1)
    if min_logprob is not None:
        ours, theirs = ours.clamp(min=min_logprob), theirs.clamp(min=min_logprob)
    value = _kl(theirs, ours)
    if rest is not None:
        value = value + rest
    return value, {"forward_kl": value.detach(), "inside_mass": mass}


def _check_reverse_kl(*, outside: str, floor: float) -> None:
    checked("outside", outside, ("bucket", "renormalise", "ignore", "floor"), "reverse_kl")
    required("reverse_kl needs a log-probability as floor, floor <= 0", floor <= 0, floor=floor)


@fr.loss(on_policy=False, max_staleness=None, check=_check_reverse_kl)
def reverse_kl(
    logits: LOGITS,
    teacher_ids: TOP_IDS,
    teacher_logprobs: TOP_LOGPROBS,
    *,
    outside: str = "bucket",
    floor: float = -100.0,
) -> Output:
    """KL(student || teacher) at each token over the teacher's k likeliest tokens: on-policy distillation.

    From Agarwal et al. (arXiv 2306.13649) and MiniLLM (arXiv 2306.08543), whose sum over the vocabulary V is cut to k.

    Args:
        outside: what becomes of the V - k other tokens. `"bucket"`: one more token holds their whole probability on either
            side; a lower bound of the full KL, 0 only where both agree on the k tokens. `"renormalise"`: both distributions
            are scaled to the k tokens; how much probability lies outside is not seen. `"ignore"`: they are left out; the sum
            may be negative, and falls when the student leaves the k tokens. `"floor"`: the teacher's log-probability of each
            of them is `floor`, far below, so that the student is driven out of them (NeMo-RL's zero outside top-k, -100).
            With k = V all are the full KL.
        floor: the log-probability for `outside="floor"`.

    Shapes: logits [T, V], the teacher's [T, k]. Metrics: `reverse_kl`, `inside_mass` (the student's probability of the k).
    """
    _check_ids("reverse_kl", logits, teacher_ids, teacher_logprobs)
    everything = _log_softmax(logits)
    ours, theirs = everything.gather(-1, teacher_ids.long()), teacher_logprobs
    mass = ours.detach().exp().sum(-1)
    if outside == "renormalise":
        value = _kl(ours.log_softmax(-1), theirs.log_softmax(-1))
    else:
        value = _kl(ours, theirs)
    if outside == "bucket":
        value = value + _rest(ours, theirs)
    elif outside == "floor":
        # sum of p (log p - floor) over the other tokens
        value = value + _entropy(ours) - _entropy(everything) - floor * (everything.exp().sum(-1) - ours.exp().sum(-1))
    return value, {"reverse_kl": value.detach(), "inside_mass": mass}


def _check_distillation_gradient(*, teacher: str, max_drop: float | None, log_ratio_clip: float | None) -> None:
    required(
        "distillation_gradient needs max_drop > 0 and log_ratio_clip > 0, or None",
        above_0(max_drop, log_ratio_clip),
        max_drop=max_drop,
        log_ratio_clip=log_ratio_clip,
    )


@fr.loss(max_staleness=None, corrects=True, weight=False, check=_check_distillation_gradient)
def distillation_gradient(
    logprobs: fr.TOKEN.f32,
    rollout_logprobs: fr.TOKEN.f32,
    teacher_logprob: fr.TOKEN.f32.named_by("teacher"),
    *,
    teacher: str = "teacher_logprobs",
    max_drop: float | None = None,
    log_ratio_clip: float | None = 20.0,
) -> Output:
    """On-policy distillation as a policy gradient: -(t - x) exp(x - q), without gradient through the bracket.

    x, q, t are the log-probabilities of the sampled token under the student, under the policy that sampled it and under the
    teacher. Its expected gradient is that of KL(student || teacher) at each token of the student's own answers, weighed from q
    to x; of the teacher it needs one number per token (MiniLLM, arXiv 2306.08543; Lu et al., "On-policy distillation", 2025).
    With `advantages.distillation` any other policy loss does the same from the student's log-probabilities before the update.

    Args:
        teacher: the column of t, e.g. `fr.logprobs(teacher, rows, out="teacher_logprobs")`.
        max_drop: tokens whose probability has fallen by more than this since they were sampled are left out (prime-rl: 0.2).
        log_ratio_clip: x - q in the exponential is held within this on both sides; None takes it as it is.

    Metrics: `reverse_kl` (x - t), `ratio`, and `dropped` with `max_drop`.
    """
    pull = (teacher_logprob - logprobs).detach()
    ratio = held(logprobs - rollout_logprobs, log_ratio_clip).exp()
    metrics = {"reverse_kl": -pull, "ratio": ratio.detach()}
    if max_drop is not None:
        fell = (rollout_logprobs.exp() - logprobs.detach().exp()) > max_drop
        metrics["dropped"] = fell.to(pull.dtype)
        pull = pull.masked_fill(fell, 0.0)
    return -pull * ratio, metrics


def _check_ids(name: str, logits: Tensor, ids: Tensor, logprobs: Tensor) -> None:
    """Refuse ids that are none here: on a GPU, reading beyond the vocabulary ends the whole process."""
    width = logits.shape[-1]
    if ids.shape != logprobs.shape or ids.shape[-1] > width:
        raise DataError(
            f"{name} needs teacher_ids and teacher_logprobs of one shape, [tokens, k] with k at most the vocabulary, {width}; "
            f"found {list(ids.shape)} and {list(logprobs.shape)}"
        )
    least, most = (int(end) for end in ids.aminmax()) if ids.numel() else (0, 0)
    if least < 0 or most >= width:
        raise DataError(
            f"{name} needs teacher_ids of the student's vocabulary, 0 to {width - 1}; found {least} to {most}: a teacher with "
            "another tokenizer cannot be compared token by token"
        )


def _log_softmax(logits: Tensor) -> Tensor:
    """In float32 at least."""
    return (logits.float() if logits.element_size() < 4 else logits).log_softmax(-1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Sum of exp(p) (p - q) over the last dimension; a token that p excludes (minus infinity) adds 0."""
    import torch

    is_there = p > -torch.inf
    return (p.exp() * torch.where(is_there, p - torch.where(is_there, q, 0.0), 0.0)).sum(-1)


def _entropy(p: Tensor) -> Tensor:
    """Minus the sum of exp(p) p over the last dimension."""
    import torch

    return -(p.exp() * torch.where(p > -torch.inf, p, 0.0)).sum(-1)


def _rest(p: Tensor, q: Tensor) -> Tensor:
    """What the probability outside the given tokens adds to KL(p || q)."""
    rest, other = _outside(p), _outside(q)
    return rest * (rest.log() - other.log())


def _outside(logprobs: Tensor) -> Tensor:
    """The probability outside the given tokens."""
    least = 1e-7  # float32 cannot tell less from 1 - (sum of the rest)
    return (1 - logprobs.exp().sum(-1)).clamp_min(least)
