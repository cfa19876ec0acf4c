"""PPO: a critic says what was to be expected, token by token.

Paper: arXiv 1707.06347.

Beside GRPO: one answer per prompt. A second model predicts the return at each token and is trained beside the policy;
advantages are per token; the KL to the reference is part of the reward; a batch is gone through twice, in
mini-batches.
"""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def ppo(prompts, policy, ref, critic, *, kl=0.01):
    rows = rewards.exact(fr.rollout(policy, prompts))
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    rows = fr.values(critic, rows)
    rows = advantages.gae(rewards.kl_shaped(rows, coefficient=kl), gamma=1.0, lam=0.95)
    passes = fr.repeat(rows, epochs=2, minibatches=2)
    policy = fr.update(policy, passes, loss=losses.ppo_clip(0.2))
    return policy, fr.update(critic, passes, loss=losses.value_clip(0.2))
