"""Losses of pairs: preferences and reward models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import flowrl as fr
from flowrl.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl_operators.losses._common import Output


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
