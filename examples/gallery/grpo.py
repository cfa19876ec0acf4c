"""GRPO: the mean of a group of answers is the baseline, their standard deviation the scale.

Paper: arXiv 2402.03300.

What the others are compared with: no critic, one advantage per answer, PPO's clipped ratio, a KL term to a frozen reference.
"""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def grpo(prompts, policy, ref, *, group_size=8, beta=1e-3):
    rows = rewards.exact(fr.rollout(policy, prompts, n=group_size))
    rows = advantages.group_norm(rows)
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2) + beta * losses.kl("k3"), average="sequence_mean")
