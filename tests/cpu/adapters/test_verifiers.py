"""Environments of verifiers: against a stand-in with the same protocol, and against the package where it is installed."""

import importlib.util
from pathlib import Path

import pytest

import flowrl as fr
from flowrl.errors import ConfigError, DataError, MissingExtra
from flowrl.graph.values import Component
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch
from flowrl_operators import adapters, advantages

HAS_PACKAGE = importlib.util.find_spec("verifiers") is not None
HAS_ENVIRONMENTS = HAS_PACKAGE and importlib.util.find_spec("verifiers.envs") is not None

QUESTIONS = [
    {"prompt": [{"role": "user", "content": f"a number from {n} to 9"}], "answer": str(n + 2), "info": {"low": n}}
    for n in range(3)
]


# --- a stand-in -----------------------------------------------------------------------------------------------------------


class Rubric:
    def __init__(self, functions):
        self.functions = functions

    async def score_rollout(self, state):
        known = {n: state[n] for n in ("prompt", "completion", "answer", "info")} | {"state": state}
        scores = {
            f.__name__: f(**{n: known[n] for n in f.__code__.co_varnames[: f.__code__.co_argcount]})
            for f in self.functions
        }
        state["metrics"], state["reward"] = scores, sum(scores.values())


class Environment:
    def __init__(self, rubric):
        self.rubric = rubric

    def get_dataset(self):
        return QUESTIONS


class SingleTurnEnv(Environment):
    """By this name the adapter knows that there is one turn."""


class Guessing(Environment):
    """Says higher or lower; counts in its state."""

    async def setup_state(self, state):
        state["guesses"] = 0

    async def is_completed(self, state, **kwargs):
        return last(state["completion"]) == state["answer"] or len(state["trajectory"]) >= 3

    async def env_response(self, messages, state, **kwargs):
        state["guesses"] += 1
        low = int(last(messages)) < int(state["answer"])
        return [{"role": "user", "content": "higher" if low else "lower"}]


def last(messages) -> str:
    message = messages[-1]
    return (message["content"] if isinstance(message, dict) else message.content).strip()


def right(completion, answer):
    return float(last(completion) == answer)


def patience(state):
    return 0.1 * state.get("guesses", 0)


def roles(completion):
    return float([m["role"] for m in completion] == ["assistant", "user", "assistant"])


def one_turn():
    return SingleTurnEnv(Rubric([right]))


def guessing():
    return Guessing(Rubric([right, patience]))


def moody():
    made = guessing()
    words = iter("abcdefgh")

    async def env_response(messages, state, **kwargs):
        return [{"role": "user", "content": next(words)}]

    made.env_response = env_response
    return made


def nothing():
    return object()


def answered(data: fr.Data, *texts: str) -> RowBatch:
    return data.rows.slice(0, len(texts)).with_column("response", list(texts), fr.SAMPLE.str)


def test_a_rubric_is_a_reward() -> None:
    task = adapters.verifiers.task(one_turn, parts=("right",))
    assert task.environment is None
    assert task.data.rows["prompt"].tolist()[0] == "a number from 0 to 9"
    done = run_operator(task.reward, answered(task.data, "2", "2", " 4\n")).rows
    assert done["reward"].tolist() == [1, 0, 1]
    assert done["right"].tolist() == [1, 0, 1]


def played(task, number: int, *turns: str) -> tuple[str, list[str | None]]:
    """(the text of a response of these turns, what the environment said)."""
    assert isinstance(task.environment, Component)
    episodes = task.environment.build()
    state = episodes.reset({"task_number": number})
    text, said = "", []
    for turn in turns:
        said.append(episodes.step(state, turn))
        text += turn + (said[-1] or "")
    return text, said


def test_turns_are_answered_until_a_condition_holds() -> None:
    task = adapters.verifiers.task(guessing)
    text, said = played(task, 1, "1", "5", "3")
    assert said == ["\n<environment>\nhigher\n</environment>\n", "\n<environment>\nlower\n</environment>\n", None]
    done = run_operator(task.reward, answered(task.data, "2", text)).rows
    # the rubric finds in the state what was there at the end: two guesses were answered
    assert done["reward"].tolist() == pytest.approx([1.0, 1.2])


def test_without_replay_a_rubric_sees_messages_only() -> None:
    task = adapters.verifiers.task(guessing, replay=False)
    text, _ = played(task, 0, "1", "2")
    assert run_operator(task.reward, answered(task.data, text)).rows["reward"].tolist() == pytest.approx([1.0])


def test_an_environment_that_answers_otherwise_is_told() -> None:
    task = adapters.verifiers.task(moody)
    text, _ = played(task, 0, "1", "2")
    done = run_operator(task.reward, answered(task.data, text))
    assert done.failed == 1
    assert "use replay=False" in done.rows["row_error"][0]


def test_turns_are_found_in_the_text_of_a_response() -> None:
    before, after = adapters.verifiers.FRAME
    cut = adapters.verifiers._turns
    assert cut("one") == [("one", None)]
    assert cut(f"one{before}more{after}two") == [("one", "more"), ("two", None)]
    assert cut(f"one{before}cut off") == [(f"one{before}cut off", None)]


def test_a_task_is_part_of_a_graph_and_of_its_text(tmp_path: Path) -> None:
    task = adapters.verifiers.task(guessing, batch=3)
    text = fr.to_text(learn.graph())
    assert fr.to_text(fr.from_text(text)) == text
    run = fr.run_local(
        learn, engine="null", prompts=task.data, policy="null", max_tokens=60, progress="off", out=tmp_path
    )
    rows = run.rows("rollout")
    assert len(run.rows()) == 12
    assert not rows["loss_mask"].values.all()


@fr.flow(columns={"prompts": {"task_number": fr.PROMPT.i64}})
def learn(prompts, policy):
    task = adapters.verifiers.task(numbers)
    rows = fr.rollout(policy, prompts, n=4, environment=task.environment, max_turns=3)
    return advantages.group_norm(task.reward(rows))


def numbers():
    """The guessing game for a policy that says anything."""
    made = guessing()

    async def env_response(messages, state, **kwargs):
        state["guesses"] += 1
        return [{"role": "user", "content": "?"}]

    made.env_response = env_response
    return made


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="neither but object"):
        adapters.verifiers.task(nothing)
    done = run_operator(
        adapters.verifiers.task(one_turn, parts=("f1",)).reward,
        answered(fr.Data([{"prompt": "x", "task_number": 0}]), "2"),
    )
    assert "has no metric f1; it has right" in done.rows["row_error"][0]


@pytest.mark.skipif(HAS_PACKAGE, reason="verifiers is installed")
def test_a_name_needs_the_package() -> None:
    with pytest.raises(MissingExtra, match="pip install verifiers"):
        adapters.verifiers.task("wordle")


# --- the package: environments (0.1) --------------------------------------------------------------------------------------


def real_single_turn():
    import verifiers as vf
    from datasets import Dataset

    return vf.SingleTurnEnv(dataset=Dataset.from_list(QUESTIONS), rubric=vf.Rubric(funcs=[right], weights=[2.0]))


def real_turns():
    import verifiers as vf
    from datasets import Dataset

    class Game(vf.MultiTurnEnv):
        async def setup_state(self, state):
            state["guesses"] = 0
            return state

        @vf.stop
        async def solved(self, state) -> bool:
            return last(state["completion"]) == state["answer"]

        async def env_response(self, messages, state, **kwargs):
            state["guesses"] += 1
            return [{"role": "user", "content": "higher" if int(last(messages)) < int(state["answer"]) else "lower"}]

    return Game(dataset=Dataset.from_list(QUESTIONS), rubric=vf.Rubric(funcs=[right, patience]), max_turns=3)


environments = pytest.mark.skipif(not HAS_ENVIRONMENTS, reason="verifiers with environments (0.1) is not installed")


@environments
def test_a_real_rubric_is_a_reward() -> None:
    task = adapters.verifiers.task(real_single_turn, parts=("right",))
    assert task.environment is None
    done = run_operator(task.reward, answered(task.data, "2", "2")).rows
    assert done["reward"].tolist() == [2, 0]
    assert done["right"].tolist() == [1, 0]


@environments
def test_a_real_environment_answers_turns() -> None:
    task = adapters.verifiers.task(real_turns, parts=("num_turns",))
    text, said = played(task, 1, "1", "5", "3")
    assert [s.strip().splitlines()[1] if s else None for s in said] == ["higher", "lower", None]
    done = run_operator(task.reward, answered(task.data, "2", text)).rows
    assert done["reward"].tolist() == pytest.approx([1.0, 1.2])
    assert done["num_turns"].tolist() == [1, 3]


# --- the package: task sets (verifiers.v1) --------------------------------------------------------------------------------


def real_taskset():
    import verifiers.v1 as vf

    class NumberData(vf.TaskData):
        answer: str = ""

    class Number(vf.Task[NumberData]):
        @vf.reward(weight=2.0)
        async def right(self, task, trace) -> float:
            return float(trace.last_reply.strip() == task.answer)

        @vf.metric
        async def length(self, trace) -> float:
            return float(len(trace.last_reply))

    class Numbers(vf.Taskset[Number]):
        def load(self):
            for row in QUESTIONS:
                yield Number(NumberData(prompt=row["prompt"][0]["content"], answer=row["answer"]))

    return Numbers(vf.TasksetConfig())


def test_real_tasks_score_a_reply() -> None:
    package = pytest.importorskip("verifiers.v1")
    if not hasattr(package, "TaskData"):
        pytest.skip("this verifiers.v1 declares tasks another way")
    task = adapters.verifiers.task(real_taskset, parts=("length", "right"))
    assert task.environment is None
    done = run_operator(task.reward, answered(task.data, "2", "2222")).rows
    assert done["reward"].tolist() == [2, 0]
    assert done["length"].tolist() == [1, 4]
    assert task.data.rows["answer"].tolist() == ["2", "3", "4"]


def test_prompts_of_several_messages_need_a_template() -> None:
    with pytest.raises(DataError, match="tokenizer="):
        adapters.verifiers.task(with_system)


def with_system():
    made = one_turn()
    made.get_dataset = lambda: [
        {**row, "prompt": [{"role": "system", "content": "x"}, *row["prompt"]]} for row in QUESTIONS
    ]
    return made
