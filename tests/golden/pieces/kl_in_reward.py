"""KL penalties in the reward."""

from __future__ import annotations

from typing import Any

import numpy as np

import flowrl as fr
from flowrl_operators import rewards
from tests.golden.runner import Where
from tests.golden.vectors import Case, matrix, ragged

KINDS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def apply_kl_penalty(case: Case, match: Any) -> dict[str, Any]:
    """verl: the penalty comes on top of scores per token, and the controller looks at the mean of row means."""
    p, state, kind = case.params, fr.State(), KINDS.get(match["kind"], match["kind"])
    scores, mask = case.array("token_level_scores"), ragged(case.array("response_mask"))
    found = rewards.adaptive_kl_shaped.function(
        np.zeros(len(scores)),
        ragged(case.array("old_log_probs")),
        ragged(case.array("ref_log_prob")),
        mask,
        ragged(scores),
        coefficient=p["init_kl_coef"],
        target=p["target_kl"],
        horizon=p["horizon"],
        kind=kind,
        value_clip=10.0 if kind == "k3" else None,
        counts="all",
        count_eps=1e-8,
        state=state,
    )
    return {
        "token_level_rewards": matrix(found["token_rewards"]),
        "current_kl": state["kl"],
        "beta_used": found["kl_coefficient"][0],
        "beta_next": state["coefficient"],
    }


def compute_reward(case: Case) -> dict[str, Any]:
    """OpenRLHF: where no token trains, and past the end, the recorded KL is garbage."""
    p, mask = case.params, case.array("action_mask")
    kl = case.array("kl")
    clip = p.get("reward_clip_range")
    found = rewards.kl_shaped.function(
        case.array("rewards"),
        ragged(kl),
        ragged(np.zeros_like(kl)),
        ragged(mask),
        coefficient=max(p["kl_coef"], 0.0),  # a negative one is taken for none
        reward_clip=tuple(clip) if clip else None,
    )
    return {"token_level_rewards": Where(matrix(found), mask)}


CONVENTIONS = {"openrlhf.compute_reward": compute_reward}
PATTERNS = [(r"verl\.apply_kl_penalty_(?P<kind>kl|k1|abs|mse|k2|low_var_kl|k3)", apply_kl_penalty)]
