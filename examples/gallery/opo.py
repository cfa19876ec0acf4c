"""OPO: the baseline that makes the variance least.

Paper: arXiv 2505.23585.

Beside GRPO: rewards of the group are averaged with the lengths of the answers as weights; exactly on policy, without
clipping or KL.
"""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def opo(prompts, policy, *, group_size=8):
    rows = advantages.opo(rewards.exact(fr.rollout(policy, prompts, n=group_size)))
    return fr.update(policy, rows, loss=losses.reinforce(), average="sequence_sum")
