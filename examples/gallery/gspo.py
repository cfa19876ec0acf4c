"""GSPO: one importance ratio per answer.

Paper: arXiv 2507.18071.

Beside GRPO: the ratio is the geometric mean over the tokens of the answer, and clipped as a whole, within a much
narrower range.
"""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def gspo(prompts, policy, *, group_size=8):
    rows = advantages.group_norm(rewards.exact(fr.rollout(policy, prompts, n=group_size)))
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    return fr.update(
        policy,
        fr.repeat(rows, minibatches=2),
        loss=losses.gspo(3e-4, high=4e-4),
        average="sequence_mean",
    )
