"""MaxRL: divide by the mean of the group, not by its deviation.

Paper: arXiv 2602.02710.

Beside GRPO: with few right answers the mean is small and the gradient large: towards the likelihood of being right at
all.
"""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def maxrl(prompts, policy, *, group_size=8):
    rows = advantages.maxrl(rewards.exact(fr.rollout(policy, prompts, n=group_size)))
    return fr.update(policy, rows, loss=losses.reinforce())
