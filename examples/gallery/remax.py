"""ReMax: the greedy answer is the baseline.

Paper: arXiv 2310.10505.

Beside GRPO: instead of a group there is one sampled and one greedy answer per prompt; what the sample earns more is
its advantage.
"""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def remax(prompts, policy):
    rows = rewards.exact(fr.rollout(policy, prompts))
    greedy = rewards.exact(fr.rollout(policy, prompts, temperature=0.0))
    rows = fr.join(rows, greedy.select(baseline="reward"), on="prompt_id")
    return fr.update(policy, advantages.remax(rows), loss=losses.reinforce(), average="sequence_sum")
