"""SFT: learn given answers by their likelihood.

Paper: arXiv 2203.02155.

Beside GRPO: no rollout: the rows come from data.
"""

import flowrl as fr
from flowrl_operators import losses


@fr.flow
def sft(examples, policy):
    return fr.update(policy, examples, loss=losses.sft())
