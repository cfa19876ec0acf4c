"""Texts whose operators have changed: refused before anything runs, or run as they are now and recorded as such."""

import json

import pytest

import flowrl as fr
from flowrl.errors import ConfigError, TraceError
from flowrl.graph.drift import without_drift
from tests.null.breaking.pieces import length, run, trained


@fr.operator(writes={"x": fr.SAMPLE.f32})
def halved(reward: fr.SAMPLE.f32, *, by: float = 2.0, key=len):
    return reward / by


def named(value):
    return value


@fr.flow
def flow(prompts, policy):
    rows = halved(length(fr.rollout(policy, prompts, n=2)), by=4.0, key=named)
    fr.log(rows, "x")
    return trained(rows, policy)


def text_with(*, name: str, then: str = "0" * 12) -> str:
    """The flow's text as if `name` had had another hash."""
    text = str(flow.graph())
    start = text.index('"', text.index("hash", text.index(f":{name}"))) + 1
    return text[:start] + then + text[start + 12 :]


@pytest.mark.parametrize("name", ["halved", "length", "reinforce", "named"])
def test_a_drifted_text_is_refused_before_it_runs(tmp_path, name):
    graph = fr.from_text(text_with(name=name))
    with pytest.raises(TraceError, match=rf":{name}' \(hash 000000000000 then, .* changed since.*allow_drift=True"):
        run(graph, checks=False, out=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["halved", "length", "reinforce", "named"])
def test_allowed_drift_runs_the_code_as_it_is_and_is_recorded(tmp_path, name):
    done = run(fr.from_text(text_with(name=name)), checks=False, out=str(tmp_path), allow_drift=True)
    info = json.loads((done.path / "run.json").read_text())
    ((changed, hashes),) = info["drift"].items()
    assert changed.endswith(f":{name}") and hashes["then"] == "0" * 12 != hashes["now"]
    assert info["graph_hash"] == run(flow, checks=False, out=str(tmp_path)).graph.hash  # what ran is what is there
    assert hashes["now"] in (done.path / "graph.txt").read_text()
    assert info["options"]["allow_drift"] is True


def test_all_that_has_changed_is_named_at_once():
    text = text_with(name="halved")
    start = text.index('"', text.index("hash", text.index(":length"))) + 1
    both = fr.from_text(text[:start] + "1" * 12 + text[start + 12 :])
    with pytest.raises(TraceError, match=r"halved' \(.*length' \(.*have changed|length' \(.*halved' \(.*have changed"):
        run(both, checks=False)


def test_a_run_without_drift_says_nothing_of_it(tmp_path):
    done = run(fr.from_text(str(flow.graph())), checks=False, out=str(tmp_path), allow_drift=True)
    assert "drift" not in json.loads((done.path / "run.json").read_text())
    graph = flow.graph()
    assert without_drift(graph, allowed=False) == (graph, ())


def test_the_configuration_must_still_fit():
    text = text_with(name="halved").replace("by=4.0", "devisor=4.0")
    with pytest.raises(ConfigError, match="'halved' has no configuration 'devisor'"):
        run(fr.from_text(text), checks=False, allow_drift=True)


def test_a_replay_of_changed_code(tmp_path):
    done = run(flow, checks=False, out=str(tmp_path), record=("*",))
    (done.path / "graph.txt").write_text(text_with(name="halved"))
    with pytest.raises(TraceError, match="halved' .*has changed since"):
        fr.replay(done.path, 0, "halved")
    again = fr.replay(done.path, 0, "halved", allow_drift=True)
    assert again.is_equal and [change.then for change in again.drift] == ["0" * 12]
    assert "with 'tests.null.runtime.test_drift:halved' (hash 000000000000 then, " in str(again)
    assert fr.replay(done.path, 0, "halved", flow=flow).drift == ()


def test_the_option_is_a_switch():
    with pytest.raises(ConfigError, match="'allow_drift' is true or false; found 'yes'"):
        run(flow, allow_drift="yes")
