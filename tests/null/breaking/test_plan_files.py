"""Files of plans that were damaged: refused with a ConfigError, or good for everything that is done with a plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import flowrl as fr
import flowrl.viz
from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.planner.explain import explain_plan
from tests.null.breaking.pieces import length, trained

SHAPE = ModelShape(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=256)


@fr.flow
def small(prompts, policy):
    return trained(length(fr.rollout(policy, prompts, n=2)), policy)


@pytest.fixture(scope="module")
def made() -> fr.Plan:
    return fr.plan(
        small,
        models={"policy": SHAPE},
        cluster="2xA100-80G",
        workload=fr.Workload(4, fr.Lengths.fixed(8), fr.Lengths.of([4, 8])),
    )


NOT_JSON: dict[str, Any] = {
    "nothing": "",
    "deep": "[" * 200_000,
    "deep value": '{"format": "flowrl plan", "version": 1, "steps": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "digits": '{"format": "flowrl plan", "version": ' + "9" * 5000 + "}",
    "none": None,
    "dict": {},
    "bytes": b"{}",
}


@pytest.mark.parametrize("text", NOT_JSON.values(), ids=NOT_JSON)
def test_what_is_no_json_of_a_plan_is_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"^a plan is "):
        fr.Plan.from_json(text)


def test_a_key_that_is_there_twice_is_refused(made: fr.Plan) -> None:
    text = made.to_json().replace('"max_staleness": 0', '"max_staleness": 7, "max_staleness": 0')
    with pytest.raises(ConfigError, match="has the key 'max_staleness' twice"):
        fr.Plan.from_json(text)


@pytest.mark.parametrize("name", ["missing.json", "folder", "folder/missing/x.json", "x" * 5000, "a\0b"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        fr.Plan.load(tmp_path / name)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\0")
    with pytest.raises(ConfigError, match="is no text in UTF-8"):
        fr.Plan.load(tmp_path / "x.json")


def test_a_path_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a path; found None"):
        fr.Plan.load(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["folder", "missing/x.json", "x" * 5000, "a\0b"])
def test_a_plan_is_not_written_where_that_cannot_be(made: fr.Plan, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        made.to_json(tmp_path / name)


# ------------------------------------------------------------------------------------------------------ damaged values


JUNK: list[Any] = [
    None,
    0,
    -1,
    1.5,
    1e308,
    10**400,
    -(10**30),
    2**63,
    2**62,
    "",
    "\ud800",
    "<script>",
    True,
    [],
    {},
    [0, 0],
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values stand in a JSON value: every key, and the first of every list."""
    if at:
        yield at
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*at, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*at, 0))


def damaged(text: str, at: tuple[Any, ...], change: Callable[[Any, Any], None]) -> str:
    """The text with one value changed, and the hash that belongs to it where it can be read."""
    values = json.loads(text)
    inner = values
    for key in at[:-1]:
        inner = inner[key]
    change(inner, at[-1])
    try:
        fr.Plan.from_json(json.dumps(values))
    except ConfigError as error:
        said = str(error).partition("have the hash ")[2]
        if said:
            values["hash"] = said.partition(",")[0]
    return json.dumps(values)


def use(plan: fr.Plan) -> None:
    """What is done with a plan once it is read."""
    assert fr.Plan.from_json(plan.to_json()) == plan
    found = plan.simulated()
    found[1].excess(plan.cluster)
    str(plan), str(explain_plan(plan)), str(plan.placement), str(plan.bottleneck)
    plan.to_html(), plan.to_text(), plan.to_svg(), plan.to_trace()


def test_a_damaged_value_is_refused_or_the_plan_can_be_used(made: fr.Plan) -> None:
    text = made.to_json()
    taken = 0
    for number, at in enumerate(places(json.loads(text))):
        for junk in JUNK[number % 5 :: 5]:  # each value at a fifth of the places
            changed = damaged(text, at, lambda inner, key, junk=junk: inner.__setitem__(key, junk))  # type: ignore[misc]
            try:
                plan = fr.Plan.from_json(changed)
            except ConfigError:
                continue
            if plan != made:
                taken += 1
                try:
                    use(plan)
                except ConfigError:
                    continue
                except Exception as error:
                    raise AssertionError(f"{'.'.join(map(str, at))} = {junk!r:.30}") from error
    assert taken > 20, "nearly everything was refused: this test has nothing to look at"


@pytest.mark.parametrize("name", ["seconds", "latency_s"])
@pytest.mark.parametrize("value", [None, 0, 1e20])
def test_absurd_times_of_the_whole_are_refused(made: fr.Plan, name: str, value: Any) -> None:
    def change(inner: Any, key: Any) -> None:
        if value is None:
            del inner[key]
        else:
            inner[key] = value

    with pytest.raises(ConfigError, match=rf"predicted\.{name}"):
        fr.Plan.from_json(damaged(made.to_json(), ("predicted", name), change))


@pytest.mark.parametrize("value", [257, 2**62])
def test_a_staleness_that_nobody_trains_with_is_refused(value: int) -> None:
    with pytest.raises(ConfigError, match="max_staleness is 256 at most"):
        fr.Async(value)


@pytest.mark.parametrize("value", [-1, 1.5, True, None, "1", float("nan"), [1]])
def test_a_staleness_is_a_whole_number(value: Any) -> None:
    with pytest.raises(ConfigError, match="max_staleness is a whole number of at least 0"):
        fr.Async(value)
