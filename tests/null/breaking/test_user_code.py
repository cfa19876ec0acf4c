"""What a user's functions do wrong: one error with the function's line and the flow's, or a flagged row; never silence."""

import bdb
import json
import re
import sys

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import ConfigError, DataError, OperatorError, TraceError
from tests.null.breaking.pieces import DATA, length, run, sampled, trained


def failing(error):
    def function(value):
        raise error

    return function


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (failing(KeyError("zz")), "KeyError: 'zz'"),
        (failing(SystemExit(0)), "SystemExit: 0"),
        (lambda text: None, "'reward' is a number; found NoneType"),
        (lambda text: "1.0", "'reward' is a number; found str"),
        (lambda text: np.ones(1), "'reward' is a number; found ndarray"),
        (lambda text: 1e300, "cannot hold 1e\\+300"),
        (lambda text: 10**60, "cannot hold 1000"),
        (lambda text: {"score": 1.0}, "declares reward and returned score"),
    ],
)
def test_a_reward_that_fails_flags_its_row_with_the_reason(answer, reason):
    @fr.reward
    def broken(response):
        return answer(response)

    done = sampled(lambda rows, policy: broken(rows))
    assert np.isnan(done.rows()["reward"]).all()
    assert all(re.search(reason, text) for text in done.rows()["row_error"])


def test_the_note_of_flagged_rows_says_why_the_first_failed(tmp_path):
    @fr.reward
    def broken(response):
        raise LookupError("no such thing")

    done = sampled(lambda rows, policy: broken(rows), out=str(tmp_path))
    from flowrl.runtime.rundir import RunDir

    [(_, note)] = RunDir.open(done.path).notes()
    assert "4 of 4 rows flagged" in note and "LookupError: no such thing" in note


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (failing(SystemExit(3)), "SystemExit: 3"),
        (lambda reward: [None] * len(reward), "no value in row 0"),
        (lambda reward: reward[:, None], "needs shape"),
        (lambda reward: [10**30] * len(reward), "beyond 64 bits"),
        (lambda reward: reward.astype(object), "array of objects"),
    ],
)
def test_an_operator_that_fails_says_where_it_is_and_where_it_is_used(answer, reason):
    @fr.operator(writes={"x": fr.SAMPLE.f32})
    def broken(reward):
        return answer(reward)

    with pytest.raises(OperatorError, match=reason) as caught:
        sampled(lambda rows, policy: broken(length(rows)))
    assert len(re.findall(r"test_user_code\.py:\d+", str(caught.value))) == 2


class Partner:
    """An environment whose two methods are given."""

    def __init__(self, reset, step):
        self.reset, self.step = reset, step


@fr.component
def partner(reset, step):
    return Partner(reset, step)


def begin(row):
    return {}


@pytest.mark.parametrize(
    ("reset", "step", "reason"),
    [
        (failing(KeyError("zz")), lambda state, text: None, "failed in reset for prompt '[0-9]': KeyError: 'zz'"),
        (begin, lambda state, text: 1 / 0, "failed in step for prompt '[0-9]': ZeroDivisionError"),
        (begin, lambda state, text: sys.exit(), "failed in step .*SystemExit"),
        (begin, lambda state, text: 3, r"answered prompt '[0-9]' with 3 \(int\); step returns text"),
        (begin, lambda state, text: True, r"with True \(bool\)"),
        (begin, lambda state, text: ("a", 1.0, False), r"\(tuple\)"),
        (lambda row: row["prompt_ids"].fill(9), lambda state, text: None, "read-only"),
    ],
)
def test_an_environment_that_fails_is_one_error_with_the_flows_line(reset, step, reason):
    @fr.flow
    def flow(prompts, policy):
        return fr.rollout(policy, prompts, environment=partner(reset, step), max_turns=3)

    with pytest.raises(OperatorError, match=reason) as caught:
        run(flow, max_tokens=60)
    assert "test_user_code.py:" in str(caught.value) and "partner" in str(caught.value)


def test_an_environment_that_hangs_ends_the_run():
    @fr.component
    class Slow:
        step_timeout_s = 0.05

        def reset(self, row):
            while True:
                pass

        def step(self, state, response):
            return None

    with pytest.raises(OperatorError, match=r"reset of environment '.*Slow' took longer than 0\.05 s"):
        run(fr.flow(lambda prompts, policy: fr.rollout(policy, prompts, environment=Slow(), max_turns=2)))


def test_an_environment_without_methods_or_that_cannot_be_made():
    @fr.component
    class Empty: ...

    @fr.component
    class Broken:
        def __init__(self):
            raise ValueError("no key")

    for component, reason in ((Empty, "has no method 'reset'"), (Broken, "cannot be made: ValueError: no key")):
        with pytest.raises(OperatorError, match=reason):
            run(_with_environment(component()))


def _with_environment(environment):
    @fr.flow
    def flow(prompts, policy):
        return fr.rollout(policy, prompts, environment=environment, max_turns=2)

    return flow


@pytest.mark.parametrize("environment", ["tools", Partner, Partner(begin, begin)])
def test_an_environment_is_a_component(environment):
    with pytest.raises(TraceError, match="needs a component as 'environment'"):
        _with_environment(environment).graph()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda response: None, "found None"),
        (lambda response: [True, False], "a prompt is a string or a list of token ids"),
        (lambda response: [-1], "found \\[-1\\]"),
        (lambda response: [["a"]], "found \\[\\['a'\\]\\]"),
        (lambda response: ["a", [65]], "returned text for row .* and token ids for row"),
        (lambda sample_index: "a" if sample_index else [65], "all prompts of a step are one or the other"),
        (lambda response: sys.exit(), "SystemExit"),
    ],
)
def test_prompts_that_are_no_prompts(function, reason):
    with pytest.raises(OperatorError, match=reason) as caught:
        sampled(lambda rows, policy: fr.rollout(policy, fr.prompts_from(rows, function)))
    assert "test_user_code.py:" in str(caught.value)


@pytest.mark.parametrize("stop", ["", ("",), ["a", ""], 3, [1]])
def test_a_stop_text_is_text(stop):
    # every text contains the empty one, so each response would end after a token
    with pytest.raises(ConfigError, match="not empty in 'stop'"):
        fr.flow(lambda prompts, policy: fr.rollout(policy, prompts, stop=stop)).graph()


@pytest.mark.parametrize("option", [{"temperature": float("inf")}, {"temperature": float("nan")}, {"role": 3}])
def test_options_of_a_rollout(option):
    with pytest.raises(ConfigError, match=f"'{next(iter(option))}'"):
        fr.flow(lambda prompts, policy: fr.rollout(policy, prompts, **option)).graph()


@fr.operator(filter=True)
def long(reward):
    return reward > 7


def test_refill_of_no_prompts_gives_no_rows():
    @fr.flow
    def flow(prompts, policy):
        none = prompts.filter(prompts["answer"] == "nothing")
        return trained(fr.refill(lambda p: length(fr.rollout(policy, p, n=2)), none, keep=long, max_rounds=2), policy)

    assert run(flow).metrics[-1]["update/steps"] == 0


def test_a_buffer_takes_any_seed_and_names_a_group_it_cannot_hold():
    assert len(sampled(lambda rows, policy: fr.buffer(length(rows), capacity=8, draw=2), seed=-3).rows()) == 2
    with pytest.raises(
        DataError, match=r"a group of equal 'prompt_id' has 2 rows and the buffer keeps 1; raise capacity"
    ):
        sampled(lambda rows, policy: fr.buffer(length(rows), capacity=1, draw=1, by="prompt_id"))


def test_more_minibatches_than_rows_are_refused_as_a_trainer_would():
    with pytest.raises(DataError, match="50 mini-batches need at least as many rows .* found 4"):
        sampled(lambda rows, policy: trained(fr.repeat(length(rows), minibatches=50), policy), checks=False)


class Letters:
    """A tokenizer that knows one letter."""

    vocab_size, eos_ids, pad_id, fingerprint = 4, frozenset({1}), 0, "letters"

    def encode(self, text):
        return [{"a": 2}[letter] for letter in text]

    encode_continuation = encode

    def decode(self, ids):
        return "a" * len(ids)


def test_a_tokenizer_that_refuses_a_text_names_the_row():
    with pytest.raises(DataError, match="tokenizer of 'policy' cannot encode 'prompt' of row '[0-9]', '.*': KeyError"):
        sampled(lambda rows, policy: rows, policy=fr.Model("null", tokenizer=Letters()), prompts=DATA)


def test_a_run_inside_a_reward_leaves_its_limit_on():
    @fr.reward(timeout_s=0.3)
    def nested(response):
        sampled(lambda rows, policy: length(rows))
        while True:
            pass

    rows = sampled(lambda rows, policy: nested(rows), batch=1).rows()
    assert all("took longer than 0.3 s" in text for text in rows["row_error"])


def test_leaving_the_debugger_in_a_reward_ends_the_run_and_flags_no_row(tmp_path):
    calls = []

    @fr.reward
    def looked_at(response):
        calls.append(response)
        raise bdb.BdbQuit

    with pytest.raises(KeyboardInterrupt, match="the debugger was left"):
        sampled(lambda rows, policy: looked_at(rows), out=str(tmp_path))
    assert len(calls) == 1
    assert json.loads((tmp_path / "made-1" / "run.json").read_text())["status"] == "interrupted"


def test_a_misspelt_argument_of_the_run_is_named():
    with pytest.raises(ConfigError, match="has no input 'step'; did you mean 'steps'"):
        sampled(lambda rows, policy: length(rows), step=3)
