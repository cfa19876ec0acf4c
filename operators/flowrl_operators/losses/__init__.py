"""Loss terms. They add, scale and multiply: `ppo_clip(0.2) * truncated_importance(2.0) + 1e-3 * kl("k3")`.

A term sees the packed tokens that train and nothing else, [T] over all rows of the micro-batch, and returns what is to be
minimised per token, or per row where declared. Averaging is `fr.update(average=...)`'s business.

torch is imported when a term runs, never before, so that flows can be written and checked without it.

Notation: d = logprobs - old_logprobs, r = exp(d), A the advantage.
"""

from flowrl_operators.losses._corrections import truncated_importance
from flowrl_operators.losses._distillation import distillation_gradient, forward_kl, jsd, reverse_kl
from flowrl_operators.losses._imitation import sft
from flowrl_operators.losses._policy import ppo_clip, reinforce
from flowrl_operators.losses._preferences import DIVERGENCES, DPO_KINDS, aot, dpo, ipo
from flowrl_operators.losses._reference_free import CPO_KINDS, chosen_nll, cpo, orpo, simpo
from flowrl_operators.losses._regularisers import entropy_bonus, kl
from flowrl_operators.losses._reward_models import bradley_terry
from flowrl_operators.losses._unpaired import bco, kto
from flowrl_operators.losses._values import value_clip

__all__ = [
    "CPO_KINDS",
    "DIVERGENCES",
    "DPO_KINDS",
    "aot",
    "bco",
    "bradley_terry",
    "chosen_nll",
    "cpo",
    "distillation_gradient",
    "dpo",
    "entropy_bonus",
    "forward_kl",
    "ipo",
    "jsd",
    "kl",
    "kto",
    "orpo",
    "ppo_clip",
    "reinforce",
    "reverse_kl",
    "sft",
    "simpo",
    "truncated_importance",
    "value_clip",
]
