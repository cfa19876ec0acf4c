"""reasoning-gym's tasks as data and reward."""

from pathlib import Path

import pytest

import flowrl as fr
from flowrl.errors import DataError
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch
from flowrl_operators import adapters, advantages

reasoning_gym = pytest.importorskip("reasoning_gym")


def answered(data: fr.Data, texts: list[str]) -> RowBatch:
    return data.rows.slice(0, len(texts)).with_column("response", texts, fr.SAMPLE.str)


def test_the_tasks_own_judge_is_asked() -> None:
    legs = adapters.reasoning_gym.task("leg_counting", size=6, seed=1, settings={"max_animals": 4}, shuffle=False)
    right = legs.data.rows["answer"].tolist()
    texts = [
        f"<answer>0</answer> no <answer> {right[0]}\n</answer>",
        "<answer>-1</answer>",
        right[2],
    ]
    done = run_operator(legs.reward, answered(legs.data, texts)).rows
    assert done["reward"].tolist() == [1, 0, 0]
    whole = adapters.reasoning_gym.reward.bind(
        task="leg_counting", size=6, seed=1, settings={"max_animals": 4}, pattern=None
    )
    assert run_operator(whole, answered(legs.data, texts)).rows["reward"].tolist()[2] == 1


def test_answers_other_than_the_recorded_one_may_be_right() -> None:
    # any way of reaching the number counts
    data = adapters.reasoning_gym.data("countdown", size=3, seed=5)
    call = adapters.reasoning_gym.reward.bind(task="countdown", size=3, seed=5)
    entry = reasoning_gym.create_dataset("countdown", size=3, seed=5)[0]
    other = f"({entry['metadata']['expression']})"
    done = run_operator(call, answered(data, [f"<answer>{other}</answer>"])).rows
    assert other != data.rows["answer"][0]
    assert done["reward"].tolist() == [1.0]


def test_a_reward_of_other_settings_is_refused() -> None:
    data = adapters.reasoning_gym.data("leg_counting", size=3, seed=1)
    call = adapters.reasoning_gym.reward.bind(task="leg_counting", size=3, seed=2)
    done = run_operator(call, answered(data, ["<answer>1</answer>"]))
    assert done.failed == 1
    assert "the same task and settings" in done.rows["row_error"][0]


def test_unknown_tasks_and_settings_are_told() -> None:
    with pytest.raises(DataError, match="'nothing'"):
        adapters.reasoning_gym.data("nothing")
    with pytest.raises(DataError, match="unexpected keyword argument 'colour'"):
        adapters.reasoning_gym.data("leg_counting", settings={"colour": 1})


@fr.flow(columns={"prompts": {"question_number": fr.PROMPT.i64}})
def learn(prompts, policy, *, size=4, seed=1):
    rows = fr.rollout(policy, prompts, n=4)
    rows = adapters.reasoning_gym.reward(rows, task="leg_counting", size=size, seed=seed, settings={"max_animals": 3})
    return fr.select(advantages.group_norm(rows), "reward", "advantage")


def test_it_is_part_of_a_graph_and_of_its_text(tmp_path: Path) -> None:
    assert learn.check() == ()
    text = fr.to_text(learn.graph())
    assert fr.to_text(fr.from_text(text)) == text
    data = adapters.reasoning_gym.data("leg_counting", size=4, seed=1, settings={"max_animals": 3})
    run = fr.run_local(fr.from_text(text), engine="null", prompts=data, policy="null", progress="off", out=tmp_path)
    assert set(run.rows()["reward"].tolist()) <= {0.0, 1.0}
