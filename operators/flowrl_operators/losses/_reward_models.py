"""Losses that train a reward model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import flowrl as fr
from flowrl.errors import DataError
from flowrl_operators._options import at_least_0, required
from flowrl_operators.losses._pairs import find_pairs, on_both_rows, smoothed

if TYPE_CHECKING:
    from flowrl_operators.losses._common import Output


def _check_bradley_terry(*, margin: float, center: float, margin_by: str | None) -> None:
    required("bradley_terry needs center >= 0", at_least_0(center), center=center)


@fr.loss(locality=fr.group("pair_id"), per="sample", on_policy=False, max_staleness=None, check=_check_bradley_terry)
def bradley_terry(
    scores: fr.SAMPLE.f32,
    chosen: fr.SAMPLE.bool,
    pair_id: fr.SAMPLE.str,
    margins: fr.SAMPLE.f32.named_by("margin_by") = None,
    segments: Any = None,
    *,
    margin: float = 0.0,
    center: float = 0.0,
    margin_by: str | None = None,
) -> Output:
    """Reward model, pairwise: -log sigma(s_w - s_l - margin), s the score of each response.

    From Bradley and Terry (1952), as used by InstructGPT (arXiv 2203.02155).

    Args:
        margin: by how much the chosen response must lead (Llama 2, arXiv 2307.09288).
        center: weight of (s_w + s_l)^2, which keeps scores near 0 (arXiv 2312.09244).
        margin_by: the column of a margin per pair, added to `margin`; the chosen row's value counts.

    A pair with a row that has no token to train is no comparison: its loss is 0. Without `segments` all rows count.

    Metrics per row: `preference_accuracy`, `preference_margin` (s_w - s_l), `chosen_reward`, `rejected_reward` (s).
    """
    winners, losers = find_pairs(pair_id, chosen)
    is_known = None
    if segments is not None:
        trains = segments.lengths > 0
        is_known = trains[winners] & trains[losers]
        scores = scores.masked_fill(~trains, 0.0)
    ours, theirs = scores[winners], scores[losers]
    lead = ours - theirs - margin
    if margin_by is not None:
        if margins is None:
            raise DataError(f"bradley_terry takes margins from the column '{margin_by}', which the rows do not have")
        lead = lead - margins[winners].to(lead.dtype)
    loss = smoothed(lead, 0.0)
    if center:
        loss = loss + center * (ours + theirs).square()
    if is_known is not None:
        loss = loss.masked_fill(~is_known, 0.0)
    return on_both_rows(loss, (ours, theirs), winners, losers)
