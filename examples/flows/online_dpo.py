"""Online DPO (arXiv 2402.04792): the loss itself is a group operator, so micro-batches keep pairs together."""

import flowrl as fr
from flowrl_operators import filters, losses


@fr.flow
def online_dpo(prompts, policy, ref, judge, *, beta=0.1):
    rows = fr.score(judge, fr.rollout(policy, prompts, n=4), out="reward")
    rows = filters.best_and_worst(rows, by="reward")
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    return fr.update(policy, rows, loss=losses.dpo(beta))
