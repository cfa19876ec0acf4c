"""GPG: the plain policy gradient, corrected for groups that say nothing.

Paper: arXiv 2504.02546.

Beside GRPO: no ratio, no clipping, no reference: centred rewards, scaled up by the share of the batch that has a
signal.
"""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def gpg(prompts, policy, *, group_size=8):
    rows = advantages.gpg(rewards.exact(fr.rollout(policy, prompts, n=group_size)))
    return fr.update(policy, rows, loss=losses.reinforce())
