"""A reward model: a scalar head learns which answer of a pair is preferred.

Paper: arXiv 2203.02155.

Beside GRPO: the trained model gives scores and no tokens; `fr.score` uses it in other flows.
"""

import flowrl as fr
from flowrl_operators import losses


@fr.flow
def reward_model(pairs, judge):
    return fr.update(judge, pairs, loss=losses.bradley_terry())
