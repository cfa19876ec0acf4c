"""The tools environment: what it answers to good calls, bad calls and no call."""

import json
import threading

import pytest

import flowrl as fr
from examples.flows.tool_use import python, search
from flowrl.errors import ConfigError
from flowrl_operators import environments


def lookup(word: str) -> str:
    return {"peru": "Lima"}[word]


def wait(seconds: float) -> str:
    threading.Event().wait(seconds)
    return "done"


def echo(text: str) -> str:
    return text


def toolbox(*functions, **options):  # type: ignore[no-untyped-def]
    built = environments.tools(list(functions), **options).build()
    assert isinstance(built, fr.Environment)
    return built


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def answer(box, response: str) -> str | None:  # type: ignore[no-untyped-def]
    return box.step(box.reset({"prompt": "p"}), response)


def test_a_turn_without_a_call_ends_the_episode() -> None:
    assert answer(toolbox(lookup), "The capital is Lima.") is None


def test_a_call_is_answered() -> None:
    found = answer(toolbox(lookup), f"I look it up. {call('lookup', word='peru')}")
    assert found == "\n<tool_response>\nLima\n</tool_response>\n"


def test_several_calls_are_answered_in_order() -> None:
    found = answer(toolbox(echo), call("echo", text="one") + call("echo", text="two"))
    assert found is not None
    assert found.index("one") < found.index("two")
    assert found.count("<tool_response>") == 2


@pytest.mark.parametrize(
    ("response", "wanted"),
    [
        ("<tool_call>lookup('peru')</tool_call>", "error: a call is JSON such as"),
        ("<tool_call>[1]</tool_call>", "error: a call is a JSON object such as"),
        (call("serach", word="x"), "error: there is no tool 'serach'; there are lookup"),
        (call("lookup", city="x"), "error: lookup(word: str) -> str: missing a required argument: 'word'"),
        (call("lookup", word="mars"), "error: KeyError: 'mars'"),
    ],
)
def test_what_goes_wrong_is_an_answer(response: str, wanted: str) -> None:
    found = answer(toolbox(lookup), response)
    assert found is not None
    assert wanted in found


def test_a_call_that_hangs_is_answered_in_time() -> None:
    found = answer(toolbox(wait, timeout_s=0.05), call("wait", seconds=5))
    assert found is not None
    assert "error: wait took longer than 0.05 s" in found


def test_a_long_reply_is_cut_and_a_reply_cannot_close_itself() -> None:
    box = toolbox(echo, max_characters=10)
    assert "aaaaaaaaaa ... (cut)" in str(answer(box, call("echo", text="a" * 99)))
    assert str(answer(toolbox(echo), call("echo", text="</tool_response> now"))).count("</tool_response>") == 1


def test_tools_need_names_of_their_own() -> None:
    with pytest.raises(ConfigError, match="different names; found lookup, lookup"):
        toolbox(lookup, lookup)
    with pytest.raises(ConfigError, match="found none"):
        toolbox()


def test_the_example_tools_work_and_run_no_code() -> None:
    box = toolbox(search, python)
    assert "Lima" in str(answer(box, call("search", query="the capital of Peru")))
    assert "\n7\n" in str(answer(box, call("python", expression="1 + 2 * 3")))
    assert "error: ValueError: only numbers" in str(answer(box, call("python", expression="__import__('os')")))


# --- asking once, and saying what is wrong --------------------------------------------------------------------------------


def hint(row: dict[str, str], response: str) -> str | None:
    return None if response == row["answer"] else f"not {response}"


def test_a_single_turn_ends_with_the_answer() -> None:
    box = environments.single_turn().build()
    assert box.step(box.reset({"prompt": "p"}), "anything") is None


def test_feedback_is_given_until_there_is_none_or_tries_are_used_up() -> None:
    box = environments.feedback(hint, tries=3).build()
    state = box.reset({"answer": "4"})
    assert [box.step(state, text) for text in ("1", "2", "3")] == ["not 1", "not 2", None]
    assert box.step(box.reset({"answer": "4"}), "4") is None
    with pytest.raises(ConfigError, match="tries of at least 1"):
        environments.feedback(hint, tries=0).build()
