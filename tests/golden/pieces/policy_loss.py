"""Policy losses."""

from __future__ import annotations

from typing import Any

from flowrl_operators import losses
from tests.golden.padded import loss_and_gradient
from tests.golden.vectors import Case

COLUMNS = {"logprobs": "log_probs", "old_logprobs": "old_log_probs", "advantages": "advantages"}


def dual_clip(case: Case) -> dict[str, Any]:
    p = case.params
    loss = losses.ppo_clip(p["clip_ratio_low"], high=p["clip_ratio_high"], dual=p["clip_ratio_c"])
    return loss_and_gradient(case, loss, COLUMNS, average="token_mean")


CONVENTIONS = {"verl.ppo_dualclip_token-mean": dual_clip}

UNANSWERED = {"actor/ppo_kl": "a figure to log", "actor/pg_clipfrac": "", "actor/pg_clipfrac_lower": ""}
