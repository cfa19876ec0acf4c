"""RAFT, rejection sampling: imitate your best answers.

Paper: arXiv 2304.06767.

Beside GRPO: no advantages: the best answer of each group is kept, if it is right at all, and learned by its
likelihood.
"""

import flowrl as fr
from flowrl_operators import filters, losses, rewards


@fr.flow
def raft(prompts, policy, *, group_size=8, least=1.0):
    rows = rewards.exact(fr.rollout(policy, prompts, n=group_size))
    return fr.update(policy, filters.top(rows, k=1, by="reward", least=least), loss=losses.sft())
