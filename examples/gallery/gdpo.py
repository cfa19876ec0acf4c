"""GDPO: several rewards, each normalised before they are added.

Paper: arXiv 2601.05242.

Beside GRPO: with a sum of rewards different mixtures fall together; here each part keeps its own scale within the
group, and the sum is normalised over the batch.
"""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def gdpo(prompts, policy, *, group_size=8):
    rows = fr.rollout(policy, prompts, n=group_size)
    rows = rewards.exact(rows, out="right")
    rows = rewards.format(rows, pattern=".{1,4}", out="tidy")
    rows = advantages.gdpo(rows, parts=("right", "tidy"))
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2))
