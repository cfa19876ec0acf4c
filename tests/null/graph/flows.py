"""The sixteen flows that the language must say, written with the stand-ins of `pieces`."""

import flowrl as fr
from tests.null.graph import pieces as p


@fr.flow
def grpo(prompts, policy, ref, *, group_size=8, beta=1e-3):
    rows = fr.rollout(policy, prompts, n=group_size)
    rows = p.math(rows)
    rows = p.group_norm(rows)
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    return fr.update(policy, rows, loss=p.ppo_clip(0.2) + beta * p.kl("k3"))


@fr.flow
def ppo(prompts, policy, ref, critic, judge, *, kl=0.05):
    rows = fr.rollout(policy, prompts)
    rows = fr.score(judge, rows, out="reward")
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    rows = fr.logprobs(policy, rows, out="old_logprobs")
    rows = fr.values(critic, rows)
    rows = p.gae(p.kl_shaped(rows, coefficient=kl), gamma=1.0, lam=0.95)
    passes = fr.repeat(rows, epochs=2, minibatches=4)
    return (
        fr.update(policy, passes, loss=p.ppo_clip(0.2)),
        fr.update(critic, passes, loss=p.value_clip(0.2)),
    )


@fr.flow
def dapo(prompts, policy, *, group_size=16):
    def attempt(new):
        return p.overlong(p.math(fr.rollout(policy, new, n=group_size)), soft=4096)

    rows = fr.refill(attempt, prompts, keep=p.group_has_signal(), max_rounds=4)
    return fr.update(policy, p.group_norm(rows), loss=p.ppo_clip(0.2, high=0.28), average="token_mean")


@fr.flow
def remax(prompts, policy):
    rows = p.math(fr.rollout(policy, prompts))
    greedy = p.math(fr.rollout(policy, prompts, temperature=0.0))
    rows = fr.join(rows, greedy.select(baseline="reward"), on="prompt_id")
    return fr.update(policy, p.remax(rows), loss=p.reinforce())


@fr.flow
def online_dpo(prompts, policy, ref, judge, *, beta=0.1):
    rows = fr.score(judge, fr.rollout(policy, prompts, n=4), out="reward")
    rows = p.best_and_worst(rows, by="reward")
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    return fr.update(policy, rows, loss=p.dpo(beta=beta))


@fr.flow
def raft(prompts, policy, *, n=8):
    rows = p.top(p.math(fr.rollout(policy, prompts, n=n)), k=1, by="reward")
    return fr.update(policy, rows, loss=p.sft())


@fr.flow
def distill(prompts, student, teacher, *, k=64):
    rows = fr.rollout(student, prompts)
    rows = fr.top_logprobs(teacher, rows, k=k, out="teacher")
    return fr.update(student, rows, loss=p.reverse_kl())


@fr.flow
def reward_model(pairs, judge):
    return fr.update(judge, pairs, loss=p.bradley_terry())


@fr.flow
def judged(prompts, policy, judge):
    rows = fr.rollout(policy, prompts, n=4)
    verdicts = fr.rollout(judge, fr.prompts_from(rows, p.judge_prompt), temperature=0.0)
    rows = fr.join(rows, p.parse_verdict(verdicts).select("reward", sample_id="source_id"), on="sample_id")
    return fr.update(policy, p.group_norm(rows), loss=p.ppo_clip(0.2))


@fr.flow
def tool_use(prompts, policy):
    rows = fr.rollout(policy, prompts, n=8, environment=p.Tools([p.search, p.python]), max_turns=6)
    rows = p.group_norm(p.exact(rows) + 0.1 * p.format(rows))
    return fr.update(policy, rows, loss=p.ppo_clip(0.2))


@fr.flow
def debate(prompts, policy):
    first = fr.rollout(policy, prompts, role="proposer")
    second = fr.rollout(policy, fr.prompts_from(first, p.rebut), role="critic")
    rows = fr.concat(p.zero_sum(first), p.zero_sum(second))
    return fr.update(policy, p.batch_norm(rows, by="role"), loss=p.ppo_clip(0.2))


@fr.flow
def replayed(prompts, policy, *, capacity=10_000):
    fresh = p.group_norm(p.math(fr.rollout(policy, prompts, n=8)))
    rows = fr.buffer(fresh, capacity=capacity, draw=512, evict="fifo")
    return fr.update(policy, rows, loss=p.ppo_clip(0.2) * p.truncated_importance(2.0))


@fr.flow
def grpo_moving_ref(prompts, heldout, policy, ref):
    policy = grpo(prompts, policy, ref)
    fr.every(50, p.pass_rate(p.math(fr.rollout(policy, heldout, n=8)), k=8))
    return policy, fr.assign(ref, policy, every=200)


@fr.flow
def vine(prompts, policy, *, branches=4):
    rows = p.math(fr.rollout(policy, prompts))
    steps = fr.prompts_from(rows, p.split_steps)
    tried = p.math(fr.rollout(policy, steps, n=branches)).select(step_value="reward")
    values = fr.reduce(tried, "mean", by="source_id").select("step_value", sample_id="source_id")
    return fr.update(policy, p.from_step_values(fr.join(rows, values, on="sample_id")), loss=p.ppo_clip(0.2))


@fr.flow
def ppo_warm(prompts, policy, ref, critic, judge, *, warmup=20):
    policy_next, critic_next = ppo(prompts, policy, ref, critic, judge)
    return fr.after(warmup, policy_next, otherwise=policy), critic_next


@fr.flow
def sft(examples, policy):
    return fr.update(policy, examples, loss=p.sft())


SIXTEEN = (
    grpo, ppo, dapo, remax, online_dpo, raft, distill, reward_model, judged, tool_use, debate, replayed, grpo_moving_ref,
    vine, ppo_warm, sft,
)  # fmt: skip
