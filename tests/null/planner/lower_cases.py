"""Flows whose calls are those of `search_cases`, and candidates to lower."""

from functools import lru_cache

import flowrl as fr
from flowrl.graph.nodes import Graph
from flowrl.graph.passes import optimise
from flowrl.planner.problem import Candidate, Problem
from flowrl.planner.search import search
from flowrl_operators import advantages, losses, rewards
from tests.null.planner.search_cases import CASES


@fr.flow
def grouped(prompts, policy, ref):
    """Rollout, a frozen reference, an update: `search_cases.group_roles`."""
    rows = fr.rollout(policy, prompts, n=8)
    rows = advantages.group_norm(rewards.math(rows))
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    return fr.update(policy, rows, loss=losses.ppo_clip(0.2) + 1e-3 * losses.kl("k3"))


@fr.flow
def criticised(prompts, policy, ref, critic):
    """Two models that are trained: `search_cases.critic_roles`."""
    rows = rewards.math(fr.rollout(policy, prompts, n=8))
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    rows = fr.values(critic, fr.logprobs(policy, rows, out="old_logprobs"))
    rows = advantages.gae(rewards.kl_shaped(rows, coefficient=0.05), gamma=1.0, lam=0.95)
    policy = fr.update(policy, rows, loss=losses.ppo_clip(0.2))
    return policy, fr.update(critic, rows, loss=losses.value_clip(0.2))


def graph_of(problem: Problem) -> Graph:
    """The graph whose calls a problem of `search_cases` has."""
    is_criticised = any(role.name == "critic" for role in problem.roles)
    graph, _ = optimise((criticised if is_criticised else grouped).graph())
    return graph.rename(
        {"ref_logprobs": "score", "old_logprobs": "old"} if is_criticised else {"ref_logprobs": "score"}
    )


@lru_cache(maxsize=len(CASES))
def candidates(name: str) -> tuple[Candidate, ...]:
    """The best of a case and what else the search kept; none where nothing fits."""
    found = search(CASES[name])
    return () if found.best is None else (found.best, *found.others)
