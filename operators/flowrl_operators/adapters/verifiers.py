"""Environments of Prime Intellect's verifiers as data, reward and environment of a flow.

Two generations of that package are taken:

    environments (0.1)   `vf.load_environment(name)`: a data set of chat messages, a rubric of weighted reward functions, and for
                         several turns `env_response(messages, state)` with stop conditions
    task sets (`verifiers.v1`)   tasks with `@vf.reward` methods that judge a trace; one turn only, since their longer episodes
                         run in programs of their own that call the model through a server
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flowrl as fr
from flowrl.errors import ConfigError, DataError, MissingExtra
from flowrl.graph.operators import OperatorCall
from flowrl.graph.values import Component, freeze, thaw
from flowrl_operators.adapters import _calls, datasets

__all__ = ["Episodes", "FRAME", "Task", "reward", "task"]

FRAME = ("\n<environment>\n", "\n</environment>\n")
"""What stands before and after an environment's words in the text of a response, so that turns can be told apart again."""


class Task:
    """`data`, `reward` and `environment` that belong together; made by `task`. `environment` is None for one turn."""

    def __init__(self, data: fr.Data, reward: OperatorCall, environment: Component | None) -> None:
        self.data = data
        self.reward = reward
        self.environment = environment


def task(
    environment: str | Callable[..., Any],
    *,
    settings: Mapping[str, Any] | None = None,
    size: int | None = None,
    tokenizer: Any = None,
    parts: Sequence[str] = (),
    replay: bool = True,
    **options: Any,
) -> Task:
    """An environment of verifiers, ready for a flow.

    Example:
        words = adapters.verifiers.task("wordle", settings={"num_train_examples": 200}, batch=16)

        @fr.flow
        def learn(prompts, policy):
            rows = fr.rollout(policy, prompts, n=8, environment=words.environment, max_turns=6)
            rows = advantages.group_norm(words.reward(rows))
            ...

    Args:
        environment: name that `vf.load_environment` knows, or a function that returns an environment or a task set.
        settings: keyword arguments of either. They and the name are part of the graph.
        size: tasks taken, from the first; None takes all.
        tokenizer: applies its chat template to prompts of more than one message, as in `adapters.datasets.data`.
        parts: metrics of the rubric to write beside `reward`, each as a column of its name.
        replay: before a rubric judges several turns, they are played to the environment again, so that it finds in its state
            what was there at the end. False gives it the messages only, for environments that answer otherwise each time.
        options: of `fr.Data`.
    """
    source = _source(environment, settings)
    rows = source.rows(size)
    table: dict[str, Any] = {
        "task_number": list(range(len(rows))),
        "answer": ["" if row.get("answer") is None else str(row.get("answer")) for row in rows],
        **{n: c.to_pylist() for n, c in datasets.prompts_of([row["prompt"] for row in rows], tokenizer).items()},
    }
    listed = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    config = {"environment": environment, "settings": dict(settings or {})}
    scored = reward.bind(**config, parts=tuple(parts), replay=replay)
    return Task(fr.Data(listed, **options), scored, Episodes(**config) if source.has_turns else None)


def _writes(*, parts: Sequence[str], **_: object) -> Mapping[str, fr.ColumnType]:
    return {"reward": fr.SAMPLE.f32, **dict.fromkeys(parts, fr.SAMPLE.f32)}


@fr.operator(writes=_writes, each_row=True, on_error="flag", timeout_s=60.0)
def reward(
    response: fr.SAMPLE.str,
    task_number: fr.PROMPT.i64,
    *,
    environment: Any,
    settings: Any = None,
    parts: Any = (),
    replay: bool = True,
):
    """What the environment's own rubric, or the task's own rewards, say of a response: their weighted sum. See `task`.

    A response that an environment took part in is cut into turns at `FRAME`; a policy that writes the frame itself only
    takes words out of its own answer.
    """
    source = _source(environment, settings)
    turns = _turns(response)
    value, metrics = source.score(int(task_number), turns, replay)
    missing = [name for name in parts if name not in metrics]
    if missing:
        raise DataError(f"the environment has no metric {', '.join(missing)}; it has {', '.join(metrics) or 'none'}")
    return {"reward": float(value), **{name: float(metrics[name]) for name in parts}}


@fr.component
class Episodes:
    """The environment of a rollout: an environment of verifiers that answers turn by turn."""

    def __init__(self, environment: Any, settings: Any = None) -> None:
        self.source = _source(environment, settings)

    def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Begin an episode of the row's task."""
        state: dict[str, Any] = self.source.begin(int(row["task_number"]))
        return state

    def step(self, state: dict[str, Any], response: str) -> str | None:
        """What the environment says to a turn, in its frame; None where one of its stop conditions holds."""
        said = self.source.answer(state, response)
        return None if said is None else f"{FRAME[0]}{said}{FRAME[1]}"


def _turns(response: str) -> list[tuple[str, str | None]]:
    """(what the policy said, what the environment said to it, or None at the end) of each turn of a response's text."""
    made = []
    rest = response
    while FRAME[0] in rest and FRAME[1] in rest.partition(FRAME[0])[2]:
        mine, _, rest = rest.partition(FRAME[0])
        theirs, _, rest = rest.partition(FRAME[1])
        made.append((mine, theirs))
    return [*made, (rest, None)]


# ---------------------------------------------------------------------------------------------------- two generations


def _source(environment: Any, settings: Mapping[str, Any] | None) -> Any:
    """The environment, made once for each name (or function) and settings."""
    return _made(environment, freeze(dict(settings or {})))


@functools.lru_cache(maxsize=16)
def _made(environment: Any, settings: Any) -> Any:
    given = thaw(settings)
    made = environment(**given) if callable(environment) else _loaded(environment, given)
    if hasattr(made, "get_dataset") and hasattr(made, "rubric"):
        return _Environment(made)
    if hasattr(made, "load") and hasattr(made, "__iter__"):
        return _TaskSet(made)
    raise ConfigError(
        f"an environment of verifiers has get_dataset() and a rubric, a task set has load(); '{environment}' made neither but "
        f"{type(made).__name__}"
    )


def _loaded(name: str, settings: Mapping[str, Any]) -> Any:
    try:
        package = importlib.import_module("verifiers")
    except ImportError as error:
        raise MissingExtra(
            f"environment '{name}' is found by verifiers, which is not installed: pip install verifiers"
        ) from error
    if not hasattr(package, "load_environment"):
        raise ConfigError(
            f"this verifiers has task sets and no environments by name; give a function that returns the task set of '{name}'"
        )
    return package.load_environment(name, **settings)


class _Environment:
    """An environment with a rubric."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment
        kinds = {kind.__name__ for kind in type(environment).__mro__}
        self.has_turns = hasattr(environment, "env_response") and "SingleTurnEnv" not in kinds
        self._rows: list[dict[str, Any]] | None = None

    def rows(self, size: int | None = None) -> list[dict[str, Any]]:
        if self._rows is None:
            self._rows = [dict(row) for row in self.environment.get_dataset()]
        return self._rows if size is None else self._rows[:size]

    def begin(self, number: int) -> dict[str, Any]:
        """State of an episode: what the package's own rollout puts there, without a client and a model."""
        row = self.rows()[number]
        info = row.get("info") or {}
        prompt = _messages(row["prompt"])
        state: dict[str, Any] = {
            **{name: value for name, value in row.items() if name not in ("prompt", "info")},
            "input": row, "prompt": prompt, "completion": [], "answer": row.get("answer", ""), "info": info,
            "task": row.get("task", row), "trajectory": [], "responses": [], "turn": 0, "id": number,
            "is_completed": False, "is_truncated": False, "reward": None, "metrics": None, "error": None,
        }  # fmt: skip
        if self.has_turns and hasattr(self.environment, "setup_state"):
            state = _calls.finished(self.environment.setup_state(state)) or state
        return state

    def answer(self, state: dict[str, Any], response: str) -> str | None:
        """Take a turn of the policy; what the environment says to it, or None where the episode ends."""
        before = [*state["prompt"], *state["completion"]]
        said = _messages([{"role": "assistant", "content": response}])
        step: dict[str, Any] = {
            "prompt": before,
            "completion": said,
            "response": None,
            "tokens": None,
            "reward": None,
            "extras": {},
        }
        state["trajectory"].append(step)
        state["completion"] = [*state["completion"], *said]
        state["turn"] += 1
        messages = [*before, *said]
        if not self.has_turns or self._is_completed(messages, state):
            return None
        reply = _calls.finished(self.environment.env_response(messages, state))
        if isinstance(reply, tuple):  # older ones return the state too
            reply, changed = reply
            state.update(changed)
        if state.get("final_env_response") is not None:
            state["completion"] = [*state["completion"], *_messages(state["final_env_response"])]
            return None
        heard = _messages(reply)
        state["completion"] = [*state["completion"], *heard]
        return _calls.text_of(heard)

    def _is_completed(self, messages: list[Any], state: dict[str, Any]) -> bool:
        asked = self.environment.is_completed
        given = {"messages": messages, "state": state}
        return bool(_calls.finished(asked(**{n: given[n] for n in _calls.named(asked) if n in given})))

    def score(
        self, number: int, turns: list[tuple[str, str | None]], replay: bool
    ) -> tuple[float, Mapping[str, float]]:
        state = self.begin(number)
        if replay and self.has_turns:
            for mine, theirs in turns:
                said = self.answer(state, mine)
                if theirs is not None and said != theirs:
                    raise DataError(
                        f"played again, the environment says {said!r:.60} where it said {theirs!r:.60}: it does not answer the "
                        "same each time; use replay=False"
                    )
        else:
            for mine, theirs in turns:
                spoken = [{"role": "assistant", "content": mine}]
                heard = [{"role": "user", "content": theirs}] if theirs is not None else []
                state["completion"] = [*state["completion"], *_messages([*spoken, *heard])]
        rubric = self.environment.rubric
        given = {n: state[n] for n in ("prompt", "completion", "answer", "info", "task")} | {"state": state}
        found = _calls.finished(rubric.score_rollout(**_calls.accepted(rubric.score_rollout, given)))
        value = getattr(found, "reward", None) if found is not None else state["reward"]
        metrics = getattr(found, "metrics", None) if found is not None else state["metrics"]
        return float(state["reward"] if value is None else value), dict(metrics or {})


def _messages(messages: Any) -> list[Any]:
    """Chat messages as the package's own functions get them: objects of its types where it has such."""
    listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
    try:
        from verifiers.utils.message_utils import maybe_normalize_messages
    except ImportError:
        return listed
    return list(maybe_normalize_messages(listed, field_name="messages"))


class _TaskSet:
    """A task set of verifiers.v1."""

    has_turns = False

    def __init__(self, taskset: Any) -> None:
        if not getattr(taskset, "bounded", True):
            raise ConfigError("the task set has no end; give a function that returns a part of it: taskset.take(1000)")
        self.tasks = list(taskset)

    def rows(self, size: int | None = None) -> list[dict[str, Any]]:
        return [
            {"prompt": self._asked(task), "answer": getattr(task.data, "answer", None)} for task in self.tasks[:size]
        ]

    def _asked(self, task: Any) -> list[dict[str, str]]:
        prompt = task.data.prompt
        if prompt is None:
            raise DataError("a task without a prompt, whose user speaks first, cannot be asked in one turn")
        listed = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [{"role": m.role, "content": _calls.text_of(m)} for m in prompt]
        )
        system = task.data.system_prompt
        return [{"role": "system", "content": system}, *listed] if system else listed

    def score(
        self, number: int, turns: list[tuple[str, str | None]], replay: bool
    ) -> tuple[float, Mapping[str, float]]:
        import verifiers.v1 as vf

        task = self.tasks[number]
        said = [*self._asked(task), {"role": "assistant", "content": turns[-1][0]}]
        nodes = [
            {"parent": i - 1 if i else None, "message": message, "sampled": message["role"] == "assistant"}
            for i, message in enumerate(said)
        ]
        trace = vf.Trace(
            task=vf.TraceTask(type=type(task).__name__, data=task.data),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            nodes=nodes,
            is_completed=True,
            ok=True,
        )
        _calls.finished(task.score(trace))
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return trace.reward, metrics | {name: r.score for name, r in trace.rewards.items() if r is not None}
