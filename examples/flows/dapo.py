"""DAPO (arXiv 2503.14476): prompts are drawn again until the batch is full of groups that teach something."""

import flowrl as fr
from flowrl_operators import advantages, filters, losses, rewards


@fr.flow
def dapo(prompts, policy, *, group_size=16):
    def attempt(p):
        return rewards.overlong(rewards.math(fr.rollout(policy, p, n=group_size)), soft=4096)

    rows = fr.refill(attempt, prompts, keep=filters.group_has_signal(), max_rounds=4)
    return fr.update(policy, advantages.group_norm(rows), loss=losses.ppo_clip(0.2, high=0.28), average="token_mean")
