"""Learning from given tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import flowrl as fr

if TYPE_CHECKING:
    from flowrl_operators.losses._common import Output


@fr.loss(on_policy=False, max_staleness=None)
def sft(logprobs: fr.TOKEN.f32) -> Output:
    """Supervised fine-tuning: minus the log-probability of each token."""
    return -logprobs
