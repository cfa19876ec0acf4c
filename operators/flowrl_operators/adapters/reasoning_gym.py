"""Tasks of reasoning-gym (Stojanovski et al., arXiv 2505.24760): questions made by a program, answers judged by one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flowrl as fr
from flowrl.errors import DataError, MissingExtra
from flowrl.graph.operators import OperatorCall
from flowrl.graph.values import freeze, thaw
from flowrl_operators.rewards import ANSWER_TAG, last_match

__all__ = ["Task", "data", "reward", "task"]


def data(
    task: str, *, size: int = 500, seed: int = 0, settings: Mapping[str, Any] | None = None, **options: Any
) -> fr.Data:
    """Questions of one task as data of a flow: `prompt`, `answer`, and `question_number`.

    Example:
        train = adapters.reasoning_gym.data("leg_counting", size=1000, seed=1, batch=32)
        rows = adapters.reasoning_gym.reward(rows, task="leg_counting", size=1000, seed=1)

    Args:
        task: name of a data set of reasoning-gym.
        size, seed, settings: of that data set; give the reward the same.
        options: of `fr.Data`.

    `answer` is one right answer; there may be others, which only the task's own judge knows.
    """
    made = _dataset(task, size, seed, freeze(dict(settings or {})))
    rows = []
    for number in range(size):
        entry = made[number]
        answer = entry["answer"]
        rows.append(
            {"prompt": entry["question"], "answer": "" if answer is None else str(answer), "question_number": number}
        )
    return fr.Data(rows, **options)


@fr.reward
def reward(
    prompt: fr.PROMPT.str,
    response: fr.SAMPLE.str,
    question_number: fr.PROMPT.i64,
    *,
    task: str,
    size: int = 500,
    seed: int = 0,
    settings: Any = None,
    pattern: str | None = ANSWER_TAG,
) -> float:
    """What reasoning-gym's own judge of the task says of the answer, mostly 0 to 1, in parts for some tasks.

    Args:
        task, size, seed, settings: as for `data`. The question is made again from them, with all that its judge needs.
        pattern: the answer is what the first group (or the whole) of this regular expression finds last in the response;
            nothing found is no answer; the prompts ask for answer tags. None judges the whole response.

    Errors: DataError for a prompt that is not the question of these settings; MissingExtra without reasoning-gym.
    """
    made = _dataset(task, size, seed, freeze(dict(settings or {})))
    entry = made[int(question_number)] if 0 <= question_number < size else {}
    if entry.get("question") != prompt:
        raise DataError(
            f"question {question_number} of '{task}' with size={size}, seed={seed} and settings {settings or {}} is "
            f"{entry.get('question')!r:.80}; the row asks {prompt!r:.80}. Give data and reward the same task and settings"
        )
    answer: str | None = response
    if pattern is not None:
        found = last_match(pattern, response)
        answer = None if found is None else found.strip()
    return float(made.score_answer(answer=answer, entry=entry))


def task(
    name: str, *, size: int = 500, seed: int = 0, settings: Mapping[str, Any] | None = None, **options: Any
) -> Task:
    """Data and reward of one task, with the same settings in both.

    Example:
        legs = adapters.reasoning_gym.task("leg_counting", size=1000, seed=1, batch=32)

        @fr.flow
        def learn(prompts, policy):
            rows = advantages.group_norm(legs.reward(fr.rollout(policy, prompts, n=8)))
            ...

        fr.run_local(learn, prompts=legs.data, ...)
    """
    return Task(
        data(name, size=size, seed=seed, settings=settings, **options),
        reward(task=name, size=size, seed=seed, settings=settings),
    )


class Task:
    """`data` and `reward` that belong together; made by `task`."""

    def __init__(self, data: fr.Data, reward: OperatorCall) -> None:
        self.data = data
        self.reward = reward


@functools.lru_cache(maxsize=32)
def _dataset(task: str, size: int, seed: int, settings: Any) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise MissingExtra(
            "reasoning-gym's tasks need reasoning-gym, which is not installed: pip install reasoning-gym"
        ) from error
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **thaw(settings))
    except (ValueError, TypeError, AssertionError) as error:  # an unknown task or setting, told as it tells it
        raise DataError(f"reasoning-gym makes no data set '{task}' of these settings: {error}") from error
