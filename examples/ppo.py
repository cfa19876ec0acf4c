"""PPO (arXiv 1707.06347, 2203.02155): a critic, a reward shaped by the distance from a reference, several passes."""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def ppo(prompts, policy, ref, critic, *, kl=0.05, epochs=2, minibatches=4):
    rows = rewards.exact(fr.rollout(policy, prompts))
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    rows = fr.values(critic, rows)
    rows = advantages.gae(rewards.kl_shaped(rows, coefficient=kl), gamma=1.0, lam=0.95)
    passes = fr.repeat(rows, epochs=epochs, minibatches=minibatches)
    policy = fr.update(policy, passes, loss=losses.ppo_clip(0.2))
    return policy, fr.update(critic, passes, loss=losses.value_clip(0.2))
