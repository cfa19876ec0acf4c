"""Lengths as histograms, and what a flow's roles do with them."""

import pytest
from hypothesis import given, strategies as st

from examples.flows.dapo import dapo
from examples.flows.grpo import grpo, grpo_moving_ref
from examples.flows.ppo import ppo, ppo_warm
from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.planner.problem import work_of
from flowrl.planner.roles import roles_of
from flowrl.planner.workload import Lengths, Workload

SHAPE = ModelShape.of("Qwen/Qwen2.5-0.5B")
WORK = Workload(32, Lengths.fixed(128), Lengths.lognormal(512, 0.6, cap=2048))


@given(st.floats(1, 4000), st.floats(0, 1.2), st.integers(4000, 20000))
def test_a_guess_has_the_mean_that_was_asked(mean, sigma, cap):
    found = Lengths.lognormal(mean, sigma, cap)
    assert found.mean == pytest.approx(mean, rel=0.02, abs=0.6)
    assert found.longest <= cap


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200))
def test_measured_lengths_come_back(lengths):
    found = Lengths.of(lengths)
    assert sorted(found.draw(len(lengths))) == sorted(lengths)
    assert found.mean == pytest.approx(sum(lengths) / len(lengths))


@given(st.integers(1, 300))
def test_a_draw_keeps_the_longest(count):
    lengths = Lengths((1, 100, 9000), (50.0, 49.0, 0.01))
    drawn = lengths.draw(count)
    assert max(drawn) == 9000 and len(drawn) == count
    assert drawn == lengths.draw(count)


def test_an_order_without_trend():
    drawn = Lengths.of(range(1, 1001)).draw(1000)
    for part in range(10):
        assert sum(drawn[part * 100 : part * 100 + 100]) / 100 == pytest.approx(500.5, rel=0.06)


@pytest.mark.parametrize("tokens, weights", [((), ()), ((2, 1), (1, 1)), ((1,), (0.0,)), ((0,), (1,)), ((1, 2), (1,))])
def test_lengths_that_make_no_sense(tokens, weights):
    with pytest.raises(ConfigError, match="Lengths needs"):
        Lengths(tokens, weights)


# ----------------------------------------------------------------------------------------------------------------- roles


def calls(flow, models: str, work: Workload = WORK):
    shapes = dict.fromkeys(models.split(), SHAPE)
    roles = roles_of(flow.graph(), shapes, work)
    return roles, {call.node: call for role in roles for call in role.calls}


def test_group_flow():
    roles, found = calls(grpo, "policy ref")
    assert [role.name for role in roles] == ["gen", "policy", "ref"]
    assert roles[0].weights_from == "policy" and roles[0].is_engine and not roles[0].is_trained
    assert found["rollout"].sequences == 32 * 8
    assert found["update"].after == ("rollout", "ref_logprobs") and found["update"].steps == 1
    assert found["ref_logprobs"].after == ("rollout",)


def test_names_mean_nothing():
    graph = grpo.graph().rename({"policy": "ref", "ref": "policy"})
    roles = roles_of(graph, {"policy": SHAPE, "ref": SHAPE}, WORK)
    assert [(role.name, role.is_trained) for role in roles] == [("gen", False), ("ref", True), ("policy", False)]


def test_forward_passes_wait_for_tokens_only():
    _, found = calls(ppo, "policy ref critic judge")
    for name in ("score", "ref_logprobs", "old_logprobs", "values"):
        assert found[name].after == ("rollout",)
    assert set(found["update"].after) == {"rollout", "score", "ref_logprobs", "old_logprobs", "values"}
    assert found["update"].steps == found["update_2"].steps == 8 and found["update"].sequences == 2 * 32


def test_group_size_of_the_workload_goes_first():
    _, found = calls(grpo, "policy ref", Workload(32, WORK.prompt_lengths, WORK.response_lengths, group_size=4))
    assert found["update"].sequences == 128


def test_a_refill_samples_more_than_it_gives():
    roles, found = calls(dapo, "policy", Workload(32, WORK.prompt_lengths, WORK.response_lengths, rounds=1.5))
    assert found["refill.rollout"].sequences == 32 * 16 * 1.5
    assert found["update"].sequences == 32 * 16 and found["update"].after == ("refill.rollout",)
    assert [role.name for role in roles] == ["gen", "policy"]


def test_what_happens_now_and_then():
    roles, found = calls(grpo_moving_ref, "policy ref")
    assert found["rollout_2"].share == pytest.approx(1 / 50)
    assert "update" in found["rollout_2"].after
    work = work_of(roles)
    names = [f"to {roles[r].name}" if call is None else roles[r].calls[call].node for r, call, _ in work]
    before = {name: {names[one] for one in work[at][2]} for at, name in enumerate(names)}
    assert "to gen" in before["rollout_2"] and {"update", "rollout"} <= before["to gen"]


def test_weights_that_are_chosen_keep_their_model():
    roles, _ = calls(ppo_warm, "policy ref critic judge")
    assert {role.name for role in roles} == {"gen", "policy", "ref", "critic", "judge"}


def test_shapes_for_the_models_there_are():
    with pytest.raises(ConfigError, match="needs a shape"):
        calls(grpo, "policy")
    with pytest.raises(ConfigError, match="has no model 'polcy'"):
        roles_of(grpo.graph(), {"polcy": SHAPE}, WORK)
