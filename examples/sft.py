"""SFT: supervised fine-tuning is a flow like any other."""

import flowrl as fr
from flowrl_operators import losses


@fr.flow
def sft(examples, policy):
    return fr.update(policy, examples, loss=losses.sft())
