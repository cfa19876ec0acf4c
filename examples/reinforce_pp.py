"""REINFORCE++ (arXiv 2501.03262): no critic and no group; token returns with a KL penalty, normalised over the batch."""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def reinforce_pp(prompts, policy, ref, *, kl=0.01):
    rows = rewards.exact(fr.rollout(policy, prompts))
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    rows = advantages.reinforce_pp(rewards.kl_shaped(rows, coefficient=kl))
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2))
