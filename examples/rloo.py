"""RLOO (arXiv 2402.14740): REINFORCE with the mean of the other answers to the same prompt as baseline."""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def rloo(prompts, policy, *, group_size=8):
    rows = fr.rollout(policy, prompts, n=group_size)
    rows = advantages.rloo(rewards.exact(rows))
    return fr.update(policy, rows, loss=losses.reinforce())
