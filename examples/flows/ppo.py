"""PPO with a critic and a reward model (arXiv 2203.02155), and the same with a critic that is warmed up first."""

import flowrl as fr
from flowrl_operators import advantages, losses, rewards


@fr.flow
def ppo(prompts, policy, ref, critic, judge, *, kl=0.05):
    rows = fr.rollout(policy, prompts)
    rows = fr.score(judge, rows, out="reward")
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    rows = fr.values(critic, rows)
    rows = advantages.gae(rewards.kl_shaped(rows, coefficient=kl), gamma=1.0, lam=0.95)
    passes = fr.repeat(rows, epochs=2, minibatches=4)
    policy = fr.update(policy, passes, loss=losses.ppo_clip(0.2))
    return policy, fr.update(critic, passes, loss=losses.value_clip(0.2))


@fr.flow
def ppo_warm(prompts, policy, ref, critic, judge, *, warmup=20):
    policy_next, critic_next = ppo(prompts, policy, ref, critic, judge)
    return fr.after(warmup, policy_next, otherwise=policy), critic_next
