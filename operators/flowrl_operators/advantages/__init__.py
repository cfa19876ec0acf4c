"""Advantages: how much better a response, a step or a token was than expected.

Operators see NumPy: [N] for values per response, `fr.Ragged` for values per token. They compute in float64; the columns
store float32.

[Note: Rows that say nothing]
A row counts in a mean or a deviation only if its reward is finite and it has a token that trains (where `loss_mask` is
there to tell). Every other row gets advantage 0 and moves nobody's baseline: a verifier that failed, or a sibling that was
masked out, must not decide what its group learns. `counts="scored"` lets masked-out siblings count, as other systems do.
Advantage 0 is no policy gradient, and that is all: the row's tokens still count in a loss's average, and its KL and entropy terms
act on them. `filters.scored` and `masks.scored` leave them out of these too.

[Note: Rounding is no signal]
Rewards that differ by no more than a few float32 steps are equal; a group of them gets exactly 0. Without this, eight times
0.95 has a deviation of 1e-8 and advantages of 0.05 to 0.9, depending on eps.
"""

from flowrl_operators.advantages._arrays import (
    any_in_row,
    at_last_token,
    counted,
    discounted,
    masked_mean,
    masked_sum,
    masked_var,
    reward_to_go,
    whitened,
)
from flowrl_operators.advantages._best import pass_at_k
from flowrl_operators.advantages._distillation import distillation
from flowrl_operators.advantages._groups import BASELINES, SCALES, group_statistics, groups_of, has_spread
from flowrl_operators.advantages._optimal import optimal_token_baseline, sum_pi_squared
from flowrl_operators.advantages._parts import gdpo, multi_reward
from flowrl_operators.advantages._preferences import kto_baseline
from flowrl_operators.advantages._responses import (
    batch_norm,
    gpg,
    group_norm,
    maxrl,
    opo,
    reinforce_pp_baseline,
    remax,
    rloo,
)
from flowrl_operators.advantages._tokens import from_step_values, gae, reinforce, reinforce_pp, whiten

__all__ = [
    "BASELINES",
    "SCALES",
    "any_in_row",
    "at_last_token",
    "batch_norm",
    "counted",
    "discounted",
    "distillation",
    "from_step_values",
    "gae",
    "gdpo",
    "gpg",
    "group_norm",
    "group_statistics",
    "groups_of",
    "has_spread",
    "kto_baseline",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "maxrl",
    "multi_reward",
    "opo",
    "optimal_token_baseline",
    "pass_at_k",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "reward_to_go",
    "rloo",
    "sum_pi_squared",
    "whiten",
    "whitened",
]
