"""Off-policy with a replay buffer: the loss must correct for older weights, and the check FR-V01 asks for it."""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def replayed(prompts, policy, *, capacity=10_000):
    fresh = advantages.group_norm(rewards.math(fr.rollout(policy, prompts, n=8)))
    rows = fr.buffer(fresh, capacity=capacity, draw=512, evict="fifo")
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2) * losses.truncated_importance(2.0))
