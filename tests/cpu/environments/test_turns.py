"""Token ids are never decoded and encoded again between turns, whatever environment answers."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import flowrl as fr
from flowrl_operators import adapters, environments
from tests.cpu.environments.conftest import TurnEngine


def echo(text: str) -> str:
    return text


def disagree(row: dict[str, Any], response: str) -> str | None:
    return None if response == row["answer"] else "hello?"


class Hearing:
    """A stand-in for an environment of verifiers that says hello."""

    class rubric:
        pass

    def get_dataset(self):
        return [{"prompt": [{"role": "user", "content": "hello"}], "answer": ""}]

    def is_completed(self, messages, state):
        return len(state["trajectory"]) > 3

    def env_response(self, messages, state):
        return [{"role": "user", "content": "hello"}]


def hearing() -> Hearing:
    return Hearing()


@fr.flow
def with_tools(prompts, policy):
    return fr.rollout(policy, prompts, environment=environments.tools([echo]), max_turns=3)


@fr.flow
def with_feedback(prompts, policy):
    return fr.rollout(policy, prompts, environment=environments.feedback(disagree), max_turns=3)


@fr.flow(columns={"prompts": {"task_number": fr.PROMPT.i64}})
def with_verifiers(prompts, policy):
    environment = adapters.verifiers.Episodes(hearing, {})
    return fr.rollout(policy, prompts, environment=environment, max_turns=3)


@fr.flow
def once(prompts, policy):
    return fr.rollout(policy, prompts, environment=environments.single_turn(), max_turns=3)


def run(flow: fr.Flow, tokenizer: Any, turns: list[list[int]], **options: Any) -> dict[str, Any]:
    prompts = fr.Data([{"prompt": "hello", "answer": "yes", "task_number": 0}], batch=1)
    model = fr.Model(turns, tokenizer)
    (row,) = (
        fr.run_local(flow, engine="turns", prompts=prompts, policy=model, progress="off", out=None, **options)
        .rows()
        .rows()
    )
    return row  # type: ignore[no-any-return]


def ids(tokenizer: Any, *tokens: str) -> list[int]:
    vocab = tokenizer.inner.get_vocab()
    return [vocab[token] for token in tokens]


def call_in_pieces(tokenizer: Any) -> list[int]:
    """A tool call that says `hello` in two tokens, which encoding would make one."""
    before, after = json.dumps({"name": "echo", "arguments": {"text": "hello"}}).split("hello")
    letters = [*f"<tool_call>{before}", "he", "llo", *f"{after}</tool_call>", "<e>"]
    return ids(tokenizer, *letters)


@pytest.mark.parametrize("flow", [with_tools, with_feedback, with_verifiers], ids=lambda flow: flow.name)
def test_sampled_ids_are_kept_in_every_environment(flow: fr.Flow, merging: Any, asked: list[list[int]]) -> None:
    first, second = call_in_pieces(merging), ids(merging, "h", "e", "ll", "o", "<e>")
    assert merging.encode_continuation("hello") == ids(merging, "hello")
    assert merging.encode_continuation(merging.decode(first)) != first[:-1]
    row = run(flow, merging, [first, second, ids(merging, "he", "<e>")])
    prompt = merging.encode("hello")
    assert asked[0] == prompt
    assert asked[1][: len(prompt) + len(first)] == [*prompt, *first]
    reply = asked[1][len(prompt) + len(first) :]
    assert "hello" in merging.decode(reply)
    assert reply == merging.encode_continuation(merging.decode(reply))
    assert row["response_ids"][: len(first) + len(reply)] == [*first, *reply]
    sampled = [i for i, trains in zip(row["response_ids"], row["loss_mask"], strict=True) if trains]
    given = [*first, *second, *ids(merging, "he", "<e>")]
    assert sampled == given[: len(sampled)]
    assert len(sampled) >= len(first) + len(second)
    for earlier, later in itertools.pairwise(asked):
        assert later[: len(earlier)] == earlier


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=6), min_size=3, max_size=3))
def test_any_ids_are_kept(turns: list[list[int]], merging: Any, asked: list[list[int]]) -> None:
    TurnEngine.asked.clear()
    row = run(with_verifiers, merging, turns, max_tokens=500)
    sampled = [i for i, trains in zip(row["response_ids"], row["loss_mask"], strict=True) if trains]
    assert sampled == [i for turn in turns for i in turn]
    assert len(TurnEngine.asked) == 3
    said = merging.encode_continuation("\n<environment>\nhello\n</environment>\n")
    assert TurnEngine.asked[2] == [*merging.encode("hello"), *turns[0], *said, *turns[1], *said]


def test_once_means_once(merging: Any, asked: list[list[int]]) -> None:
    row = run(once, merging, [ids(merging, "he", "llo", "<e>")])
    assert row["num_turns"] == 1
    assert len(asked) == 1


def test_feedback_ends_where_there_is_nothing_to_say(merging: Any, asked: list[list[int]]) -> None:
    yes = ids(merging, *"yes", "<e>")
    row = run(with_feedback, merging, [yes])
    assert (row["num_turns"], row["response"]) == (1, "yes")
    row = run(with_feedback, merging, [ids(merging, *"no", "<e>"), yes])
    assert (row["num_turns"], row["response"]) == (2, "nohello?yes")
    no = ids(merging, *"no", "<e>")
    assert run(with_feedback, merging, [no, no, no])["num_turns"] == 3
