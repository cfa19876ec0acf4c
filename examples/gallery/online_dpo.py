"""Online DPO: the best and the worst answer of each group are a pair.

Paper: arXiv 2402.04792.

Beside GRPO: the group is used as a preference instead of a baseline; the loss compares both answers with the
reference, and keeps their rows together in a micro-batch.
"""

import flowrl as fr
from flowrl_operators import filters, losses, rewards


@fr.flow
def online_dpo(prompts, policy, ref, *, group_size=4, beta=0.1):
    rows = rewards.exact(fr.rollout(policy, prompts, n=group_size))
    rows = filters.best_and_worst(rows, by="reward")
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    return fr.update(policy, rows, loss=losses.dpo(beta))
