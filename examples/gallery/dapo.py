"""DAPO: every group of the batch teaches something.

Paper: arXiv 2503.14476.

Beside GRPO: prompts are drawn again until the batch is full of groups with different rewards; the ratio may rise
further than it may fall; all tokens of the batch weigh the same; answers that are nearly too long pay for it. No KL
term.
"""

import flowrl as fr
from flowrl_operators import advantages, filters, losses, rewards


@fr.flow
def dapo(prompts, policy, *, group_size=8, soft_length=16384):
    def attempt(drawn):
        return rewards.exact(fr.rollout(policy, drawn, n=group_size))

    # groups are judged by right and wrong alone: one that is all right says nothing, however long its answers are
    rows = fr.refill(attempt, prompts, keep=filters.group_has_signal(), max_rounds=4)
    rows = rewards.overlong(rows, soft=soft_length)
    return fr.update(policy, advantages.group_norm(rows), loss=losses.ppo_clip(0.2, high=0.28), average="token_mean")
