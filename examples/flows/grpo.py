"""GRPO (arXiv 2402.03300), and the same with a reference that follows the policy and an evaluation beside training."""

import flowrl as fr
from flowrl_operators import advantages, evaluate, losses, rewards


@fr.flow
def grpo(prompts, policy, ref, *, group_size=8, beta=1e-3):
    rows = fr.rollout(policy, prompts, n=group_size)
    rows = rewards.math(rows)
    rows = advantages.group_norm(rows)
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2) + beta * losses.kl("k3"))


@fr.flow
def grpo_moving_ref(prompts, heldout, policy, ref):
    policy = grpo(prompts, policy, ref)
    fr.every(50, evaluate.pass_at(policy, heldout, k=(1, 8)))
    return policy, fr.assign(ref, policy, every=200)  # or fr.ema(ref, policy, 0.995)
