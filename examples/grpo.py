"""GRPO (arXiv 2402.03300): a group of answers per prompt is its own baseline, a frozen reference holds the policy near."""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def grpo(prompts, policy, ref, *, group_size=8, beta=1e-3):
    rows = fr.rollout(policy, prompts, n=group_size)
    rows = rewards.exact(rows)
    rows = advantages.group_norm(rows)
    rows = fr.logprobs(ref, rows, out="ref_logprobs")  # left out, with its model, when beta is 0
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2) + beta * losses.kl("k3"))
