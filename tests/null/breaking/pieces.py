"""Short ways to run a flow on the null engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flowrl as fr
from flowrl_operators import advantages, losses

DATA = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(6)]


@fr.reward
def length(response):
    return float(len(response))


def run(flow: Any, **given: Any) -> fr.Run:
    """A run of two prompts that shows and writes nothing."""
    settings = {"engine": "null", "out": None, "progress": "off", "max_tokens": 8, "batch": 2, **given}
    settings.setdefault("prompts", DATA)
    settings.setdefault("policy", "null")
    return fr.run_local(flow, **settings)


def sampled(body: Callable[[Any, Any], Any], **given: Any) -> fr.Run:
    """A run of a flow that hands (rows of a rollout, policy) to `body`."""

    @fr.flow
    def made(prompts, policy):
        return body(fr.rollout(policy, prompts, n=2), policy)

    return run(made, **given)


def trained(rows: Any, policy: Any) -> Any:
    return fr.update(policy, advantages.group_norm(rows), loss=losses.reinforce())
