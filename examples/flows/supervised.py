"""Learning from given or chosen answers: SFT, rejection sampling (RAFT, arXiv 2304.06767), a reward model, distillation."""

import flowrl as fr
from flowrl_operators import filters, losses, rewards


@fr.flow
def sft(examples, policy):
    return fr.update(policy, examples, loss=losses.sft())


@fr.flow
def raft(prompts, policy, *, n=8):
    rows = filters.top(rewards.math(fr.rollout(policy, prompts, n=n)), k=1, by="reward")
    return fr.update(policy, rows, loss=losses.sft())


@fr.flow
def reward_model(pairs, judge):
    return fr.update(judge, pairs, loss=losses.bradley_terry())


@fr.flow
def distill(prompts, student, teacher, *, k=64):
    rows = fr.rollout(student, prompts)
    rows = fr.top_logprobs(teacher, rows, k=k, out="teacher")  # teacher_ids, teacher_logprobs: TOKEN x k
    return fr.update(student, rows, loss=losses.reverse_kl())
