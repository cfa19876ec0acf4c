"""Flows that make no sense, found before they run; names and values that once went through or fell over."""

import copy
import pickle
import threading

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import CheckError, ConfigError, TextError, TraceError
from flowrl_operators import losses
from tests.null.breaking.pieces import length, run, sampled, trained


@fr.flow
def small(prompts, policy, *, n=2, name="x", place=1, parameters=2, function="f"):
    return trained(length(fr.rollout(policy, prompts, n=n)), policy)


def test_configuration_may_have_any_name():
    assert small(name="y", place=3, parameters=0, function="g") == small()


def test_a_flow_that_calls_itself():
    @fr.flow
    def again(prompts, policy):
        return again(prompts, policy)

    with pytest.raises(TraceError, match=r"flow 'again' .*test_flows\.py:\d+\) calls itself without end"):
        again.graph()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda rows, policy: (), "returns nothing, so there is nothing to run"),
        (lambda rows, policy: policy, r"returns only what it was given \(policy\)"),
    ],
)
def test_a_flow_that_would_run_for_nothing(body, reason):
    with pytest.raises(ConfigError, match=reason):
        sampled(body)


def test_a_flow_that_returns_an_input_it_does_not_use():
    @fr.flow
    def flow(prompts, policy, ref):
        return fr.rollout(policy, prompts), ref

    with pytest.raises(ConfigError, match="returns its input 'ref', which it uses nowhere"):
        run(flow, ref="null")


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), True])
def test_rewards_are_scaled_by_a_finite_number(factor):
    with pytest.raises(TraceError, match="scaled by a number that is finite"):
        sampled(lambda rows, policy: length(rows) + factor * length(rows))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda r: r.filter(r["reward"]), "SAMPLE.f32 and no yes or no"),
        (lambda r: r.filter(r["response"]), "SAMPLE.str and no yes or no"),
        (lambda r: r.filter(r["response_ids"] > 3), "which is a list per row"),
        (lambda r: r.filter(r["answer"] == 3), "str and i64 on the sides of '=='"),
        (lambda r: r.filter(r["answer"] > 3), "str and i64 on the sides of '>'"),
        (lambda r: r.with_columns(z=r["answer"] + 1), r"on the sides of '\+'"),
        (lambda r: r.with_columns(z=-r["answer"]), "on the sides of '-'"),
        (lambda r: r.with_columns(z=None), "uses None"),
        (lambda r: r.with_columns(z=fr.where(r["reward"] > 0, "a", 1.0)), "is str or f32"),
        (lambda r: r.with_columns(z=fr.where(r["reward"], 2.0, 1.0)), "is f32 and no yes or no"),
        (lambda r: r.with_columns(z=r["prompt_ids"] + 1), "several values each"),
        (lambda r: fr.log(r, "response"), "logs the mean of 'response', which is SAMPLE.str"),
        (lambda r: fr.join(r, r.select("response_ids"), on="response_ids"), "takes 'response_ids' as a key"),
        (lambda r: fr.reduce(r, "mean", by="response_ids"), "takes 'response_ids' as a key"),
        (lambda r: fr.repeat(r, by="response_ids"), "takes 'response_ids' as a key"),
        (lambda r: fr.join(r, r.select(b="rollout_logprobs"), on="prompt_id", collect=True), "a list of lists"),
    ],
)
def test_what_does_not_go_together_is_found_before_the_run(body, reason):
    with pytest.raises(CheckError, match=reason) as caught:
        sampled(lambda rows, policy: body(length(rows)))
    assert [problem.code for problem in caught.value.problems] == ["FR-C02"]


def test_a_misspelt_text_column_is_one_problem():
    with pytest.raises(CheckError) as caught:
        sampled(lambda rows, policy: rows.filter(rows["finish_reson"] == "stop"))
    assert [problem.code for problem in caught.value.problems] == ["FR-C01"]


def test_token_columns_in_conditions():
    @fr.flow
    def flow(prompts, policy):
        rows = length(fr.rollout(policy, prompts, n=2))
        rows = rows.with_columns(mine=fr.where(rows["response_ids"] > 60, rows["rollout_logprobs"], rows["reward"]))
        return rows.with_columns(loss_mask=fr.where(rows["loss_mask"], False, False))

    rows = run(flow).rows()
    for row, ids in enumerate(rows["response_ids"]):
        assert np.array_equal(rows["mine"][row], np.where(ids > 60, rows["rollout_logprobs"][row], rows["reward"][row]))
    assert (
        rows["loss_mask"].lengths.tolist() == rows["response_ids"].lengths.tolist()
        and not rows["loss_mask"].values.any()
    )


def test_a_column_is_selected_once():
    with pytest.raises(ConfigError, match="two columns the name 'reward'"):
        sampled(lambda rows, policy: length(rows).select("reward", reward="response"))
    assert "reward" in sampled(lambda rows, policy: length(rows).select("reward", "reward")).rows()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('kind="weights"', 'kind="wat"', "<text>:3: node 'policy' of kind 'input' is rows, weights or unused"),
        ("n=2, ", "", "<text>:4: node 'rollout' of kind 'rollout' needs the parameter 'n'"),
        ("n=2", "n=0", "a whole number of at least 1 for 'n'"),
        ("operator=length()", 'operator="length"', "a declared operator"),
        ("loss=reinforce()", "loss=3", "a declared loss"),
    ],
)
def test_a_text_that_the_language_could_not_have_written(old, new, expected):
    text = str(small.graph())
    assert old in text
    graph = fr.from_text(text.replace(old, new, 1))
    with pytest.raises(TextError, match=expected):
        graph.check()
    with pytest.raises(TextError, match=expected):
        run(graph)


def test_graphs_are_pickled_and_everything_is_copied():
    graph = small.graph()
    again = pickle.loads(pickle.dumps(graph))
    assert again == graph and again["length"]["operator"].function is length.function
    assert again["update"]["loss"].function is losses.reinforce.function

    @fr.reward
    def local(response):
        return 1.0

    for value in (small, local, losses.reinforce):
        assert copy.deepcopy(value) is value and copy.copy(value) is value
    assert copy.deepcopy(graph) == graph


def test_a_flow_without_a_name_has_a_run_folder(tmp_path):
    done = sampled(lambda rows, policy: rows)
    assert done.path is None
    nameless = fr.flow(lambda prompts, policy: fr.rollout(policy, prompts))
    assert run(nameless, out=str(tmp_path)).path.name == "run-1"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"seed": "a"}, "whole number as seed"),
        ({"seed": None}, "whole number as seed"),
        ({"log_samples": -1}, "'log_samples'"),
        ({"log_samples": "a"}, "'log_samples'"),
        ({"out": 3}, "'out'"),
        ({"name": 3}, "'name'"),
        ({"record": None}, "'record'"),
        ({"schedule": "async"}, "'schedule'"),
        ({"options": {"batch": 3}}, "fr.Options"),
    ],
)
def test_options_that_are_no_options(given, reason):
    with pytest.raises(ConfigError, match=reason):
        run(small, **given)
    assert run(small, seed=np.int64(3)).status == "finished"


def test_runs_in_threads_and_inside_each_other_agree():
    inner: list[float] = []

    @fr.operator(writes={"x": fr.SAMPLE.f32})
    def nested(reward):
        inner.append(run(small).metrics[-1]["reward/mean"])
        return reward

    found: list[float] = []
    threads = [threading.Thread(target=lambda: found.append(run(small).metrics[-1]["reward/mean"])) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    sampled(lambda rows, policy: nested(length(rows)))
    assert len({*found, *inner}) == 1 and len(found) == 3
