"""An operator that reads as many columns as a configuration value lists."""

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import ConfigError, FlowError, SchemaError
from flowrl.graph.text import from_text, to_text
from flowrl.runtime.operators import run_operator
from flowrl.store.rows import RowBatch


@fr.operator(writes={"total": fr.SAMPLE.f32}, locality=lambda *, by, **_: fr.group(by))
def summed(
    key: fr.SAMPLE.str.named_by("by"),
    bonus: fr.SAMPLE.f32 = None,
    *part: fr.SAMPLE.f32.named_by("parts"),
    parts: tuple[str, ...],
    by: str = "prompt_id",
):
    return sum(part) + (0 if bonus is None else bonus) + len(parts)


def rows(**more: list[float]) -> RowBatch:
    columns = {"prompt_id": np.asarray(["a", "b"], object), "right": np.asarray([1.0, 0.0], np.float32)}
    columns |= {name: np.asarray(values, np.float32) for name, values in {"tidy": [0.5, 0.25], **more}.items()}
    types = {name: fr.PROMPT.str if name == "prompt_id" else fr.SAMPLE.f32 for name in columns}
    return RowBatch(columns, types)


def test_it_gets_the_columns_in_the_order_of_the_list() -> None:
    call = summed.bind(parts=("tidy", "right"))
    assert [read.column for read in call.reads] == ["prompt_id", "bonus", "tidy", "right"]
    assert run_operator(call, rows()).rows["total"].tolist() == [3.5, 2.25]
    assert run_operator(call, rows(bonus=[10, 20])).rows["total"].tolist() == [13.5, 22.25]
    assert run_operator(summed.bind(parts=["right"]), rows()).rows["total"].tolist() == [2.0, 1.0]


def test_it_is_a_plain_function_of_arrays_too() -> None:
    assert summed(None, None, np.ones(1), np.ones(1), parts=("x", "y")).tolist() == [4.0]


@pytest.mark.parametrize("parts", [(), ("a", "a"), "a", ("a", 1), None])
def test_names_that_make_no_list_are_refused(parts: object) -> None:
    with pytest.raises(ConfigError, match="names of one or more columns in 'parts', each once"):
        summed.bind(parts=parts)


def test_every_listed_column_is_checked_and_kept_in_the_text() -> None:
    @fr.flow
    def flow(prompts, policy):  # type: ignore[no-untyped-def]
        sampled = fr.rollout(policy, prompts, n=2).with_columns(right=1.0)
        return summed(sampled, parts=("right", "tidi"))

    graph = flow.graph()
    assert from_text(to_text(graph)) == graph
    assert [problem.code for problem in flow.check() if "tidi" in str(problem)] == ["FR-C01"]


def test_a_loss_and_a_nameless_list_are_refused() -> None:
    with pytest.raises(SchemaError, match="each must be named; a list of names"):

        @fr.operator(writes={"x": fr.SAMPLE.f32})
        def nameless(*part):  # type: ignore[no-untyped-def]
            return part

    with pytest.raises(FlowError, match="each must be named"):

        @fr.loss
        def many(*part: fr.TOKEN.f32.named_by("parts"), parts: tuple[str, ...]):
            return part[0]
