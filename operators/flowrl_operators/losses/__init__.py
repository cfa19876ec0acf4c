"""Loss terms. They add, scale and multiply: `ppo_clip(0.2) * truncated_importance(2.0) + 1e-3 * kl("k3")`.

A term sees the packed tokens that train and nothing else, [T] over all rows of the micro-batch, and returns what is to be
minimised per token, or per row where declared. Averaging is `fr.update(average=...)`'s business.

torch is imported when a term runs, never before, so that flows can be written and checked without it.

Notation: d = logprobs - old_logprobs, r = exp(d), A the advantage.
"""

from flowrl_operators.losses._corrections import (
    masked_importance,
    off_policy_mask,
    stored_importance,
    truncated_importance,
    within_drift,
)
from flowrl_operators.losses._covariance import clip_cov, kl_cov, top_entropy
from flowrl_operators.losses._distillation import distillation_gradient, forward_kl, jsd, reverse_kl
from flowrl_operators.losses._imitation import sft
from flowrl_operators.losses._policy import cispo, dro, ppo_clip, reinforce, sapo, topr
from flowrl_operators.losses._preferences import DIVERGENCES, DPO_KINDS, aot, dpo, ipo
from flowrl_operators.losses._reference_free import CPO_KINDS, chosen_nll, cpo, orpo, simpo
from flowrl_operators.losses._regularisers import entropy_bonus, full_kl, kl
from flowrl_operators.losses._reward_models import bradley_terry
from flowrl_operators.losses._sequence import gmpo, gspo, vespo
from flowrl_operators.losses._trust_region import dppo
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
    "cispo",
    "clip_cov",
    "cpo",
    "distillation_gradient",
    "dpo",
    "dppo",
    "dro",
    "entropy_bonus",
    "forward_kl",
    "full_kl",
    "gmpo",
    "gspo",
    "ipo",
    "jsd",
    "kl",
    "kl_cov",
    "kto",
    "masked_importance",
    "off_policy_mask",
    "orpo",
    "ppo_clip",
    "reinforce",
    "reverse_kl",
    "sapo",
    "sft",
    "simpo",
    "stored_importance",
    "top_entropy",
    "topr",
    "truncated_importance",
    "value_clip",
    "vespo",
    "within_drift",
]
