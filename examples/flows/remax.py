"""ReMax (arXiv 2310.10505): the greedy answer to the same prompt is the baseline."""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def remax(prompts, policy):
    rows = rewards.math(fr.rollout(policy, prompts))
    greedy = rewards.math(fr.rollout(policy, prompts, temperature=0.0))
    rows = fr.join(rows, greedy.select(baseline="reward"), on="prompt_id")
    return fr.update(policy, advantages.remax(rows), loss=losses.reinforce())
