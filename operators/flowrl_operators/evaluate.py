"""Evaluation beside training."""

from __future__ import annotations

from typing import Any

import numpy as np

import flowrl as fr
from flowrl.errors import ConfigError
from flowrl_operators import rewards
from flowrl_operators._options import required

__all__ = ["pass_at", "pass_rates"]


def _pass_columns(*, k: tuple[int, ...], **_: object) -> dict[str, Any]:
    is_list = len(k) > 0 and min(k) >= 1 and len(set(k)) == len(k)
    required("pass_rates needs one or more numbers of tries in k, each at least 1 and once", is_list, k=k)
    return {f"pass@{number}": fr.SAMPLE.f32 for number in k}


def _most(*, k: tuple[int, ...], **_: object) -> int:
    return max(k)


@fr.operator(writes=_pass_columns, locality=fr.group("prompt_id"), min_group=_most)
def pass_rates(reward: fr.SAMPLE.f32, *, k: tuple[int, ...] = (1,), threshold: float = 1.0):
    """Unbiased pass@k of each prompt: with n responses of which c are right, 1 - C(n - c, k) / C(n, k).

    From Chen et al. (arXiv 2107.03374), as a product that does not overflow. A response is right when its reward is at
    least `threshold`; NaN is wrong. Every row of the group gets the group's value.
    """
    n = len(reward)
    right = int(np.count_nonzero(np.asarray(reward, np.float64) >= threshold))
    if max(k) > n:
        raise ConfigError(f"pass@{max(k)} needs at least {max(k)} responses per prompt; found a group of {n}")
    return {f"pass@{number}": np.full(n, _pass_at(n, right, number), np.float32) for number in k}


def _pass_at(n: int, right: int, k: int) -> float:
    if n - right < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - right + 1, n + 1)))


def pass_at(
    policy: Any,
    prompts: Any,
    *,
    k: tuple[int, ...] = (1,),
    reward: Any = rewards.math,
    n: int | None = None,
    threshold: float = 1.0,
    temperature: float = 1.0,
    max_tokens: int | None = None,
) -> Any:
    """Sample, score and log `pass@k`: `fr.every(50, evaluate.pass_at(policy, heldout, k=(1, 8)))`.

    Args:
        k: which pass@k to log.
        reward: operator that writes `reward`.
        n: responses per prompt; None takes the largest k.
        threshold: least reward of a right answer.

    Returns rows with columns `pass@1`, ...
    """
    rows = fr.rollout(policy, prompts, n=n or max(k), temperature=temperature, max_tokens=max_tokens)
    rows = pass_rates(reward(rows), k=tuple(k), threshold=threshold)
    return fr.log(rows, *(f"pass@{number}" for number in k))
