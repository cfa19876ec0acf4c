"""REINFORCE++: one answer per prompt, and the batch as baseline.

Paper: arXiv 2501.03262.

Beside GRPO: no groups: returns (with the KL to the reference paid at every token) are whitened over all tokens of the
batch.
"""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def reinforce_pp(prompts, policy, ref, *, kl=0.01):
    rows = rewards.exact(fr.rollout(policy, prompts))
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    rows = rewards.kl_shaped(rows, coefficient=kl, logprobs="rollout_logprobs")
    return fr.update(policy, advantages.reinforce_pp(rows), loss=losses.ppo_clip(0.2))
