"""TRL's reward functions in a flow, and FlowRL's rewards in TRL's trainer."""

import math
from pathlib import Path

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import ConfigError, DataError, OperatorError
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch
from flowrl.testing import operator_cases
from flowrl_operators import adapters, advantages, rewards

TYPES = {
    "prompt_id": fr.PROMPT.str,
    "prompt": fr.PROMPT.str,
    "response": fr.SAMPLE.str,
    "answer": fr.PROMPT.str,
    "level": fr.PROMPT.i64,
    "response_ids": fr.TOKEN.i32,
}


def table() -> RowBatch:
    rows = [("a", "1+1=", "2", "2", 1, [5, 6]), ("a", "1+1=", "3", "2", 1, [7]), ("b", "2+2=", "4", "4", 2, [8, 9])]
    return RowBatch.from_rows([dict(zip(TYPES, row, strict=True)) for row in rows], TYPES)


def by_answer(prompts, completions, answer, **kwargs):
    assert not kwargs.get("trainer_state")
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def by_level(completions, level, completion_ids=None):
    return [None if n == 2 else len(ids) / 10 for n, ids in zip(level, completion_ids, strict=True)]


async def chatty(prompts, completions):
    assert prompts[0] == [{"role": "user", "content": "1+1="}]
    return [len(completion[-1]["content"]) for completion in completions]


def test_a_function_gets_the_columns_it_names() -> None:
    assert run_operator(adapters.trl.reward(by_answer), table()).rows["reward"].tolist() == [1, 0, 1]
    found = run_operator(adapters.trl.reward(by_level), table()).rows["reward"]
    np.testing.assert_allclose(found, [0.2, 0.1, np.nan])


def test_none_is_what_it_is_declared_to_be() -> None:
    found = run_operator(adapters.trl.reward(by_level, none=-1.0, out="by_level"), table()).rows["by_level"]
    np.testing.assert_allclose(found, [0.2, 0.1, -1.0])


def test_columns_may_be_said_and_must_be_there() -> None:
    assert [r.column for r in adapters.trl.reward(by_level).reads] == ["prompt", "response", "response_ids", "level"]
    call = adapters.trl.reward(by_answer, columns=("answer", "source"))
    with pytest.raises(OperatorError, match="reads 'source'"):
        run_operator(call, table())


def test_messages_and_coroutines() -> None:
    call = adapters.trl.reward(chatty, messages=True)
    assert run_operator(call, table()).rows["reward"].tolist() == [1, 1, 1]


def test_a_wrong_number_of_rewards_is_told() -> None:
    with pytest.raises(OperatorError, match="'short' returned 1 rewards for 3 rows"):
        run_operator(adapters.trl.reward(short), table())
    with pytest.raises(ConfigError, match="needs a function"):
        adapters.trl.reward("accuracy")  # type: ignore[arg-type]


def short(completions, **kwargs):
    return [1.0]


def of_messages(completions, **kwargs):
    return [float(len(completion[0]["content"])) for completion in completions]


def by_get(completions, **kwargs):
    return [float(len(completion[0].get("content"))) for completion in completions]


def by_solution(completions, **kwargs):
    return [float(c == a) for c, a in zip(completions, kwargs["solution"], strict=True)]


def own_fault(completions, **kwargs):
    return [{}[completion] for completion in completions]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (of_messages, "'of_messages' failed with TypeError: .*say messages=True"),
        (by_get, "'by_get' failed with AttributeError: .*say messages=True"),
        (by_solution, r"'by_solution' failed with KeyError: 'solution'; .*columns=\['solution', \.\.\.\]"),
    ],
)
def test_what_a_function_was_not_given_is_told_with_the_option(function: object, said: str) -> None:
    with pytest.raises(OperatorError, match=said):
        run_operator(adapters.trl.reward(function), table())
    if function is not by_solution:
        assert run_operator(adapters.trl.reward(function, messages=True), table()).rows["reward"].tolist() == [1, 1, 1]


def test_one_row_that_raises_ends_the_run_or_is_flagged() -> None:
    def fragile(completions, completion_ids, answer):
        assert all(type(ids) is list for ids in completion_ids)
        return [None if c == "2" else 1.0 / (int(c) - 3) for c in completions]

    with pytest.raises(OperatorError, match="ZeroDivisionError"):
        run_operator(adapters.trl.reward(fragile), table())
    done = run_operator(adapters.trl.reward(fragile, locality="row", none=-1.0), table())
    np.testing.assert_array_equal(done.rows["reward"], [-1, np.nan, 1])
    assert [bool(text) for text in done.rows["row_error"]] == [False, True, False]
    assert done.rows["row_error"][1].startswith("ZeroDivisionError")
    with pytest.raises(ConfigError, match="locality"):
        adapters.trl.reward(fragile, locality="group")


def test_rows_may_be_given_with_the_function_and_the_node_is_called_after_it() -> None:
    @fr.flow
    def flow(prompts, policy):
        rows = fr.rollout(policy, prompts, n=2)
        given = adapters.trl.reward(rows, by_answer) + adapters.trl.reward(rows, function=lengths, out="reward")
        return given + adapters.trl.reward(lambda completions: [0.0] * len(completions))(rows)

    assert flow.graph()["reward"]["names"] == ("by_answer", "lengths", "function_reward")
    for wrong in (lambda: adapters.trl.reward("accuracy"), adapters.trl.reward):
        with pytest.raises(ConfigError, match=r"reward\(function\)\(rows\) or reward\(rows, function\)"):
            wrong()


@fr.flow
def learn(prompts, policy):
    rows = adapters.trl.reward(by_answer)(fr.rollout(policy, prompts, n=4))
    rows = advantages.group_norm(rows)
    return fr.select(rows, "reward", "advantage")


def test_it_is_part_of_a_graph_and_of_its_text(tmp_path: Path) -> None:
    assert learn.check() == ()
    text = fr.to_text(learn.graph())
    assert "by_answer" in text
    assert fr.to_text(fr.from_text(text)) == text
    run = fr.run_local(
        fr.from_text(text),
        engine="null",
        prompts=[{"prompt": "3?", "answer": "3"}],
        policy="null",
        progress="off",
        out=tmp_path,
    )
    assert set(run.rows()["reward"].tolist()) <= {0.0, 1.0}


def lengths(prompts, completions):
    return [len(completion) for completion in completions]


@pytest.mark.parametrize("case", operator_cases(adapters.trl.reward(lengths)), ids=str)
def test_conformance(case) -> None:
    case.check()


# --- the other way ------------------------------------------------------------------------------------------------------


@fr.reward
def shout(response: str, answer: str, *, loud: float = 2.0) -> float:
    if response == "?":
        raise ValueError("no answer")
    return loud * float(response.upper() == answer)


def test_an_operator_is_a_reward_function() -> None:
    function = adapters.trl.reward_function(shout, loud=3.0)
    assert function.__name__ == "shout"
    found = function(
        prompts=["a", "b", "c"],
        completions=["x", "y", "?"],
        completion_ids=[[1], [2], [3]],
        answer=["X", "Z", "?"],
        trainer_state=object(),
    )
    assert found == [3.0, 0.0, None]
    chat = [[{"role": "assistant", "content": "x"}], [{"role": "assistant", "content": "y"}]]
    assert function(prompts=chat, completions=chat, answer=["X", "Y"]) == [3.0, 3.0]


def test_column_operators_work_too_and_others_are_refused() -> None:
    function = adapters.trl.reward_function(rewards.exact, name="right", pattern=r"\d")
    assert function.__name__ == "right"
    assert function(["p"], ["it is 4"], answer=["4"]) == [1.0]
    with pytest.raises(DataError, match="reads 'answer'"):
        function(["p"], ["it is 4"])
    with pytest.raises(ConfigError, match="writes nothing"):
        from flowrl_operators import filters

        adapters.trl.reward_function(filters.top)


def test_a_function_that_went_there_and_back_says_the_same() -> None:
    back = adapters.trl.reward_function(adapters.trl.reward(by_answer))
    assert back(["p", "p"], ["1", "2"], [[1], [2]], answer=["1", "1"]) == [1.0, 0.0]


def test_real_reward_functions_of_trl() -> None:
    trl_rewards = pytest.importorskip("trl.rewards")
    call = adapters.trl.reward(trl_rewards.think_format_reward, messages=True)
    rows = table().with_column("response", ["<think>x</think>y", "y", "<think></think>"], fr.SAMPLE.str)
    assert run_operator(call, rows).rows["reward"].tolist() == [1, 0, 1]


@pytest.mark.slow
def test_trls_trainer_takes_an_operator(tmp_path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<e>", "0", "1", "2", "3", "4", "?"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>", pad_token="<pad>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), pad_token_id=0, eos_token_id=1, **sizes))
    data = datasets.Dataset.from_list([{"prompt": str(n), "answer": str(n)} for n in range(4)])
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=4, num_generations=4, max_completion_length=3,
        report_to=[], use_cpu=True, logging_steps=1, save_strategy="no",
    )  # fmt: skip
    functions = [adapters.trl.reward_function(rewards.exact), adapters.trl.reward_function(shout)]
    trainer = trl.GRPOTrainer(
        model, reward_funcs=functions, args=arguments, train_dataset=data, processing_class=tokenizer
    )
    trainer.train()
    log = {key: value for entry in trainer.state.log_history for key, value in entry.items()}
    assert math.isfinite(log["rewards/exact/mean"])
    assert math.isfinite(log["rewards/shout/mean"])
