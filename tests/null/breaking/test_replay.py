"""Replaying what cannot be replayed, and texts whose code is not what it was."""

import pytest

import flowrl as fr
from flowrl.errors import ConfigError, PackError, RunError, TraceError
from tests.null.breaking.pieces import length, run, trained


@fr.operator(writes={"x": fr.SAMPLE.f32}, locality="stateful")
def counts(reward, *, state: fr.State):
    state["seen"] = state.get("seen", 0) + len(reward)
    return reward + state["seen"]


@fr.flow
def remembers(prompts, policy):
    rows = fr.buffer(counts(length(fr.rollout(policy, prompts, n=2))), capacity=100, draw=4)
    return trained(rows, policy), rows


@pytest.mark.parametrize("node", ["counts", "buffer"])
def test_what_remembers_is_replayed_at_its_first_step_only(tmp_path, node):
    done = run(remembers, steps=2, record=("*",), out=str(tmp_path), checks=False)
    assert fr.replay(done, 0, node).is_equal
    with pytest.raises(RunError, match=f"node '{node}' remembers earlier steps"):
        fr.replay(done, 1, node)
    with pytest.raises(RunError, match="changes weights"):
        fr.replay(done, 1, "update")  # refused before a model is asked for
    with pytest.raises(ConfigError, match="number of a step; found '1'"):
        fr.replay(done, "1", "length")


@pytest.mark.parametrize("name", ["length", "reinforce"])
def test_a_text_whose_code_has_changed_is_refused(name):
    text = str(remembers.graph())
    start = text.index('"', text.index("hash", text.index(f"{name} = ", text.index("operator length")))) + 1
    changed = fr.from_text(text[:start] + "0" * 12 + text[start + 12 :])
    node, param = {"length": ("length", "operator"), "reinforce": ("update", "loss")}[name]
    with pytest.raises(TraceError, match=f"{name}' .*has changed since the text of the graph was written"):
        changed[node][param].resolve()
    assert run(fr.from_text(text), checks=False).status == "finished"


def test_a_text_whose_code_is_not_there():
    text = str(remembers.graph()).replace("tests.null.breaking.pieces:length", "tests.null.breaking.nowhere:length")
    with pytest.raises(PackError, match="nowhere:length', which cannot be imported"):
        run(fr.from_text(text), checks=False)


def test_an_operator_of_a_script_is_replayed_with_the_flow(tmp_path):
    @fr.operator(writes={"x": fr.SAMPLE.f32})
    def doubled(reward):
        return reward * 2

    @fr.flow
    def flow(prompts, policy):
        rows = doubled(length(fr.rollout(policy, prompts, n=2)))
        fr.log(rows, "x")
        return trained(rows, policy)

    done = run(flow, record=("*",), out=str(tmp_path))
    with pytest.raises(TraceError, match=r"give the flow itself, e.g. fr.replay\(..., flow=...\)"):
        fr.replay(done.path, 0, "doubled")
    again = fr.replay(done.path, 0, "doubled", flow=flow)
    assert str(again) == f"<{len(again.rows)} rows, equal to the recorded ones>"
    assert "was not recorded" in str(fr.runtime.replay.Replayed(again.rows, None))
    assert "not equal" in str(fr.runtime.replay.Replayed(again.rows, again.recorded.take([0])))
