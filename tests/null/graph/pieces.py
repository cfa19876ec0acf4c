"""Operators and losses of the graph tests: small, torch-free stand-ins for a pack's."""

import numpy as np

import flowrl as fr

T, S = fr.TOKEN, fr.SAMPLE
IDS, NATS = T.i32["k"], T.f32["k"]


@fr.reward
def math(response, answer):
    return float(response == answer)


@fr.reward
def exact(response, answer):
    return float(response == answer)


@fr.reward
def format(response):
    return float(response.startswith("<"))


@fr.operator(writes={"reward": S.f32})
def overlong(reward: S.f32, response_ids: T.i32, *, soft: int, replace=True):
    return reward - (response_ids.lengths > soft)


@fr.operator(writes={"token_rewards": T.f32})
def kl_shaped(reward: S.f32, rollout_logprobs: T.f32, ref_logprobs: T.f32, *, coefficient=0.1):
    return -coefficient * (rollout_logprobs - ref_logprobs)


@fr.operator(writes={"advantage": S.f32}, locality=fr.group("prompt_id"), min_group=2)
def group_norm(reward: S.f32, *, eps=1e-6):
    return (reward - reward.mean()) / (reward.std() + eps)


@fr.operator(writes={"advantage": S.f32}, locality="batch")
def batch_norm(reward: S.f32, key: S.str.named_by("by"), *, by: str, eps=1e-6):
    return (reward - reward.mean()) / (reward.std() + eps)


@fr.operator(writes={"advantage": S.f32})
def remax(reward: S.f32, baseline: S.f32):
    return reward - baseline


@fr.operator(writes={"advantages": T.f32, "returns": T.f32})
def gae(token_rewards: T.f32, values: T.f32, *, gamma=1.0, lam=0.95):
    return {"advantages": token_rewards - values, "returns": token_rewards}


@fr.operator(writes={"advantages": T.f32})
def from_step_values(reward: S.f32, step_value: S.f32, response_ids: T.i32):
    return response_ids * 0.0


@fr.operator(filter=True, locality=fr.group("prompt_id"))
def group_has_signal(reward: S.f32):
    return np.full(len(reward), reward.std() > 0)


@fr.operator(filter=True, locality=fr.group("prompt_id"))
def top(score: S.f32.named_by("by"), *, k: int, by: str = "reward"):
    return score >= sorted(score)[-k]


@fr.operator(filter=True, writes={"pair_id": S.str, "chosen": S.bool}, locality=fr.group("prompt_id"), min_group=2)
def best_and_worst(score: S.f32.named_by("by"), prompt_id: S.str, *, by: str = "reward"):
    return fr.Keep(score == score.max(), {"pair_id": prompt_id, "chosen": score == score.max()})


@fr.operator(writes={"reward": S.f32})
def parse_verdict(response: S.str):
    return response == "yes"


@fr.operator(writes={"reward": S.f32}, locality="batch")
def zero_sum(response: S.str):
    return response == "I win"


@fr.operator(writes={"pass_at": S.f32}, locality=fr.group("prompt_id"))
def pass_rate(reward: S.f32, *, k: int):
    return reward


@fr.loss
def ppo_clip(
    logprobs,
    old_logprobs: T.f32.or_live("logprobs"),
    advantages: T.f32.or_broadcast("advantage"),
    *,
    clip=0.2,
    high=None,
):
    return -(logprobs - old_logprobs) * advantages


@fr.loss
def kl(logprobs, ref_logprobs: T.f32, *, estimator="k3"):
    return logprobs - ref_logprobs


@fr.loss
def reinforce(logprobs, advantages: T.f32.or_broadcast("advantage")):
    return -logprobs * advantages


@fr.loss(on_policy=False, max_staleness=None)
def sft(logprobs):
    return -logprobs


@fr.loss(on_policy=False, max_staleness=None, locality=fr.group("pair_id"), per="sample")
def dpo(logprobs, ref_logprobs: T.f32, chosen: S.bool, pair_id: S.str, segments, *, beta=0.1):
    return logprobs


@fr.loss(on_policy=False, max_staleness=None, locality=fr.group("pair_id"), per="sample")
def bradley_terry(scores, chosen: S.bool, pair_id: S.str):
    return scores


@fr.loss(on_policy=False, max_staleness=None)
def value_clip(values, old_values: T.f32.column("values"), returns: T.f32, *, clip=0.2):
    return (values - returns) ** 2


@fr.loss(on_policy=False, max_staleness=None)
def reverse_kl(logits, teacher_ids: IDS, teacher_logprobs: NATS):
    return logits


@fr.loss(max_staleness=4, corrects=True)
def truncated_importance(logprobs, rollout_logprobs: T.f32, *, cap=2.0):
    return (logprobs - rollout_logprobs).exp().clip(max=cap)


@fr.component
class Tools:
    """An environment."""

    def __init__(self, tools, limit=3):
        self.tools = tools
        self.limit = limit


def search(query: str) -> str:
    return query


def python(code: str) -> str:
    return code


def judge_prompt(prompt, response):
    return f"Is this right? {prompt} {response}"


def rebut(response):
    return f"Argue against: {response}"


def split_steps(prompt, response):
    return [prompt + part for part in response.split("\n")]
