"""Averages: what may be said in a flow and in its text, and the weights that counts give. No torch here."""

from fractions import Fraction

import numpy as np
import pytest

import flowrl as fr
from flowrl.engines.averages import Totals, weights
from flowrl.errors import ConfigError, TextError
from flowrl.graph.averages import AVERAGES, OVER_ROWS, Average
from flowrl.graph.text import from_text, to_text
from tests.null.graph import pieces as p

OPTIONS = [
    {"average": "token_mean"},
    {"average": "token_sum"},
    {"average": "sequence_mean", "average_rows": "all", "average_eps": 1e-8},
    {"average": "sequence_sum", "average_rows": 8},
    {"average": "constant", "average_length": 1024, "average_rows": "all"},
    {"average": "prompt_mean"},
]


def flow_of(**options):
    @fr.flow
    def learns(prompts, policy):
        rows = p.group_norm(p.exact(fr.rollout(policy, prompts, n=2)))
        return fr.update(policy, rows, loss=p.ppo_clip(0.2), **options)

    return learns.graph()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options["average"])
def test_the_text_of_an_average_parses_back(options):
    graph = flow_of(**options)
    text = to_text(graph)
    assert from_text(text) == graph
    for name, value in options.items():
        assert f"{name}={value!r}".replace("'", '"') in text
    assert Average.of(graph["update"].get).params == options


def test_options_at_their_default_leave_no_trace():
    plain = flow_of(average="sequence_mean")
    assert flow_of(average="sequence_mean", average_rows="trained", average_eps=0) == plain
    assert "average_rows" not in to_text(plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average": "sequence_means"}, "average is one of .*'sequence_means'.*sequence_mean"),
        ({"average": "constant"}, "average_length belongs to"),
        ({"average": "token_mean", "average_length": 8}, "average_length belongs to"),
        ({"average": "constant", "average_length": 0}, "whole number of at least 1; found 0"),
        ({"average": "sequence_mean", "average_rows": "some"}, "'trained', 'all' or a whole number.*'some'"),
        ({"average": "sequence_mean", "average_rows": True}, "'trained', 'all' or a whole number.*True"),
        ({"average": "token_mean", "average_rows": "all"}, "'token_mean' counts no rows"),
        ({"average": "sequence_mean", "average_eps": -1.0}, "at least 0; found -1.0"),
        ({"average": "sequence_mean", "average_eps": float("nan")}, "at least 0; found nan"),
        ({"average": "token_mean", "average_eps": 1e-8}, "'token_mean' does not divide by them"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_written(options, message):
    with pytest.raises(ConfigError, match=rf"test_averages\.py:\d+.*{message}"):
        flow_of(**options)


def test_an_edited_text_is_checked_too():
    text = to_text(flow_of(average="sequence_mean", average_rows="all"))
    with pytest.raises(TextError, match="'token_mean' counts no rows"):
        from_text(text.replace('average="sequence_mean"', 'average="token_mean"')).check()


COUNTS = np.array([3, 0, 1, 4])
PROMPTS = ["a", "a", "b", "b"]

# the weight of a token of each row, and of each row
WANTED = {
    ("token_mean", "trained"): (["1/8", 0, "1/8", "1/8"], 3),
    ("token_sum", "trained"): ([1, 0, 1, 1], 3),
    ("sequence_mean", "trained"): (["1/9", 0, "1/3", "1/12"], 3),
    ("sequence_mean", "all"): (["1/12", 0, "1/4", "1/16"], 4),
    ("sequence_mean", 1): (["1/3", 0, 1, "1/4"], 1),
    ("sequence_sum", "trained"): (["1/3", 0, "1/3", "1/3"], 3),
    ("sequence_sum", "all"): (["1/4", 0, "1/4", "1/4"], 4),
    ("constant", "trained"): (["1/30", 0, "1/30", "1/30"], 3),
    ("constant", 2): (["1/20", 0, "1/20", "1/20"], 2),
    ("prompt_mean", "trained"): (["1/6", 0, "1/10", "1/10"], 3),
}


@pytest.mark.parametrize(("kind", "rows"), WANTED)
def test_weights(kind, rows):
    average = Average(kind, 10 if kind == "constant" else None, rows)
    token, row = weights(average, COUNTS, prompts=PROMPTS)
    wanted, divisor = WANTED[kind, rows]
    np.testing.assert_allclose(token, [float(Fraction(w)) for w in wanted], rtol=1e-14)
    np.testing.assert_allclose(row, (COUNTS > 0) / divisor, rtol=1e-14)


def test_every_average_is_tried():
    assert {kind for kind, _ in WANTED} == set(AVERAGES)
    assert set(AVERAGES) - OVER_ROWS == {"token_mean", "token_sum"}


def test_eps_is_added_to_the_tokens_of_a_row():
    token, _ = weights(Average("sequence_mean", eps=0.5), COUNTS)
    np.testing.assert_allclose(token, [1 / 10.5, 0, 1 / 4.5, 1 / 13.5])


def test_prompts_without_a_trained_token_count_only_when_all_do():
    counts, prompts = np.array([2, 0]), ["a", "b"]
    assert weights(Average("prompt_mean"), counts, prompts=prompts)[0].tolist() == [0.5, 0]
    assert weights(Average("prompt_mean", rows="all"), counts, prompts=prompts)[0].tolist() == [0.25, 0]


def test_nothing_to_train_on_gives_weights_of_0():
    for kind in AVERAGES:
        average = Average(kind, 5 if kind == "constant" else None)
        for found in weights(average, np.zeros(2, np.int64), prompts=["a", "b"]):
            assert found.tolist() == [0, 0]
        assert weights(average, np.zeros(0, np.int64), prompts=[])[0].shape == (0,)


def test_totals_of_parts_add_up():
    halves = [Totals.of(COUNTS[part], PROMPTS[part]) for part in (slice(0, 3), slice(3, 4))]
    assert halves[0] + halves[1] == Totals.of(COUNTS, PROMPTS)
    assert (Totals(3, 1) + Totals(2, 1)).num_all_rows is None


def test_totals_that_lack_what_the_average_needs_are_refused():
    with pytest.raises(ConfigError, match="needs the number of all rows"):
        weights(Average("sequence_mean", rows="all"), COUNTS, totals=Totals(8, 3))
    with pytest.raises(ConfigError, match="a column 'prompt_id'; found none"):
        weights(Average("prompt_mean"), COUNTS)
    with pytest.raises(ConfigError, match="prompt 'a' is not there"):
        weights(Average("prompt_mean"), COUNTS, totals=Totals(8, 3), prompts=PROMPTS)
