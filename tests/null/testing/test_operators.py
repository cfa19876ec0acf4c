"""The kit catches every operator that breaks a property, and no other."""

import unittest
from typing import Any

import numpy as np
import pytest

import flowrl as fr
from flowrl import errors
from flowrl.errors import ConfigError, PackError
from flowrl.testing import ConformanceError, check_loss, check_operator, operator_cases, pack_cases
from flowrl.testing._operators import PROPERTIES
from tests.null.testing import broken


@pytest.mark.parametrize("case", [c for op in broken.RIGHT for c in operator_cases(op)], ids=str)
def test_right_operators_pass(case: Any) -> None:
    case.check()


@pytest.mark.parametrize(
    ("name", "operator", "says"), broken.BROKEN, ids=[f"{name}-{op.__name__}" for name, op, _ in broken.BROKEN]
)
def test_each_broken_operator_is_caught(name: str, operator: Any, says: str) -> None:
    (case,) = [case for case in operator_cases(operator) if case.property == name]
    with pytest.raises(ConformanceError) as caught:
        case.check()
    message = str(caught.value)
    assert says in message
    assert message.startswith(f"{operator.__name__} breaks '{name}' ({PROPERTIES[name].says}):\n")


def test_every_property_has_an_operator_that_breaks_it() -> None:
    assert {name for name, _, _ in broken.BROKEN} == set(PROPERTIES)


def test_a_cost_is_no_part_of_what_an_operator_is() -> None:
    assert broken.costed.cost_s(num_rows=10, num_tokens=0, scale=2.0) == pytest.approx(2e-5)
    assert broken.centred.cost_s(num_rows=10, num_tokens=0) is None
    bare = fr.operator(writes=broken.ADVANTAGE)(broken.costed.function)
    assert bare.hash == broken.costed.hash and bare.bind() == broken.costed.bind()


def test_a_failure_shows_a_small_input_and_both_answers() -> None:
    with pytest.raises(ConformanceError) as caught:
        check_operator(broken.no_row)
    text = str(caught.value)
    assert "  input     reward = [" in text
    assert "  expected  [" in text and "  found     [" in text
    small = next(line for line in text.splitlines() if "reward = [" in line)
    assert small.count(",") == 1  # two rows are enough to show it
    assert "also breaks" not in text.partition("breaks 'chunks'")[0]


def test_one_cause_is_told_once() -> None:
    with pytest.raises(ConformanceError) as caught:
        check_operator(broken.one_of_two)
    text = str(caught.value)
    assert text.count("declares advantage, baseline") == 1
    assert "also breaks repeatable, chunks" in text


def test_one_cause_is_told_once_whatever_the_rows() -> None:
    with pytest.raises(ConformanceError) as caught:
        check_operator(broken.fourth_is_baseline)
    text = str(caught.value)
    assert text.count("out of bounds") == 1 and text.count("breaks '") == 1
    assert text.endswith("\n  also breaks inputs, repeatable, chunks, order, one_row, poison, pickles")


def test_a_failure_outside_a_flow_names_no_place_in_one() -> None:
    with pytest.raises(ConformanceError) as caught:
        check_operator(broken.fourth_is_baseline)
    assert "broken.py:" in str(caught.value)
    assert "used at" not in str(caught.value) and "no source" not in str(caught.value)


def test_what_a_property_says_cannot_be_read_as_a_finding() -> None:
    from flowrl.testing import _losses

    assert {one.says.split()[0] for one in (*PROPERTIES.values(), *_losses.PROPERTIES.values())} == {"must"}


def test_configurations_are_tried_and_named() -> None:
    check_operator(broken.centred, config=[{}, {"scale": 0.5}])
    check_operator(broken.centred(scale=2.0))
    with pytest.raises(ConformanceError, match=r"centred\(scale=nan\) breaks 'columns'"):
        check_operator(broken.centred, config=[{}, {"scale": float("nan")}])
    with pytest.raises(ConfigError, match="no configuration 'scales'"):
        check_operator(broken.centred, config={"scales": 1.0})

    @fr.operator(writes=broken.ADVANTAGE)
    def needs(reward, *, by: float):
        return reward * by

    with pytest.raises(ConfigError, match="'needs' needs a value for by to be tried: config={'by': ...}"):
        operator_cases(needs)


def test_columns_are_made_by_the_author_where_given() -> None:
    asked: list[Any] = []

    def rewards(rng: np.random.Generator, n: int) -> np.ndarray:
        asked.append(n)
        return rng.integers(5, 7, n)

    (case,) = [c for c in operator_cases(broken.centred, columns={"reward": rewards}) if c.property == "columns"]
    case.check()
    assert asked and min(asked) >= 1

    def tokens(rng: np.random.Generator, lengths: np.ndarray) -> list[np.ndarray]:
        return [np.full(length, 7) for length in lengths]

    check_operator(broken.not_long, columns={"response_ids": tokens})
    with pytest.raises(
        ConfigError, match="'centred' reads no column 'rewrd' to make with columns=; did you mean 'reward'"
    ):
        check_operator(broken.centred, columns={"rewrd": rewards})


def test_skipping_takes_a_property_that_exists_and_a_reason() -> None:
    check_operator(broken.no_row, skip={"chunks": "on purpose", "poison": "on purpose", "empty": "on purpose"})
    (case,) = [c for c in operator_cases(broken.no_row, skip={"chunks": "on purpose"}) if c.property == "chunks"]
    with pytest.raises(unittest.SkipTest, match="on purpose"):  # pytest takes it as skipped
        case.check()
    check_operator(broken.no_row, skip={"*": "all of it"})
    with pytest.raises(
        ConfigError, match="skip names 'chunk', which is no property of 'no_row'; did you mean 'chunks'"
    ):
        check_operator(broken.no_row, skip={"chunk": "x"})
    with pytest.raises(ConfigError, match="skip gives the reason why 'no_row' need not hold 'chunks'; found ''"):
        check_operator(broken.no_row, skip={"chunks": ""})


def test_what_is_no_operator_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs an operator .*; found function"):
        check_operator(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a loss .*; found Operator"):
        check_loss(broken.centred)  # type: ignore[arg-type]


def test_a_module_is_checked_like_a_pack() -> None:
    cases = pack_cases(broken, settings={"centred": {"config": {"scale": 2.0}}})
    names = {case.name for case in cases}
    assert {"centred", "no_row", "masked_sum"} <= names and "first_twice" not in {str(c) for c in cases}
    with pytest.raises(
        ConfigError, match="settings name 'centered', which the pack does not have; did you mean 'centred'"
    ):
        pack_cases(broken, settings={"centered": {}})
    with pytest.raises(PackError, match="offers no operator and no loss"):
        pack_cases(errors)
    with pytest.raises(PackError, match=r"no pack 'mine' is installed; .*; install yours .* its module in place of"):
        pack_cases("mine")


def test_the_ids_of_cases_are_readable() -> None:
    ids = [str(case) for case in operator_cases(broken.centred, name="advantages.centred")]
    assert "advantages.centred-chunks" in ids and "advantages.centred-state" not in ids
    assert len(ids) == len(set(ids))


def test_inputs_are_the_same_in_every_run() -> None:
    def seen() -> list[Any]:
        made: list[Any] = []

        def keep(rng: np.random.Generator, n: int) -> np.ndarray:
            made.append(rng.normal(size=n))
            return made[-1]

        check_operator(broken.centred, columns={"reward": keep})
        return [array.tolist() for array in made]

    assert seen() == seen()


def test_one_operator_may_be_tried_in_several_ways() -> None:
    ways = [{"skip": {"poison": "x"}}, {"config": {"scale": 2.0}}]
    cases = [
        c
        for c in pack_cases(broken, settings={"centred": ways})
        if c.name.startswith("centred#") or c.name == "centred"
    ]
    assert {c.name for c in cases} == {"centred", "centred#2"}
    assert [str(c) for c in cases if c.skipped] == ["centred-poison"]
    with pytest.raises(ConfigError, match="the settings of 'centred' do not fit: .*'confg'"):
        pack_cases(broken, settings={"centred": {"confg": {}}})


def test_what_is_not_tried_needs_no_configuration() -> None:
    @fr.operator(writes=broken.ADVANTAGE)
    def needs(reward, *, by: float):
        return reward * by

    (case,) = operator_cases(needs, skip={"*": "asks a server"})
    assert str(case) == "needs-all"
    with pytest.raises(unittest.SkipTest, match="asks a server"):
        case.check()
