"""What a flow's function may not do while it is traced, and what it is told instead."""

import re

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import ConfigError, TraceError
from tests.null.graph import pieces as p
from tests.null.graph.flows import dapo, grpo

HERE = r"test_tracing\.py:\d+"


def traced(body) -> fr.Graph:
    """The graph of a flow with the given body over (prompts, policy)."""

    def flow(prompts, policy):
        return body(prompts, policy)

    return fr.flow(flow).graph()


MISUSES = {
    "if": (lambda rows: rows if rows else None, "`if`.*fr.where.*fr.filter.*fr.refill.*fr.after"),
    "and": (lambda rows: rows and rows, "`if` \\(or `and`"),
    "not": (lambda rows: not rows, "`not`"),
    "for": (lambda rows: [r.node for r in rows], "`for`.*fr.repeat"),
    "unpack": (lambda rows: (lambda a, b: a)(*rows), "unpacking"),
    "len": (lambda rows: len(rows), "len\\(\\).*operator"),
    "float": (float, "float\\(\\).*fr.log"),
    "int": (int, "fr.log"),
    "index": (lambda rows: [1, 2][rows], "fr.log"),
    "condition on a column": (
        lambda rows: rows if rows["reward"] > 0 else None,
        "no value while the flow is traced.*fr.where",
    ),
    "two comparisons": (lambda rows: 0 < rows["reward"] < 1, "no value while the flow is traced"),
    "row index": (lambda rows: rows[0], 'rows\\["name"\\]'),
    "method": (lambda rows: rows.map(len), "no method 'map'.*select, with_columns"),
    "column as attribute": (lambda rows: rows.reward + 1, "a column is rows\\['reward'\\]"),
    "rows plus number": (lambda rows: rows + 1, "rows are added to rows; found int"),
    "rows times rows": (lambda rows: rows * rows, "scaled by a number"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_handles_refuse_what_needs_values(name: str) -> None:
    misuse, message = MISUSES[name]

    def body(prompts, policy):
        misuse(p.math(fr.rollout(policy, prompts)))

    with pytest.raises(TraceError, match=re.compile(f"{HERE}.*{message}", re.DOTALL)):
        traced(body)


def test_if_and_for_over_configuration_work() -> None:
    @fr.flow
    def configured(prompts, policy, *, times=2, logs=True):
        rows = fr.rollout(policy, prompts)
        for number in range(times):
            rows = rows.with_columns(**{f"c{number}": number})
        if logs:
            fr.log(rows, "c0")
        return rows

    assert len(configured.graph()) == 6
    assert len(configured.graph(times=1, logs=False)) == 4


def test_data_is_no_handle() -> None:
    with pytest.raises(
        TraceError, match=f"{HERE}: fr.rollout needs rows \\(a table\\) for 'rows'; found list.*parameters"
    ):
        traced(lambda prompts, policy: fr.rollout(policy, [{"prompt": "2+2="}]))
    with pytest.raises(TraceError, match="needs weights \\(a model\\) for 'model'; found str"):
        traced(lambda prompts, policy: fr.rollout("gpt2", prompts))


def test_rows_and_weights_are_not_swapped() -> None:
    with pytest.raises(TraceError, match="'prompts' is used as weights.*before and as rows.*here"):
        traced(lambda prompts, policy: fr.rollout(prompts, prompts))
    with pytest.raises(TraceError, match="fr.rollout needs weights \\(a model\\) for 'model'; found <rows 'rollout'"):
        traced(lambda prompts, policy: fr.rollout(fr.rollout(policy, prompts), prompts))


def test_a_flow_takes_no_data_when_it_is_called() -> None:
    with pytest.raises(TraceError, match="called with list.*fr.run_local\\(grpo, prompts=..., policy=..., ref=...\\)"):
        grpo([1], None, None)


def test_a_handle_cannot_leave_its_flow() -> None:
    kept = []
    traced(lambda prompts, policy: kept.append(fr.rollout(policy, prompts)) or kept[0])
    with pytest.raises(TraceError, match="handles cannot leave the flow"):
        traced(lambda prompts, policy: p.math(kept[0]))
    with pytest.raises(TraceError, match="works inside a function decorated with @fr.flow"):
        p.math(kept[0])


def test_a_handle_cannot_leave_refill() -> None:
    def body(prompts, policy):
        kept = []

        def attempt(new):
            kept.append(p.math(fr.rollout(policy, new, n=4)))
            return kept[0]

        fr.refill(attempt, prompts, keep=p.group_has_signal(), max_rounds=2)
        return p.group_norm(kept[0])

    with pytest.raises(TraceError, match="handles cannot leave"):
        traced(body)


def test_refill_repeats_something_that_returns_rows() -> None:
    def two(prompts, policy):
        def attempt(new):
            rows = p.math(fr.rollout(policy, new))
            return rows, rows

        return fr.refill(attempt, prompts, keep=p.group_has_signal(), max_rounds=2)

    with pytest.raises(TraceError, match="returns rows and nothing else"):
        traced(two)
    with pytest.raises(TraceError, match="needs keep= a filter operator"):
        traced(lambda prompts, policy: fr.refill(lambda new: new, prompts, keep=p.group_norm(), max_rounds=2))


def test_refill_cannot_use_the_prompts_around_it() -> None:
    def body(prompts, policy):
        return fr.refill(
            lambda new: p.math(fr.rollout(policy, prompts)), prompts, keep=p.group_has_signal(), max_rounds=2
        )

    with pytest.raises(TraceError, match="use its parameter instead"):
        traced(body)


def test_nodes_of_a_sub_graph_never_take_the_name_of_one_around_it() -> None:
    def body(prompts, policy):
        rows = fr.rollout(policy, prompts)

        def attempt(new):
            inner = p.math(fr.rollout(policy, new))
            return fr.join(inner, rows.select(first="response"), on="prompt_id")

        return fr.refill(attempt, prompts, keep=p.group_has_signal(), max_rounds=2)

    graph = traced(body)
    inner = graph["refill"].body
    assert inner is not None
    assert inner["rollout"].kind == "input" and inner["rollout_2"].kind == "rollout"
    assert graph["refill"].inputs == (("rows", "prompts"), ("model", "policy"), ("captured", "rollout"))
    kinds = [node.kind for node in inner]
    assert kinds == sorted(kinds, key=lambda kind: kind != "input")


def test_nested_refill() -> None:
    def body(prompts, policy):
        def outer(new):
            def inner(newer):
                return p.math(fr.rollout(policy, newer, n=2))

            return fr.refill(inner, new, keep=p.group_has_signal(), max_rounds=2)

        return fr.refill(outer, prompts, keep=p.group_has_signal(), max_rounds=3)

    graph = traced(body)
    assert fr.from_text(fr.to_text(graph)) == graph
    assert graph.check() == ()


def test_unknown_configuration_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no configuration 'grop_size'; did you mean 'group_size'"):
        grpo.graph(grop_size=4)
    with pytest.raises(ConfigError, match="it is an input"):
        grpo.graph(policy=1)
    with pytest.raises(ConfigError, match="'group_norm' has no configuration 'epsilon'; "):
        p.group_norm(epsilon=1)
    with pytest.raises(ConfigError, match="'ppo_clip' has no configuration 'clp'; did you mean 'clip'"):
        p.ppo_clip(clp=0.1)
    with pytest.raises(ConfigError, match="'overlong' needs a value for soft"):
        p.overlong()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda rows, policy: fr.rollout(policy, rows, n=0), "whole number of at least 1 for 'n'; found 0"),
        (lambda rows, policy: fr.rollout(policy, rows, n=2.0), "found 2.0"),
        (lambda rows, policy: fr.rollout(policy, rows, n=rows["n"]), "exists only when it runs"),
        (lambda rows, policy: fr.rollout(policy, rows, temperature=-1), "at least 0"),
        (lambda rows, policy: fr.rollout(policy, rows, max_turns=3), "needs an environment"),
        (lambda rows, policy: fr.update(policy, rows, loss=p.sft(), average="mean"), "average is one of.*found 'mean'"),
        (lambda rows, policy: fr.update(policy, rows, loss=p.sft(), average="constant"), "average_length"),
        (lambda rows, policy: fr.buffer(rows, capacity=5, draw=6), "draws 6 rows of at most 5"),
        (lambda rows, policy: fr.reduce(rows, "median", of="values"), "reduce knows mean.*found 'median'"),
        (lambda rows, policy: fr.repeat(rows, epochs=0), "'epochs'; found 0"),
        (lambda rows, policy: fr.log(rows), "columns to write"),
    ],
)
def test_values_that_make_no_sense(call, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{HERE}.*{message}"):
        traced(lambda prompts, policy: call(prompts, policy))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (p.sft, "the loss function 'sft' without its parentheses"),
        (lambda: 0 * p.sft(), None),
        (1.0, "found float"),
    ],
)
def test_update_needs_a_loss(loss, message: str | None) -> None:
    if message is None:
        loss, message = loss(), "multiplied by 0"
    with pytest.raises(TraceError, match=message):
        traced(lambda prompts, policy: fr.update(policy, prompts, loss=loss))


def test_what_a_flow_returns() -> None:
    with pytest.raises(TraceError, match="returns NoneType; it returns what the run keeps"):
        traced(lambda prompts, policy: None)
    with pytest.raises(TraceError, match="returns float"):
        traced(lambda prompts, policy: (fr.rollout(policy, prompts), 0.5))


def test_what_a_flow_may_be() -> None:
    with pytest.raises(TraceError, match="has '\\*args'"):

        @fr.flow
        def star(*args):
            return args

    with pytest.raises(TraceError, match="has a default; configuration goes after '\\*'"):

        @fr.flow
        def default(prompts, n=4):
            return prompts

    with pytest.raises(TraceError, match="name of a run option"):

        @fr.flow
        def reserved(prompts, steps):
            return prompts

    with pytest.raises(TraceError, match="no input 'prompt' for columns="):

        @fr.flow(columns={"prompt": {"x": fr.PROMPT.str}})
        def unknown(prompts):
            return prompts


def test_numpy_numbers_are_numbers() -> None:
    @fr.flow
    def scaled(prompts, policy, *, n, clip):
        return fr.update(policy, p.group_norm(p.math(fr.rollout(policy, prompts, n=int(n)))), loss=p.ppo_clip(clip))

    plain = scaled.graph(n=4, clip=0.5)
    same = scaled.graph(n=np.int64(4), clip=np.float64(0.5))
    assert plain == same and plain.hash == same.hash and fr.to_text(plain) == fr.to_text(same)


def test_every_node_knows_its_line() -> None:
    graph = dapo.graph()
    body = graph["refill"].body
    assert body is not None
    for node in (*graph, *body):
        assert node.place.file.endswith("flows.py") and node.place.line > 0 and node.place.text
    assert "fr.refill(attempt" in graph["refill"].place.text
    assert "p.overlong(p.math" in body["math"].place.text


def test_an_operator_called_with_values_is_the_plain_function() -> None:
    assert p.exact("a", "a") == 1.0
