"""CISPO: the weight is clipped, never the gradient.

Paper: arXiv 2506.13585.

Beside GRPO: the clipped ratio is a constant weight of the policy gradient, so that rare tokens whose ratio runs away
still teach.
"""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def cispo(prompts, policy, *, group_size=8):
    rows = advantages.group_norm(rewards.exact(fr.rollout(policy, prompts, n=group_size)))
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    return fr.update(policy, fr.repeat(rows, minibatches=2), loss=losses.cispo())
