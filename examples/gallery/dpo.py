"""DPO: learn from given preferences.

Paper: arXiv 2305.18290.

Beside GRPO: no rollout and no reward: pairs of answers come from data, and the reference says how far to move.
"""

import flowrl as fr
from flowrl_operators import losses


@fr.flow
def dpo(pairs, policy, ref, *, beta=0.1):
    pairs = fr.logprobs(ref, pairs, out="ref_logprobs")
    return fr.update(policy, pairs, loss=losses.dpo(beta))
