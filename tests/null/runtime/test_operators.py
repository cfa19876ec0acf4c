"""Running one operator: locality, what it may return, failures that name file, line and row."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import flowrl as fr
from flowrl.errors import ConfigError, OperatorError
from flowrl.graph.operators import State
from flowrl.runtime.operators import run_operator
from flowrl.schema import PROMPT, SAMPLE, TOKEN
from flowrl.store.rows import RowBatch


def rows(**columns: tuple[Any, fr.ColumnType]) -> RowBatch:
    return RowBatch({n: v for n, (v, _) in columns.items()}, {n: t for n, (_, t) in columns.items()})


GROUPS = {
    "prompt_id": (["a", "b", "a", "b", "b"], PROMPT.str),
    "sample_id": (["a/0", "b/0", "a/1", "b/1", "b/2"], SAMPLE.str),
    "reward": (np.array([1.0, 1, 0, 1, 0], np.float32), SAMPLE.f32),
    "response_ids": ([[1, 2], [3], [], [4, 5], [6]], TOKEN.i32),
}


@fr.operator(writes={"centred": fr.SAMPLE.f32}, locality=fr.group("prompt_id"))
def centre(reward: fr.SAMPLE.f32):
    return reward - reward.mean()


def test_groups_are_found_by_value_not_by_stride():
    done = run_operator(centre.bind(), rows(**GROUPS))
    np.testing.assert_allclose(done.rows["centred"], [0.5, 1 / 3, -0.5, 1 / 3, -2 / 3], rtol=1e-6)


def test_group_answers_do_not_depend_on_row_order():
    batch = rows(**GROUPS)
    order = np.array([4, 2, 0, 3, 1])
    shuffled = run_operator(centre.bind(), batch.take(order)).rows["centred"]
    np.testing.assert_allclose(shuffled, run_operator(centre.bind(), batch).rows["centred"][order])


def test_ragged_columns_reach_operators_and_come_back():
    @fr.operator(writes={"advantages": fr.TOKEN.f32})
    def spread(reward: fr.SAMPLE.f32, response_ids: fr.TOKEN.i32):
        return fr.Ragged.like(response_ids.spread(reward), response_ids)

    done = run_operator(spread.bind(), rows(**GROUPS))
    assert done.rows["advantages"].to_list() == [[1, 1], [1], [], [1, 1], [0]]


def test_broadcast_read_repeats_the_coarse_column():
    @fr.operator(writes={"twice": fr.TOKEN.f32})
    def twice(advantages: fr.TOKEN.f32.or_broadcast("reward")):
        return advantages * 2

    assert run_operator(twice.bind(), rows(**GROUPS)).rows["twice"].to_list() == [[2, 2], [2], [], [2, 2], [0]]


def test_failure_names_operator_line_flow_line_and_group():
    @fr.operator(writes={"x": fr.SAMPLE.f32}, locality=fr.group("prompt_id"))
    def broken(reward: fr.SAMPLE.f32):
        raise KeyError("no such thing")

    with pytest.raises(OperatorError) as caught:
        run_operator(broken.bind(), rows(**GROUPS), place=fr.graph.code.Place("flow.py", 7, "broken(rows)"))
    text = str(caught.value)
    assert (
        "broken" in text and "test_operators.py:" in text and "flow.py:7" in text and "prompt_id='a' (2 rows)" in text
    )
    assert isinstance(caught.value.__cause__, KeyError)


def test_writing_into_an_input_is_refused_and_leaves_it_as_it_was():
    @fr.operator(writes={"x": fr.SAMPLE.f32})
    def in_place(reward: fr.SAMPLE.f32):
        reward -= reward.mean()
        return reward

    batch = rows(**GROUPS)
    before = batch["reward"].copy()
    with pytest.raises(OperatorError, match="read-only"):
        run_operator(in_place.bind(), batch)
    np.testing.assert_array_equal(batch["reward"], before)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda r: r[:2], "one value per row"),
        (lambda r: 1.0, "a float"),
        (lambda r: {"other": r}, "declares x and returned other"),
        (lambda r: np.array(["text"] * len(r)), "returned 'x' wrongly"),
    ],
)
def test_wrong_answers_are_refused_with_what_was_declared(answer, said):
    @fr.operator(writes={"x": fr.SAMPLE.f32})
    def wrong(reward: fr.SAMPLE.f32):
        return answer(reward)

    with pytest.raises(OperatorError, match=said):
        run_operator(wrong.bind(), rows(**GROUPS))


def test_filters_return_a_mask_and_may_add_columns():
    @fr.operator(writes={"chosen": fr.SAMPLE.bool}, filter=True, locality=fr.group("prompt_id"))
    def best(reward: fr.SAMPLE.f32):
        return fr.Keep(reward == reward.max(), {"chosen": np.ones(len(reward), bool)})

    done = run_operator(best.bind(), rows(**GROUPS))
    assert done.mask is not None and done.mask.tolist() == [True, True, False, True, False]
    assert done.rows["chosen"].all()


def test_a_filter_that_returns_numbers_is_refused():
    @fr.operator(filter=True)
    def wrong(reward: fr.SAMPLE.f32):
        return reward

    with pytest.raises(OperatorError, match="one boolean per row"):
        run_operator(wrong.bind(), rows(**GROUPS))


def test_one_bad_row_is_flagged_and_the_others_scored():
    @fr.reward
    def fragile(sample_id, reward: fr.SAMPLE.f32):
        if sample_id == "b/0":
            raise RuntimeError("parser fell over")
        return reward + 1

    done = run_operator(fragile.bind(), rows(**GROUPS))
    assert done.failed == 1
    assert np.isnan(done.rows["reward"]).tolist() == [False, True, False, False, False]
    assert "parser fell over" in done.rows["row_error"][1] and done.rows["row_error"][0] == ""


def test_a_bad_row_can_end_the_run_instead():
    @fr.reward(on_error="raise")
    def fragile(sample_id):
        raise RuntimeError("parser fell over")

    with pytest.raises(OperatorError, match="row 'a/0'.*parser fell over"):
        run_operator(fragile.bind(), rows(**GROUPS))


def test_a_row_that_hangs_is_cut_off_and_flagged():
    @fr.reward(timeout_s=0.05)
    def hangs(sample_id):
        while sample_id == "a/1":
            pass
        return 1.0

    done = run_operator(hangs.bind(), rows(**GROUPS))
    assert done.failed == 1 and "longer than 0.05 s" in done.rows["row_error"][2]
    assert np.isnan(done.rows["reward"][2]) and done.rows["reward"][3] == 1.0


def test_a_hanging_call_is_cut_off_outside_the_main_thread_too():
    @fr.operator(writes={"x": fr.SAMPLE.f32}, timeout_s=0.05)
    def hangs(reward: fr.SAMPLE.f32):
        threading.Event().wait(2)
        return reward

    caught: list[BaseException] = []

    def work():
        try:
            run_operator(hangs.bind(), rows(**GROUPS))
        except OperatorError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(5)
    assert len(caught) == 1 and "longer than 0.05 s" in str(caught[0])


def test_a_reward_that_is_no_number_is_refused():
    @fr.reward(on_error="raise")
    def none(sample_id):
        return None

    with pytest.raises(OperatorError, match="'reward' is a number; found NoneType"):
        run_operator(none.bind(), rows(**GROUPS))


def test_state_is_kept_between_calls():
    @fr.operator(writes={"seen": fr.SAMPLE.i32}, locality="stateful")
    def count(reward: fr.SAMPLE.f32, *, state: fr.State):
        state["n"] = state.get("n", 0) + len(reward)
        return np.full(len(reward), state["n"], np.int32)

    state = State()
    run_operator(count.bind(), rows(**GROUPS), state=state)
    assert run_operator(count.bind(), rows(**GROUPS), state=state).rows["seen"].tolist() == [10] * 5


def test_no_rows_is_not_an_error_for_group_operators():
    empty = rows(**GROUPS).take(np.zeros(0, np.int64))
    assert len(run_operator(centre.bind(), empty).rows["centred"]) == 0


@pytest.mark.parametrize(
    ("returned", "found"),
    [
        (None, r"found None \(does it return\?\)"),
        ([1.0], "found 1 value$"),
        ([1.0, 2.0], "found 2 values$"),
        (1.0, "a float$"),
    ],
)
def test_what_was_returned_is_named(returned: Any, found: str) -> None:
    @fr.operator(writes={"x": fr.SAMPLE.f32}, locality="batch")
    def gives(reward: fr.SAMPLE.f32):
        return returned

    with pytest.raises(OperatorError, match=found):
        run_operator(gives.bind(), rows(**GROUPS))


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@fr.reward
def odd(reward: fr.SAMPLE.f32, *, error: str):
    if not reward:
        raise ConfigError("odd needs another option") if error == "config" else Mute
    return 1.0


def test_an_option_that_makes_no_sense_ends_the_run_and_flags_no_rows():
    with pytest.raises(OperatorError, match="failed on row 'a/1': ConfigError: odd needs another option"):
        run_operator(odd.bind(error="config", out="more"), rows(**GROUPS))


def test_an_error_without_a_text_flags_its_row():
    done = run_operator(odd.bind(error="mute", out="more"), rows(**GROUPS))
    assert done.failed == 2 and done.first_error == "Mute (its text cannot be had)"
