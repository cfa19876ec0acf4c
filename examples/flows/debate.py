"""Self-play: one policy in two roles; what one says is the other's prompt, what one wins the other loses."""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


def rebut(prompt, response):
    return f"{prompt}\n\nSomebody answered:\n{response}\n\nShow where this is wrong."


def zero_sum(first, second):
    scored = rewards.exact(first)
    first = scored.with_columns(reward=2.0 * scored["reward"] - 1.0)
    second = fr.join(second, first.select(proposed="reward", source_id="sample_id"), on="source_id")
    return first, second.with_columns(reward=-second["proposed"])


@fr.flow
def debate(prompts, policy):
    first = fr.rollout(policy, prompts, role="proposer")
    second = fr.rollout(policy, fr.prompts_from(first, rebut), role="critic")
    rows = fr.concat(*zero_sum(first, second))
    return fr.update(policy, advantages.batch_norm(rows, by="role"), loss=losses.ppo_clip(0.2))
