"""Environments: what answers a policy turn by turn."""

from __future__ import annotations

import inspect
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flowrl as fr
from flowrl.errors import ConfigError

__all__ = ["Feedback", "SingleTurn", "Toolbox", "feedback", "single_turn", "tools"]

CALL, REPLY = "tool_call", "tool_response"


class SingleTurn:
    """The environment that `single_turn` builds."""

    def reset(self, row: Mapping[str, Any]) -> None:
        """Nothing is kept."""

    def step(self, state: None, response: str) -> None:
        """The answer ends the episode."""


@fr.component
def single_turn() -> SingleTurn:
    """Ask once: the policy's first turn ends the episode, and a reward operator judges it.

    The same as a rollout without an environment; for flows that take their environment as an argument.
    """
    return SingleTurn()


class Feedback:
    """The environment that `feedback` builds."""

    def __init__(self, function: Callable[..., Any], tries: int) -> None:
        if tries < 1:
            raise ConfigError(f"environments.feedback needs tries of at least 1; found {tries!r}")
        self.function = function
        self.tries = tries

    def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Begin an episode; its state holds the prompt's columns and counts the tries."""
        return {"row": dict(row), "tries": 0}

    def step(self, state: dict[str, Any], response: str) -> str | None:
        """What the function says to this try; None when it has nothing to say or tries are used up."""
        state["tries"] += 1
        if state["tries"] >= self.tries:
            return None
        said = self.function(state["row"], response)
        return None if said is None else str(said)


@fr.component
def feedback(function: Callable[..., Any], *, tries: int = 3) -> Feedback:
    """Ask, say what is wrong, ask again.

    Args:
        function: `f(row, response)` with the prompt's columns and one turn's text; its text is said to the policy, None means
            that there is nothing left to say and ends the episode.
        tries: turns the policy has at most. Give the rollout `max_turns` of as many.
    """
    return Feedback(function, tries)


class Toolbox:
    """The environment that `tools` builds."""

    def __init__(self, functions: Sequence[Callable[..., Any]], timeout_s: float, max_characters: int) -> None:
        self.functions = {function.__name__: function for function in functions}
        if not functions or len(self.functions) != len(functions):
            names = ", ".join(f.__name__ for f in functions) or "none"
            raise ConfigError(f"environments.tools needs functions with different names; found {names}")
        self.timeout_s = timeout_s
        self.max_characters = max_characters

    def reset(self, row: Mapping[str, Any]) -> dict[str, int]:
        """Begin an episode; its state counts the calls."""
        return {"calls": 0}

    def step(self, state: dict[str, int], response: str) -> str | None:
        """Answer every call in the policy's turn, in order; None when there is none, which ends the episode."""
        calls = re.findall(rf"<{CALL}>(.*?)</{CALL}>", response, re.DOTALL)
        if not calls:
            return None
        state["calls"] += len(calls)
        replies = (self._cut(self._answer(call)) for call in calls)
        return "".join(f"\n<{REPLY}>\n{reply}\n</{REPLY}>\n" for reply in replies)

    def _answer(self, call: str) -> str:
        try:
            wanted = json.loads(call)
        except json.JSONDecodeError as error:
            return f"error: a call is JSON such as {self._sample()}; {error}"
        if not isinstance(wanted, dict) or not isinstance(wanted.get("arguments", {}), dict):
            return f"error: a call is a JSON object such as {self._sample()}"
        name, arguments = wanted.get("name"), wanted.get("arguments", {})
        function = self.functions.get(name) if isinstance(name, str) else None
        if function is None:
            return f"error: there is no tool {name!r}; there are {', '.join(self.functions)}"
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            return f"error: {name}{inspect.signature(function)}: {error}"
        return _run(function, arguments, self.timeout_s)

    def _sample(self) -> str:
        name, function = next(iter(self.functions.items()))
        arguments = dict.fromkeys(inspect.signature(function).parameters, "...")
        return json.dumps({"name": name, "arguments": arguments})

    def _cut(self, text: str) -> str:
        # a tool that prints its own closing tag would end the reply early
        text = text.replace(f"</{REPLY}>", f"<\\/{REPLY}>")
        return text if len(text) <= self.max_characters else f"{text[: self.max_characters]} ... (cut)"


def _run(function: Callable[..., Any], arguments: Mapping[str, Any], timeout_s: float) -> str:
    """The function's answer as text; what goes wrong in it is an answer too, for the policy to learn from."""
    answer: list[str] = []

    def work() -> None:
        try:
            answer.append(str(function(**arguments)))
        except Exception as error:  # a tool's failure is the policy's to deal with
            answer.append(f"error: {type(error).__name__}: {error}")

    thread = threading.Thread(target=work, name=f"tool {function.__name__}", daemon=True)
    thread.start()
    thread.join(timeout_s)
    # Python cannot stop a thread: one that hangs is left behind, and dies with the process
    return answer[0] if answer else f"error: {function.__name__} took longer than {timeout_s:g} s"


@fr.component
def tools(functions: Sequence[Callable[..., Any]], *, timeout_s: float = 10.0, max_characters: int = 4000) -> Toolbox:
    """An environment that runs functions the policy calls.

    The policy calls with `<tool_call>{"name": "search", "arguments": {"query": "capital of Peru"}}</tool_call>`, the syntax that
    Qwen and Hermes models are trained on, and reads `<tool_response>...</tool_response>`. A turn may hold several calls; a turn
    without one ends the episode. A call that is malformed, names no tool, fails or takes too long is answered with a line that
    begins with `error:`.

    Args:
        functions: plain functions with keyword arguments that JSON can hold; what they return becomes text.
        timeout_s: seconds per call.
        max_characters: longer replies are cut.

    Tools run in this process with its rights: run code that a policy writes in a sandbox of your own.
    """
    return Toolbox(functions, timeout_s, max_characters)
