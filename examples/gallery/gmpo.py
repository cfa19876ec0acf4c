"""GMPO: the geometric mean of the token ratios instead of their arithmetic mean.

Paper: arXiv 2507.20673.

Beside GRPO: token ratios are clipped in log space, wider than usual, and one outlier hardly moves their geometric
mean.
"""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def gmpo(prompts, policy, *, group_size=8):
    rows = advantages.group_norm(rewards.exact(fr.rollout(policy, prompts, n=group_size)))
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    return fr.update(policy, fr.repeat(rows, minibatches=2), loss=losses.gmpo())
