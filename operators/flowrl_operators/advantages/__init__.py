"""Advantages: how much better a response, a step or a token was than expected.

Operators see NumPy: [N] for values per response, `fr.Ragged` for values per token. They compute in float64; the columns
store float32.

[Note: Rows that say nothing]
A row counts in a mean or a deviation only if its reward is finite and it has a token that trains (where `loss_mask` is
there to tell). Every other row gets advantage 0 and moves nobody's baseline: a verifier that failed, or a sibling that was
masked out, must not decide what its group learns.

[Note: Rounding is no signal]
Rewards that differ by no more than a few float32 steps are equal; a group of them gets exactly 0. Without this, eight times
0.95 has a deviation of 1e-8 and advantages of 0.05 to 0.9, depending on eps.
"""

from flowrl_operators.advantages._arrays import (
    at_last_token,
    centred_in_groups,
    counted,
    deviation,
    discounted,
    groups_of,
    has_spread,
    reward_to_go,
    whitened,
)
from flowrl_operators.advantages._distillation import distillation
from flowrl_operators.advantages._preferences import kto_baseline
from flowrl_operators.advantages._responses import SCALES, batch_norm, group_norm, remax, rloo
from flowrl_operators.advantages._tokens import from_step_values, gae, reinforce_pp

__all__ = [
    "SCALES",
    "at_last_token",
    "batch_norm",
    "centred_in_groups",
    "counted",
    "deviation",
    "discounted",
    "distillation",
    "from_step_values",
    "gae",
    "group_norm",
    "groups_of",
    "has_spread",
    "kto_baseline",
    "reinforce_pp",
    "remax",
    "reward_to_go",
    "rloo",
    "whitened",
]
