"""A judge that writes: its prompts are made from answers, its verdicts joined back to them."""

import re

import flowrl as fr
from flowrl_operators import advantages, losses


def judge_prompt(prompt, response):
    return f"Task:\n{prompt}\n\nAnswer:\n{response}\n\nHow good is the answer, from 0 to 10? Reply with one number."


@fr.reward
def parse_verdict(response):
    found = re.findall(r"\d+(?:\.\d+)?", response)
    return min(float(found[-1]), 10.0) / 10.0 if found else float("nan")


@fr.flow
def judged(prompts, policy, judge):
    rows = fr.rollout(policy, prompts, n=4)
    verdicts = fr.rollout(judge, fr.prompts_from(rows, judge_prompt), temperature=0.0)
    rows = fr.join(rows, parse_verdict(verdicts).select("reward", sample_id="source_id"), on="sample_id")
    return fr.update(policy, advantages.group_norm(rows), loss=losses.ppo_clip(0.2))
