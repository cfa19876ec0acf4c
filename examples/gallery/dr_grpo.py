"""Dr. GRPO: GRPO without its two biases.

Paper: arXiv 2503.20783.

Beside GRPO: rewards are centred and not divided by the deviation of their group, so that very easy and very hard
prompts do not count more; the loss is summed over tokens and divided by a constant, so that a long wrong answer is
not let off.
"""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def dr_grpo(prompts, policy, *, group_size=8, length=1024):
    rows = rewards.exact(fr.rollout(policy, prompts, n=group_size))
    rows = advantages.group_norm(rows, scale="none")
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2), average="constant", average_length=length)
