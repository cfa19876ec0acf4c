"""Losses of single responses that were found good or bad: KTO, BCO. No pairs; `chosen` says which response is good.

Notation: h the sum over a response's tokens of logprobs - ref_logprobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import flowrl as fr
from flowrl.errors import DataError
from flowrl_operators._options import at_least_0, required
from flowrl_operators.losses._pairs import check_pairs, row_scores

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl_operators.losses._common import Output

# [Note: Reference points are columns]
# KTO and BCO compare a response with a number that is estimated over a whole batch and has no gradient. It is a column, written
# by an operator before the update, so that it does not change with micro-batches and ranks, and the loss itself is local to rows.


def _check_kto(*, beta: float, desirable_weight: float, undesirable_weight: float, baseline: str | None) -> None:
    check_pairs("kto", beta=beta)
    required(
        "kto needs desirable_weight >= 0 and undesirable_weight >= 0",
        at_least_0(desirable_weight, undesirable_weight),
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )


@fr.loss(per="sample", on_policy=False, max_staleness=None, check=_check_kto)
def kto(
    logprobs: fr.TOKEN.f32,
    ref_logprobs: fr.TOKEN.f32,
    chosen: fr.SAMPLE.bool,
    segments: Any,
    kl_baseline: fr.SAMPLE.f32.named_by("baseline") = None,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    baseline: str | None = "kl_baseline",
) -> Output:
    """Kahneman-Tversky optimisation: a good row's loss is 1 - sigma(beta (h - z0)), a bad one's 1 - sigma(beta (z0 - h)).

    From Ethayarajh et al. (arXiv 2402.01306). h is the sum over a response's tokens of logprobs - ref_logprobs.

    Args:
        desirable_weight, undesirable_weight: factors of good (`chosen`) and of bad rows.
        baseline: the column of z0, an estimate of KL(policy || ref) in nats, equal in all rows; `advantages.kto_baseline` writes
            it from log-probabilities of responses to other prompts. None takes z0 = 0: APO-zero for unpaired rows
            (arXiv 2408.06266).

    Metrics per row: `implicit_reward` (beta h), `kl_baseline`. Errors: DataError when the column of `baseline` is missing.
    """
    import torch

    h = row_scores(logprobs - ref_logprobs, segments, "sum")
    level = _point(kl_baseline, baseline, h, "kto", "advantages.kto_baseline writes one; baseline=None takes 0")
    gain = beta * (h - level)
    is_good = chosen.to(torch.bool)
    loss = torch.where(is_good, desirable_weight * (-gain).sigmoid(), undesirable_weight * gain.sigmoid())
    return loss, {"implicit_reward": (beta * h).detach(), "kl_baseline": level}


def _check_bco(*, beta: float, shift: str | None) -> None:
    check_pairs("bco", beta=beta)


@fr.loss(per="sample", on_policy=False, max_staleness=None, check=_check_bco)
def bco(
    logprobs: fr.TOKEN.f32,
    ref_logprobs: fr.TOKEN.f32,
    chosen: fr.SAMPLE.bool,
    segments: Any,
    reward_shift: fr.SAMPLE.f32.named_by("shift") = None,
    *,
    beta: float = 0.1,
    shift: str | None = None,
) -> Output:
    """Binary classifier optimisation: -log sigma(beta h - shift) for a good row, -log sigma(shift - beta h) for a bad one.

    h is the sum over a response's tokens of logprobs - ref_logprobs.
    From Jung et al. (arXiv 2404.04656). TRL's `bco_pair` adds up both rows of a pair: with as many good rows as bad ones its mean
    over pairs is twice this loss's mean over rows.

    Args:
        shift: the column of the reward shift, in the paper the running mean of beta h over good and bad rows; None takes 0.

    Metrics per row: `implicit_reward` (beta h). Errors: DataError when the column of `shift` is missing.
    """
    import torch
    from torch.nn.functional import logsigmoid

    h = row_scores(logprobs - ref_logprobs, segments, "sum")
    level = _point(reward_shift, shift, h, "bco", "shift=None takes 0")
    gain = beta * h - level
    is_good = chosen.to(torch.bool)
    return -logsigmoid(torch.where(is_good, gain, -gain)), {"implicit_reward": (beta * h).detach()}


def _point(column: Tensor | None, name: str | None, like: Tensor, loss: str, remedy: str) -> Tensor:
    """The reference point of each row, without gradient. See [Note: Reference points are columns]."""
    import torch

    if name is None:
        return torch.zeros_like(like).detach()
    if column is None:
        raise DataError(f"{loss} compares with the column '{name}', which the rows do not have; {remedy}")
    return column.detach().to(like.dtype)
