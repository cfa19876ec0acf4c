"""RLOO: the baseline of an answer is the mean of the other ones.

Paper: arXiv 2402.14740.

Beside GRPO: the answer itself is left out of its baseline, which makes the gradient unbiased; nothing is divided by a
deviation; the whole answer is one action, so the gradient is plain REINFORCE on its log-probability.
"""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def rloo(prompts, policy, *, group_size=4):
    rows = advantages.rloo(rewards.exact(fr.rollout(policy, prompts, n=group_size)))
    return fr.update(policy, rows, loss=losses.reinforce(), average="sequence_sum")
