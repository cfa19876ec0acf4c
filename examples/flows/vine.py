"""VinePPO (arXiv 2410.01679): the value of each reasoning step is the mean reward of answers that go on from its start."""

import flowrl as fr
from flowrl_operators import rewards
from flowrl_operators.advantages import from_step_values
from flowrl_operators.losses import ppo_clip


@fr.operator(writes={"step_starts": fr.TURN.i32}, each_row=True)
def mark_steps(response_ids, *, stride=32):
    return list(range(0, max(len(response_ids), 1), stride))  # a step is 32 tokens; a paragraph would do as well


def split_steps(prompt_ids, response_ids, step_starts):
    return [[*prompt_ids, *response_ids[:start]] for start in step_starts]


@fr.flow
def vine(prompts, policy, *, branches=4):
    rows = mark_steps(rewards.math(fr.rollout(policy, prompts)))
    steps = rewards.math(fr.rollout(policy, fr.prompts_from(rows, split_steps), n=branches))  # a prompt per step
    values = fr.reduce(steps.select(step_value="reward", sample_id="source_id"), "mean", by="prompt_id")
    return fr.update(policy, from_step_values(fr.join(rows, values, on="sample_id", collect=True)), loss=ppo_clip(0.2))
