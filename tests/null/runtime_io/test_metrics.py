"""Numbers of a step: right, named as promised, and independent of how rows were split."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import flowrl as fr
from flowrl.engines.protocol import Stat, UpdateReport
from flowrl.graph.nodes import Node
from flowrl.runtime.metrics import Moments, Tally, step_metrics, trained_writers
from flowrl.schema import PROMPT, SAMPLE, TOKEN
from flowrl.store.rows import RowBatch

NAN = float("nan")


def rows(**columns: Any) -> RowBatch:
    types = {
        "reward": SAMPLE.f32, "reward/exact": SAMPLE.f32, "has_answer": SAMPLE.bool, "temperature": SAMPLE.f32,
        "response_ids": TOKEN.i32, "finish_reason": SAMPLE.str, "difficulty": PROMPT.f32, "embedding": SAMPLE.f32[2],
        "sample_index": SAMPLE.i32, "advantages": TOKEN.f32,
    }  # fmt: skip
    return RowBatch(columns, {name: types[name] for name in columns})


def report(total: float, count: float, tokens: int = 0) -> UpdateReport:
    return UpdateReport({"clip_fraction": Stat(total, count)}, steps=1, tokens=tokens)


def test_a_step_has_the_promised_names() -> None:
    sampled = rows(
        response_ids=[[1, 2, 3], [4]], finish_reason=["stop", "environment"], temperature=[1, 1], sample_index=[0, 1]
    )
    scored = rows(reward=[1.0, 0.0], has_answer=[True, False], difficulty=[1, 1], embedding=[[1, 2], [3, 4]])
    found = step_metrics(
        written=[
            (Node("rollout", "rollout"), sampled, sampled.names),
            (Node("math", "apply"), scored, (*scored.names, "not_there")),
        ],
        updates=[("update", report(1, 4, tokens=4))],
        seconds={"rollout": 0.5, "update": 1.5},
        step_s=2.0,
        extra={"refill/rounds": 2},
    )
    assert found == {
        "reward/mean": 0.5, "reward/std": 0.5, "reward/min": 0.0, "reward/max": 1.0, "has_answer/mean": 0.5,
        "response_length/mean": 2.0, "response_length/max": 3.0,
        "finish_reason/stop": 0.5, "finish_reason/length": 0.0, "finish_reason/environment": 0.5,
        "update/clip_fraction": 0.25, "update/steps": 1, "update/skipped": 0, "update/tokens": 4,
        "refill/rounds": 2, "time/rollout_s": 0.5, "time/update_s": 1.5, "time/step_s": 2.0, "tokens_per_s": 2.0,
    }  # fmt: skip


def test_without_sampling_the_trained_tokens_are_counted() -> None:
    assert step_metrics(written=[], updates=[("update", report(0, 0, tokens=30))], step_s=2.0)["tokens_per_s"] == 15.0
    assert step_metrics(written=[]) == {}


def test_an_update_is_pooled_and_not_a_mean_of_means() -> None:
    found = step_metrics(written=[], updates=[("update", report(3, 12)), ("update", report(3, 4))])
    assert found["update/clip_fraction"] == 0.375  # a mean of means would be 0.5
    assert found["update/steps"] == 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.floats(-1e3, 1e3, width=32), st.just(NAN)), min_size=1, max_size=30),
    st.lists(st.integers(0, 30), max_size=4),
    st.integers(0, 30),
)
def test_no_number_depends_on_the_split(values: list[float], cuts: list[int], ranks: int) -> None:
    whole = rows(
        reward=values,
        has_answer=[v > 0 for v in values],
        response_ids=[[0] * (i % 4) for i in range(len(values))],
        finish_reason=["stop" if i % 3 else "length" for i in range(len(values))],
    )
    bounds = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [whole.slice(a, b) for a, b in itertools.pairwise(bounds)]
    one, many, merged = Tally(), Tally(), Tally()
    one.add_rows("n", whole, whole.names)
    for index, part in enumerate(parts):
        many.add_rows("n", part, part.names)
        rank = Tally()
        rank.add_rows("n", part, part.names)
        rank.add_update("update", report(index, 2 * index))
        many.add_update("update", report(index, 2 * index))
        one.add_update("update", report(index, 2 * index))
        merged.merge(rank)
    expected = one.metrics()
    for other in (many.metrics(), merged.metrics()):
        assert other.keys() == expected.keys()
        for name in expected:
            assert other[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-9, nan_ok=True), name
    known = np.asarray(whole["reward"], np.float64)[~np.isnan(values)]
    if len(known):
        assert expected["reward/mean"] == pytest.approx(known.mean(), abs=1e-9)
        assert expected["reward/std"] == pytest.approx(known.std(), abs=1e-6)
    assert expected.get("reward/num_nan", 0) == sum(math.isnan(v) for v in values)


def test_a_large_mean_does_not_swallow_the_spread() -> None:
    values = 1e9 + np.array([1.0, 2.0, 3.0, 4.0])
    assert Moments.of(values[:1]).merge(Moments.of(values[1:])).std == pytest.approx(np.std([1, 2, 3, 4]))


def test_nan_is_counted_and_infinity_is_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    found = step_metrics(written=[(Node("a", "apply"), rows(reward=[NAN, NAN]), ["reward"])])
    assert found["reward/num_nan"] == 2 and math.isnan(found["reward/mean"]) and math.isnan(found["reward/min"])
    found = step_metrics(written=[(Node("a", "apply"), rows(reward=[math.inf, 1.0]), ["reward"])])
    assert found["reward/max"] == math.inf and math.isnan(found["reward/std"])
    assert step_metrics(written=[(Node("a", "apply"), rows(reward=[]), ["reward"])]) == {}
    assert not recwarn.list


def test_two_nodes_that_write_one_column_keep_their_numbers_apart() -> None:
    first, second = rows(reward=[1.0], response_ids=[[1]]), rows(reward=[0.0], response_ids=[[1, 2, 3]])
    written = [(Node(n, "apply"), r, r.names) for n, r in (("math", first), ("math_2", second))]
    found = step_metrics(written=written)
    assert (found["reward/mean"], found["math.reward/mean"]) == (0.0, 1.0)
    assert (found["response_length/mean"], found["math_2.response_length/mean"]) == (1.0, 3.0)
    found = step_metrics(written=written, writers={"reward": "math", "other": "nobody"})
    assert (found["reward/mean"], found["math_2.reward/mean"]) == (1.0, 0.0)


def test_the_same_node_in_several_rounds_is_one_table() -> None:
    parts = [(Node("math", "apply"), rows(reward=[v]), ["reward"]) for v in (0.0, 1.0, 1.0)]
    assert step_metrics(written=parts)["reward/mean"] == pytest.approx(2 / 3)


def test_the_plain_name_is_of_what_trains() -> None:
    @fr.operator(writes={"reward": fr.SAMPLE.f32})
    def judge(response):
        return np.ones(len(response))

    @fr.flow
    def remax(prompts, policy):
        rows = judge(fr.rollout(policy, prompts))
        greedy = judge(fr.rollout(policy, prompts, temperature=0.0))
        return fr.update(policy, fr.join(rows, greedy.select(baseline="reward"), on="prompt_id"), loss=reinforce())

    @fr.loss
    def reinforce(logprobs, reward):
        return -logprobs * reward

    writers = trained_writers(remax.graph())
    assert (writers["reward"], writers["response_ids"], writers["baseline"]) == ("judge", "rollout", "join")
